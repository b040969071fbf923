"""PReLUBackward, compiled: float32 sums of short runs, added up in float64, in an order that the shape alone decides.

A tensor is (batch, channels, length), a channel being an entry of the slope. An item is a part of a channel, or where
channels lie side by side, of a block of them: it goes through a run twice, the second time in a cache.
"""

import math
from dataclasses import dataclass

import numpy as np

from onnx_backprop.opset.operators.p_relu_backward import OP
from onnx_backprop.ort_ops.compiler.decorators import fast, inner
from onnx_backprop.ort_ops.compiler.llvm import by_type, load_f32, load_f64, stack, store_f32, store_f64
from onnx_backprop.ort_ops.compiler.records import Record
from onnx_backprop.ort_ops.runtime.bridge import NativeKernel, Request
from onnx_backprop.ort_ops.runtime.stages import Plan, stage
from onnx_backprop.ort_ops.vector.rows import clear, read_run, write_run

RUN = 2048  # elements of a run that are added up in float32
BLOCK = 256  # channels side by side
ROWS = 64  # of a block that are added up in float32
ITEMS = 64  # that a call is cut into, about

_block = stack(2 * BLOCK)  # float64 totals; float32 slopes, sums


@dataclass(frozen=True, kw_only=True)
class PReLU(Record):
    """The numbers of a plan. A channel has `pieces` that its parts share: `runs` of an image, or ROWS rows."""

    kind: int
    batch: int
    channels: int
    length: int
    runs: int
    pieces: int
    parts: int


@inner
def _differentiate(load, store, dx, x, dy, first, count, slope):
    for i in range(first, first + count):
        g = load(dy, i)
        store(dx, i, g if load(x, i) > np.float32(0.0) else slope * g)


@fast("reassoc", "contract")
def _sum(load, _store, x, dy, first, count):
    total = np.float32(0.0)
    for i in range(first, first + count):
        s = load(x, i)
        total += np.float32(0.0) if s > np.float32(0.0) else s * load(dy, i)
    return total


@inner
def _differentiate_row(load, store, dx, x, dy, first, count, slopes):
    for i in range(count):
        g = load(dy, first + i)
        store(dx, first + i, g if load(x, first + i) > np.float32(0.0) else load_f32(slopes, i) * g)


@inner
def _add_row(load, _store, sums, x, dy, first, count):
    for i in range(count):
        s = load(x, first + i)
        store_f32(sums, i, load_f32(sums, i) + (np.float32(0.0) if s > np.float32(0.0) else s * load(dy, first + i)))


@inner
def _give(call, p, part, channel, totals, count):
    """Totals to where those of all parts wait, or to the output, rounded once, where there is one part."""
    for i in range(count):
        if p.parts > 1:
            store_f64(call.shared, part * p.channels + channel + i, load_f64(totals, i))
        else:
            store_f32(totals, i, np.float32(load_f64(totals, i)))  # in front of what is still to be read
    if p.parts == 1:
        write_run(p.kind, call.more[0], channel, 1, totals, 0, count)


@inner
def _runs(call, p, item, _scratch):
    """A part of one channel."""
    x, dy, totals = call.inputs[0], call.inputs[2], _block()
    slope = totals + 8 * BLOCK
    channel, part = item // p.parts, item % p.parts
    read_run(p.kind, slope, 0, call.inputs[1], channel, 1, 1)
    total = 0.0
    for piece in range(part * p.pieces // p.parts, (part + 1) * p.pieces // p.parts):
        start = piece % p.runs * RUN
        first, count = (piece // p.runs * p.channels + channel) * p.length + start, min(RUN, p.length - start)
        if call.output:
            by_type(p.kind, _differentiate, call.output, x, dy, first, count, load_f32(slope, 0))
        if call.more[0]:
            total += np.float64(by_type(p.kind, _sum, x, dy, first, count))
    store_f64(totals, 0, total)
    if call.more[0]:
        _give(call, p, part, channel, totals, 1)


@inner
def _rows(call, p, item, _scratch):
    """A part of the rows of a block of channels."""
    x, dy, totals = call.inputs[0], call.inputs[2], _block()
    slopes = totals + 8 * BLOCK
    sums = slopes + 4 * BLOCK
    channel, part = item // p.parts * BLOCK, item % p.parts
    count = min(BLOCK, p.channels - channel)
    read_run(p.kind, slopes, 0, call.inputs[1], channel, 1, count)
    for i in range(count):
        store_f64(totals, i, 0.0)
    for piece in range(part * p.pieces // p.parts, (part + 1) * p.pieces // p.parts):
        clear(sums, 0, count)
        for row in range(piece * ROWS, min(p.batch, (piece + 1) * ROWS)):
            first = row * p.channels + channel
            if call.output:
                by_type(p.kind, _differentiate_row, call.output, x, dy, first, count, slopes)
            if call.more[0]:
                by_type(p.kind, _add_row, sums, x, dy, first, count)
        for i in range(count):
            store_f64(totals, i, load_f64(totals, i) + np.float64(load_f32(sums, i)))
    if call.more[0]:
        _give(call, p, part, channel, totals, count)


@inner
def _join(call, p, _item, _scratch):
    """The totals of all parts, one after the other."""
    shared, channels = call.shared, p.channels
    for i in range(channels if call.more[0] else 0):
        total = load_f64(shared, i)
        for part in range(1, p.parts):
            total += load_f64(shared, part * channels + i)
        store_f32(shared, i, np.float32(total))  # in front of what is still to be read
    if call.more[0]:
        write_run(p.kind, call.more[0], 0, 1, shared, 0, channels)


_RUNS = stage("p_relu_runs", PReLU, _runs)
_ROWS = stage("p_relu_rows", PReLU, _rows)
_JOIN = stage("p_relu_join", PReLU, _join)


def _plan(request: Request) -> Plan:
    src, slope = request.outputs
    channels, batch, length = math.prod(slope), src[0], 1
    if channels == 1:
        batch, length = 1, math.prod(src)
    elif len(slope) == 1 and request.attributes["data_format"] == "NCX":
        length = math.prod(src[2:])
    elif len(slope) == 1:
        batch = math.prod(src[:-1])
    side_by_side, runs = length == 1, -(-length // RUN)
    units, pieces = (-(-channels // BLOCK), -(-batch // ROWS)) if side_by_side else (channels, batch * runs)
    parts = max(1, min(pieces, ITEMS // max(units, 1)))
    parameters = PReLU(
        kind=request.element_type, batch=batch, channels=channels, length=length, runs=runs, pieces=pieces, parts=parts
    )
    join = ((_JOIN, 1),) if parts > 1 else ()
    stages = (_ROWS if side_by_side else _RUNS, units * parts), *join
    return Plan(parameters, stages, 8 * parts * channels if parts > 1 else 0)


KERNEL = NativeKernel(OP, _plan)
