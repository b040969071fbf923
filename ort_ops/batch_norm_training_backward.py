"""BatchNormTrainingBackward, compiled: a channel, or a block of them, from its sums to its gradients by one worker.

Three passes over a channel: the mean; the variance and the sums of dy and dy·(x - μ); the gradient. A channel mostly
fits a cache, so memory is read once. Sums of up to CHUNK elements are taken in float32 and added up in float64; the
shape alone decides their order.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from ..opset.batch_norm_training_backward import OP
from ..opset.layout import data_to_ncx
from .native_bridge import Call, NativeKernel, Plan, keep
from .native_call import CALL_INPUTS, CALL_MORE, CALL_OUTPUT, CALL_PARAMETERS, parallel
from .native_llvm import (
    BF16,
    F16,
    load_bf16,
    load_f16,
    load_f32,
    load_f64,
    load_i64,
    stack,
    store_bf16,
    store_f16,
    store_f32,
    store_f64,
)
from .native_rows import clear
from .native_source import compiled, exported

# parameters; EPSILON is a float32. NCX: a channel has RUNS runs of LENGTH elements. NXC: RUNS rows of CHANNELS
WORKER, KIND, RUNS, CHANNELS, LENGTH, LAST, EPSILON, ITEMS = range(8)
MEAN, VARIANCE, GAMMA = (CALL_INPUTS + 2 + n for n in range(3))
CHUNK = 4096
ROWS = 64  # added up in float32, NXC
BLOCK = 64  # channels of an item, NXC

_sums = stack(3 * BLOCK // 2)
_totals = stack(3 * BLOCK)
_factors = stack(4 * BLOCK // 2)


def _loops(name: str, load: Any, store: Any) -> tuple[Any, Any, Any, Any, Any, Any]:
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

    @compiled(f"norm_row_sum_{name}")
    def row_sum(sums, x, first, count):
        for i in range(count):
            store_f32(sums, i, load_f32(sums, i) + load(x, first + i))

    @compiled(f"norm_row_moments_{name}")
    def row_moments(squares, wholes, alongs, x, dy, first, count, means):
        for i in range(count):
            deviation, g = load(x, first + i) - load_f32(means, i), load(dy, first + i)
            store_f32(squares, i, load_f32(squares, i) + deviation * deviation)
            store_f32(wholes, i, load_f32(wholes, i) + g)
            store_f32(alongs, i, load_f32(alongs, i) + g * deviation)

    @compiled(f"norm_row_gradient_{name}")
    def row_gradient(dx, x, dy, first, count, means, slopes, alongs, levels):
        for i in range(count):
            deviation = load(x, first + i) - load_f32(means, i)
            rest = deviation * load_f32(alongs, i) + load_f32(levels, i)
            store(dx, first + i, load(dy, first + i) * load_f32(slopes, i) + rest)

    return run_sum, run_moments, run_gradient, row_sum, row_moments, row_gradient


_sum_f32, _moments_f32, _gradient_f32, _row_sum_f32, _row_moments_f32, _row_gradient_f32 = _loops(
    "f32", load_f32, store_f32
)
_sum_f16, _moments_f16, _gradient_f16, _row_sum_f16, _row_moments_f16, _row_gradient_f16 = _loops(
    "f16", load_f16, store_f16
)
_sum_bf16, _moments_bf16, _gradient_bf16, _row_sum_bf16, _row_moments_bf16, _row_gradient_bf16 = _loops(
    "bf16", load_bf16, store_bf16
)


@njit
def _sum(kind, x, first, count):
    if kind == F16:
        return _sum_f16(x, first, count)
    if kind == BF16:
        return _sum_bf16(x, first, count)
    return _sum_f32(x, first, count)


@njit
def _moments(kind, x, dy, first, count, mean):
    if kind == F16:
        return _moments_f16(x, dy, first, count, mean)
    if kind == BF16:
        return _moments_bf16(x, dy, first, count, mean)
    return _moments_f32(x, dy, first, count, mean)


@njit
def _gradient(kind, dx, x, dy, first, count, mean, slope, along, level):
    if kind == F16:
        _gradient_f16(dx, x, dy, first, count, mean, slope, along, level)
    elif kind == BF16:
        _gradient_bf16(dx, x, dy, first, count, mean, slope, along, level)
    else:
        _gradient_f32(dx, x, dy, first, count, mean, slope, along, level)


@njit
def _row_sum(kind, sums, x, first, count):
    if kind == F16:
        _row_sum_f16(sums, x, first, count)
    elif kind == BF16:
        _row_sum_bf16(sums, x, first, count)
    else:
        _row_sum_f32(sums, x, first, count)


@njit
def _row_moments(kind, sums, x, dy, first, count, means):
    wholes, alongs = sums + 4 * BLOCK, sums + 8 * BLOCK
    if kind == F16:
        _row_moments_f16(sums, wholes, alongs, x, dy, first, count, means)
    elif kind == BF16:
        _row_moments_bf16(sums, wholes, alongs, x, dy, first, count, means)
    else:
        _row_moments_f32(sums, wholes, alongs, x, dy, first, count, means)


@njit
def _row_gradient(kind, dx, x, dy, first, count, means, factors):
    slopes, alongs, levels = factors, factors + 4 * BLOCK, factors + 8 * BLOCK
    if kind == F16:
        _row_gradient_f16(dx, x, dy, first, count, means, slopes, alongs, levels)
    elif kind == BF16:
        _row_gradient_bf16(dx, x, dy, first, count, means, slopes, alongs, levels)
    else:
        _row_gradient_f32(dx, x, dy, first, count, means, slopes, alongs, levels)


@njit
def _factor(call, channel, square, whole, along):
    """From the sums of a channel: its entries of diff_gamma and diff_beta, stored; (slope, along, level) of dx."""
    p = load_i64(call, CALL_PARAMETERS)
    count = np.float64(max(1, load_i64(p, RUNS) * load_i64(p, LENGTH)))
    given, scales = load_i64(call, VARIANCE), load_i64(call, GAMMA)
    variance = np.float64(load_f32(given, channel)) if given else square / count
    rate = 1.0 / np.sqrt(variance + np.float64(load_f32(p, 2 * EPSILON)))
    dgamma = along * rate
    if load_i64(call, CALL_MORE):
        store_f32(load_i64(call, CALL_MORE), channel, np.float32(dgamma))
    if load_i64(call, CALL_MORE + 1):
        store_f32(load_i64(call, CALL_MORE + 1), channel, np.float32(whole))
    slope = rate * np.float64(load_f32(scales, channel)) if scales else rate
    return np.float32(slope), np.float32(-slope * rate * dgamma / count), np.float32(-slope * whole / count)


@njit
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
    slope, share, level = _factor(call, channel, square, whole, along)
    if dx:
        for n in range(runs):
            _gradient(kind, dx, x, dy, (n * channels + channel) * length, length, mean, slope, share, level)


@njit
def _add_up(totals, sums, count):
    """float64 totals += float32 sums, which are cleared."""
    for i in range(count):
        store_f64(totals, i, load_f64(totals, i) + np.float64(load_f32(sums, i)))
    clear(sums, 0, count)


@njit
def _block(call, block):
    """NXC: some channels."""
    p = load_i64(call, CALL_PARAMETERS)
    x, dy, dx = load_i64(call, CALL_INPUTS), load_i64(call, CALL_INPUTS + 1), load_i64(call, CALL_OUTPUT)
    kind, rows, channels = load_i64(p, KIND), load_i64(p, RUNS), load_i64(p, CHANNELS)
    c0 = block * BLOCK
    count = min(BLOCK, channels - c0)
    sums, totals, factors = _sums(), _totals(), _factors()
    means = factors + 12 * BLOCK
    clear(sums, 0, 3 * BLOCK)
    for i in range(3 * BLOCK):
        store_f64(totals, i, 0.0)
    given = load_i64(call, MEAN)
    if given == 0:
        for row in range(rows):
            _row_sum(kind, sums, x, row * channels + c0, count)
            if row % ROWS == ROWS - 1 or row == rows - 1:
                _add_up(totals, sums, count)
    for i in range(count):
        mean = load_f32(given, c0 + i) if given else np.float32(load_f64(totals, i) / np.float64(max(1, rows)))
        store_f32(means, i, mean)
        store_f64(totals, i, 0.0)
    for row in range(rows):
        _row_moments(kind, sums, x, dy, row * channels + c0, count, means)
        if row % ROWS == ROWS - 1 or row == rows - 1:
            _add_up(totals, sums, 3 * BLOCK)
    for i in range(count):
        square, whole, along = load_f64(totals, i), load_f64(totals, BLOCK + i), load_f64(totals, 2 * BLOCK + i)
        slope, share, level = _factor(call, c0 + i, square, whole, along)
        store_f32(factors, i, slope)
        store_f32(factors, BLOCK + i, share)
        store_f32(factors, 2 * BLOCK + i, level)
    if dx:
        for row in range(rows):
            _row_gradient(kind, dx, x, dy, row * channels + c0, count, means, factors)


def _build() -> tuple[Any, Any]:
    @exported(types.void(types.int64, types.int64))
    def work(call, item):
        if load_i64(load_i64(call, CALL_PARAMETERS), LAST):
            _block(call, item)
        else:
            _channel(call, item)

    @exported(types.int64(types.int64))
    def run(call):
        p = load_i64(call, CALL_PARAMETERS)
        return parallel(call, load_i64(p, WORKER), call, load_i64(p, ITEMS))

    return work, run


@cache
def _functions() -> tuple[Any, Any]:
    return keep(_build())


def _plan(call: Call) -> Plan:
    src = call.inputs[0]
    assert src is not None
    work, run = _functions()
    batch, channels, *lengths = (src[axis] for axis in data_to_ncx(call.attributes["data_format"], len(src)))
    length = math.prod(lengths)
    last = call.attributes["data_format"] == "NXC" or length == 1
    words = {
        WORKER: work.address,
        KIND: call.element_type,
        RUNS: batch * length if last else batch,
        CHANNELS: channels,
        LENGTH: 1 if last else length,
        LAST: last,
        EPSILON: int(np.float32(call.attributes["epsilon"]).view(np.int32)),
        ITEMS: -(-channels // BLOCK) if last else channels,
    }
    return Plan(run.address, np.array([words[n] for n in range(len(words))], np.int64))


KERNEL = NativeKernel(OP, _plan, _functions)
