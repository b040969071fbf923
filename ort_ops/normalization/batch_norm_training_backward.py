"""BatchNormTrainingBackward, compiled: NCX, a channel from its sums to its gradient by one worker.

Three passes over a channel: the mean; the variance and the sums of dy and dy·(x - μ); the gradient. A channel mostly
fits a cache, so memory is read once. Sums of up to CHUNK elements are taken in float32 and added up in float64; the
shape alone decides their order. Where mean and variance are given there are two passes, and sums are in float64, in
which no order shows: ranks that add up theirs come to the same numbers as one. Then what stands before, as
ReLUBackward, may be done at once (`batch_norm_programs`). Rows of channels (NXC) are in batch_norm_rows.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from onnx_backprop.opset.core.errors import ShapeError
from onnx_backprop.opset.core.layout import data_to_ncx
from onnx_backprop.opset.core.op import Input, Output
from onnx_backprop.opset.operators.batch_norm_training_backward import OP
from onnx_backprop.ort_ops.compiler.decorators import compiled, fast, inner, shared
from onnx_backprop.ort_ops.compiler.llvm import by_type, load_f32, load_f64, stack, store_f32, store_f64, store_i64
from onnx_backprop.ort_ops.compiler.objects import Exported
from onnx_backprop.ort_ops.compiler.records import Record, view
from onnx_backprop.ort_ops.elementwise.program import Program, digest, runner
from onnx_backprop.ort_ops.normalization import batch_norm_programs as programs
from onnx_backprop.ort_ops.normalization import batch_norm_rows
from onnx_backprop.ort_ops.normalization.batch_norm_factors import GAMMA, MEAN, VARIANCE, factors_of, slope_of
from onnx_backprop.ort_ops.runtime.bridge import NativeKernel, Request
from onnx_backprop.ort_ops.runtime.stages import Call, Plan, stage
from onnx_backprop.ort_ops.vector.rows import SUM_CHUNK, sum_run

CHUNK = SUM_CHUNK
BETA, NUMBERS = 5, 6  # further inputs
PUT_OUT = 2  # a further output: dy
_sums = stack(2)


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
def _factors(call, p, channel, square, whole, along):
    """float32 factors of the gradient of a channel."""
    count = np.float64(max(1, p.runs * p.length))
    factors = factors_of(call, channel, count, p.epsilon, square, whole, along)
    return np.float32(factors[0]), np.float32(factors[1]), np.float32(factors[2])


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
    slope, share, level = _factors(call, p, channel, square, whole, along)
    if dx:
        for n in range(runs):
            by_type(kind, _gradient, dx, x, dy, (n * channels + channel) * length, length, mean, slope, share, level)


@shared
def _begin(address, channel, numbers):
    """The first numbers of a program: μ, γ·r and β."""
    call = view(Call, address)
    p, betas = view(BatchNormBackward, call.parameters), call.inputs[BETA]
    variance = np.float64(load_f32(call.inputs[VARIANCE], channel))
    slope = np.float32(slope_of(call.inputs[GAMMA], channel, variance, p.epsilon))
    beta = load_f32(betas, channel) if betas else np.float32(0.0)
    programs.begin(numbers, load_f32(call.inputs[MEAN], channel), slope, beta)


@shared
def _add(x, dy, first, count, numbers, sums):
    """Sums of dy and dy·(x - μ), added to those before."""
    exact = _exact_moments(load_f32, store_f32, x, dy, first, count, np.float64(load_f32(numbers, 0)))
    store_f64(sums, 0, load_f64(sums, 0) + exact[0])
    store_f64(sums, 1, load_f64(sums, 1) + exact[1])


@shared
def _finish(address, channel, numbers, sums):
    """The gradient of a channel, of dy as a program has made it."""
    call = view(Call, address)
    p, x, dx, kept = view(BatchNormBackward, call.parameters), call.inputs[0], call.output, call.more[PUT_OUT]
    slope, share, level = _factors(call, p, channel, 0.0, load_f64(sums, 0), load_f64(sums, 1))
    mean, channels, length = load_f32(numbers, 0), p.channels, p.length
    for n in range(p.runs):
        first = (n * channels + channel) * length
        if kept:
            _gradient(load_f32, store_f32, dx, x, kept, first, length, mean, slope, share, level)
        else:  # that it is one address tells LLVM that it may go by vectors
            _gradient(load_f32, store_f32, dx, x, dx, first, length, mean, slope, share, level)


@cache
def _programmed(text: str, planes: int) -> Exported:
    """`_channel` where a program makes dy, which lies where dx comes to lie unless it is put out; μ, σ² are given."""
    run, program, name = runner(text), Program.parse(text), f"batch_norm_backward_{digest(text)}_{planes}"
    tensors, count = program.tensors, program.numbers

    @compiled(name)
    def work(call, p, channel, _scratch):
        row, numbers, sums, channels, length = programs.row(), programs.numbers(), _sums(), p.channels, p.length
        dy = call.more[PUT_OUT] if call.more[PUT_OUT] else call.output
        _begin(call, channel, numbers)
        programs.fill(call, row, numbers, 2, tensors, NUMBERS, planes, count)
        store_i64(row, tensors, dy)
        store_f64(sums, 0, 0.0)
        store_f64(sums, 1, 0.0)
        for n in range(p.runs):
            first = (n * channels + channel) * length
            programs.fill_planes(call, numbers, NUMBERS + tensors - 1, planes, n * channels + channel)
            run(numbers, row, first, length)
            _add(call.inputs[0], dy, first, length, numbers, sums)
        _finish(call, channel, numbers, sums)

    return stage(name, BatchNormBackward, work)


_CHANNEL = stage("batch_norm_channel", BatchNormBackward, _channel)


def _plan(request: Request) -> Plan:
    src = request.inputs[0]
    assert src is not None
    batch, channels, *lengths = (src[axis] for axis in data_to_ncx(request.attributes["data_format"], len(src)))
    length, epsilon = math.prod(lengths), float(np.float32(request.attributes["epsilon"]))
    program = programs.program_of(request)
    given = [request.inputs[n] for n in (MEAN, VARIANCE, BETA)] if program else []
    if None in given[:2] or given[2:] not in ([], [None], [(channels,)]):
        raise ShapeError(f"a program wants mean, variance and beta, got those of {given}", op_type=OP.name)
    if request.attributes["data_format"] == "NXC" or (length == 1 and not program):
        return batch_norm_rows.plan(request.element_type, batch * length, channels, epsilon)
    parameters = BatchNormBackward(
        kind=request.element_type, runs=batch, channels=channels, length=length, epsilon=epsilon
    )
    return Plan(parameters, ((_programmed(program, request.attributes["planes"]) if program else _CHANNEL, channels),))


_BETA = Input("beta", "T5", "That of the forward pass, 1-D.", optional=True)
_DY = Output("program_result", "What the program makes.")
KERNEL = NativeKernel(programs.accepting(OP, 2, (_BETA,), (_DY,)), _plan)
