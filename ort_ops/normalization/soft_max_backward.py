"""SoftMaxBackward, compiled: two passes over a line while it is in a cache, or over a block of lines side by side."""

import math
from dataclasses import dataclass

import numpy as np

from onnx_backprop.opset.operators.soft_max_backward import OP
from onnx_backprop.ort_ops.compiler.decorators import fast, inner
from onnx_backprop.ort_ops.compiler.llvm import by_type, load_f32, stack, store_f32
from onnx_backprop.ort_ops.compiler.records import Record
from onnx_backprop.ort_ops.runtime.bridge import NativeKernel, Request
from onnx_backprop.ort_ops.runtime.stages import Plan, stage
from onnx_backprop.ort_ops.vector.rows import clear

CHUNK = 4096  # elements added up in float32
BLOCK = 64
ELEMENTS = 1 << 14  # of an item, about

_sums = stack(BLOCK // 2)


@dataclass(frozen=True, kw_only=True)
class SoftMax(Record):
    """A tensor (outer, length, inner). An item is `rows` of outer where inner is 1, else BLOCK of inner of one."""

    kind: int
    outer: int
    length: int
    inner: int
    rows: int


@fast("reassoc", "contract")
def _dot(load, dy, y, first, count):
    total = np.float32(0.0)
    for i in range(count):
        total += load(dy, first + i) * load(y, first + i)
    return total


@inner
def _line(load, store, dx, dy, y, first, length):
    total = 0.0
    for done in range(0, length, CHUNK):
        total += np.float64(_dot(load, dy, y, first + done, min(CHUNK, length - done)))
    along = np.float32(total)
    for i in range(first, first + length):
        store(dx, i, load(y, i) * (load(dy, i) - along))


@inner
def _block(load, store, dx, dy, y, first, length, inner, count, sums):
    clear(sums, 0, count)
    for k in range(length):
        at = first + k * inner
        for i in range(count):
            store_f32(sums, i, load_f32(sums, i) + load(dy, at + i) * load(y, at + i))
    for k in range(length):
        at = first + k * inner
        for i in range(count):
            store(dx, at + i, load(y, at + i) * (load(dy, at + i) - load_f32(sums, i)))


@inner
def _work(call, p, item, _scratch):
    dy, y, dx = call.inputs[0], call.inputs[1], call.output
    if p.inner == 1:
        for row in range(item * p.rows, min(p.outer, (item + 1) * p.rows)):
            by_type(p.kind, _line, dx, dy, y, row * p.length, p.length)
        return
    blocks = (p.inner + BLOCK - 1) // BLOCK
    start = item % blocks * BLOCK
    count, first = min(BLOCK, p.inner - start), item // blocks * p.length * p.inner + start
    by_type(p.kind, _block, dx, dy, y, first, p.length, p.inner, count, _sums())


_WORK = stage("soft_max", SoftMax, _work)


def _plan(request: Request) -> Plan:
    axis = request.attributes["axis"] % len(request.output)
    outer, length, inner = math.prod(request.output[:axis]), request.output[axis], math.prod(request.output[axis + 1 :])
    rows = max(1, ELEMENTS // length)
    items = -(-outer // rows) if inner == 1 else outer * -(-inner // BLOCK)
    parameters = SoftMax(kind=request.element_type, outer=outer, length=length, inner=inner, rows=rows)
    return Plan(parameters, ((_WORK, items),))


KERNEL = NativeKernel(OP, _plan)
