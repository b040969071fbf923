"""Runs of elements of any type: to float32, from float32, added up. Compiled.

A run is an address, a first index, a step between elements and a count. Steps of one have loops of their own, which
vectorise.
"""

import numpy as np

from onnx_backprop.ort_ops.compiler.decorators import apart, fast, inner, shared
from onnx_backprop.ort_ops.compiler.llvm import F32, by_half, by_type, load_f32, store_f32
from onnx_backprop.ort_ops.vector.registers import MOST_STEP, blend_even, clear_run, copy_every, copy_run, spread_even

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
