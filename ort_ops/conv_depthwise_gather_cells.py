"""Bands of a gather with one channel per group, of channels-last data. Compiled.

    out[n, q·S' + r, c] = Σ_t w[c, t] · in[n, q·S + shift(t), c]

A vector is some channels of a cell, an item a block of them: wide pieces of every cell. float32 is read and written
where it lies, other types through float32 copies of whole rows. No zeros stand for what lies outside the image: the
columns of a row are split into those that all taps reach and, for every column of taps, those that it reaches besides.
"""

from __future__ import annotations

from numba import njit

from . import conv_parameters as par
from .conv_boxes import copy_box_within, load3, reached
from .conv_epilogue import bias_address, bias_of
from .conv_planes import out_at, phase_size
from .native_call import CALL_INPUTS, CALL_OUTPUT
from .native_llvm import F32, load_i64, store_i64
from .native_rows import clear, scatter_run, write_run
from .native_source import VECTOR
from .native_taps import weigh_taps_of
from .native_vectors import clear_run, copy_run

_BYTES = 4 * VECTOR


@njit
def _tap(p, phase, tap, axis):
    """The shift of a phase's tap along an axis."""
    return load_i64(p, load_i64(phase, par.TAP_TABLE) + par.TAP_WORDS * tap + par.TAP_SHIFT_3 + axis)


@njit
def _weights(call, p, phase, before, channel, count, target):
    """Vectors of the weights, [channels][taps], of a phase whose taps are preceded by so many."""
    kind, source = load_i64(p, par.KIND), load_i64(call, CALL_INPUTS + load_i64(p, par.WEIGHTS))
    table, step, taps = load_i64(phase, par.TAP_TABLE), load_i64(p, par.W_GROUP), load_i64(p, par.ALL_TAPS)
    for vector in range(0, count, VECTOR):
        lanes = min(VECTOR, count - vector)
        for tap in range(load_i64(phase, par.TAPS)):
            place = vector * taps + (before + tap) * VECTOR
            first = (channel + vector) * step + load_i64(p, table + par.TAP_WORDS * tap + par.TAP_WEIGHT)
            clear(target, place + lanes, VECTOR - lanes)
            scatter_run(kind, target, place, 1, source, first, step, lanes)


@njit
def gather_depthwise_cells(call, p, n, block, cell, size, scratch):
    """All phases of one band of a block of channels."""
    kind, width, all_taps = load_i64(p, par.KIND), load_i64(p, par.BLOCK), load_i64(p, par.ALL_TAPS)
    channel = block * width
    count = min(width, load_i64(p, par.DEPTHWISE) - channel)
    shifts = scratch + 4 * all_taps * width
    start = (shifts + 8 * all_taps + 63) & -64
    results, bias = start + 4 * width, bias_address(call, p)
    if bias:
        bias_of(kind, bias, channel, count, start)
        clear(start, count, width - count)
    else:
        start = 0
    step, stride, low, high = load3(p, par.STEP_3), load3(p, par.IN_3), load3(p, par.LOW_3), load3(p, par.HIGH_3)
    data, first = load_i64(call, CALL_INPUTS + load_i64(p, par.DATA)), n * load_i64(p, par.IN_N) + channel
    corner = (cell[0] * step[0], cell[1] * step[1], cell[2] * step[2])
    if kind == F32:
        data += 4 * first
    else:
        copy = results + 4 * size[2] * count
        at = (corner[0] + low[0], corner[1] + low[1], corner[2] + low[2])
        box = (
            (size[0] - 1) * step[0] + high[0] - low[0] + 1,
            (size[1] - 1) * step[1] + high[1] - low[1] + 1,
            (size[2] - 1) * step[2] + high[2] - low[2] + 1,
        )
        data, stride = copy_box_within(kind, copy, data, first, count, stride, at, box, load3(p, par.LENGTH_3))
    data += 4 * (corner[0] * stride[0] + corner[1] * stride[1] + corner[2] * stride[2])
    before, phases = 0, p + 8 * load_i64(p, par.PHASE_TABLE)
    for number in range(load_i64(p, par.PHASES)):
        phase = phases + 8 * par.PHASE_WORDS * number
        _weights(call, p, phase, before, channel, count, scratch)
        for tap in range(load_i64(phase, par.TAPS)):
            at = _tap(p, phase, tap, 0) * stride[0]
            at += _tap(p, phase, tap, 1) * stride[1] + _tap(p, phase, tap, 2) * stride[2]
            store_i64(shifts, before + tap, 4 * at)
        before += load_i64(phase, par.TAPS)
    out = load_i64(call, CALL_OUTPUT)
    for z in range(size[0]):
        for y in range(size[1]):
            source, before = data + 4 * (z * step[0] * stride[0] + y * step[1] * stride[1]), 0
            for number in range(load_i64(p, par.PHASES)):
                phase = phases + 8 * par.PHASE_WORDS * number
                own, (at, to) = phase_size(phase, cell, size), out_at(p, phase, n, 0, cell)
                if z < own[0] and y < own[1] and own[2] > 0:
                    at += channel + z * to[0] + y * to[1]
                    target, target_cell = out + 4 * at, 4 * to[2]
                    aheads = 4 * to[1], 4 * (step[1] + high[1]) * stride[1]
                    if kind != F32:
                        target, target_cell, aheads = results, 4 * count, (0, 0)
                    place = (corner[0] + z * step[0], corner[1] + y * step[1], corner[2])
                    operands = (source, 4 * step[2] * stride[2], scratch + _BYTES * before, shifts + 8 * before, start)
                    _row(p, phase, place, own[2], target, target_cell, operands, count, aheads)
                    if kind != F32:
                        _write(kind, out, at, to[2], results, own[2], count)
                before += load_i64(phase, par.TAPS)


@njit
def _write(kind, out, at, step, results, cells, count):
    if step == count:
        write_run(kind, out, at, 1, results, 0, cells * count)
        return
    for x in range(cells):
        write_run(kind, out, at + x * step, 1, results, x * count, count)


@njit
def _row(p, phase, place, size, to, to_cell, operands, count, aheads):
    """A row of a phase; place: the cell of `in` at shift 0 from the first one, operands: its address first."""
    at, at_cell, weights, shifts, start = operands
    length, step, kernel = load3(p, par.LENGTH_3), load3(p, par.STEP_3), load3(phase, par.TAPS_3)
    taps, all_taps, column = load_i64(phase, par.TAPS), load_i64(p, par.ALL_TAPS), kernel[0] * kernel[1]
    # which rows of taps reach the image, and which columns all taps do
    rows = (0, kernel[1])
    while rows[0] < rows[1] and place[1] + _tap(p, phase, rows[0], 1) < 0:
        rows = (rows[0] + 1, rows[1])
    while rows[0] < rows[1] and place[1] + _tap(p, phase, rows[1] - 1, 1) >= length[1]:
        rows = (rows[0], rows[1] - 1)
    every = taps > 0 and rows[0] == 0 and rows[1] == kernel[1]
    for tap in range(kernel[0]):
        if not 0 <= place[0] + _tap(p, phase, tap * kernel[1], 0) < length[0]:
            every = False
    begin, end = 0, size * every
    for tap in range(kernel[2] * every):
        own = reached(place[2] + _tap(p, phase, tap * column, 2), 0, size, step[2], length[2])
        begin, end = max(begin, own[0]), min(end, own[1])
    if begin >= end:
        begin, end = 0, 0
    for vector in range(0, count, VECTOR):
        lanes, initial = count - vector, start + 4 * vector * (start != 0)
        target, source, factors = to + 4 * vector, at + 4 * vector, weights + 4 * vector * all_taps
        if begin < end:
            t, s = target + begin * to_cell, source + begin * at_cell
            weigh_taps_of(
                lanes, taps, t, to_cell, s, at_cell, shifts, factors, end - begin, 0, initial, aheads[0], aheads[1]
            )
        if begin == 0 and end == size:
            continue
        for x in range(size):
            if x < begin or x >= end:
                if initial:
                    copy_run(target + x * to_cell, initial, min(lanes, VECTOR))
                else:
                    clear_run(target + x * to_cell, min(lanes, VECTOR))
        for tap_x in range(kernel[2]):
            own = reached(place[2] + _tap(p, phase, tap_x * column, 2), 0, size, step[2], length[2])
            for tap_z in range(kernel[0]):
                tap = tap_x * column + tap_z * kernel[1]
                if not 0 <= place[0] + _tap(p, phase, tap, 0) < length[0]:
                    continue
                tap += rows[0]
                f, table, some = factors + _BYTES * tap, shifts + 8 * tap, rows[1] - rows[0]
                left, right = min(own[1], begin), max(own[0], end)
                if own[0] < left:
                    t, s = target + own[0] * to_cell, source + own[0] * at_cell
                    weigh_taps_of(lanes, some, t, to_cell, s, at_cell, table, f, left - own[0], 1, 0, 0, 0)
                if right < own[1]:
                    t, s = target + right * to_cell, source + right * at_cell
                    weigh_taps_of(lanes, some, t, to_cell, s, at_cell, table, f, own[1] - right, 1, 0, 0, 0)
