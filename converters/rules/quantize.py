"""Gradients of QuantizeLinear, DynamicQuantizeLinear and DequantizeLinear, as quantisation-aware training takes them.

Rounding has a derivative of zero almost everywhere. The straight-through estimator takes it for the identity, which is
another function's gradient, so it must be asked for: `straight_through=True`. Between the two nodes the gradient by an
integer tensor is a float tensor.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder, dims, element_type
from onnx_backprop.converters.reverse.forward import Forward
from onnx_backprop.converters.reverse.registry import Grads, gradient
from onnx_backprop.converters.rules.common import cast, work_type
from onnx_backprop.opset.core.errors import UnsupportedError

VERSIONS = (13, 19, 21, 23, 24, 25)
TYPES = ("INT8", "UINT8", "INT16", "UINT16", "INT4", "UINT4")


@gradient("QuantizeLinear", versions=VERSIONS, inputs=(0, 1))
def quantize_linear(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """q = clip(round(x / s) + z)  =>  with round' = 1: dx = dq / s, ds = -Σ dq x / s², both 0 where q was clipped.

    Shapes: s and z of x's, of one element, or 1-D along `axis`.
    """
    _require_straight_through(op, node)
    x, scale, q = node.input(0), node.input(1), node.output()
    dtype = element_type(q)
    if dtype.name not in TYPES:
        raise node.refuse("output type", dtype.name, f"of {', '.join(TYPES)}")
    own, own_scale, wide = element_type(x), element_type(scale), work_type(x)
    s = _aligned(op, node, cast(op, scale, own_scale, wide), scale)
    steps = op.Div(cast(op, x, own, wide), s)
    place = op.Round(steps)
    if node.has(2):
        zero_point = op.Cast(node.input(2), to=wide.value)
        place = op.Add(place, _aligned(op, node, zero_point, node.input(2)))
    low, high = (op.constant(np.array(limit, wide.numpy())) for limit in (int(dtype.min), int(dtype.max)))
    inside = op.And(op.GreaterOrEqual(place, low), op.LessOrEqual(place, high))
    nothing = op.constant(np.array(0, wide.numpy()))
    g = op.Where(inside, op.Div(cast(op, dy, own_scale, wide), s), nothing)
    grads: list[ir.Value | None] = [None] * len(node.inputs)
    grads[0] = cast(op, g, wide, own)
    if node.wants(1):
        grads[1] = cast(op, op.Neg(_summed(op, node, op.Mul(g, steps), scale)), wide, own_scale)
    return grads


@gradient("DynamicQuantizeLinear", versions=(11,), all_outputs=True)
def dynamic_quantize_linear(op: Builder, node: Forward, dys: list[ir.Value | None]) -> Grads:
    """s = (max(x, 0) - min(x, 0)) / 255, q = round(x / s) + z  =>  with round' = 1 and z held:
    dx = dq / s where x lies, and (ds - Σ dq x / s²) / 255 more at its maximum, less at its minimum.

    The gradient by s alone needs no estimator. Edge: equal extrema share; where 0 is one itself, it gets nothing.
    """
    dq, ds, _ = dys
    x, s = node.input(0), node.output(1)
    grads: list[ir.Value] = [] if ds is None else [ds]
    parts: list[ir.Value] = []
    if dq is not None:
        _require_straight_through(op, node)
        parts.append(op.Div(dq, s))
        grads.append(op.Neg(op.ReduceSum(op.Div(op.Mul(parts[0], x), s), keepdims=0)))
    zero, steps = op.scalar(0.0, x), op.scalar(255.0, x)
    share = op.Div(op.accumulate(grads), steps)
    for reduce, beyond, sign in ((op.ReduceMax, op.Greater, share), (op.ReduceMin, op.Less, op.Neg(share))):
        end = reduce(x, keepdims=0)
        hit = op.And(op.Equal(x, end), beyond(x, zero))
        count = op.Max(op.ReduceSum(op.Cast(hit, to=element_type(x).value), keepdims=0), op.scalar(1.0, x))
        parts.append(op.Where(hit, op.Div(sign, count), zero))
    return (op.accumulate(parts),)


@gradient("DequantizeLinear", versions=VERSIONS, inputs=(0, 1))
def dequantize_linear(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = (q - z) s  =>  dq = dy s, ds = Σ dy (q - z).

    Shapes: s and z of q's, of one element, or 1-D along `axis`. dq has the type of s.
    """
    q, scale = node.input(0), node.input(1)
    own, wide = element_type(scale), work_type(scale)
    dy = cast(op, dy, element_type(node.output()), wide)
    grads: list[ir.Value | None] = [None] * len(node.inputs)
    if node.wants(0):
        grads[0] = cast(op, op.Mul(dy, _aligned(op, node, cast(op, scale, own, wide), scale)), wide, own)
    if node.wants(1):
        steps = op.Cast(q, to=wide.value)
        if node.has(2):
            zero_point = op.Cast(node.input(2), to=wide.value)
            steps = op.Sub(steps, _aligned(op, node, zero_point, node.input(2)))
        grads[1] = cast(op, _summed(op, node, op.Mul(dy, steps), scale), wide, own)
    return grads


def _require_straight_through(op: Builder, node: Forward) -> None:
    if not op.straight_through:
        raise UnsupportedError(
            "it rounds, so its derivative is zero almost everywhere. Pass straight_through=True to differentiate it as "
            "if it did not",
            op_type=node.op_type,
            node=node.name,
        )


def _axis(node: Forward, scale: ir.Value) -> int | None:
    """The axis that scales lie along, counted from the end; None for one scale."""
    if node.int("block_size", 0):
        raise node.refuse("block_size", node.int("block_size", 0), "of 0 only")
    shape, known = dims(scale), dims(node.input(0))
    if shape is None or len(shape) > 1:
        raise UnsupportedError(
            "the gradient needs a scale of rank 0 or 1, known at conversion", op_type=node.op_type, node=node.name
        )
    if shape in ((), (1,)):
        return None
    axis = node.int("axis", 1)
    if known is None:
        raise UnsupportedError(
            "the gradient by several scales needs the rank of the input at conversion, and shape inference does not "
            "find it. Give that value a shape",
            op_type=node.op_type,
            node=node.name,
        )
    return axis if axis < 0 else axis - len(known)


def _aligned(op: Builder, node: Forward, value: ir.Value, like: ir.Value) -> ir.Value:
    """A scale or zero point in a shape that broadcasts to x."""
    axis = _axis(node, like)
    return op.Reshape(value, op.ints([] if axis is None else [-1] + [1] * (-1 - axis)))


def _summed(op: Builder, node: Forward, terms: ir.Value, scale: ir.Value) -> ir.Value:
    """Terms of x's shape, summed to the scale's."""
    axis, known = _axis(node, scale), dims(node.input(0))
    if axis is None or known is None:
        return op.Reshape(op.ReduceSum(terms, keepdims=0), op.shape(scale), allowzero=1)
    others = [n for n in range(len(known)) if n != axis + len(known)]
    return op.ReduceSum(terms, op.ints(others), keepdims=0, noop_with_empty_axes=1)
