"""The windows of MaxPoolBackward, compiled: which touch a band, which taps lie inside, which of those wins.

The parameters of a call lie here too, for the loops that go from window to window (`max_pool_backward`).
"""

from dataclasses import dataclass

import numpy as np

from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import F32, by_half, by_type, load_f32, store_f16, store_f32, store_i64
from onnx_backprop.ort_ops.compiler.records import Record, Triple
from onnx_backprop.ort_ops.vector.rows import clear

NONE = np.int32(-1)


@dataclass(frozen=True, kw_only=True)
class PoolOffsets(Record):
    """Of a thread's scratch."""

    table: int = 0  # taps of a window
    owners: int = 0  # winners of some windows
    grads: int = 0  # dy of these
    sums: int = 0


@dataclass(frozen=True, kw_only=True)
class Pool(Record):
    """The numbers of a plan; triples for the axes A, B and W, the last spatial one."""

    kind: int
    bands: int
    blocks: int  # of channels, NXC
    channels: int
    listed: int  # most taps of a table, 0: none, windows go singly
    cut: int  # which axis is cut into bands, W only where the others have length 1
    apart: bool  # no window overlaps another, and a half type is written at once
    length: Triple
    out: Triple
    taps: Triple
    stride: Triple
    dilation: Triple
    pad: Triple
    offsets: PoolOffsets


@inner
def first_from(place, step):
    """The first n >= 0 with n·step >= place."""
    return (place + step - 1) // step if place > 0 else 0


@inner
def end_until(place, step, count):
    """One behind the last n < count with n·step <= place."""
    return min(count, place // step + 1) if place >= 0 else 0


@inner
def windows_of_band(p, axis, first, last):
    """The windows that touch the cells first … last - 1 of an axis: first, and one behind the last."""
    stride, pad = p.stride[axis], p.pad[axis]
    reach = (p.taps[axis] - 1) * p.dilation[axis]
    return first_from(first + pad - reach, stride), end_until(last - 1 + pad, stride, p.out[axis])


@inner
def taps_inside(p, axis, start):
    """The taps of a window that begins at `start` which lie inside the source: first, and one behind the last."""
    dilation, last = p.dilation[axis], p.length[axis] - 1
    return first_from(-start, dilation), end_until(last - start, dilation, p.taps[axis])


@inner
def list_taps(p, table, a_first, a_last, b_first, b_last, w_first, w_last, pitch):
    """The taps in row-major order: elements (`pitch` to a cell) and cells from where the window begins; how many."""
    count = 0
    for ka in range(a_first, a_last):
        for kb in range(b_first, b_last):
            row = ka * p.dilation[0] * p.length[1] + kb * p.dilation[1]
            for kw in range(w_first, w_last):
                cell = row * p.length[2] + kw * p.dilation[2]
                store_i64(table, 2 * count, cell * pitch)
                store_i64(table, 2 * count + 1, cell)
                count += 1
    return count


@inner
def _element(load, _store, source, index):
    return load(source, index)


@inner
def winner_of(p, kind, x, start, pitch, a_first, a_last, b_first, b_last, w_first, w_last):
    """The winner of one window, from where it begins, `pitch` elements to a cell; NONE without a tap."""
    best, owner = np.float32(0.0), NONE
    for ka in range(a_first, a_last):
        for kb in range(b_first, b_last):
            row = ka * p.dilation[0] * p.length[1] + kb * p.dilation[1]
            for kw in range(w_first, w_last):
                cell = row * p.length[2] + kw * p.dilation[2]
                value = by_type(kind, _element, x, start + cell * pitch)
                if owner == NONE or value > best:
                    best, owner = value, np.int32(cell)
    return owner


@inner
def clear_sums(kind, target, first, count):
    """Zeros of an element type."""
    if kind == F32:
        clear(target, first, count)
    else:
        for i in range(first, first + count):
            store_f16(target, i, np.float32(0.0))  # zero in all half types


@inner
def _store_sum(_load, store, sums, place, value):
    store(sums, place, np.float32(0.0) + value)


@inner
def add_one(kind, sums, place, value):
    """Add to a sum; in a half type there is nothing yet."""
    if kind == F32:
        store_f32(sums, place, load_f32(sums, place) + value)
    else:
        by_half(kind, _store_sum, sums, place, value)
