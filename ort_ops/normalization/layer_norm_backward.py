"""LayerNormBackward, compiled: a row from its sums to its gradient while it is in a cache.

Rows are shared out in parts, each with sums of its own for the gradients of scale and bias. Long rows are looked at
twice instead: first for what is the same for a whole row, then in blocks of columns over all rows. Sums of up to CHUNK
elements, and of up to FLUSH rows, are taken in float32 and added up in float64; shapes alone decide their order.
"""

import math
from dataclasses import dataclass

import numpy as np

from onnx_backprop.opset.operators.layer_norm_backward import OP
from onnx_backprop.ort_ops.compiler.decorators import fast, inner
from onnx_backprop.ort_ops.compiler.llvm import by_type, load_f32, load_f64, store_f32, store_f64
from onnx_backprop.ort_ops.compiler.records import Record
from onnx_backprop.ort_ops.normalization.batch_norm_factors import DIFF_BETA, DIFF_GAMMA, GAMMA, MEAN, VARIANCE
from onnx_backprop.ort_ops.runtime.bridge import NativeKernel, Request
from onnx_backprop.ort_ops.runtime.stages import Plan, stage
from onnx_backprop.ort_ops.runtime.workspace import DOUBLE, FLOAT, workspace
from onnx_backprop.ort_ops.vector.rows import SUM_CHUNK, clear, sum_run

CHUNK = SUM_CHUNK
FLUSH = 64
GROUP = 4  # rows that are added up together
BLOCK = 1024  # columns of an item
LONG = 1 << 15  # elements of a row that is looked at twice
PART = 1 << 14  # elements of a part, at least
MAX_PARTS, MAX_SUMS = 32, 1 << 18
# of a row: dx = dy·γ·rate + (x - mean)·along + level
F_MEAN, F_RATE, F_ALONG, F_LEVEL, FACTORS = range(5)


@dataclass(frozen=True, kw_only=True)
class Offsets(Record):
    """Of a scratch. sums, totals: of the columns of two gradients, one behind the other."""

    ones: int = 0  # for a scale that is not given
    factors: int = 0  # of some rows
    sums: int = 0
    totals: int = 0


@dataclass(frozen=True, kw_only=True)
class LayerNorm(Record):
    """The numbers of a plan. thread, shared: of a thread's scratch and of that of all."""

    kind: int
    rows: int
    length: int
    parts: int  # of the rows, 0: blocks of columns
    epsilon: float
    share: float  # 1 / length
    thread: Offsets
    shared: Offsets


@fast("reassoc", "contract")
def _moments(load, _store, x, dy, gamma, first, count, mean):
    square, whole, along = np.float32(0.0), np.float32(0.0), np.float32(0.0)
    for i in range(count):
        deviation, g = load(x, first + i) - mean, load(dy, first + i) * load_f32(gamma, i)
        square += deviation * deviation
        whole += g
        along += g * deviation
    return square, whole, along


@fast("contract")
def _gradient(load, store, dx, x, dy, gamma, first, count, factors):
    mean, rate = load_f32(factors, F_MEAN), load_f32(factors, F_RATE)
    along, level = load_f32(factors, F_ALONG), load_f32(factors, F_LEVEL)
    for i in range(count):
        rest = (load(x, first + i) - mean) * along + level
        store(dx, first + i, load(dy, first + i) * load_f32(gamma, i) * rate + rest)


@fast("contract")
def _add(load, _store, scales, biases, x, dy, first, count, factors):
    mean, rate = load_f32(factors, F_MEAN), load_f32(factors, F_RATE)
    for i in range(count):
        g = load(dy, first + i)
        store_f32(biases, i, load_f32(biases, i) + g)
        store_f32(scales, i, load_f32(scales, i) + g * ((load(x, first + i) - mean) * rate))


@fast("contract")
def _add_group(load, _store, scales, biases, x, dy, first, pitch, count, factors):
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


@inner
def _add_rows(kind, scales, biases, x, dy, first, pitch, rows, count, factors):
    """Some rows, at most GROUP, added to the sums of their columns."""
    if rows == GROUP:
        by_type(kind, _add_group, scales, biases, x, dy, first, pitch, count, factors)
        return
    for row in range(rows):
        row_factors = factors + 4 * FACTORS * row
        by_type(kind, _add, scales, biases, x, dy, first + row * pitch, count, row_factors)


@inner
def _gamma_at(call, ones, column):
    """Up to CHUNK entries of gamma from a column on, ones where there is none."""
    gamma = call.inputs[GAMMA]
    return gamma + 4 * column if gamma else ones


@inner  # a variance of zero without epsilon gives what it gives in NumPy
def _measure(call, p, row, ones, factors):
    """What is the same for a whole row."""
    x, dy, kind = call.inputs[0], call.inputs[1], p.kind
    length, means, variances = p.length, call.inputs[MEAN], call.inputs[VARIANCE]
    first, share = row * length, p.share
    mean = load_f32(means, row) if means else np.float32(sum_run(kind, x, first, length, 0.0) * share)
    square, whole, along = 0.0, 0.0, 0.0
    for done in range(0, length, CHUNK):
        gamma = _gamma_at(call, ones, done)
        sums = by_type(kind, _moments, x, dy, gamma, first + done, min(CHUNK, length - done), mean)
        square += np.float64(sums[0])
        whole += np.float64(sums[1])
        along += np.float64(sums[2])
    variance = np.float64(load_f32(variances, row)) if variances else square * share
    rate = 1.0 / np.sqrt(variance + p.epsilon)
    store_f32(factors, F_MEAN, mean)
    store_f32(factors, F_RATE, np.float32(rate))
    store_f32(factors, F_ALONG, np.float32(-rate * rate * rate * along * share))
    store_f32(factors, F_LEVEL, np.float32(-rate * whole * share))


@inner
def _differentiate(call, p, row, column, count, ones, factors):
    """dx of some columns of a row."""
    dx = call.output
    if dx == 0:
        return
    x, dy = call.inputs[0], call.inputs[1]
    first = row * p.length
    for done in range(column, column + count, CHUNK):
        gamma, some = _gamma_at(call, ones, done), min(CHUNK, column + count - done)
        by_type(p.kind, _gradient, dx, x, dy, gamma, first + done, some, factors)


@inner
def _summed(call):
    """Whether anybody asks for the gradients of scale and bias."""
    return call.more[DIFF_GAMMA] != 0 or call.more[DIFF_BETA] != 0


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
def _part(call, p, part, scratch):
    """All columns of some rows."""
    rows, length, parts, kind = p.rows, p.length, p.parts, p.kind
    x, dy, ones = call.inputs[0], call.inputs[1], call.shared + p.shared.ones
    totals, summed = call.shared + p.shared.totals + 16 * part * length, _summed(call)
    factors, scales = scratch + p.thread.factors, scratch + p.thread.sums
    biases = scales + 4 * length
    if summed:
        clear(scales, 0, 2 * length)
        _clear_totals(totals, 2 * length)
    start, end = part * rows // parts, (part + 1) * rows // parts
    for group in range(start, end, GROUP):
        count = min(GROUP, end - group)
        for n in range(count):
            row_factors = factors + 4 * FACTORS * n
            _measure(call, p, group + n, ones, row_factors)
            _differentiate(call, p, group + n, 0, length, ones, row_factors)
        if summed:
            _add_rows(kind, scales, biases, x, dy, group * length, length, count, length, factors)
            if (group - start) % FLUSH == FLUSH - GROUP or group + GROUP >= end:
                _flush(totals, scales, 2 * length)


@inner
def _block(call, p, block, scratch):
    """All rows of some columns, which have been measured."""
    ones, measured = call.shared + p.shared.ones, call.shared + p.shared.factors
    rows, length, kind = p.rows, p.length, p.kind
    x, dy, summed = call.inputs[0], call.inputs[1], _summed(call)
    column = block * BLOCK
    count = min(BLOCK, length - column)
    totals, scales = scratch + p.thread.totals, scratch + p.thread.sums
    biases = scales + 4 * BLOCK
    clear(scales, 0, 2 * BLOCK)
    _clear_totals(totals, 2 * BLOCK)
    for group in range(0, rows, GROUP):
        some, factors = min(GROUP, rows - group), measured + 4 * FACTORS * group
        for n in range(some):
            _differentiate(call, p, group + n, column, count, ones, factors + 4 * FACTORS * n)
        if summed:
            _add_rows(kind, scales, biases, x, dy, group * length + column, length, some, count, factors)
            if group % FLUSH == FLUSH - GROUP or group + GROUP >= rows:
                _flush(totals, scales, 2 * BLOCK)
    _write(call, column, totals, BLOCK, count)


@inner
def _write(call, column, totals, biases, count):
    """Some columns of the gradients of scale and bias, whose totals begin at the index `biases`."""
    diff_gamma, diff_beta = call.more[DIFF_GAMMA], call.more[DIFF_BETA]
    if diff_gamma:
        for i in range(count):
            store_f32(diff_gamma, column + i, np.float32(load_f64(totals, i)))
    if diff_beta:
        for i in range(count):
            store_f32(diff_beta, column + i, np.float32(load_f64(totals, biases + i)))


@inner
def _row(call, p, row, _scratch):
    _measure(call, p, row, call.shared + p.shared.ones, call.shared + p.shared.factors + 4 * FACTORS * row)


@inner
def _fill(call, p, _item, _scratch):
    """The ones that stand for a scale that is not given."""
    for i in range(CHUNK):
        store_f32(call.shared + p.shared.ones, i, np.float32(1.0))


@inner
def _join(call, p, _item, _scratch):
    """The sums of all parts, one after the other."""
    if not _summed(call):
        return
    totals, length = call.shared + p.shared.totals, p.length
    for part in range(1, p.parts):
        part_totals = totals + 16 * part * length
        for i in range(2 * length):
            store_f64(totals, i, load_f64(totals, i) + load_f64(part_totals, i))
    _write(call, 0, totals, length, length)


_FILL = stage("layer_norm_fill", LayerNorm, _fill)
_PART = stage("layer_norm_part", LayerNorm, _part)
_JOIN = stage("layer_norm_join", LayerNorm, _join)
_ROW = stage("layer_norm_row", LayerNorm, _row)
_BLOCK = stage("layer_norm_block", LayerNorm, _block)


def _plan(request: Request) -> Plan:
    src = request.inputs[0]
    assert src is not None
    start = request.attributes["begin_norm_axis"] % len(src)
    rows, length = math.prod(src[:start]), math.prod(src[start:])
    parts = 0
    if length <= LONG:
        parts = max(1, min(MAX_PARTS, rows * length // PART, rows, MAX_SUMS // length))
    epsilon = float(np.float32(request.attributes["epsilon"]))
    if parts:
        stages = (_FILL, 1), (_PART, parts), (_JOIN, 1)
        shared, bytes_shared = workspace(Offsets, ones=FLOAT * CHUNK, totals=DOUBLE * 2 * parts * length)
        thread, per_thread = workspace(Offsets, factors=FLOAT * FACTORS * GROUP, sums=FLOAT * 2 * length)
    else:
        stages = (_FILL, 1), (_ROW, rows), (_BLOCK, -(-length // BLOCK))
        shared, bytes_shared = workspace(Offsets, ones=FLOAT * CHUNK, factors=FLOAT * FACTORS * rows)
        thread, per_thread = workspace(Offsets, totals=DOUBLE * 2 * BLOCK, sums=FLOAT * 2 * BLOCK)
    parameters = LayerNorm(
        kind=request.element_type, rows=rows, length=length, parts=parts, epsilon=epsilon, share=1 / length,
        thread=thread, shared=shared,
    )  # fmt: skip
    return Plan(parameters, stages, bytes_shared, per_thread)


KERNEL = NativeKernel(OP, _plan)
