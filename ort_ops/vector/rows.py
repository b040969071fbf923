"""Runs of elements of any type: to float32, from float32, added up. Compiled.

A run is an address, a first index, a step between elements and a count. Steps of one have loops of their own, which
vectorise.
"""

import numpy as np

from onnx_backprop.ort_ops.compiler.decorators import VECTOR, apart, fast, inner, shared
from onnx_backprop.ort_ops.compiler.llvm import F32, by_half, by_type, load_f32, store_f32
from onnx_backprop.ort_ops.vector.registers import (
    MOST_STEP,
    blend_even,
    clear_run,
    copy_every,
    copy_rows,
    copy_run,
    fetch,
    spread_even,
)

SUM_CHUNK = 4096  # elements


@inner
def _read(load, _store, target, to, source, first, step, count):
    if step == 1:
        for i in range(count):
            store_f32(target, to + i, load(source, first + i))
    else:
        for i in range(count):
            store_f32(target, to + i, load(source, first + i * step))


@inner
def _scatter(load, _store, target, to, target_step, source, first, step, count):
    for i in range(count):
        store_f32(target, to + i * target_step, load(source, first + i * step))


@inner
def _write(_load, store, target, to, step, source, first, count):
    if step == 1:
        for i in range(count):
            store(target, to + i, load_f32(source, first + i))
    else:
        for i in range(count):
            store(target, to + i * step, load_f32(source, first + i))


@inner
def _add(load, _store, target, source, first, count):
    for i in range(count):
        store_f32(target, i, load_f32(target, i) + load(source, first + i))


@shared
def read_run(kind, target, to, source, first, step, count):
    """float32 target[to + i] = source[first + i·step]."""
    if kind != F32:
        by_half(kind, _read, target, to, source, first, step, count)
    elif step == 1:
        copy_run(target + 4 * to, source + 4 * first, count)
    elif 2 <= step <= MOST_STEP:
        copy_every(step, target + 4 * to, 0, source + 4 * first, 0, 1, count)
    else:
        _scatter(load_f32, store_f32, target, to, 1, source, first, step, count)


@apart
def scatter_run(kind, target, to, target_step, source, first, step, count):
    """float32 target[to + i·target_step] = source[first + i·step]."""
    by_type(kind, _scatter, target, to, target_step, source, first, step, count)


@shared
def write_run(kind, target, to, step, source, first, count):
    """target[to + i·step] = float32 source[first + i], rounded once."""
    if kind != F32:
        by_half(kind, _write, target, to, step, source, first, count)
    elif step == 1:
        copy_run(target + 4 * to, source + 4 * first, count)
    elif step == 2:
        spread_even(target + 4 * to, source + 4 * first, count)
    else:
        _scatter(load_f32, store_f32, target, to, step, source, first, 1, count)


@apart
def write_phase(kind, target, to, step, source, first, count):
    """As `write_run`, of a thread that writes what lies between the elements as well."""
    if kind == F32 and step == 2:
        blend_even(target + 4 * to, source + 4 * first, count)
    else:
        write_run(kind, target, to, step, source, first, count)


@apart
def add_run(kind, target, source, first, count):
    """float32 target[i] += source[first + i]."""
    by_type(kind, _add, target, source, first, count)


@fast("reassoc", "contract")
def _sum(load, _store, source, first, count):
    total = np.float32(0.0)
    for i in range(count):
        total += load(source, first + i)
    return total


@inner
def sum_run(kind, source, first, count, total):
    """float64 total + Σ source[first + i], of which up to SUM_CHUNK elements at a time are added up in float32."""
    for done in range(0, count, SUM_CHUNK):
        total += np.float64(by_type(kind, _sum, source, first + done, min(SUM_CHUNK, count - done)))
    return total


@inner
def clear(target, to, count):
    """float32 target[to + i] = 0."""
    clear_run(target + 4 * to, count)


@inner
def add_to_rows(tile, row, values, rows, columns):
    """tile[i, j] += values[i]; `row` bytes from row to row, float32."""
    for i in range(rows):
        value, at = load_f32(values, i), tile + i * row
        for j in range(columns):
            store_f32(at, j, load_f32(at, j) + value)


@inner
def add_to_columns(tile, row, values, rows, columns):
    """tile[i, j] += values[j]."""
    for i in range(rows):
        at = tile + i * row
        for j in range(columns):
            store_f32(at, j, load_f32(at, j) + load_f32(values, j))


@inner
def copy_narrow(target, width, source, step, some, left, count):
    """`count` <= width numbers of some channels, of the `left` last ones of a tap, `width` and `step` apart.

    Whole vectors where channels behind overwrite what is too much of them, and have as much to be read: AMD's masked
    stores are slow.
    """
    vectors = (width + VECTOR - 1) // VECTOR * VECTOR
    rows = max(0, min(some, left - (vectors - 1) // width)) if count == width and step >= vectors else 0
    copy_rows(target, 4 * width, source, 4 * step, rows, vectors)
    copy_rows(target + 4 * rows * width, 4 * width, source + 4 * rows * step, 4 * step, some - rows, count)


@inner
def fetch_kernels(kernels, ahead, channels, w_s, w_out, span, count):
    """The kernels of some channels, so many ahead: those of all outputs follow one another, or those of all inputs."""
    at = kernels + 4 * ahead * w_s
    if w_out < w_s:
        fetch(at, 4 * ((count - 1) * w_out + span))
    else:
        for row in range(count):
            fetch(at + 4 * row * w_out, 4 * channels * w_s)
