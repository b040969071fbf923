"""BiasAddBackward, compiled: short float32 sums, added up in float64, in an order that the shape alone decides."""

import math
from dataclasses import dataclass

import numpy as np

from onnx_backprop.opset.operators.bias_add_backward import OP
from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import load_f32, load_f64, stack, store_f32, store_f64
from onnx_backprop.ort_ops.compiler.records import Record
from onnx_backprop.ort_ops.runtime.bridge import NativeKernel, Request
from onnx_backprop.ort_ops.runtime.scratch import POOL_BYTES
from onnx_backprop.ort_ops.runtime.stages import Plan, stage
from onnx_backprop.ort_ops.vector.rows import add_run, clear, write_run

SUMS = 64  # independent partial sums of one run
BLOCK = 32 * SUMS  # elements of a run added up before they join the sum of the channel
CHUNK = 64  # rows added up before they join the sum of the part

_sums = stack(SUMS // 2)


@dataclass(frozen=True, kw_only=True)
class BiasAdd(Record):
    """The numbers of a plan: rows of channels (`last`), or a batch of channels of so many elements."""

    kind: int
    batch: int
    channels: int
    length: int
    parts: int  # of the batch or the rows
    last: bool
    at_once: int  # channels


@inner
def _sum_channel(kind, source, p, part, channel):
    """NCX: return the sum of one channel over one part of the batch."""
    channels, length = p.channels, p.length
    parts, batch = p.parts, p.batch
    sums = _sums()
    total = 0.0
    for n in range(part * batch // parts, (part + 1) * batch // parts):
        first = (n * channels + channel) * length
        for start in range(0, length, BLOCK):
            clear(sums, 0, SUMS)
            end = min(length, start + BLOCK)
            for done in range(start, end, SUMS):
                add_run(kind, sums, source, first + done, min(SUMS, end - done))
            width = SUMS
            while width > 1:
                width //= 2
                for i in range(width):
                    store_f32(sums, i, load_f32(sums, i) + load_f32(sums, i + width))
            total += np.float64(load_f32(sums, 0))
    return total


@inner
def _sum_rows(kind, source, p, part, first, count, sums):
    """NXC: some channels of a part of the rows."""
    channels = p.channels
    parts, rows = p.parts, p.batch
    total = sums + 8 * part * count
    chunk = sums + 8 * parts * count + 4 * part * count
    for i in range(count):
        store_f64(total, i, 0.0)
    row, end = part * rows // parts, (part + 1) * rows // parts
    while row < end:
        stop = min(end, row + CHUNK)
        clear(chunk, 0, count)
        while row < stop:
            add_run(kind, chunk, source, row * channels + first, count)
            row += 1
        for i in range(count):
            store_f64(total, i, load_f64(total, i) + np.float64(load_f32(chunk, i)))


@inner
def _work(call, p, index, _scratch):
    count = min(p.at_once, p.channels - call.part)
    if p.last:
        _sum_rows(p.kind, call.inputs[0], p, index, call.part, count, call.shared)
        return
    part, channel = index // p.at_once, index % p.at_once
    if channel < count:
        total = _sum_channel(p.kind, call.inputs[0], p, part, call.part + channel)
        store_f64(call.shared, part * count + channel, total)


@inner
def _finish(call, p, _item, _scratch):
    count, sums = min(p.at_once, p.channels - call.part), call.shared
    for i in range(count):
        total = load_f64(sums, i)
        for part in range(1, p.parts):
            total += load_f64(sums, part * count + i)
        store_f32(sums, i, np.float32(total))  # in front of what is still to be read
    write_run(p.kind, call.output, call.part, 1, sums, 0, count)


_WORK = stage("bias_add", BiasAdd, _work)
_FINISH = stage("bias_add_finish", BiasAdd, _finish)


def _plan(request: Request) -> Plan:
    shape = request.inputs[0]
    assert shape is not None
    rows_of_channels = request.attributes["data_format"] == "NXC"
    last = rows_of_channels and shape[-1] > 1
    if last:
        rows, channels, length = math.prod(shape[:-1]), shape[-1], 1
        parts = max(1, min(16, rows // CHUNK))
    else:
        rows, channels, length = (1, 1, math.prod(shape)) if rows_of_channels else (*shape[:2], math.prod(shape[2:]))
        parts = max(1, min(rows, 16 // channels))
    per_channel = (12 if last else 8) * parts
    at_once = min(channels, POOL_BYTES // per_channel)
    parameters = BiasAdd(
        kind=request.element_type, batch=rows, channels=channels, length=length, parts=parts, last=last, at_once=at_once
    )
    stages = (_WORK, parts if last else parts * at_once), (_FINISH, 1)
    return Plan(parameters, stages, at_once * per_channel, parts=(channels, at_once))


KERNEL = NativeKernel(OP, _plan)
