"""BatchNormTrainingBackward, compiled: NCX, a channel from its sums to its gradient by one worker.

Three passes over a channel: the mean; the variance and the sums of dy and dy·(x - μ); the gradient. A channel mostly
fits a cache, so memory is read once. Sums of up to CHUNK elements are taken in float32 and added up in float64; the
shape alone decides their order. Rows of channels (NXC) are in batch_norm_rows.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import types

from onnx_backprop.opset.core.layout import data_to_ncx
from onnx_backprop.opset.operators.batch_norm_training_backward import OP
from onnx_backprop.ort_ops.normalization import batch_norm_rows
from onnx_backprop.ort_ops.normalization.batch_norm_factors import MEAN, factors_of
from onnx_backprop.ort_ops.runtime.bridge import Call, NativeKernel, Plan, keep
from onnx_backprop.ort_ops.runtime.call import CALL_INPUTS, CALL_OUTPUT, CALL_PARAMETERS, parallel
from onnx_backprop.ort_ops.runtime.compile import compiled, exported, inner
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
)

# parameters; a channel has RUNS runs of LENGTH elements. EPSILON is a float64
WORKER, KIND, RUNS, CHANNELS, LENGTH, EPSILON = range(6)
CHUNK = 4096


def _loops(name: str, load: Any, store: Any) -> tuple[Any, Any, Any]:
    """The three passes over a run of one channel, whose sums may be split into vectors, and over a row of channels."""
    fast = {"reassoc", "contract"}

    @compiled(f"norm_sum_{name}", fastmath=fast)
    def run_sum(x, first, count):
        total = np.float32(0.0)
        for i in range(count):
            total += load(x, first + i)
        return total

    @compiled(f"norm_moments_{name}", fastmath=fast)
    def run_moments(x, dy, first, count, mean):
        square, whole, along = np.float32(0.0), np.float32(0.0), np.float32(0.0)
        for i in range(count):
            deviation, g = load(x, first + i) - mean, load(dy, first + i)
            square += deviation * deviation
            whole += g
            along += g * deviation
        return square, whole, along

    @compiled(f"norm_gradient_{name}")
    def run_gradient(dx, x, dy, first, count, mean, slope, along, level):
        for i in range(count):
            deviation = load(x, first + i) - mean
            store(dx, first + i, load(dy, first + i) * slope + (deviation * along + level))

    return run_sum, run_moments, run_gradient


_sum_f32, _moments_f32, _gradient_f32 = _loops("f32", load_f32, store_f32)
_sum_f16, _moments_f16, _gradient_f16 = _loops("f16", load_f16, store_f16)
_sum_bf16, _moments_bf16, _gradient_bf16 = _loops("bf16", load_bf16, store_bf16)


@inner
def _sum(kind, x, first, count):
    if kind == F16:
        return _sum_f16(x, first, count)
    if kind == BF16:
        return _sum_bf16(x, first, count)
    return _sum_f32(x, first, count)


@inner
def _moments(kind, x, dy, first, count, mean):
    if kind == F16:
        return _moments_f16(x, dy, first, count, mean)
    if kind == BF16:
        return _moments_bf16(x, dy, first, count, mean)
    return _moments_f32(x, dy, first, count, mean)


@inner
def _gradient(kind, dx, x, dy, first, count, mean, slope, along, level):
    if kind == F16:
        _gradient_f16(dx, x, dy, first, count, mean, slope, along, level)
    elif kind == BF16:
        _gradient_bf16(dx, x, dy, first, count, mean, slope, along, level)
    else:
        _gradient_f32(dx, x, dy, first, count, mean, slope, along, level)


@inner
def _channel(call, channel):
    """NCX: one channel."""
    p = load_i64(call, CALL_PARAMETERS)
    x, dy, dx = load_i64(call, CALL_INPUTS), load_i64(call, CALL_INPUTS + 1), load_i64(call, CALL_OUTPUT)
    kind, runs, channels, length = (
        load_i64(p, KIND),
        load_i64(p, RUNS),
        load_i64(p, CHANNELS),
        load_i64(p, LENGTH),
    )
    if load_i64(call, MEAN):
        mean = load_f32(load_i64(call, MEAN), channel)
    else:
        total = 0.0
        for n in range(runs):
            first = (n * channels + channel) * length
            for done in range(0, length, CHUNK):
                total += np.float64(_sum(kind, x, first + done, min(CHUNK, length - done)))
        mean = np.float32(total / np.float64(max(1, runs * length)))
    square, whole, along = 0.0, 0.0, 0.0
    for n in range(runs):
        first = (n * channels + channel) * length
        for done in range(0, length, CHUNK):
            sums = _moments(kind, x, dy, first + done, min(CHUNK, length - done), mean)
            square += np.float64(sums[0])
            whole += np.float64(sums[1])
            along += np.float64(sums[2])
    count, epsilon = np.float64(max(1, runs * length)), load_f64(p, EPSILON)
    factors = factors_of(call, channel, count, epsilon, square, whole, along)
    slope, share, level = np.float32(factors[0]), np.float32(factors[1]), np.float32(factors[2])
    if dx:
        for n in range(runs):
            _gradient(kind, dx, x, dy, (n * channels + channel) * length, length, mean, slope, share, level)


def _build() -> tuple[Any, Any]:
    @exported(types.void(types.int64, types.int64))
    def work(call, item):
        _channel(call, item)

    @exported(types.int64(types.int64))
    def run(call):
        p = load_i64(call, CALL_PARAMETERS)
        return parallel(call, load_i64(p, WORKER), call, load_i64(p, CHANNELS))

    return work, run


@cache
def _functions() -> tuple[Any, Any]:
    return keep(_build())


def _compile() -> None:
    _functions()
    batch_norm_rows.functions()


def _plan(call: Call) -> Plan:
    src = call.inputs[0]
    assert src is not None
    batch, channels, *lengths = (src[axis] for axis in data_to_ncx(call.attributes["data_format"], len(src)))
    length, epsilon = math.prod(lengths), float(np.float32(call.attributes["epsilon"]))
    if call.attributes["data_format"] == "NXC" or length == 1:
        return batch_norm_rows.plan(call.element_type, batch * length, channels, epsilon)
    work, run = _functions()
    words = {
        WORKER: work.address,
        KIND: call.element_type,
        RUNS: batch,
        CHANNELS: channels,
        LENGTH: length,
        EPSILON: int(np.float64(epsilon).view(np.int64)),
    }
    return Plan(run.address, np.array([words[n] for n in range(len(words))], np.int64))


KERNEL = NativeKernel(OP, _plan, _compile)
