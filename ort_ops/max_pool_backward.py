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
from numba import njit, types

from ..opset import conv_spec, pooling
from ..opset.errors import ShapeError
from ..opset.max_pool_backward import OP
from .native_bridge import Call, NativeKernel, Plan, keep
from .native_call import (
    CALL_INPUTS,
    CALL_OUTPUT,
    CALL_PARAMETERS,
    CALL_RUNTIME,
    acquire,
    lanes,
    no_memory,
    parallel,
    release,
    take,
)
from .native_llvm import (
    BF16,
    F16,
    F32,
    exchange,
    load_bf16,
    load_f16,
    load_f32,
    load_i32,
    load_i64,
    stack,
    store_bf16,
    store_f16,
    store_f32,
    store_i32,
    store_i64,
)
from .native_rows import clear, read_run, write_run
from .native_source import exported
from .native_vectors import fetch
from .native_windows import winners

# parameters; three numbers each from LENGTH on, for A, B and W, the last spatial axis. CUT: which one is cut into
# bands, W only where the others have length 1. LISTED: most taps of a table, 0: none, windows go singly. APART: no
# window overlaps another, and a half type is written at once
(
    WORKER, KIND, ITEMS, BANDS, BLOCKS, CHANNELS, SCRATCH, LISTED, CUT, APART, LENGTH, OUT, TAPS, STRIDE, DILATION, PAD,
    WORDS,
) = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 13, 16, 19, 22, 25, 28)  # fmt: skip

JOB_CALL, JOB_NEXT, JOB_FAILED = range(3)
_job = stack(3)

BLOCK = 128  # channels of an item, NXC
BAND_CELLS = 1 << 15  # of a plane, roughly
MIN_ITEMS = 16
MAX_CELLS = 2**31 - 1  # their numbers are int32
NARROW = 16  # channels of an item, NXC, whose sums are too many otherwise
MAX_LISTED = 1 << 16  # taps of a table: 1 MiB
MAX_HELD = 5 << 17  # float32 sums of an item: 2.5 MiB
WINDOWS = 1 << 12  # of a row at a time
NONE = np.int32(-1)


@njit
def _from(place, step):
    """The first n >= 0 with n·step >= place."""
    return (place + step - 1) // step if place > 0 else 0


@njit
def _until(place, step, count):
    """One behind the last n < count with n·step <= place."""
    return min(count, place // step + 1) if place >= 0 else 0


@njit
def _windows_of_band(p, axis, first, last):
    """The windows that touch the cells first … last - 1 of an axis: first, and one behind the last."""
    stride, pad = load_i64(p, STRIDE + axis), load_i64(p, PAD + axis)
    reach = (load_i64(p, TAPS + axis) - 1) * load_i64(p, DILATION + axis)
    return _from(first + pad - reach, stride), _until(last - 1 + pad, stride, load_i64(p, OUT + axis))


@njit
def _taps(p, axis, start):
    """The taps of a window that begins at `start` which lie inside the source: first, and one behind the last."""
    dilation = load_i64(p, DILATION + axis)
    return _from(-start, dilation), _until(load_i64(p, LENGTH + axis) - 1 - start, dilation, load_i64(p, TAPS + axis))


@njit
def _list_taps(p, table, a_first, a_last, b_first, b_last, w_first, w_last, pitch):
    """The taps in row-major order: elements (`pitch` to a cell) and cells from where the window begins; how many."""
    count = 0
    for ka in range(a_first, a_last):
        for kb in range(b_first, b_last):
            row = ka * load_i64(p, DILATION) * load_i64(p, LENGTH + 1) + kb * load_i64(p, DILATION + 1)
            for kw in range(w_first, w_last):
                cell = row * load_i64(p, LENGTH + 2) + kw * load_i64(p, DILATION + 2)
                store_i64(table, 2 * count, cell * pitch)
                store_i64(table, 2 * count + 1, cell)
                count += 1
    return count


@njit
def _load(kind, source, index):
    if kind == F16:
        return load_f16(source, index)
    if kind == BF16:
        return load_bf16(source, index)
    return load_f32(source, index)


@njit
def _edge_winner(p, kind, x, start, pitch, a_first, a_last, b_first, b_last, w_first, w_last):
    """The winner of one window, from where it begins, `pitch` elements to a cell; NONE without a tap."""
    best, owner = np.float32(0.0), NONE
    for ka in range(a_first, a_last):
        for kb in range(b_first, b_last):
            row = ka * load_i64(p, DILATION) * load_i64(p, LENGTH + 1) + kb * load_i64(p, DILATION + 1)
            for kw in range(w_first, w_last):
                cell = row * load_i64(p, LENGTH + 2) + kw * load_i64(p, DILATION + 2)
                value = _load(kind, x, start + cell * pitch)
                if owner == NONE or value > best:
                    best, owner = value, np.int32(cell)
    return owner


@njit
def _clear(kind, target, first, count):
    """Zeros of an element type."""
    if kind == F32:
        clear(target, first, count)
    else:
        for i in range(first, first + count):
            store_f16(target, i, np.float32(0.0))  # zero in all half types


@njit
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
    _clear(kind if direct else F32, sums, low, high - low)
    w_first, w_last = 0, load_i64(p, OUT + 2)
    if load_i64(p, CUT):
        w_first, w_last = _windows_of_band(p, 2, low, high)
    first, last = _windows_of_band(p, 0, a0, a1)
    listed = (-1, -1, -1, -1, 0)
    for oa in range(first, last):
        a_start = oa * load_i64(p, STRIDE) - load_i64(p, PAD)
        a_taps = _taps(p, 0, a_start)
        for ob in range(load_i64(p, OUT + 1)):
            b_start = ob * load_i64(p, STRIDE + 1) - load_i64(p, PAD + 1)
            b_taps = _taps(p, 1, b_start)
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


@njit
def _winners_of_row(p, call, row, a_taps, b_taps, first, count, table, owner, listed):
    """The winners of `count` windows of a row from `first` on; which taps are listed then, and how many.

    Those that lie inside along the row go together, the others singly.
    """
    kind, stride, pad = load_i64(p, KIND), load_i64(p, STRIDE + 2), load_i64(p, PAD + 2)
    width, kernel, x = load_i64(p, LENGTH + 2), load_i64(p, TAPS + 2), load_i64(call, CALL_INPUTS)
    begin = min(first + count, max(first, _from(pad, stride)))
    inside = width - 1 + pad - (kernel - 1) * load_i64(p, DILATION + 2)
    end = max(begin, _until(inside, stride, first + count))
    if load_i64(p, LISTED) == 0:
        end = begin
    if begin < end:
        if listed[:4] != (a_taps[0], a_taps[1], b_taps[0], b_taps[1]):
            taps = _list_taps(p, table, a_taps[0], a_taps[1], b_taps[0], b_taps[1], 0, kernel, 1)
            listed = (a_taps[0], a_taps[1], b_taps[0], b_taps[1], taps)
        place = x + (4 if kind == F32 else 2) * (row + begin * stride)
        winners(kind, owner + 4 * (begin - first), place, table, listed[4], stride, 0, end - begin)
    before = begin - first
    for edge in range(count - (end - begin)):
        ow = first + edge if edge < before else end + edge - before
        w_first, w_last = _taps(p, 2, ow * stride - pad)
        base = row + ow * stride
        winner = _edge_winner(p, kind, x, base, 1, a_taps[0], a_taps[1], b_taps[0], b_taps[1], w_first, w_last)
        store_i32(owner, ow - first, winner)
    return listed


@njit
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
            _add_one(kind if load_i64(p, APART) else F32, sums, place, load_f32(dy, at + i))


@njit
def _add_one(kind, sums, place, value):
    """Add to a sum; in a half type there is nothing yet."""
    if kind == F16:
        store_f16(sums, place, np.float32(0.0) + value)
    elif kind == BF16:
        store_bf16(sums, place, np.float32(0.0) + value)
    else:
        store_f32(sums, place, load_f32(sums, place) + value)


@njit
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
        _clear(held, sums, cell * pitch, count)
    taps, listed = 0, (-1, -1, -1, -1, -1, -1)
    first, last = _windows_of_band(p, 0, a0, a1)
    for oa in range(first, last):
        a_start = oa * load_i64(p, STRIDE) - load_i64(p, PAD)
        a_first, a_last = _taps(p, 0, a_start)
        for ob in range(out_depth):
            b_start = ob * load_i64(p, STRIDE + 1) - load_i64(p, PAD + 1)
            b_first, b_last = _taps(p, 1, b_start)
            for ow in range(out_width):
                w_start = ow * load_i64(p, STRIDE + 2) - load_i64(p, PAD + 2)
                w_first, w_last = _taps(p, 2, w_start)
                if a_first >= a_last or b_first >= b_last or w_first >= w_last:
                    continue
                start = (a_start * depth + b_start) * width + w_start
                base = (origin + start) * channels + c0
                key = (a_first, a_last, b_first, b_last, w_first, w_last)
                if load_i64(p, LISTED) == 0:
                    for c in range(count):
                        winner = _edge_winner(
                            p, kind, x, base + c, channels, a_first, a_last, b_first, b_last, w_first, w_last
                        )
                        store_i32(owner, c, winner)
                elif key != listed:
                    taps = _list_taps(p, table, a_first, a_last, b_first, b_last, w_first, w_last, channels)
                    listed = key
                if load_i64(p, LISTED):
                    winners(kind, owner, x + size * base, table, taps, 1, 0, count)
                at = ((image * out_rows + oa) * out_depth + ob) * out_width + ow
                read_run(kind, grads, 0, dy, at * channels + c0, 1, count)
                for c in range(count):
                    cell = start + load_i32(owner, c)
                    if low <= cell < high:
                        _add_one(held, sums, cell * pitch + c, load_f32(grads, c))
    if not direct:
        for cell in range(low, high):
            write_run(kind, out, (origin + cell) * channels + c0, 1, sums, cell * pitch, count)


@njit
def _work(job, _lane):
    """Take items until none is left."""
    call = load_i64(job, JOB_CALL)
    p, runtime = load_i64(call, CALL_PARAMETERS), load_i64(call, CALL_RUNTIME)
    size = load_i64(p, SCRATCH)
    scratch = acquire(runtime, size)
    if scratch == 0:
        exchange(job + 8 * JOB_FAILED, 1)
        return
    while True:
        item = take(job + 8 * JOB_NEXT)
        if item >= load_i64(p, ITEMS):
            break
        if load_i64(p, BLOCKS):
            _blocks(p, call, item, scratch)
        else:
            _planes(p, call, item, scratch)
    release(runtime, scratch, size)


@njit
def _run(call):
    p = load_i64(call, CALL_PARAMETERS)
    job = _job()
    store_i64(job, JOB_CALL, call)
    store_i64(job, JOB_NEXT, 0)
    store_i64(job, JOB_FAILED, 0)
    status = parallel(call, load_i64(p, WORKER), job, min(lanes(call), load_i64(p, ITEMS)))
    if status == 0 and load_i64(job, JOB_FAILED):
        return no_memory(call)
    return status


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
    x, dy = (conv_spec.ncx(call.attributes, shape) for shape in call.inputs)
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
