"""The windows of MaxPoolBackward, compiled: which touch a band, which taps lie inside, which of those wins.

The parameters of a call lie here too, for the loops that go from window to window (`max_pool_backward`).
"""

from __future__ import annotations

import numpy as np

from onnx_backprop.ort_ops.runtime.compile import inner
from onnx_backprop.ort_ops.runtime.llvm import (
    BF16,
    F16,
    F32,
    load_bf16,
    load_f16,
    load_f32,
    load_i64,
    store_bf16,
    store_f16,
    store_f32,
    store_i64,
)
from onnx_backprop.ort_ops.vector.rows import clear

# parameters; three numbers each from LENGTH on, for A, B and W, the last spatial axis. CUT: which one is cut into
# bands, W only where the others have length 1. LISTED: most taps of a table, 0: none, windows go singly. APART: no
# window overlaps another, and a half type is written at once
(
    WORKER, KIND, ITEMS, BANDS, BLOCKS, CHANNELS, SCRATCH, LISTED, CUT, APART, LENGTH, OUT, TAPS, STRIDE, DILATION, PAD,
    WORDS,
) = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 13, 16, 19, 22, 25, 28)  # fmt: skip

NONE = np.int32(-1)


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
    stride, pad = load_i64(p, STRIDE + axis), load_i64(p, PAD + axis)
    reach = (load_i64(p, TAPS + axis) - 1) * load_i64(p, DILATION + axis)
    return first_from(first + pad - reach, stride), end_until(last - 1 + pad, stride, load_i64(p, OUT + axis))


@inner
def taps_inside(p, axis, start):
    """The taps of a window that begins at `start` which lie inside the source: first, and one behind the last."""
    dilation, last = load_i64(p, DILATION + axis), load_i64(p, LENGTH + axis) - 1
    return first_from(-start, dilation), end_until(last - start, dilation, load_i64(p, TAPS + axis))


@inner
def list_taps(p, table, a_first, a_last, b_first, b_last, w_first, w_last, pitch):
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


@inner
def _load(kind, source, index):
    if kind == F16:
        return load_f16(source, index)
    if kind == BF16:
        return load_bf16(source, index)
    return load_f32(source, index)


@inner
def winner_of(p, kind, x, start, pitch, a_first, a_last, b_first, b_last, w_first, w_last):
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


@inner
def clear_sums(kind, target, first, count):
    """Zeros of an element type."""
    if kind == F32:
        clear(target, first, count)
    else:
        for i in range(first, first + count):
            store_f16(target, i, np.float32(0.0))  # zero in all half types


@inner
def add_one(kind, sums, place, value):
    """Add to a sum; in a half type there is nothing yet."""
    if kind == F16:
        store_f16(sums, place, np.float32(0.0) + value)
    elif kind == BF16:
        store_bf16(sums, place, np.float32(0.0) + value)
    else:
        store_f32(sums, place, load_f32(sums, place) + value)
