"""Transposed interpolation, compiled: every source pixel gathers what the destination pixels that read it hold.

    dx = W_0ᵀ · W_1ᵀ · … · dy

Tensors are rows of columns: the last resized axis makes the columns (each with `inner` elements behind it), every axis
before it the rows. A row of dx is first a weighted sum of rows of dy, along memory; then its columns are gathered, with
vectors across the elements behind a column or, where there are too few, across rows, which are transposed for that.
float32 throughout; every sum runs in the order of dy's indices, whatever the threads do.
"""

import numpy as np

from onnx_backprop.ort_ops.compiler.decorators import VECTOR, inner
from onnx_backprop.ort_ops.compiler.llvm import F32, load_f32, load_i64
from onnx_backprop.ort_ops.compiler.machine import PERMUTES
from onnx_backprop.ort_ops.compiler.records import view
from onnx_backprop.ort_ops.interpolation.rows import (
    Chunk,
    Interpolation,
    RowAxis,
    combine,
    innermost_taps,
    last_row,
    row_taps,
)
from onnx_backprop.ort_ops.runtime.stages import stage
from onnx_backprop.ort_ops.vector.gemm_tile import gather_columns, stream_columns
from onnx_backprop.ort_ops.vector.permute import ROWS, gather_windows
from onnx_backprop.ort_ops.vector.registers import BYTES, fence, fetch, transpose_tile
from onnx_backprop.ort_ops.vector.row_sums import SHORT
from onnx_backprop.ort_ops.vector.rows import write_run

ALONG, ACROSS, WINDOWS = range(3)  # METHOD
_ROW = 4 * VECTOR
_AHEAD = 4096  # bytes


@inner
def _along(p, call, row, chunk, scratch):
    """One row; vectors go along the elements behind a column."""
    kind, inner = p.kind, p.inner
    low, length = chunk.low, chunk.length
    first, count = chunk.first, chunk.count
    data = call.inputs[p.data]
    out, at = call.output, (row * p.columns + first) * inner
    table, sums = scratch + p.offsets.table, scratch + p.offsets.sums
    rows = row_taps(p, row, low * inner, table)
    if p.starts == 0:  # no resized axis but those of the rows
        if kind == F32:
            combine(kind, out + 4 * at, data, table, rows, count * inner)
        else:
            combine(kind, sums, data, table, rows, count * inner)
            write_run(kind, out, at, 1, sums, 0, count * inner)
        return
    if rows == 1 and kind == F32 and load_f32(table, 2) == np.float32(1.0):
        source = data + 4 * load_i64(table, 0)
    else:
        combine(kind, sums, data, table, rows, length * inner)
        source = sums
    source -= 4 * low * inner
    starts, taps = p + 8 * (p.starts + first), p + 8 * p.taps
    gathered = out + 4 * at if kind == F32 else scratch + p.offsets.gathered
    streaming = kind == F32 and p.streamed and (gathered | 4 * inner) % BYTES == 0
    if streaming:
        stream_columns(gathered, 4 * inner, source, 4 * inner, 4 * inner, starts, taps, count)
    else:
        gather_columns(gathered, 4 * inner, source, 4 * inner, 4 * inner, starts, taps, count)
    if kind != F32:
        write_run(kind, out, at, 1, gathered, 0, count * inner)


@inner
def _across(p, call, block, chunk, scratch):
    """As many rows as a vector has lanes; vectors go across them."""
    kind, inner = p.kind, p.inner
    low, length = chunk.low, chunk.length
    first, count = chunk.first, chunk.count
    data, out = call.inputs[p.data], call.output
    row = block * VECTOR
    rows = min(VECTOR, p.row_count - row)
    elements, results = length * inner, count * inner
    pitch = (elements + VECTOR - 1) // VECTOR * VECTOR
    pitch += VECTOR * (1 - pitch // VECTOR % 2)  # the rows of powers of two lie apart in the cache
    table, sums, transposed = scratch + p.offsets.table, scratch + p.offsets.sums, scratch + p.offsets.transposed
    gathered, tile = scratch + p.offsets.gathered, scratch + p.offsets.tile
    row_length = p.columns * inner
    at = row * row_length + first * inner
    start = behind = 0
    for lane in range(rows):
        taps = row_taps(p, row + lane, low * inner, table)
        if lane == 0:
            start = load_i64(table, 0)
        behind = load_i64(table, 0)
        combine(kind, sums + 4 * lane * pitch, data, table, taps, elements)
    if kind == F32:  # short rows are no stream that a processor would fetch ahead
        fetch(data + 4 * behind, 4 * min(max(0, behind - start), 4 * VECTOR * elements))
    for i in range(0, elements, VECTOR):
        transpose_tile(transposed + _ROW * i, _ROW, sums + 4 * i, 4 * pitch)
    starts, taps = p + 8 * (p.starts + first), p + 8 * p.taps
    source = transposed - _ROW * low * inner
    gather_columns(gathered, _ROW * inner, source, _ROW * inner, _ROW * inner, starts, taps, count)
    for i in range(0, results, VECTOR):
        if kind == F32 and rows == VECTOR and i + VECTOR <= results:
            transpose_tile(out + 4 * (at + i), 4 * row_length, gathered + _ROW * i, _ROW)
        else:
            transpose_tile(tile, _ROW, gathered + _ROW * i, _ROW)
            for lane in range(rows):
                write_run(kind, out, at + lane * row_length + i, 1, tile, lane * VECTOR, min(VECTOR, results - i))


@inner
def _sum_rows(p, kind, data, row, rows, base, count, table, sums, pitch):
    """The sums of rows of dy that some rows of dx need; most have one axis to look up, and follow one another in it."""
    if p.innermost == 0:
        for r in range(rows):
            taps = row_taps(p, row + r, base, table)
            combine(kind, sums + 4 * r * pitch, data, table, taps, count)
        return
    first_axis = p + 8 * p.axis_table
    axes = view(RowAxis, first_axis)
    plane, length, step = 0, p.row_count, 0
    if p.axes == 2:
        step, length = axes.stride, view(RowAxis, first_axis, 1).length
        plane = row // length
    i, stride = row - plane * length, view(RowAxis, first_axis, p.axes - 1).stride
    fetches = kind == F32 and count == stride and p.columns * p.inner <= count <= SHORT
    before = base + plane * step - stride
    if fetches and i > 0:
        taps = innermost_taps(p, i - 1, base + plane * step, table)
        before = last_row(table, taps, before)
    for r in range(rows):
        taps = innermost_taps(p, i, base + plane * step, table)
        if fetches:  # while this row is made, as many rows as it reads anew
            last = last_row(table, taps, before)
            fetch(data + 4 * last + _AHEAD, 4 * (last - before))
            before = last
        combine(kind, sums + 4 * r * pitch, data, table, taps, count)
        i += 1
        if i == length:
            i, plane = 0, plane + 1


@inner
def _windows(p, call, block, chunk, scratch):
    """A few rows; vectors go along them and are permuted."""
    kind, inner, pitch = p.kind, p.inner, p.pitch
    low, length = chunk.low, chunk.length
    first, count = chunk.first, chunk.count
    data, out = call.inputs[p.data], call.output
    row = block * ROWS
    rows = min(ROWS, p.row_count - row)
    row_length = p.columns * inner
    at = row * row_length + first * inner
    table, sums = scratch + p.offsets.table, scratch + p.offsets.sums
    _sum_rows(p, kind, data, row, rows, low * inner, length * inner, table, sums, pitch)
    results = count * inner
    target, step = out + 4 * at, 4 * row_length
    if kind != F32:
        target, step = scratch + p.offsets.gathered, 4 * results
    ends = p + 8 * (p.ends + first * inner // VECTOR)
    entries, patterns = p + 8 * p.entries, p + 8 * p.patterns
    streaming = kind == F32 and p.streamed and (target | step) % BYTES == 0
    gather_windows(rows, target, step, sums, 4 * pitch, ends, entries, patterns, results, streaming)
    if kind != F32:
        for r in range(rows):
            write_run(kind, out, at + r * row_length, 1, target, r * results, results)


@inner
def _item(call, p, item, scratch):
    """Units of work that lie one behind the other: a chunk of columns of one row, or of one block of rows."""
    chunks, method, each = p.chunks, p.method, p.per_item
    block, n = item * each // chunks, item * each % chunks
    for _ in range(min(p.units - item * each, each)):
        chunk = view(Chunk, p + 8 * p.chunk_table, n)
        if PERMUTES and method == WINDOWS:
            _windows(p, call, block, chunk, scratch)
        elif method == ACROSS:
            _across(p, call, block, chunk, scratch)
        else:
            _along(p, call, block, chunk, scratch)
        n += 1
        if n == chunks:
            block, n = block + 1, 0
    fence()


GATHER = stage("interpolation", Interpolation, _item)
