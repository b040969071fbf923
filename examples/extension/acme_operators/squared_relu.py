"""acme::SquaredRelu, y = max(x, 0)², and acme::SquaredReluBackward: declared, with kernels in NumPy and compiled."""

import math
from dataclasses import dataclass

import numpy as np

import onnx_backprop as ob
from onnx_backprop.opset.core.errors import ShapeError
from onnx_backprop.opset.core.op import Input, Op, Output
from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import by_type
from onnx_backprop.ort_ops.compiler.records import Record
from onnx_backprop.ort_ops.runtime.stages import Plan, stage

SQUARED_RELU = Op(
    name="SquaredRelu",
    domain="acme",
    doc="y = max(x, 0)², of any shape.",
    inputs=(Input("x", "T1", "Any shape."),),
    outputs=(Output("y", "As x."),),
    shape=lambda _attributes, args: args[0].dims,
    reference=lambda _attributes, _shape, x: np.maximum(x, 0) ** 2,
    body=lambda b, _attributes, x: b.Mul(b.Relu(x), b.Relu(x)),
)


def _shape_of_gradient(attributes, args):
    x, dy = (arg.dims for arg in args)
    if x is not None and dy is not None and len(x) != len(dy):
        raise ShapeError(f"expected dy of the shape of x, {x}, got {dy}", op_type=attributes.op)
    return x if x is not None else dy


SQUARED_RELU_BACKWARD = Op(
    name="SquaredReluBackward",
    domain="acme",
    doc="dx = 2·max(x, 0)·dy, of any shape.",
    inputs=(Input("x", "T1", "Any shape."), Input("dy", "T1", "As x.")),
    outputs=(Output("dx", "As x."),),
    shape=_shape_of_gradient,
    reference=lambda _attributes, _shape, x, dy: 2 * np.maximum(x, 0) * dy,
    body=lambda b, _attributes, x, dy: b.Mul(b.Mul(b.Relu(x), b.float_scalar(2)), dy),
)

PIECE = 1 << 15  # elements that a thread takes at a time


@dataclass(frozen=True, kw_only=True)
class Elements(Record):
    """The numbers of a plan, which compiled code reads as fields."""

    kind: int
    count: int
    pieces: int


@inner
def _square(load, store, x, y, first, last):
    for i in range(first, last):
        value = max(load(x, i), np.float32(0.0))
        store(y, i, value * value)


@inner
def _squares(call, p, piece, _scratch):
    first, last = piece * p.count // p.pieces, (piece + 1) * p.count // p.pieces
    by_type(p.kind, _square, call.inputs[0], call.output, first, last)


@inner
def _slope(load, store, x, dy, dx, first, last):
    for i in range(first, last):
        store(dx, i, np.float32(2.0) * max(load(x, i), np.float32(0.0)) * load(dy, i))


@inner
def _slopes(call, p, piece, _scratch):
    first, last = piece * p.count // p.pieces, (piece + 1) * p.count // p.pieces
    by_type(p.kind, _slope, call.inputs[0], call.inputs[1], call.output, first, last)


_SQUARES, _SLOPES = stage("squares", Elements, _squares), stage("slopes", Elements, _slopes)


def _planned(work):
    def plan(request):
        count = math.prod(request.output)
        pieces = -(-count // PIECE)
        return Plan(Elements(kind=request.element_type, count=count, pieces=pieces), ((work, pieces),))

    return plan


ob.register_kernel(SQUARED_RELU, _planned(_SQUARES))
ob.register_kernel(SQUARED_RELU_BACKWARD, _planned(_SLOPES))


@ob.register_gradient("acme", "SquaredRelu")
def squared_relu(op, node, dy):
    """dx = 2·max(x, 0)·dy."""
    return op.emit("SquaredReluBackward", [node.input(0), dy], {}, domain="acme")[0]


@ob.register_gradient("acme", "SquaredReluBackward")
def squared_relu_backward(op, node, g):
    """∂dx/∂x = 2·dy where x > 0, else 0;  ∂dx/∂dy = 2·max(x, 0)."""
    x, dy = node.input(0), node.input(1)
    return op.Where(op.Greater(x, 0), 2 * g * dy, 0), 2 * op.Relu(x) * g
