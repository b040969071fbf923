"""Gradients of normalisations."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..opset.errors import UnsupportedError
from .builder import Builder, dims, element_type
from .forward import Forward
from .idioms import cast, work_type
from .registry import Grads, gradient


@gradient("Softmax", versions=(13,))
def softmax(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = e^x / Σ e^x along an axis  =>  dx = Y · (dy - Σ Y · dy)."""
    y, axis = node.output(), op.ints([node.int("axis", -1)])
    return (op.Mul(y, op.Sub(dy, op.ReduceSum(op.Mul(y, dy), axis, keepdims=1))),)


@gradient("LogSoftmax", versions=(13,))
def log_softmax(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x - ln Σ e^x along an axis  =>  dx = dy - e^Y · Σ dy."""
    y, axis = node.output(), op.ints([node.int("axis", -1)])
    return (op.Sub(dy, op.Mul(op.Exp(y), op.ReduceSum(dy, axis, keepdims=1))),)


@gradient("BatchNormalization", versions=(15,))
def batch_normalization(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = s · (x - m) · r + b, r = 1/√(v + ε)  =>  dx = dy · s · r, ds = Σ dy · (x - m) · r, db = Σ dy,
    dm = -s · r · Σ dy, dv = -s · r² · ds / 2, Σ over all axes but the channels'.

    The statistics m and v are inputs like the others; training_mode = 1, which takes them from x, is refused.
    Shapes: x (N, C, …), the others (C). Half types are computed in float32.
    """
    if node.int("training_mode", 0):
        raise node.refuse("training_mode", 1, "of 0 only (frozen statistics)")
    known = dims(node.input(0))
    if known is None:
        raise UnsupportedError(
            "the gradient needs the rank of X at conversion, and shape inference does not find it",
            op_type=node.op_type,
            node=node.name,
        )
    inputs = [node.input(n) for n in range(5)]
    own = [element_type(value) for value in inputs]
    wide = ir.DataType.DOUBLE if ir.DataType.DOUBLE in own else work_type(inputs[0])
    x, scale, _, mean, variance = (cast(op, value, t, wide) for value, t in zip(inputs, own, strict=True))
    dy = cast(op, dy, own[0], wide)
    epsilon = op.constant(np.array(node.float("epsilon", 1e-5), wide.numpy()))
    per_channel = op.ints([-1] + [1] * (len(known) - 2))
    others = op.ints([axis for axis in range(len(known)) if axis != 1])

    rate = op.Reciprocal(op.Sqrt(op.Add(variance, epsilon)))
    slope = op.Mul(scale, rate)
    grads: list[ir.Value | None] = [None] * 5
    if node.wants(0):
        grads[0] = op.Mul(dy, op.Reshape(slope, per_channel))
    if node.wants(2) or node.wants(3):
        grads[2] = op.ReduceSum(dy, others, keepdims=0)
        grads[3] = op.Neg(op.Mul(slope, grads[2]))
    if node.wants(1) or node.wants(4):
        centred = op.Sub(x, op.Reshape(mean, per_channel))
        grads[1] = op.Mul(rate, op.ReduceSum(op.Mul(dy, centred), others, keepdims=0))
        half = op.constant(np.array(-0.5, wide.numpy()))
        grads[4] = op.Mul(half, op.Mul(op.Mul(slope, rate), grads[1]))
    return [
        cast(op, g, wide, t) if g is not None and node.wants(n) else None
        for n, (g, t) in enumerate(zip(grads, own, strict=True))
    ]
