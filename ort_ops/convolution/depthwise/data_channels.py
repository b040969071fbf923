"""Bands of a gather with one channel per group, of channels-last data. Compiled.

    out[n, q·S' + r, c] = Σ_t w[c, t] · in[n, q·S + shift(t), c]

A vector is some channels of a cell, an item a block of them: wide pieces of every cell. float32 is read and written
where it lies, other types through float32 copies of whole rows. No zeros stand for what lies outside the image: every
cell has the list of the taps that reach it, and those of a row that all columns of taps reach have one list.
"""

from __future__ import annotations

from onnx_backprop.ort_ops.compiler.decorators import VECTOR, inner
from onnx_backprop.ort_ops.compiler.llvm import F32, load_i64, store_i64
from onnx_backprop.ort_ops.compiler.records import view
from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.bias import bias_address, bias_of
from onnx_backprop.ort_ops.convolution.gather.planes import out_at, phase_size
from onnx_backprop.ort_ops.vector.boxes import copy_box_within, reached
from onnx_backprop.ort_ops.vector.pixel_tap_sums import TAP_BYTES, weigh_cells
from onnx_backprop.ort_ops.vector.registers import settle
from onnx_backprop.ort_ops.vector.rows import clear, scatter_run, write_run

_BYTES = 4 * VECTOR


@inner
def _tap(p, phase, tap, axis):
    """The shift of a phase's tap along an axis."""
    return view(par.GatherTap, p + phase.tap_table, tap).shift[axis]


@inner
def weights_of(call, p, phase, before, taps, channel, count, target):
    """Vectors of the weights, [channels][taps], of a phase whose taps are preceded by so many of all."""
    kind, source, step = p.kind, call.inputs[1], p.w_group
    for vector in range(0, count, VECTOR):
        lanes = min(VECTOR, count - vector)
        for tap in range(phase.taps):
            place = vector * taps + (before + tap) * VECTOR
            first = (channel + vector) * step + view(par.GatherTap, p + phase.tap_table, tap).weight
            clear(target, place + lanes, VECTOR - lanes)
            scatter_run(kind, target, place, 1, source, first, step, lanes)


@inner
def gather_depthwise_cells(call, p, n, block, cell, size, scratch):
    """All phases of one band of a block of channels."""
    kind, width, all_taps = p.kind, p.block, p.all_taps
    channel = block * width
    count = min(width, p.channels - channel)
    shifts = scratch + 4 * all_taps * width
    entries = shifts + 8 * all_taps
    start = (entries + TAP_BYTES * all_taps + 63) & -64
    results, bias = start + 4 * width, bias_address(call, p)
    if bias:
        bias_of(kind, bias, channel, count, start)
        clear(start, count, width - count)
    else:
        start = 0
    step, stride, low, high = p.step, p.in_stride, p.low, p.high
    data, first = call.inputs[0], n * p.in_n + channel
    corner = (cell[0] * step[0], cell[1] * step[1], cell[2] * step[2])
    if kind == F32:
        data += 4 * first
    else:
        copy = results + 4 * size[2] * count
        lowest = (corner[0] + low[0], corner[1] + low[1], corner[2] + low[2])
        box = (
            (size[0] - 1) * step[0] + high[0] - low[0] + 1,
            (size[1] - 1) * step[1] + high[1] - low[1] + 1,
            (size[2] - 1) * step[2] + high[2] - low[2] + 1,
        )
        data, stride = copy_box_within(kind, copy, data, first, count, stride, lowest, box, p.length)
    data += 4 * (corner[0] * stride[0] + corner[1] * stride[1] + corner[2] * stride[2])
    before = 0
    for number in range(p.phases):
        phase = view(par.Phase, p + p.phase_table, number)
        weights_of(call, p, phase, before, all_taps, channel, count, scratch)
        for tap in range(phase.taps):
            shift = _tap(p, phase, tap, 0) * stride[0]
            shift += _tap(p, phase, tap, 1) * stride[1] + _tap(p, phase, tap, 2) * stride[2]
            store_i64(shifts, before + tap, 4 * shift)
        before += phase.taps
    out = call.output
    for z in range(size[0]):
        for y in range(size[1]):
            source, before = data + 4 * (z * step[0] * stride[0] + y * step[1] * stride[1]), 0
            for number in range(p.phases):
                phase = view(par.Phase, p + p.phase_table, number)
                own, (at, to) = phase_size(phase, cell, size), out_at(p, phase, n, 0, cell)
                if z < own[0] and y < own[1] and own[2] > 0:
                    at += channel + z * to[0] + y * to[1]
                    target, target_cell = out + 4 * at, 4 * to[2]
                    aheads = 4 * to[1], 4 * (step[1] + high[1]) * stride[1]
                    if kind != F32:
                        target, target_cell, aheads = results, 4 * count, (0, 0)
                    place = (corner[0] + z * step[0], corner[1] + y * step[1], corner[2])
                    weights, places = scratch + _BYTES * before, shifts + 8 * before
                    operands = (source, 4 * step[2] * stride[2], weights, places, start, entries)
                    _row(p, phase, place, own[2], target, target_cell, operands, count, aheads)
                    if kind != F32:
                        _write(kind, out, at, to[2], results, own[2], count)
                before += phase.taps
    settle()


@inner
def _write(kind, out, at, step, results, cells, count):
    if step == count:
        write_run(kind, out, at, 1, results, 0, cells * count)
        return
    for x in range(cells):
        write_run(kind, out, at + x * step, 1, results, x * count, count)


@inner
def _row(p, phase, place, size, to, to_cell, operands, count, aheads):
    """A row of a phase; place: the cell of `in` at shift 0 from the first one, operands: its address first."""
    at, at_cell, weights, shifts, start, entries = operands
    length, step, columns = p.length, p.step, phase.taps_along[2]
    weights_step = _BYTES * p.all_taps
    streaming = p.streamed and p.kind == F32 and (to | to_cell) % _BYTES == 0
    begin, end = 0, size  # the cells that all columns of taps reach
    for column in range(min(columns, phase.taps)):
        own = reached(place[2] + _tap(p, phase, column, 2), 0, size, step[2], length[2])
        begin, end = max(begin, own[0]), min(end, own[1])
    x = 0
    while x < size:
        cells = end - x if begin <= x < end else 1
        taps = _reaching(p, phase, (place[0], place[1], place[2] + x * step[2]), length, shifts, entries)
        t, s = to + x * to_cell, at + x * at_cell
        weigh_cells(
            cells, count, t, to_cell, s, at_cell, taps, entries, weights, weights_step, start, aheads, streaming
        )
        x += cells


@inner
def _reaching(p, phase, cell, length, shifts, entries):
    """How many taps of a phase reach the image from a cell of `in`; their entries for `weigh_cells`."""
    count = 0
    for tap in range(phase.taps):
        z, y, x = cell[0] + _tap(p, phase, tap, 0), cell[1] + _tap(p, phase, tap, 1), cell[2] + _tap(p, phase, tap, 2)
        if 0 <= z < length[0] and 0 <= y < length[1] and 0 <= x < length[2]:
            store_i64(entries, 2 * count, load_i64(shifts, tap))
            store_i64(entries, 2 * count + 1, _BYTES * tap)
            count += 1
    return count
