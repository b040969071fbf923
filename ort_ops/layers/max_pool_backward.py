"""MaxPoolBackward, compiled: the winners of a row of windows, found tap by tap, then dy added to them.

An item of work is a band of rows of one plane (NCX) or of some channels of one image (NXC); where a plane is one row,
a band is a part of it. A worker looks at every window that touches its band and adds only what falls into it, so no two
of them write the same cell, and each cell is summed in the order of the windows, however many bands there are. float32
throughout; where no windows overlap, each cell of a half type has at most one summand, which is written as it is.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import types

from onnx_backprop.opset.core.errors import ShapeError
from onnx_backprop.opset.maths import convolution_attributes, pooling
from onnx_backprop.opset.operators.max_pool_backward import OP
from onnx_backprop.ort_ops.layers.max_pool_windows import (
    APART,
    BANDS,
    BLOCKS,
    CHANNELS,
    CUT,
    DILATION,
    ITEMS,
    KIND,
    LENGTH,
    LISTED,
    OUT,
    PAD,
    SCRATCH,
    STRIDE,
    TAPS,
    WORDS,
    WORKER,
    add_one,
    clear_sums,
    end_until,
    first_from,
    list_taps,
    taps_inside,
    windows_of_band,
    winner_of,
)
from onnx_backprop.ort_ops.runtime.bridge import Call, NativeKernel, Plan, keep
from onnx_backprop.ort_ops.runtime.call import CALL_INPUTS, CALL_OUTPUT, CALL_PARAMETERS
from onnx_backprop.ort_ops.runtime.compile import exported, inner
from onnx_backprop.ort_ops.runtime.jobs import JOB_CALL, begin, new_job, work_off, worker
from onnx_backprop.ort_ops.runtime.llvm import F32, load_f32, load_i32, load_i64, store_i32
from onnx_backprop.ort_ops.vector.pool_windows import winners
from onnx_backprop.ort_ops.vector.registers import fetch
from onnx_backprop.ort_ops.vector.rows import read_run, write_run

BLOCK = 128  # channels of an item, NXC
BAND_CELLS = 1 << 15  # of a plane, roughly
MIN_ITEMS = 16
MAX_CELLS = 2**31 - 1  # their numbers are int32
NARROW = 16  # channels of an item, NXC, whose sums are too many otherwise
MAX_LISTED = 1 << 16  # taps of a table: 1 MiB
MAX_HELD = 5 << 17  # float32 sums of an item: 2.5 MiB
WINDOWS = 1 << 12  # of a row at a time


@inner
def _planes(p, call, item, scratch):
    """NCX: a band of one plane."""
    kind, bands, direct = load_i64(p, KIND), load_i64(p, BANDS), load_i64(p, KIND) == F32 or load_i64(p, APART)
    rows, depth, width = load_i64(p, LENGTH), load_i64(p, LENGTH + 1), load_i64(p, LENGTH + 2)
    plane, band = item // bands, item % bands
    a0, a1, low, high = 0, rows, band * width // bands, (band + 1) * width // bands
    if load_i64(p, CUT) == 0:
        a0, a1 = band * rows // bands, (band + 1) * rows // bands
        low, high = a0 * depth * width, a1 * depth * width
    cells, size = rows * depth * width, 4 if kind == F32 else 2
    x, table = load_i64(call, CALL_INPUTS) + size * plane * cells, scratch
    owner = table + 16 * load_i64(p, LISTED)
    grads = owner + 4 * WINDOWS
    sums = load_i64(call, CALL_OUTPUT) + size * plane * cells if direct else grads + 4 * WINDOWS - 4 * low
    clear_sums(kind if direct else F32, sums, low, high - low)
    w_first, w_last = 0, load_i64(p, OUT + 2)
    if load_i64(p, CUT):
        w_first, w_last = windows_of_band(p, 2, low, high)
    first, last = windows_of_band(p, 0, a0, a1)
    listed = (-1, -1, -1, -1, 0)
    for oa in range(first, last):
        a_start = oa * load_i64(p, STRIDE) - load_i64(p, PAD)
        a_taps = taps_inside(p, 0, a_start)
        for ob in range(load_i64(p, OUT + 1)):
            b_start = ob * load_i64(p, STRIDE + 1) - load_i64(p, PAD + 1)
            b_taps = taps_inside(p, 1, b_start)
            if a_taps[0] >= a_taps[1] or b_taps[0] >= b_taps[1]:
                continue
            row = (a_start * depth + b_start) * width - load_i64(p, PAD + 2)  # where the row's first window begins
            if depth == 1:  # while winners of this row of windows are added, fetch what the next one looks at anew
                fetch(x + size * (row + load_i64(p, STRIDE) * width), size * load_i64(p, STRIDE) * width)
            for ow in range(w_first, w_last, WINDOWS):
                count = min(WINDOWS, w_last - ow)
                listed = _winners_of_row(p, call, plane * cells + row, a_taps, b_taps, ow, count, table, owner, listed)
                at = ((plane * load_i64(p, OUT) + oa) * load_i64(p, OUT + 1) + ob) * load_i64(p, OUT + 2) + ow
                start = row + ow * load_i64(p, STRIDE + 2)
                _add(p, call, sums, owner, at, count, start, low, high, grads)
    if not direct:
        write_run(kind, load_i64(call, CALL_OUTPUT), plane * cells + low, 1, sums, low, high - low)


@inner
def _winners_of_row(p, call, row, a_taps, b_taps, first, count, table, owner, listed):
    """The winners of `count` windows of a row from `first` on; which taps are listed then, and how many.

    Those that lie inside along the row go together, the others singly.
    """
    kind, stride, pad = load_i64(p, KIND), load_i64(p, STRIDE + 2), load_i64(p, PAD + 2)
    width, kernel, x = load_i64(p, LENGTH + 2), load_i64(p, TAPS + 2), load_i64(call, CALL_INPUTS)
    begin = min(first + count, max(first, first_from(pad, stride)))
    inside = width - 1 + pad - (kernel - 1) * load_i64(p, DILATION + 2)
    end = max(begin, end_until(inside, stride, first + count))
    if load_i64(p, LISTED) == 0:
        end = begin
    if begin < end:
        if listed[:4] != (a_taps[0], a_taps[1], b_taps[0], b_taps[1]):
            taps = list_taps(p, table, a_taps[0], a_taps[1], b_taps[0], b_taps[1], 0, kernel, 1)
            listed = (a_taps[0], a_taps[1], b_taps[0], b_taps[1], taps)
        place = x + (4 if kind == F32 else 2) * (row + begin * stride)
        winners(kind, owner + 4 * (begin - first), place, table, listed[4], stride, 0, end - begin)
    before = begin - first
    for edge in range(count - (end - begin)):
        ow = first + edge if edge < before else end + edge - before
        w_first, w_last = taps_inside(p, 2, ow * stride - pad)
        base = row + ow * stride
        winner = winner_of(p, kind, x, base, 1, a_taps[0], a_taps[1], b_taps[0], b_taps[1], w_first, w_last)
        store_i32(owner, ow - first, winner)
    return listed


@inner
def _add(p, call, sums, owner, at, count, start, low, high, grads):
    """dy from its element `at` on to the winners, where those lie in the band; start: where the first window begins."""
    kind, stride, dy = load_i64(p, KIND), load_i64(p, STRIDE + 2), load_i64(call, CALL_INPUTS + 1)
    if kind != F32:
        read_run(kind, grads, 0, dy, at, 1, count)
        dy, at = grads, 0
    for i in range(count):
        cell = np.int64(load_i32(owner, i))
        place = start + i * stride + cell
        if cell >= 0 and low <= place < high:
            add_one(kind if load_i64(p, APART) else F32, sums, place, load_f32(dy, at + i))


@inner
def _blocks(p, call, item, scratch):
    """NXC: a band of some channels of one image."""
    kind, bands, blocks, channels = load_i64(p, KIND), load_i64(p, BANDS), load_i64(p, BLOCKS), load_i64(p, CHANNELS)
    rows, depth, width = load_i64(p, LENGTH), load_i64(p, LENGTH + 1), load_i64(p, LENGTH + 2)
    out_rows, out_depth, out_width = load_i64(p, OUT), load_i64(p, OUT + 1), load_i64(p, OUT + 2)
    image, band, block = item // (bands * blocks), item // blocks % bands, item % blocks
    c0 = block * channels // blocks
    count = (block + 1) * channels // blocks - c0
    a0, a1 = band * rows // bands, (band + 1) * rows // bands
    low, high = a0 * depth * width, a1 * depth * width
    x, dy, out = load_i64(call, CALL_INPUTS), load_i64(call, CALL_INPUTS + 1), load_i64(call, CALL_OUTPUT)
    table, size = scratch, 4 if kind == F32 else 2
    owner = table + 16 * load_i64(p, LISTED)
    grads = owner + 4 * count
    sums, pitch, held = grads + 4 * count - 4 * low * count, count, F32
    origin = image * rows * depth * width
    direct = kind == F32 or load_i64(p, APART)
    if direct:
        sums, pitch, held = out + size * (origin * channels + c0), channels, kind
    for cell in range(low, high):
        clear_sums(held, sums, cell * pitch, count)
    taps, listed = 0, (-1, -1, -1, -1, -1, -1)
    first, last = windows_of_band(p, 0, a0, a1)
    for oa in range(first, last):
        a_start = oa * load_i64(p, STRIDE) - load_i64(p, PAD)
        a_first, a_last = taps_inside(p, 0, a_start)
        for ob in range(out_depth):
            b_start = ob * load_i64(p, STRIDE + 1) - load_i64(p, PAD + 1)
            b_first, b_last = taps_inside(p, 1, b_start)
            for ow in range(out_width):
                w_start = ow * load_i64(p, STRIDE + 2) - load_i64(p, PAD + 2)
                w_first, w_last = taps_inside(p, 2, w_start)
                if a_first >= a_last or b_first >= b_last or w_first >= w_last:
                    continue
                start = (a_start * depth + b_start) * width + w_start
                base = (origin + start) * channels + c0
                key = (a_first, a_last, b_first, b_last, w_first, w_last)
                if load_i64(p, LISTED) == 0:
                    for c in range(count):
                        winner = winner_of(
                            p, kind, x, base + c, channels, a_first, a_last, b_first, b_last, w_first, w_last
                        )
                        store_i32(owner, c, winner)
                elif key != listed:
                    taps = list_taps(p, table, a_first, a_last, b_first, b_last, w_first, w_last, channels)
                    listed = key
                if load_i64(p, LISTED):
                    winners(kind, owner, x + size * base, table, taps, 1, 0, count)
                at = ((image * out_rows + oa) * out_depth + ob) * out_width + ow
                read_run(kind, grads, 0, dy, at * channels + c0, 1, count)
                for c in range(count):
                    cell = start + load_i32(owner, c)
                    if low <= cell < high:
                        add_one(held, sums, cell * pitch + c, load_f32(grads, c))
    if not direct:
        for cell in range(low, high):
            write_run(kind, out, (origin + cell) * channels + c0, 1, sums, cell * pitch, count)


@inner
def _item(job, item, scratch):
    call = load_i64(job, JOB_CALL)
    p = load_i64(call, CALL_PARAMETERS)
    if load_i64(p, BLOCKS):
        _blocks(p, call, item, scratch)
    else:
        _planes(p, call, item, scratch)


_work = worker("max_pool_work", _item, ITEMS, SCRATCH)


@inner
def _run(call):
    p, job = load_i64(call, CALL_PARAMETERS), new_job()
    begin(job, call, 0)
    return work_off(job, load_i64(p, WORKER), load_i64(p, ITEMS))


def _build() -> tuple[Any, Any]:
    @exported(types.void(types.int64, types.int64))
    def work(job, lane):
        _work(job, lane)

    @exported(types.int64(types.int64))
    def run(call):
        return _run(call)

    return work, run


@cache
def _functions() -> tuple[Any, Any]:
    return keep(_build())


def _plan(call: Call) -> Plan:
    x, dy = (convolution_attributes.ncx(call.attributes, shape) for shape in call.inputs)
    assert x is not None
    assert dy is not None
    batch, channels, *lengths = (int(n) for n in x if isinstance(n, int))
    outs = [int(n) for n in dy[2:] if isinstance(n, int)]
    axes = pooling.axes_of(call.attributes, lengths, outs)
    # a row of windows lies along the last axis, a band of rows along the first; channels are a row by themselves
    blank, last = pooling.Axis(1, 1, 1, 1, 1, 0), call.attributes["data_format"] == "NXC"
    if len(axes) == 1:
        a, b, w = (axes[0], blank, blank) if last else (blank, blank, axes[0])
    else:
        a, b, w = axes[0], axes[1] if len(axes) > 2 else blank, axes[-1]
    cells = math.prod(lengths)
    if cells > MAX_CELLS:
        raise ShapeError(f"src: expected at most {MAX_CELLS} cells per channel, got {cells}", op_type=OP.name)
    cut, along = (2, w) if a.length == b.length == 1 and not last else (0, a)
    apart = call.element_type != F32 and all(axis.out == 1 or axis.stride >= _extent(axis) for axis in axes)
    summed = call.element_type != F32 and not apart
    blocks = -(-channels // BLOCK) if last else 0
    if summed and last and cells * min(channels, BLOCK) > MAX_HELD:
        blocks = -(-channels // NARROW)
    width = -(-channels // blocks) if last else 1  # elements of a cell
    pieces = batch * (blocks or channels)
    wanted = max(-(-cells * width // BAND_CELLS), -(-MIN_ITEMS // pieces))
    bands = max(1, min(wanted, along.length // _extent(along)))
    held = cells // along.length * width  # of a row of the axis that is cut
    if summed:  # windows that touch several bands are looked at for each
        bands = max(bands, min(along.length, -(-along.length * held // MAX_HELD)))
    work, run = _functions()
    words = np.zeros(WORDS, np.int64)
    words[WORKER], words[KIND], words[ITEMS] = work.address, call.element_type, pieces * bands
    words[BANDS], words[BLOCKS], words[CHANNELS], words[CUT], words[APART] = bands, blocks, channels, cut, apart
    # of a window's taps no more lie inside than there are cells
    listed = math.prod(min(axis.kernel, axis.length) for axis in axes)
    words[LISTED] = listed if listed <= MAX_LISTED else 0
    words[SCRATCH] = 16 * words[LISTED] + 8 * (width if last else WINDOWS)
    words[SCRATCH] += 4 * -(-along.length // bands) * held if summed else 0
    fields = {LENGTH: "length", OUT: "out", TAPS: "kernel", STRIDE: "stride", DILATION: "dilation", PAD: "begin"}
    for place, name in fields.items():
        words[place : place + 3] = [getattr(axis, name) for axis in (a, b, w)]
    return Plan(run.address, words, lane=int(words[SCRATCH]))


def _extent(axis: pooling.Axis) -> int:
    """Cells from the first of a window to its last."""
    return (axis.kernel - 1) * axis.dilation + 1


KERNEL = NativeKernel(OP, _plan, _functions)
