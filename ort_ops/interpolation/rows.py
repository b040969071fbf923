"""A row of transposed interpolation before its columns are gathered: the weighted sum of rows of dy."""

from dataclasses import dataclass

import numpy as np

from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import (
    F32,
    by_half,
    fma_f32,
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    store_i64,
)
from onnx_backprop.ort_ops.compiler.records import Record, view
from onnx_backprop.ort_ops.vector.row_sums import combine_rows
from onnx_backprop.ort_ops.vector.rows import clear


@dataclass(frozen=True, kw_only=True)
class Offsets(Record):
    """Of a thread's scratch."""

    table: int = 0  # the taps of a row
    sums: int = 0  # of rows of dy
    transposed: int = 0  # these, a row in every lane
    gathered: int = 0  # columns
    tile: int = 0  # of these, transposed back


@dataclass(frozen=True, kw_only=True)
class Interpolation(Record):
    """The numbers of a plan; what is called a table lies so many words behind it, 0: there is none."""

    kind: int
    data: int  # which input is dy
    axes: int  # before the columns
    axis_table: int
    row_count: int
    columns: int
    inner: int  # elements of a column
    starts: int  # tables of the columns' taps
    taps: int
    chunks: int
    chunk_table: int
    offsets: Offsets
    method: int
    units: int
    per_item: int
    ends: int = 0  # tables of `Windows`
    entries: int = 0
    patterns: int = 0
    pitch: int
    innermost: bool  # no axis of the rows but the last one is resized, and that one is
    streamed: bool  # dx is stored past the caches, which do not hold it together with dy


@dataclass(frozen=True, kw_only=True)
class RowAxis(Record):
    """An axis before the columns: length in dx, elements from cell to cell in dy; where it is resized, its tables."""

    length: int
    stride: int
    starts: int = 0
    taps: int = 0


@dataclass(frozen=True, kw_only=True)
class Chunk(Record):
    """Some columns: first and count in dx, first and count in dy."""

    first: int
    count: int
    low: int
    length: int


@inner
def _combine(load, _store, target, source, table, count, length):
    """A weighted sum of rows, tap after tap as `combine_rows` makes it of float32."""
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


@inner
def combine(kind, target, source, table, count, length):
    if count == 0:
        clear(target, 0, length)
    elif kind == F32:
        combine_rows(target, source, table, count, length)
    else:
        by_half(kind, _combine, target, source, table, count, length)


@inner
def row_taps(p, row, base, table):
    """The rows of dy that a row of dx sums: pairs of element index and weight; how many."""
    count, axis = 1, p.axes
    store_i64(table, 0, base)
    store_f32(table, 2, np.float32(1.0))
    while axis > 0:
        axis -= 1
        entry = view(RowAxis, p + 8 * p.axis_table, axis)
        length, stride = entry.length, entry.stride
        i, row = row % length, row // length
        starts = entry.starts
        if starts == 0:
            for t in range(count):
                store_i64(table, 2 * t, load_i64(table, 2 * t) + i * stride)
            continue
        first, last = load_i64(p, starts + i), load_i64(p, starts + i + 1)
        taps = p + 8 * (entry.taps + first)
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
    entry = view(RowAxis, p + 8 * p.axis_table, (p.axes - 1))
    stride, starts = entry.stride, entry.starts
    first, last = load_i64(p, starts + i), load_i64(p, starts + i + 1)
    taps = p + 8 * (entry.taps + first)
    for t in range(last - first):
        store_i64(table, 2 * t, start + load_i32(taps, 2 * t) * stride)
        store_f32(table, 4 * t + 2, load_f32(taps, 2 * t + 1))
    return last - first


@inner
def last_row(table, taps, before):
    """The element index of the last of so many taps; `before` if there are none, or it lies behind."""
    return max(before, load_i64(table, 2 * taps - 2)) if taps > 0 else before
