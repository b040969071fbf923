"""ReLUBackward, compiled: one pass, cut into pieces for the threads."""

import math
from dataclasses import dataclass

import numpy as np

from onnx_backprop.opset.operators.relu_backward import OP
from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import by_type
from onnx_backprop.ort_ops.compiler.records import Record
from onnx_backprop.ort_ops.runtime.bridge import NativeKernel, Request
from onnx_backprop.ort_ops.runtime.stages import Plan, stage

PIECE = 1 << 15  # elements, about


@dataclass(frozen=True, kw_only=True)
class ReLU(Record):
    """The numbers of a plan."""

    kind: int
    count: int
    pieces: int


@inner
def _pick(load, store, x, dy, dx, first, last):
    for i in range(first, last):
        store(dx, i, load(dy, i) if load(x, i) > np.float32(0.0) else np.float32(0.0))


@inner
def _work(call, p, piece, _scratch):
    first, last = piece * p.count // p.pieces, (piece + 1) * p.count // p.pieces
    by_type(p.kind, _pick, call.inputs[0], call.inputs[1], call.output, first, last)


_WORK = stage("relu", ReLU, _work)


def _plan(request: Request) -> Plan:
    count = math.prod(request.output)
    pieces = -(-count // PIECE)
    return Plan(ReLU(kind=request.element_type, count=count, pieces=pieces), ((_WORK, pieces),))


KERNEL = NativeKernel(OP, _plan)
