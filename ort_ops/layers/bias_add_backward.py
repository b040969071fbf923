"""BiasAddBackward, compiled: channel sums in two levels of float32 partial sums whose order the shape alone decides."""

import math
from dataclasses import dataclass

import numpy as np

from onnx_backprop.opset.operators.bias_add_backward import OP
from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import F32, load_f32, stack, store_f32
from onnx_backprop.ort_ops.compiler.records import Record
from onnx_backprop.ort_ops.runtime.bridge import NativeKernel, Request
from onnx_backprop.ort_ops.runtime.scratch import POOL_BYTES
from onnx_backprop.ort_ops.runtime.stages import Plan, stage
from onnx_backprop.ort_ops.vector.rows import add_run, clear, write_run

SUMS = 64  # independent partial sums of one run
CHUNK = 128  # rows added up before they join the sum of the part

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
    """NCX: one channel of a part of the batch."""
    channels, length = p.channels, p.length
    parts, batch = p.parts, p.batch
    sums = _sums()
    total = np.float32(0.0)
    for n in range(part * batch // parts, (part + 1) * batch // parts):
        clear(sums, 0, SUMS)
        first = (n * channels + channel) * length
        done = 0
        while done < length:
            count = min(SUMS, length - done)
            add_run(kind, sums, source, first + done, count)
            done += count
        width = SUMS
        while width > 1:
            width //= 2
            for i in range(width):
                store_f32(sums, i, load_f32(sums, i) + load_f32(sums, i + width))
        total += load_f32(sums, 0)
    return total


@inner
def _sum_rows(kind, source, p, part, first, count, sums):
    """NXC: some channels of a part of the rows."""
    channels = p.channels
    parts, rows = p.parts, p.batch
    total = sums + 8 * part * count
    chunk = total + 4 * count
    clear(total, 0, count)
    row, end = part * rows // parts, (part + 1) * rows // parts
    while row < end:
        stop = min(end, row + CHUNK)
        clear(chunk, 0, count)
        while row < stop:
            add_run(kind, chunk, source, row * channels + first, count)
            row += 1
        for i in range(count):
            store_f32(total, i, load_f32(total, i) + load_f32(chunk, i))


@inner
def _work(call, p, index, _scratch):
    count = min(p.at_once, p.channels - call.part)
    if p.last:
        _sum_rows(p.kind, call.inputs[0], p, index, call.part, count, call.shared)
        return
    part, channel = index // p.at_once, index % p.at_once
    if channel < count:
        total = _sum_channel(p.kind, call.inputs[0], p, part, call.part + channel)
        store_f32(call.shared, part * count + channel, total)


@inner
def _finish(call, p, _item, _scratch):
    count, sums = min(p.at_once, p.channels - call.part), call.shared
    for part in range(1, p.parts):
        add_run(F32, sums, sums, part * (2 * count if p.last else count), count)
    write_run(p.kind, call.output, call.part, 1, sums, 0, count)


_WORK = stage("bias_add", BiasAdd, _work)
_FINISH = stage("bias_add_finish", BiasAdd, _finish)


def _plan(request: Request) -> Plan:
    shape = request.inputs[0]
    assert shape is not None
    last = request.attributes["data_format"] == "NXC"
    if last:
        rows, channels, length = math.prod(shape[:-1]), shape[-1], 1
        parts = max(1, min(16, rows // CHUNK))
    else:
        rows, channels, length = shape[0], shape[1], math.prod(shape[2:])
        parts = max(1, min(rows, 16 // channels))
    per_channel = (8 if last else 4) * parts
    at_once = min(channels, POOL_BYTES // per_channel)
    parameters = BiasAdd(
        kind=request.element_type, batch=rows, channels=channels, length=length, parts=parts, last=last, at_once=at_once
    )
    stages = (_WORK, parts if last else parts * at_once), (_FINISH, 1)
    return Plan(parameters, stages, at_once * per_channel, parts=(channels, at_once))


KERNEL = NativeKernel(OP, _plan)
