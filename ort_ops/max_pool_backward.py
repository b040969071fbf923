"""MaxPoolBackward, compiled: the winners of a row of windows, found tap by tap, then dy added to them.

An item of work is a band of rows of one plane (NCX) or of some channels of one image (NXC). A worker looks at every
window that touches its band and adds only what falls into it, so no two of them write the same cell, and each cell is
summed in the order of the windows, however many bands there are. float32 throughout.
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
    store_f32,
    store_i32,
    store_i64,
)
from .native_rows import clear, read_run, write_run
from .native_source import exported
from .native_windows import winners

# parameters; three numbers each from LENGTH on, for A (cut into bands), B and W, the last spatial axis
(
    WORKER, KIND, ITEMS, BANDS, BLOCKS, CHANNELS, SCRATCH, LISTED, LENGTH, OUT, TAPS, STRIDE, DILATION, PAD, WORDS,
) = (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 14, 17, 20, 23, 26)  # fmt: skip

JOB_CALL, JOB_NEXT, JOB_FAILED = range(3)
_job = stack(3)

BLOCK = 128  # channels of an item, NXC
BAND_CELLS = 1 << 15  # of a plane, roughly
MIN_ITEMS = 16
MAX_CELLS = 2**31 - 1  # their numbers are int32
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
def _windows_of_band(p, a0, a1):
    """The rows of windows that touch the rows a0 … a1 - 1: first, and one behind the last."""
    stride, pad = load_i64(p, STRIDE), load_i64(p, PAD)
    reach = (load_i64(p, TAPS) - 1) * load_i64(p, DILATION)
    return _from(a0 + pad - reach, stride), _until(a1 - 1 + pad, stride, load_i64(p, OUT))


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
def _edge_winner(p, kind, x, start, a_first, a_last, b_first, b_last, w_first, w_last):
    """The winner of one window, from where it begins; NONE without a tap."""
    best, owner = np.float32(0.0), NONE
    for ka in range(a_first, a_last):
        for kb in range(b_first, b_last):
            row = ka * load_i64(p, DILATION) * load_i64(p, LENGTH + 1) + kb * load_i64(p, DILATION + 1)
            for kw in range(w_first, w_last):
                cell = row * load_i64(p, LENGTH + 2) + kw * load_i64(p, DILATION + 2)
                value = _load(kind, x, start + cell)
                if owner == NONE or value > best:
                    best, owner = value, np.int32(cell)
    return owner


@njit
def _planes(p, call, item, scratch):
    """NCX: a band of one plane. Windows from `begin` to `end` of a row lie inside along it; the others go singly."""
    kind, bands = load_i64(p, KIND), load_i64(p, BANDS)
    rows, depth, width = load_i64(p, LENGTH), load_i64(p, LENGTH + 1), load_i64(p, LENGTH + 2)
    out_rows, out_depth, out_width = load_i64(p, OUT), load_i64(p, OUT + 1), load_i64(p, OUT + 2)
    stride, pad, kernel = load_i64(p, STRIDE + 2), load_i64(p, PAD + 2), load_i64(p, TAPS + 2)
    size = 4 if kind == F32 else 2
    plane, band = item // bands, item % bands
    a0, a1 = band * rows // bands, (band + 1) * rows // bands
    low, high = a0 * depth * width, a1 * depth * width
    cells = rows * depth * width
    x, dy, out = load_i64(call, CALL_INPUTS), load_i64(call, CALL_INPUTS + 1), load_i64(call, CALL_OUTPUT)
    table = scratch
    owner = table + 16 * load_i64(p, LISTED)
    grads = owner + 4 * out_width
    sums = out + 4 * plane * cells if kind == F32 else grads + 4 * out_width - 4 * low
    clear(sums, low, high - low)
    begin = min(out_width, _from(pad, stride))
    end = max(begin, _until(width - 1 + pad - (kernel - 1) * load_i64(p, DILATION + 2), stride, out_width))
    taps, listed_a, listed_b, listed_from_a, listed_from_b = 0, -1, -1, -1, -1
    first, last = _windows_of_band(p, a0, a1)
    for oa in range(first, last):
        a_start = oa * load_i64(p, STRIDE) - load_i64(p, PAD)
        a_first, a_last = _taps(p, 0, a_start)
        for ob in range(out_depth):
            b_start = ob * load_i64(p, STRIDE + 1) - load_i64(p, PAD + 1)
            b_first, b_last = _taps(p, 1, b_start)
            if a_first >= a_last or b_first >= b_last:
                continue
            start = (a_start * depth + b_start) * width - pad  # of the row's first window
            if begin < end:
                if a_first != listed_from_a or a_last != listed_a or b_first != listed_from_b or b_last != listed_b:
                    taps = _list_taps(p, table, a_first, a_last, b_first, b_last, 0, kernel, 1)
                    listed_from_a, listed_a, listed_from_b, listed_b = a_first, a_last, b_first, b_last
                inside = x + size * (plane * cells + start + begin * stride)
                winners(kind, owner + 4 * begin, inside, table, taps, stride, 0, end - begin)
            for edge in range(begin + out_width - end):
                ow = edge if edge < begin else edge - begin + end
                w_first, w_last = _taps(p, 2, ow * stride - pad)
                base = plane * cells + start + ow * stride
                winner = _edge_winner(p, kind, x, base, a_first, a_last, b_first, b_last, w_first, w_last)
                store_i32(owner, ow, winner)
            at = ((plane * out_rows + oa) * out_depth + ob) * out_width
            source = dy
            if kind != F32:
                read_run(kind, grads, 0, dy, at, 1, out_width)
                source, at = grads, 0
            _add(sums, owner, source, at, out_width, start, stride, low, high)
    if kind != F32:
        write_run(kind, out, plane * cells + low, 1, sums, low, high - low)


@njit
def _add(sums, owner, dy, at, count, start, stride, low, high):
    """Every float32 dy to its winner, where that lies in the band."""
    for i in range(count):
        cell = np.int64(load_i32(owner, i))
        place = start + i * stride + cell
        if cell >= 0 and low <= place < high:
            store_f32(sums, place, load_f32(sums, place) + load_f32(dy, at + i))


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
    table = scratch
    owner = table + 16 * load_i64(p, LISTED)
    grads = owner + 4 * count
    sums, pitch = grads + 4 * count - 4 * low * count, count
    origin = image * rows * depth * width
    if kind == F32:
        sums, pitch = out + 4 * (origin * channels + c0), channels
    for cell in range(low, high):
        clear(sums, cell * pitch, count)
    size = 4 if kind == F32 else 2
    taps, listed = 0, (-1, -1, -1, -1, -1, -1)
    first, last = _windows_of_band(p, a0, a1)
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
                key = (a_first, a_last, b_first, b_last, w_first, w_last)
                if key != listed:
                    taps = _list_taps(p, table, a_first, a_last, b_first, b_last, w_first, w_last, channels)
                    listed = key
                start = (a_start * depth + b_start) * width + w_start
                winners(kind, owner, x + size * ((origin + start) * channels + c0), table, taps, 1, 0, count)
                at = ((image * out_rows + oa) * out_depth + ob) * out_width + ow
                read_run(kind, grads, 0, dy, at * channels + c0, 1, count)
                for c in range(count):
                    cell = start + load_i32(owner, c)
                    if low <= cell < high:
                        place = cell * pitch + c
                        store_f32(sums, place, load_f32(sums, place) + load_f32(grads, c))
    if kind != F32:
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
    # a row of windows lies along the last axis, a band of rows along the first
    blank = pooling.Axis(1, 1, 1, 1, 1, 0)
    a, b, w = [axes[0] if len(axes) > 1 else blank, axes[1] if len(axes) > 2 else blank, axes[-1]]
    last = call.attributes["data_format"] == "NXC"
    blocks = -(-channels // BLOCK) if last else 0
    width = min(channels, BLOCK) if last else 1  # elements of a cell
    pieces = batch * (blocks or channels)
    cells = math.prod(lengths)
    if cells > MAX_CELLS:
        raise ShapeError(f"src: expected at most {MAX_CELLS} cells per channel, got {cells}", op_type=OP.name)
    wanted = max(-(-cells * width // BAND_CELLS), -(-MIN_ITEMS // pieces))
    bands = max(1, min(wanted, a.length // max((a.kernel - 1) * a.dilation + 1, 1)))
    held = 0 if call.element_type == F32 else (-(-a.length // bands)) * b.length * w.length * width
    work, run = _functions()
    words = np.zeros(WORDS, np.int64)
    words[WORKER], words[KIND], words[ITEMS] = work.address, call.element_type, pieces * bands
    words[BANDS], words[BLOCKS], words[CHANNELS] = bands, blocks, channels
    # of a window's taps no more lie inside than there are cells
    words[LISTED] = math.prod(min(axis.kernel, axis.length) for axis in axes)
    words[SCRATCH] = 16 * words[LISTED] + 4 * (2 * (width if last else w.out) + held)
    fields = {LENGTH: "length", OUT: "out", TAPS: "kernel", STRIDE: "stride", DILATION: "dilation", PAD: "begin"}
    for place, name in fields.items():
        words[place : place + 3] = [getattr(axis, name) for axis in (a, b, w)]
    return Plan(run.address, words, lane=int(words[SCRATCH]))


KERNEL = NativeKernel(OP, _plan, _functions)
