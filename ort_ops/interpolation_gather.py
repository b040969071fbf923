"""Transposed interpolation, compiled: every source pixel gathers what the destination pixels that read it hold.

    dx = W_0ᵀ · W_1ᵀ · … · dy

Tensors are rows of columns: the last resized axis makes the columns (each with `inner` elements behind it), every axis
before it the rows. A row of dx is first a weighted sum of rows of dy, along memory; then its columns are gathered, with
vectors across the elements behind a column or, where there are too few, across rows, which are transposed for that.
float32 throughout; every sum runs in the order of dy's indices, whatever the threads do.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from .native_bridge import keep
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
from .native_combine import combine_rows
from .native_llvm import (
    BF16,
    F16,
    F32,
    exchange,
    fma_f32,
    load_bf16,
    load_f16,
    load_f32,
    load_i32,
    load_i64,
    stack,
    store_f32,
    store_i64,
)
from .native_micro import gather_columns
from .native_rows import clear, write_run
from .native_source import VECTOR, compiled, exported
from .native_vectors import fetch, transpose_tile

# parameters; the tables lie behind them, at word indices
(
    WORKER, KIND, DATA, AXES, AXIS_TABLE, ROW_COUNT, COLUMNS, INNER, STARTS, TAPS, CHUNKS, CHUNK_TABLE, LIST_WORDS,
    LANE_BYTES, ITEMS,
) = range(15)  # fmt: skip
WORDS = 15
# an axis before the columns: length in dx, elements from cell to cell in dy, and where it is resized (else 0) the word
# indices of its starts and taps
AXIS_LENGTH, AXIS_STRIDE, AXIS_STARTS, AXIS_TAPS, AXIS_WORDS = range(5)
# a chunk of columns: first and count in dx, first and count in dy
CHUNK_FIRST, CHUNK_COUNT, CHUNK_LOW, CHUNK_LENGTH, CHUNK_WORDS = range(5)

JOB_CALL, JOB_NEXT, JOB_FAILED = range(3)
_job = stack(3)
_ROW = 4 * VECTOR


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


@njit
def combine(kind, target, source, table, count, length):
    if count == 0:
        clear(target, 0, length)
    elif kind == F16:
        _combine_f16(target, source, table, count, length)
    elif kind == BF16:
        _combine_bf16(target, source, table, count, length)
    else:
        combine_rows(target, source, table, count, length)


@njit
def _row_taps(p, row, base, table):
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


@njit
def _along(p, call, row, chunk, scratch):
    """One row; vectors go along the elements behind a column."""
    kind, inner = load_i64(p, KIND), load_i64(p, INNER)
    low, length = load_i64(chunk, CHUNK_LOW), load_i64(chunk, CHUNK_LENGTH)
    first, count = load_i64(chunk, CHUNK_FIRST), load_i64(chunk, CHUNK_COUNT)
    data = load_i64(call, CALL_INPUTS + load_i64(p, DATA))
    out, at = load_i64(call, CALL_OUTPUT), (row * load_i64(p, COLUMNS) + first) * inner
    table = scratch
    sums = table + 8 * load_i64(p, LIST_WORDS)
    rows = _row_taps(p, row, low * inner, table)
    if load_i64(p, STARTS) == 0:  # no resized axis but those of the rows
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
    starts, taps = p + 8 * (load_i64(p, STARTS) + first), p + 8 * load_i64(p, TAPS)
    gathered = out + 4 * at if kind == F32 else sums + 4 * length * inner
    c = 0
    while c < inner:
        c = min(c, inner - VECTOR)
        gather_columns(gathered + 4 * c, 4 * inner, source + 4 * c, 4 * inner, starts, taps, count)
        c += VECTOR
    if kind != F32:
        write_run(kind, out, at, 1, gathered, 0, count * inner)


@njit
def _across(p, call, block, chunk, scratch):
    """As many rows as a vector has lanes; vectors go across them."""
    kind, inner = load_i64(p, KIND), load_i64(p, INNER)
    low, length = load_i64(chunk, CHUNK_LOW), load_i64(chunk, CHUNK_LENGTH)
    first, count = load_i64(chunk, CHUNK_FIRST), load_i64(chunk, CHUNK_COUNT)
    data, out = load_i64(call, CALL_INPUTS + load_i64(p, DATA)), load_i64(call, CALL_OUTPUT)
    row = block * VECTOR
    rows = min(VECTOR, load_i64(p, ROW_COUNT) - row)
    elements, results = length * inner, count * inner
    pitch = (elements + VECTOR - 1) // VECTOR * VECTOR
    pitch += VECTOR * (1 - pitch // VECTOR % 2)  # the rows of powers of two lie apart in the cache
    table = scratch
    sums = table + 8 * load_i64(p, LIST_WORDS)
    turned = sums + 4 * VECTOR * pitch
    gathered = turned + 4 * VECTOR * pitch
    tile = gathered + 4 * VECTOR * ((results + VECTOR - 1) // VECTOR * VECTOR)
    row_length = load_i64(p, COLUMNS) * inner
    at = row * row_length + first * inner
    start = behind = 0
    for lane in range(rows):
        taps = _row_taps(p, row + lane, low * inner, table)
        if lane == 0:
            start = load_i64(table, 0)
        behind = load_i64(table, 0)
        combine(kind, sums + 4 * lane * pitch, data, table, taps, elements)
    if kind == F32:  # short rows are no stream that a processor would fetch ahead
        fetch(data + 4 * behind, 4 * min(max(0, behind - start), 4 * VECTOR * elements))
    for i in range(0, elements, VECTOR):
        transpose_tile(turned + _ROW * i, _ROW, sums + 4 * i, 4 * pitch)
    starts, taps = p + 8 * (load_i64(p, STARTS) + first), p + 8 * load_i64(p, TAPS)
    source = turned - _ROW * low * inner
    for c in range(inner):
        gather_columns(gathered + _ROW * c, _ROW * inner, source + _ROW * c, _ROW * inner, starts, taps, count)
    for i in range(0, results, VECTOR):
        if kind == F32 and rows == VECTOR and i + VECTOR <= results:
            transpose_tile(out + 4 * (at + i), 4 * row_length, gathered + _ROW * i, _ROW)
        else:
            transpose_tile(tile, _ROW, gathered + _ROW * i, _ROW)
            for lane in range(rows):
                write_run(kind, out, at + lane * row_length + i, 1, tile, lane * VECTOR, min(VECTOR, results - i))


@njit
def _work(job, _lane):
    """Take items until none is left: a chunk of columns of one row, or of one block of rows."""
    call = load_i64(job, JOB_CALL)
    p, runtime = load_i64(call, CALL_PARAMETERS), load_i64(call, CALL_RUNTIME)
    items, size, scratch = load_i64(p, ITEMS), load_i64(p, LANE_BYTES), 0
    chunks, across = load_i64(p, CHUNKS), load_i64(p, INNER) < VECTOR and load_i64(p, STARTS) != 0
    batch = max(1, items // (64 * lanes(call)))
    while True:
        batch_at = take(job + 8 * JOB_NEXT)
        if batch_at * batch >= items:
            break
        if scratch == 0:
            scratch = acquire(runtime, size)
            if scratch == 0:
                exchange(job + 8 * JOB_FAILED, 1)
                break
        for item in range(batch_at * batch, min(items, (batch_at + 1) * batch)):
            chunk = p + 8 * (load_i64(p, CHUNK_TABLE) + CHUNK_WORDS * (item % chunks))
            if across:
                _across(p, call, item // chunks, chunk, scratch)
            else:
                _along(p, call, item // chunks, chunk, scratch)
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
def functions() -> tuple[Any, Any]:
    """(work, run), compiled."""
    return keep(_build())
