"""BatchNormTrainingBackward, compiled: NCX, a channel from its sums to its gradient by one worker.

Three passes over a channel: the mean; the variance and the sums of dy and dy·(x - μ); the gradient. A channel mostly
fits a cache, so memory is read once. Sums of up to CHUNK elements are taken in float32 and added up in float64; the
shape alone decides their order. Where mean and variance are given there are two passes, and sums are in float64, in
which no order shows: ranks that add up theirs come to the same numbers as one. Rows of channels (NXC) are in
batch_norm_rows.
"""

import math
from dataclasses import dataclass

import numpy as np

from onnx_backprop.opset.core.layout import data_to_ncx
from onnx_backprop.opset.operators.batch_norm_training_backward import OP
from onnx_backprop.ort_ops.compiler.decorators import fast, inner
from onnx_backprop.ort_ops.compiler.llvm import by_type, load_f32
from onnx_backprop.ort_ops.compiler.records import Record
from onnx_backprop.ort_ops.normalization import batch_norm_rows
from onnx_backprop.ort_ops.normalization.batch_norm_factors import MEAN, VARIANCE, factors_of
from onnx_backprop.ort_ops.runtime.bridge import NativeKernel, Request
from onnx_backprop.ort_ops.runtime.stages import Plan, stage
from onnx_backprop.ort_ops.vector.rows import SUM_CHUNK, sum_run

CHUNK = SUM_CHUNK


@dataclass(frozen=True, kw_only=True)
class BatchNormBackward(Record):
    """The numbers of a plan; a channel has `runs` runs of `length` elements."""

    kind: int
    runs: int
    channels: int
    length: int
    epsilon: float


@fast("reassoc", "contract")
def _moments(load, _store, x, dy, first, count, mean):
    square, whole, along = np.float32(0.0), np.float32(0.0), np.float32(0.0)
    for i in range(count):
        deviation, g = load(x, first + i) - mean, load(dy, first + i)
        square += deviation * deviation
        whole += g
        along += g * deviation
    return square, whole, along


@fast("reassoc", "contract")
def _exact_moments(load, _store, x, dy, first, count, mean):
    whole, along = 0.0, 0.0
    for i in range(count):
        g = np.float64(load(dy, first + i))
        whole += g
        along += g * (np.float64(load(x, first + i)) - mean)
    return whole, along


@inner
def _gradient(load, store, dx, x, dy, first, count, mean, slope, along, level):
    for i in range(count):
        deviation = load(x, first + i) - mean
        store(dx, first + i, load(dy, first + i) * slope + (deviation * along + level))


@inner
def _channel(call, p, channel, _scratch):
    """NCX: one channel."""
    x, dy, dx = call.inputs[0], call.inputs[1], call.output
    kind, runs, channels, length = p.kind, p.runs, p.channels, p.length
    if call.inputs[MEAN]:
        mean = load_f32(call.inputs[MEAN], channel)
    else:
        total = 0.0
        for n in range(runs):
            total = sum_run(kind, x, (n * channels + channel) * length, length, total)
        mean = np.float32(total / np.float64(max(1, runs * length)))
    square, whole, along = 0.0, 0.0, 0.0
    for n in range(runs):
        first = (n * channels + channel) * length
        if call.inputs[MEAN] and call.inputs[VARIANCE]:
            exact = by_type(kind, _exact_moments, x, dy, first, length, np.float64(mean))
            whole += exact[0]
            along += exact[1]
        else:
            for done in range(0, length, CHUNK):
                sums = by_type(kind, _moments, x, dy, first + done, min(CHUNK, length - done), mean)
                square += np.float64(sums[0])
                whole += np.float64(sums[1])
                along += np.float64(sums[2])
    count, epsilon = np.float64(max(1, runs * length)), p.epsilon
    factors = factors_of(call, channel, count, epsilon, square, whole, along)
    slope, share, level = np.float32(factors[0]), np.float32(factors[1]), np.float32(factors[2])
    if dx:
        for n in range(runs):
            by_type(kind, _gradient, dx, x, dy, (n * channels + channel) * length, length, mean, slope, share, level)


_CHANNEL = stage("batch_norm_channel", BatchNormBackward, _channel)


def _plan(request: Request) -> Plan:
    src = request.inputs[0]
    assert src is not None
    batch, channels, *lengths = (src[axis] for axis in data_to_ncx(request.attributes["data_format"], len(src)))
    length, epsilon = math.prod(lengths), float(np.float32(request.attributes["epsilon"]))
    if request.attributes["data_format"] == "NXC" or length == 1:
        return batch_norm_rows.plan(request.element_type, batch * length, channels, epsilon)
    parameters = BatchNormBackward(
        kind=request.element_type, runs=batch, channels=channels, length=length, epsilon=epsilon
    )
    return Plan(parameters, ((_CHANNEL, channels),))


KERNEL = NativeKernel(OP, _plan)
