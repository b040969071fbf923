"""LayerNormBackward, compiled: a row from its sums to its gradient while it is in a cache.

Rows are shared out in parts, each with sums of its own for the gradients of scale and bias. Long rows are looked at
twice instead: first for what is the same for a whole row, then in blocks of columns over all rows. Sums of up to CHUNK
elements, and of up to FLUSH rows, are taken in float32 and added up in float64; shapes alone decide their order.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import types

from onnx_backprop.opset.operators.layer_norm_backward import OP
from onnx_backprop.ort_ops.runtime.bridge import Call, NativeKernel, Plan, keep
from onnx_backprop.ort_ops.runtime.call import (
    CALL_INPUTS,
    CALL_MORE,
    CALL_OUTPUT,
    CALL_PARAMETERS,
    CALL_RUNTIME,
    acquire,
    no_memory,
    release,
)
from onnx_backprop.ort_ops.runtime.compile import compiled, exported, inner
from onnx_backprop.ort_ops.runtime.jobs import JOB_CALL, JOB_SHARED, begin, new_job, work_off, worker
from onnx_backprop.ort_ops.runtime.llvm import (
    BF16,
    F16,
    load_bf16,
    load_f16,
    load_f32,
    load_f64,
    load_i64,
    store_bf16,
    store_f16,
    store_f32,
    store_f64,
)
from onnx_backprop.ort_ops.vector.rows import clear

# parameters; PARTS of the rows, 0: blocks of columns. EPSILON and SHARE, which is 1 / LENGTH, are float64
(
    WORKER, MEASURER, KIND, ROWS, LENGTH, PARTS, EPSILON, SHARE, ITEMS, LANE_BYTES, SHARED_BYTES,
) = range(11)  # fmt: skip
MEAN, VARIANCE, GAMMA = (CALL_INPUTS + 2 + n for n in range(3))
DIFF_GAMMA, DIFF_BETA = CALL_MORE, CALL_MORE + 1
CHUNK = 4096
FLUSH = 64
GROUP = 4  # rows that are added up together
BLOCK = 1024  # columns of an item
LONG = 1 << 15  # elements of a row that is looked at twice
PART = 1 << 14  # elements of a part, at least
MAX_PARTS, MAX_SUMS = 32, 1 << 18
# of a row: dx = dy·γ·rate + (x - mean)·along + level
F_MEAN, F_RATE, F_ALONG, F_LEVEL, FACTORS = range(5)


def _loops(name: str, load: Any, store: Any) -> tuple[Any, Any, Any, Any, Any]:
    fast = {"reassoc", "contract"}

    @compiled(f"layer_norm_sum_{name}", fastmath=fast)
    def row_sum(x, first, count):
        total = np.float32(0.0)
        for i in range(count):
            total += load(x, first + i)
        return total

    @compiled(f"layer_norm_moments_{name}", fastmath=fast)
    def moments(x, dy, gamma, first, count, mean):
        square, whole, along = np.float32(0.0), np.float32(0.0), np.float32(0.0)
        for i in range(count):
            deviation, g = load(x, first + i) - mean, load(dy, first + i) * load_f32(gamma, i)
            square += deviation * deviation
            whole += g
            along += g * deviation
        return square, whole, along

    @compiled(f"layer_norm_gradient_{name}", fastmath={"contract"})
    def gradient(dx, x, dy, gamma, first, count, factors):
        mean, rate = load_f32(factors, F_MEAN), load_f32(factors, F_RATE)
        along, level = load_f32(factors, F_ALONG), load_f32(factors, F_LEVEL)
        for i in range(count):
            rest = (load(x, first + i) - mean) * along + level
            store(dx, first + i, load(dy, first + i) * load_f32(gamma, i) * rate + rest)

    @compiled(f"layer_norm_add_{name}", fastmath={"contract"})
    def add(scales, biases, x, dy, first, count, factors):
        mean, rate = load_f32(factors, F_MEAN), load_f32(factors, F_RATE)
        for i in range(count):
            g = load(dy, first + i)
            store_f32(biases, i, load_f32(biases, i) + g)
            store_f32(scales, i, load_f32(scales, i) + g * ((load(x, first + i) - mean) * rate))

    @compiled(f"layer_norm_add_group_{name}", fastmath={"contract"})
    def add_group(scales, biases, x, dy, first, pitch, count, factors):
        second, third, fourth = first + pitch, first + 2 * pitch, first + 3 * pitch
        m0, r0 = load_f32(factors, F_MEAN), load_f32(factors, F_RATE)
        m1, r1 = load_f32(factors, FACTORS + F_MEAN), load_f32(factors, FACTORS + F_RATE)
        m2, r2 = load_f32(factors, 2 * FACTORS + F_MEAN), load_f32(factors, 2 * FACTORS + F_RATE)
        m3, r3 = load_f32(factors, 3 * FACTORS + F_MEAN), load_f32(factors, 3 * FACTORS + F_RATE)
        for i in range(count):
            a, b, c, d = load(dy, first + i), load(dy, second + i), load(dy, third + i), load(dy, fourth + i)
            store_f32(biases, i, load_f32(biases, i) + ((a + b) + (c + d)))
            front = a * ((load(x, first + i) - m0) * r0) + b * ((load(x, second + i) - m1) * r1)
            back = c * ((load(x, third + i) - m2) * r2) + d * ((load(x, fourth + i) - m3) * r3)
            store_f32(scales, i, load_f32(scales, i) + (front + back))

    return row_sum, moments, gradient, add, add_group


_sum_f32, _moments_f32, _gradient_f32, _add_f32, _add_group_f32 = _loops("f32", load_f32, store_f32)
_sum_f16, _moments_f16, _gradient_f16, _add_f16, _add_group_f16 = _loops("f16", load_f16, store_f16)
_sum_bf16, _moments_bf16, _gradient_bf16, _add_bf16, _add_group_bf16 = _loops("bf16", load_bf16, store_bf16)


@inner
def _sum(kind, x, first, count):
    if kind == F16:
        return _sum_f16(x, first, count)
    if kind == BF16:
        return _sum_bf16(x, first, count)
    return _sum_f32(x, first, count)


@inner
def _moments(kind, x, dy, gamma, first, count, mean):
    if kind == F16:
        return _moments_f16(x, dy, gamma, first, count, mean)
    if kind == BF16:
        return _moments_bf16(x, dy, gamma, first, count, mean)
    return _moments_f32(x, dy, gamma, first, count, mean)


@inner
def _gradient(kind, dx, x, dy, gamma, first, count, factors):
    if kind == F16:
        _gradient_f16(dx, x, dy, gamma, first, count, factors)
    elif kind == BF16:
        _gradient_bf16(dx, x, dy, gamma, first, count, factors)
    else:
        _gradient_f32(dx, x, dy, gamma, first, count, factors)


@inner
def _add(kind, scales, biases, x, dy, first, pitch, rows, count, factors):
    """Some rows, at most GROUP, added to the sums of their columns."""
    if rows == GROUP:
        if kind == F16:
            _add_group_f16(scales, biases, x, dy, first, pitch, count, factors)
        elif kind == BF16:
            _add_group_bf16(scales, biases, x, dy, first, pitch, count, factors)
        else:
            _add_group_f32(scales, biases, x, dy, first, pitch, count, factors)
        return
    for row in range(rows):
        at, own = first + row * pitch, factors + 4 * FACTORS * row
        if kind == F16:
            _add_f16(scales, biases, x, dy, at, count, own)
        elif kind == BF16:
            _add_bf16(scales, biases, x, dy, at, count, own)
        else:
            _add_f32(scales, biases, x, dy, at, count, own)


@inner
def _gamma_at(call, ones, column):
    """Up to CHUNK entries of gamma from a column on, ones where there is none."""
    gamma = load_i64(call, GAMMA)
    return gamma + 4 * column if gamma else ones


@inner  # a variance of zero without epsilon gives what it gives in NumPy
def _measure(call, row, ones, factors):
    """What is the same for a whole row."""
    p = load_i64(call, CALL_PARAMETERS)
    x, dy, kind = load_i64(call, CALL_INPUTS), load_i64(call, CALL_INPUTS + 1), load_i64(p, KIND)
    length, means, variances = load_i64(p, LENGTH), load_i64(call, MEAN), load_i64(call, VARIANCE)
    first, share = row * length, load_f64(p, SHARE)
    if means:
        mean = load_f32(means, row)
    else:
        total = 0.0
        for done in range(0, length, CHUNK):
            total += np.float64(_sum(kind, x, first + done, min(CHUNK, length - done)))
        mean = np.float32(total * share)
    square, whole, along = 0.0, 0.0, 0.0
    for done in range(0, length, CHUNK):
        gamma = _gamma_at(call, ones, done)
        sums = _moments(kind, x, dy, gamma, first + done, min(CHUNK, length - done), mean)
        square += np.float64(sums[0])
        whole += np.float64(sums[1])
        along += np.float64(sums[2])
    variance = np.float64(load_f32(variances, row)) if variances else square * share
    rate = 1.0 / np.sqrt(variance + load_f64(p, EPSILON))
    store_f32(factors, F_MEAN, mean)
    store_f32(factors, F_RATE, np.float32(rate))
    store_f32(factors, F_ALONG, np.float32(-rate * rate * rate * along * share))
    store_f32(factors, F_LEVEL, np.float32(-rate * whole * share))


@inner
def _differentiate(call, row, column, count, ones, factors):
    """dx of some columns of a row."""
    p, dx = load_i64(call, CALL_PARAMETERS), load_i64(call, CALL_OUTPUT)
    if dx == 0:
        return
    x, dy = load_i64(call, CALL_INPUTS), load_i64(call, CALL_INPUTS + 1)
    first = row * load_i64(p, LENGTH)
    for done in range(column, column + count, CHUNK):
        gamma, some = _gamma_at(call, ones, done), min(CHUNK, column + count - done)
        _gradient(load_i64(p, KIND), dx, x, dy, gamma, first + done, some, factors)


@inner
def _summed(call):
    """Whether anybody asks for the gradients of scale and bias."""
    return load_i64(call, DIFF_GAMMA) != 0 or load_i64(call, DIFF_BETA) != 0


@inner
def _flush(totals, sums, count):
    """float64 totals += float32 sums, which are cleared."""
    for i in range(count):
        store_f64(totals, i, load_f64(totals, i) + np.float64(load_f32(sums, i)))
    clear(sums, 0, count)


@inner
def _clear_totals(totals, count):
    for i in range(count):
        store_f64(totals, i, 0.0)


@inner
def _part(job, part, scratch):
    """All columns of some rows."""
    call, ones = load_i64(job, JOB_CALL), load_i64(job, JOB_SHARED)
    p = load_i64(call, CALL_PARAMETERS)
    rows, length, parts, kind = load_i64(p, ROWS), load_i64(p, LENGTH), load_i64(p, PARTS), load_i64(p, KIND)
    x, dy = load_i64(call, CALL_INPUTS), load_i64(call, CALL_INPUTS + 1)
    totals, summed = ones + 4 * CHUNK + 16 * part * length, _summed(call)
    factors = scratch
    scales = factors + 4 * FACTORS * GROUP
    biases = scales + 4 * length
    if summed:
        clear(scales, 0, 2 * length)
        _clear_totals(totals, 2 * length)
    start, end = part * rows // parts, (part + 1) * rows // parts
    for group in range(start, end, GROUP):
        count = min(GROUP, end - group)
        for n in range(count):
            own = factors + 4 * FACTORS * n
            _measure(call, group + n, ones, own)
            _differentiate(call, group + n, 0, length, ones, own)
        if summed:
            _add(kind, scales, biases, x, dy, group * length, length, count, length, factors)
            if (group - start) % FLUSH == FLUSH - GROUP or group + GROUP >= end:
                _flush(totals, scales, 2 * length)


@inner
def _block(job, block, scratch):
    """All rows of some columns, which have been measured."""
    call, ones = load_i64(job, JOB_CALL), load_i64(job, JOB_SHARED)
    p = load_i64(call, CALL_PARAMETERS)
    rows, length, kind, measured = load_i64(p, ROWS), load_i64(p, LENGTH), load_i64(p, KIND), ones + 4 * CHUNK
    x, dy, summed = load_i64(call, CALL_INPUTS), load_i64(call, CALL_INPUTS + 1), _summed(call)
    column = block * BLOCK
    count = min(BLOCK, length - column)
    totals = scratch
    scales = totals + 16 * BLOCK
    biases = scales + 4 * BLOCK
    clear(scales, 0, 2 * BLOCK)
    _clear_totals(totals, 2 * BLOCK)
    for group in range(0, rows, GROUP):
        some, factors = min(GROUP, rows - group), measured + 4 * FACTORS * group
        for n in range(some):
            _differentiate(call, group + n, column, count, ones, factors + 4 * FACTORS * n)
        if summed:
            _add(kind, scales, biases, x, dy, group * length + column, length, some, count, factors)
            if group % FLUSH == FLUSH - GROUP or group + GROUP >= rows:
                _flush(totals, scales, 2 * BLOCK)
    _write(call, column, totals, BLOCK, count)


@inner
def _write(call, column, totals, biases, count):
    """Some columns of the gradients of scale and bias, whose totals begin at the index `biases`."""
    diff_gamma, diff_beta = load_i64(call, DIFF_GAMMA), load_i64(call, DIFF_BETA)
    if diff_gamma:
        for i in range(count):
            store_f32(diff_gamma, column + i, np.float32(load_f64(totals, i)))
    if diff_beta:
        for i in range(count):
            store_f32(diff_beta, column + i, np.float32(load_f64(totals, biases + i)))


@inner
def _item(job, n, scratch):
    if load_i64(load_i64(load_i64(job, JOB_CALL), CALL_PARAMETERS), PARTS):
        _part(job, n, scratch)
    else:
        _block(job, n, scratch)


@inner
def _row(job, row, _scratch):
    ones = load_i64(job, JOB_SHARED)
    _measure(load_i64(job, JOB_CALL), row, ones, ones + 4 * CHUNK + 4 * FACTORS * row)


_work = worker("layer_norm_work", _item, ITEMS, LANE_BYTES)
_measure_rows = worker("layer_norm_measure", _row, ROWS, LANE_BYTES)


@inner
def _run(call):
    p, runtime = load_i64(call, CALL_PARAMETERS), load_i64(call, CALL_RUNTIME)
    size, parts, length = load_i64(p, SHARED_BYTES), load_i64(p, PARTS), load_i64(p, LENGTH)
    shared = acquire(runtime, size)
    if shared == 0:
        return no_memory(call)
    for i in range(CHUNK):
        store_f32(shared, i, np.float32(1.0))
    job, status = new_job(), 0
    if parts == 0:
        begin(job, call, shared)
        status = work_off(job, load_i64(p, MEASURER), load_i64(p, ROWS))
    if status == 0:
        begin(job, call, shared)
        status = work_off(job, load_i64(p, WORKER), load_i64(p, ITEMS))
    if status == 0 and parts and _summed(call):
        totals = shared + 4 * CHUNK
        for part in range(1, parts):
            own = totals + 16 * part * length
            for i in range(2 * length):
                store_f64(totals, i, load_f64(totals, i) + load_f64(own, i))
        _write(call, 0, totals, length, length)
    release(runtime, shared, size)
    return status


def _build() -> tuple[Any, Any, Any]:
    @exported(types.void(types.int64, types.int64))
    def work(job, lane):
        _work(job, lane)

    @exported(types.void(types.int64, types.int64))
    def measure(job, lane):
        _measure_rows(job, lane)

    @exported(types.int64(types.int64))
    def run(call):
        return _run(call)

    return work, measure, run


@cache
def _functions() -> tuple[Any, Any, Any]:
    return keep(_build())


def _bits(number: float) -> int:
    return int(np.float64(number).view(np.int64))


def _plan(call: Call) -> Plan:
    src = call.inputs[0]
    assert src is not None
    work, measure, run = _functions()
    start = call.attributes["begin_norm_axis"] % len(src)
    rows, length = math.prod(src[:start]), math.prod(src[start:])
    parts = 0
    if length <= LONG:
        parts = max(1, min(MAX_PARTS, rows * length // PART, rows, MAX_SUMS // length))
    words = {
        WORKER: work.address,
        MEASURER: measure.address,
        KIND: call.element_type,
        ROWS: rows,
        LENGTH: length,
        PARTS: parts,
        EPSILON: _bits(float(np.float32(call.attributes["epsilon"]))),
        SHARE: _bits(1 / length),
        ITEMS: parts or -(-length // BLOCK),
        LANE_BYTES: 4 * FACTORS * GROUP + 8 * length if parts else 24 * BLOCK,
        SHARED_BYTES: 4 * CHUNK + (16 * parts * length if parts else 4 * FACTORS * rows),
    }
    return Plan(run.address, np.array([words[n] for n in range(len(words))], np.int64))


KERNEL = NativeKernel(OP, _plan, _functions)
