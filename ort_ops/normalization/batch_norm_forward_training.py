"""BatchNormForwardTraining, compiled: a channel (NCX), or some of every row (NXC), by one worker.

One pass takes Σ d and Σ d² in float64, d = x - shift, of which μ = shift + Σ d / n and σ² = Σ d² / n - (Σ d / n)². The
shift is the running mean, which is near μ; where it turns out to be many σ away, or x is the same everywhere, the sums
are taken again about μ. No order of them shows in float32: ranks that add up theirs come to the same numbers as one. A
last pass, over what mostly is in a cache still, normalises in float32, every step rounded, and may do what follows, as
Add and Relu, at once (`batch_norm_programs`).
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from onnx_backprop.opset.core.layout import data_to_ncx
from onnx_backprop.opset.operators.batch_norm_forward_training import OP
from onnx_backprop.ort_ops.compiler.decorators import compiled, fast, inner, shared
from onnx_backprop.ort_ops.compiler.llvm import by_type, load_f32, load_f64, store_f32, store_f64, store_i64
from onnx_backprop.ort_ops.compiler.objects import Exported
from onnx_backprop.ort_ops.compiler.records import Record, view
from onnx_backprop.ort_ops.elementwise.program import Program, digest, runner
from onnx_backprop.ort_ops.normalization import batch_norm_programs as programs
from onnx_backprop.ort_ops.normalization.batch_norm_factors import slope_of
from onnx_backprop.ort_ops.runtime.bridge import NativeKernel, Request
from onnx_backprop.ort_ops.runtime.stages import Call, Plan, stage

MEAN, VARIANCE, GAMMA, BETA, NUMBERS = 1, 2, 3, 4, 5  # inputs
RUNNING_MEAN, RUNNING_VARIANCE, BATCH_MEAN, BATCH_VARIANCE = range(4)  # further outputs
AWAY = 2.0**12  # (shift - μ)² of so many σ² costs as many times the rounding of a float64
ATTEMPTS = 2  # more: from a shift of 10³⁰ it takes both
WIDTH = 64  # channels of a row that are looked at together
# arrays in scratch, WIDTH numbers each: float64, then float32
SHIFTS, TOTALS, SQUARES, DOUBLES = range(4)
MEANS, SLOPES, BETAS, FLOATS = range(4)


@dataclass(frozen=True, kw_only=True)
class BatchNormForward(Record):
    """The numbers of a plan; a channel has `runs` runs of `length` elements."""

    kind: int
    runs: int
    channels: int
    length: int
    epsilon: float
    momentum: float


@inner
def _shift(call, channel):
    """The running mean, or 0 where it is no finite number."""
    shift = np.float64(load_f32(call.inputs[MEAN], channel))
    return shift if shift - shift == 0.0 else 0.0


@inner
def _better(shift, count, total, square):
    """Where to take the sums about instead: shift, unless it is far from μ, measured in σ; a float32 number."""
    if count == 0.0:
        return shift
    step = total / count
    near = step * step <= AWAY * (square / count - step * step)
    candidate = np.float64(np.float32(shift + step))
    return shift if near or candidate - candidate != 0.0 else candidate


@inner
def _finish(call, p, channel, shift, total, square):
    """Store the statistics of a channel; float32 (μ, γ·r, β)."""
    count = np.float64(p.runs * p.length)
    mean, variance = 0.0, 0.0
    if count > 0.0:
        step = total / count
        mean, variance = shift + step, square / count - step * step
        variance = 0.0 if variance < 0.0 else variance
    momentum = p.momentum
    old_mean, old_variance = load_f32(call.inputs[MEAN], channel), load_f32(call.inputs[VARIANCE], channel)
    if call.more[RUNNING_MEAN]:
        new = momentum * np.float64(old_mean) + (1.0 - momentum) * mean
        store_f32(call.more[RUNNING_MEAN], channel, np.float32(new))
    if call.more[RUNNING_VARIANCE]:
        new = momentum * np.float64(old_variance) + (1.0 - momentum) * variance
        store_f32(call.more[RUNNING_VARIANCE], channel, np.float32(new))
    if call.more[BATCH_MEAN]:
        store_f32(call.more[BATCH_MEAN], channel, np.float32(mean))
    if call.more[BATCH_VARIANCE]:
        store_f32(call.more[BATCH_VARIANCE], channel, np.float32(variance))
    slope = slope_of(call.inputs[GAMMA], channel, np.float64(np.float32(variance)), p.epsilon)
    beta = call.inputs[BETA]
    return np.float32(mean), np.float32(slope), load_f32(beta, channel) if beta else np.float32(0.0)


@fast("reassoc", "contract")
def _sums(load, _store, x, first, count, shift):
    total, square = 0.0, 0.0
    for i in range(count):
        d = np.float64(load(x, first + i)) - shift
        total += d
        square += d * d
    return total, square


@inner
def _normalise(load, store, y, x, first, count, mean, slope, beta):
    for i in range(count):
        store(y, first + i, (load(x, first + i) - mean) * slope + beta)


@inner
def _channel_sums(p, x, channel, shift):
    kind, runs, channels, length = p.kind, p.runs, p.channels, p.length
    total, square = 0.0, 0.0
    for n in range(runs):
        sums = by_type(kind, _sums, x, (n * channels + channel) * length, length, shift)
        total += sums[0]
        square += sums[1]
    return total, square


@inner
def _statistics(call, p, channel):
    """Those of one channel, NCX, stored; what `_finish` answers."""
    x = call.inputs[0]
    shift, count = _shift(call, channel), np.float64(p.runs * p.length)
    total, square = _channel_sums(p, x, channel, shift)
    for _attempt in range(ATTEMPTS):
        better = _better(shift, count, total, square)
        if better != shift:
            shift = better
            total, square = _channel_sums(p, x, channel, shift)
    return _finish(call, p, channel, shift, total, square)


@inner
def _channel(call, p, channel, _scratch):
    """NCX: one channel."""
    x, y, kind, channels, length = call.inputs[0], call.output, p.kind, p.channels, p.length
    mean, slope, beta = _statistics(call, p, channel)
    if y:
        for n in range(p.runs):
            by_type(kind, _normalise, y, x, (n * channels + channel) * length, length, mean, slope, beta)


@shared
def _measure(address, channel, numbers):
    """The first numbers of a program: μ, γ·r and β."""
    call = view(Call, address)
    mean, slope, beta = _statistics(call, view(BatchNormForward, call.parameters), channel)
    programs.begin(numbers, mean, slope, beta)


@cache
def _programmed(text: str) -> Exported:
    """`_channel` where the last pass is a program."""
    run, program = runner(text), Program.parse(text)
    tensors, count = program.tensors, program.numbers

    @compiled(f"batch_norm_forward_{digest(text)}")
    def work(call, p, channel, _scratch):
        row, numbers, channels, length = programs.row(), programs.numbers(), p.channels, p.length
        _measure(call, channel, numbers)
        programs.fill(call, row, numbers, 1, tensors, NUMBERS, 0, count)
        store_i64(row, tensors, call.output)
        for n in range(p.runs):
            run(numbers, row, (n * channels + channel) * length, length)

    return stage(f"batch_norm_forward_{digest(text)}", BatchNormForward, work)


@inner
def _add_row(load, _store, x, first, count, shifts, totals, squares):
    for i in range(count):
        d = np.float64(load(x, first + i)) - load_f64(shifts, i)
        store_f64(totals, i, load_f64(totals, i) + d)
        store_f64(squares, i, load_f64(squares, i) + d * d)


@inner
def _normalise_row(load, store, y, x, first, count, means, slopes, betas):
    for i in range(count):
        store(y, first + i, (load(x, first + i) - load_f32(means, i)) * load_f32(slopes, i) + load_f32(betas, i))


@inner
def _columns_sums(p, x, channel, count, shifts, totals, squares):
    kind, rows, channels = p.kind, p.runs, p.channels
    for i in range(count):
        store_f64(totals, i, 0.0)
        store_f64(squares, i, 0.0)
    for row in range(rows):
        by_type(kind, _add_row, x, row * channels + channel, count, shifts, totals, squares)


@inner
def _columns(call, p, item, scratch):
    """NXC: WIDTH channels of every row."""
    x, y, kind, rows, channels = call.inputs[0], call.output, p.kind, p.runs, p.channels
    channel = item * WIDTH
    count = min(WIDTH, channels - channel)
    shifts, totals, squares = scratch, scratch + 8 * TOTALS * WIDTH, scratch + 8 * SQUARES * WIDTH
    means = scratch + 8 * DOUBLES * WIDTH
    slopes, betas = means + 4 * SLOPES * WIDTH, means + 4 * BETAS * WIDTH
    for i in range(count):
        store_f64(shifts, i, _shift(call, channel + i))
    again = 1
    for attempt in range(ATTEMPTS + 1):
        if again:
            again = 0
            _columns_sums(p, x, channel, count, shifts, totals, squares)
            for i in range(count):
                shift = load_f64(shifts, i)
                better = _better(shift, np.float64(rows), load_f64(totals, i), load_f64(squares, i))
                if better != shift and attempt < ATTEMPTS:
                    store_f64(shifts, i, better)
                    again = 1
    for i in range(count):
        statistics = _finish(call, p, channel + i, load_f64(shifts, i), load_f64(totals, i), load_f64(squares, i))
        store_f32(means, i, statistics[0])
        store_f32(slopes, i, statistics[1])
        store_f32(betas, i, statistics[2])
    if y:
        for row in range(rows):
            by_type(kind, _normalise_row, y, x, row * channels + channel, count, means, slopes, betas)


_CHANNEL = stage("batch_norm_forward_channel", BatchNormForward, _channel)
_COLUMNS = stage("batch_norm_forward_columns", BatchNormForward, _columns)


def _plan(request: Request) -> Plan:
    src, attributes = request.inputs[0], request.attributes
    assert src is not None
    batch, channels, *lengths = (src[axis] for axis in data_to_ncx(attributes["data_format"], len(src)))
    length, program = math.prod(lengths), programs.program_of(request)
    rows = attributes["data_format"] == "NXC" or (length == 1 and not program)
    parameters = BatchNormForward(
        kind=request.element_type,
        runs=batch * length if rows else batch,
        channels=channels,
        length=1 if rows else length,
        epsilon=float(np.float32(attributes["epsilon"])),
        momentum=float(np.float32(attributes["momentum"])),
    )
    if rows:
        return Plan(parameters, ((_COLUMNS, -(-channels // WIDTH)),), per_thread=(8 * DOUBLES + 4 * FLOATS) * WIDTH)
    return Plan(parameters, ((_programmed(program) if program else _CHANNEL, channels),))


KERNEL = NativeKernel(programs.accepting(OP, 1), _plan)
