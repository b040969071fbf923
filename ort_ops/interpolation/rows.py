"""A row of transposed interpolation before its columns are gathered: the weighted sum of rows of dy."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnx_backprop.ort_ops.runtime.compile import compiled, inner
from onnx_backprop.ort_ops.runtime.llvm import (
    BF16,
    F16,
    fma_f32,
    load_bf16,
    load_f16,
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    store_i64,
)
from onnx_backprop.ort_ops.vector.row_sums import combine_rows
from onnx_backprop.ort_ops.vector.rows import clear

# the parameters of `interpolation.gather`; the tables lie behind them, at word indices
(
    WORKER, KIND, DATA, AXES, AXIS_TABLE, ROW_COUNT, COLUMNS, INNER, STARTS, TAPS, CHUNKS, CHUNK_TABLE, LIST_WORDS,
    LANE_BYTES, METHOD, UNITS, PER_ITEM, ITEMS, ENDS, ENTRIES, PATTERNS, PITCH, INNERMOST,
    STREAMED,
) = range(24)  # fmt: skip
WORDS = 24
# STREAMED: whether dx is stored past the caches, which do not hold it together with dy
# INNERMOST: whether no axis of the rows but the last one is resized, and that one is
# an axis before the columns: length in dx, elements from cell to cell in dy, and where it is resized (else 0) the word
# indices of its starts and taps
AXIS_LENGTH, AXIS_STRIDE, AXIS_STARTS, AXIS_TAPS, AXIS_WORDS = range(5)
# a chunk of columns: first and count in dx, first and count in dy
CHUNK_FIRST, CHUNK_COUNT, CHUNK_LOW, CHUNK_LENGTH, CHUNK_WORDS = range(5)


def _combiner(name: str, load: Any) -> Any:
    """A weighted sum of rows, tap after tap as `combine_rows` makes it of float32."""

    @compiled(f"combine_{name}")
    def combine(target, source, table, count, length):
        clear(target, 0, length)
        t = 0
        while t < count:
            a, wa = load_i64(table, 2 * t), load_f32(table, 4 * t + 2)
            if count - t >= 4:
                b, wb = load_i64(table, 2 * t + 2), load_f32(table, 4 * t + 6)
                c, wc = load_i64(table, 2 * t + 4), load_f32(table, 4 * t + 10)
                d, wd = load_i64(table, 2 * t + 6), load_f32(table, 4 * t + 14)
                for i in range(length):
                    total = fma_f32(wa, load(source, a + i), load_f32(target, i))
                    total = fma_f32(wc, load(source, c + i), fma_f32(wb, load(source, b + i), total))
                    store_f32(target, i, fma_f32(wd, load(source, d + i), total))
                t += 4
            else:
                for i in range(length):
                    store_f32(target, i, fma_f32(wa, load(source, a + i), load_f32(target, i)))
                t += 1

    return combine


_combine_f16 = _combiner("f16", load_f16)
_combine_bf16 = _combiner("bf16", load_bf16)


@inner
def combine(kind, target, source, table, count, length):
    if count == 0:
        clear(target, 0, length)
    elif kind == F16:
        _combine_f16(target, source, table, count, length)
    elif kind == BF16:
        _combine_bf16(target, source, table, count, length)
    else:
        combine_rows(target, source, table, count, length)


@inner
def row_taps(p, row, base, table):
    """The rows of dy that a row of dx sums: pairs of element index and weight; how many."""
    count, axis = 1, load_i64(p, AXES)
    store_i64(table, 0, base)
    store_f32(table, 2, np.float32(1.0))
    while axis > 0:
        axis -= 1
        entry = p + 8 * (load_i64(p, AXIS_TABLE) + AXIS_WORDS * axis)
        length, stride = load_i64(entry, AXIS_LENGTH), load_i64(entry, AXIS_STRIDE)
        i, row = row % length, row // length
        starts = load_i64(entry, AXIS_STARTS)
        if starts == 0:
            for t in range(count):
                store_i64(table, 2 * t, load_i64(table, 2 * t) + i * stride)
            continue
        first, last = load_i64(p, starts + i), load_i64(p, starts + i + 1)
        taps = p + 8 * (load_i64(entry, AXIS_TAPS) + first)
        more = last - first
        t = count * more
        if count == 1:  # the innermost axis: no products yet
            start, weight = load_i64(table, 0), load_f32(table, 2)
            while t > 0:
                t -= 1
                store_f32(table, 4 * t + 2, weight * load_f32(taps, 2 * t + 1))
                store_i64(table, 2 * t, start + load_i32(taps, 2 * t) * stride)
        while t > 0:  # from the end, so that what is still to be read stays
            t -= 1
            old, new = t % count, t // count
            store_f32(table, 4 * t + 2, load_f32(table, 4 * old + 2) * load_f32(taps, 2 * new + 1))
            store_i64(table, 2 * t, load_i64(table, 2 * old) + load_i32(taps, 2 * new) * stride)
        count *= more
        if count == 0:
            break
    return count


@inner
def innermost_taps(p, i, start, table):
    """`row_taps` where only the last axis of the rows is resized: of its row i; its first row in dy is at `start`."""
    entry = p + 8 * (load_i64(p, AXIS_TABLE) + AXIS_WORDS * (load_i64(p, AXES) - 1))
    stride, starts = load_i64(entry, AXIS_STRIDE), load_i64(entry, AXIS_STARTS)
    first, last = load_i64(p, starts + i), load_i64(p, starts + i + 1)
    taps = p + 8 * (load_i64(entry, AXIS_TAPS) + first)
    for t in range(last - first):
        store_i64(table, 2 * t, start + load_i32(taps, 2 * t) * stride)
        store_f32(table, 4 * t + 2, load_f32(taps, 2 * t + 1))
    return last - first


@inner
def last_row(table, taps, before):
    """The element index of the last of so many taps; `before` if there are none, or it lies behind."""
    return max(before, load_i64(table, 2 * taps - 2)) if taps > 0 else before
