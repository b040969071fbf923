"""Gradients of QuantizeLinear, DynamicQuantizeLinear and DequantizeLinear, as quantisation-aware training takes them.

Rounding has a derivative of zero almost everywhere. The straight-through estimator takes it for the identity, which is
another function's gradient, so it must be asked for: `straight_through=True`. Between the two nodes the gradient by an
integer tensor is a float tensor.
"""

import onnx_ir as ir

from onnx_backprop.converters.reverse.known import dims, element_type, known_lengths
from onnx_backprop.converters.reverse.long_sums import sum_over
from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads, gradient
from onnx_backprop.converters.rules.common import as_shaped, cast, narrow, widen, work_type
from onnx_backprop.converters.rules.conv import conv
from onnx_backprop.converters.rules.matmul import matmul

VERSIONS = (13, 19, 21, 23, 24, 25)
TYPES = ("INT8", "UINT8", "INT16", "UINT16", "INT4", "UINT4")


@gradient("QuantizeLinear", versions=VERSIONS, inputs=(0, 1))
def quantize_linear(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """q = clip(round(x / s) + z)  =>  with round' = 1: dx = dq / s, ds = -Σ dq x / s², both 0 where q was clipped.

    Shapes: s and z of x's, of one element, or 1-D along `axis`.
    """
    _require_straight_through(op, node)
    x, scale, q = node.input(0), node.input(1), element_type(node.output())
    if q.name not in TYPES:
        raise node.refuse("output type", q.name, f"of {', '.join(TYPES)}")
    wide = work_type(x)
    s = _aligned(op, node, cast(op, scale, wide), scale)
    steps = op.Div(widen(op, x), s)
    place = op.Round(steps)
    if node.has(2):
        place = op.Add(place, _aligned(op, node, op.Cast(node.input(2), to=wide), node.input(2)))
    inside = op.And(op.GreaterOrEqual(place, int(q.min)), op.LessOrEqual(place, int(q.max)))
    g = op.Where(inside, op.Div(cast(op, dy, wide), s), 0)
    return narrow(op, g, x), narrow(op, op.Neg(_summed(op, node, op.Mul(g, steps), scale)), scale)


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
    share = op.Div(op.accumulate(grads), 255)
    for reduce, beyond, sign in ((op.ReduceMax, op.Greater, share), (op.ReduceMin, op.Less, op.Neg(share))):
        hit = op.And(op.Equal(x, reduce(x, keepdims=0)), beyond(x, 0))
        count = op.Max(op.ReduceSum(op.Cast(hit, to=element_type(x)), keepdims=0), 1)
        parts.append(op.Where(hit, op.Div(sign, count), 0))
    return op.accumulate(parts)


@gradient("DequantizeLinear", versions=VERSIONS, inputs=(0, 1))
def dequantize_linear(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = (q - z) s  =>  dq = dy s, ds = Σ dy (q - z).

    Shapes: s and z of q's, of one element, or 1-D along `axis`. dq has the type of s.
    """
    q, scale = node.input(0), node.input(1)
    wide = work_type(scale)
    dy = cast(op, dy, wide)
    steps = op.Cast(q, to=wide)
    if node.has(2):
        steps = op.Sub(steps, _aligned(op, node, op.Cast(node.input(2), to=wide), node.input(2)))
    dq = op.Mul(dy, _aligned(op, node, widen(op, scale), scale))
    return narrow(op, dq, scale), narrow(op, _summed(op, node, op.Mul(dy, steps), scale), scale)


@gradient("MatMulInteger", versions=(10,))
def matmul_integer(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = (A - z_A) · (B - z_B)  =>  with round' = 1 where A and B were rounded: as MatMul, z held.

    Shapes: z_A of one element or per row of A, z_B of one element or per column of B.
    """
    a = _shifted(op, node, 0, 2, dy, [-1, 1])
    b = _shifted(op, node, 1, 3, dy, [-1])
    return matmul(op, _in_floats(op, node, "MatMul", [a, b]), dy)


@gradient("ConvInteger", versions=(10,))
def conv_integer(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = (X - z_X) * (W - z_W)  =>  with round' = 1 where X and W were rounded: as Conv, z held.

    Shapes: z_X of one element, z_W of one element or one per output channel.
    """
    x = _shifted(op, node, 0, 2, dy, [-1])
    w = _shifted(op, node, 1, 3, dy, [-1] + [1] * (node.rank(1) - 1))
    return conv(op, _in_floats(op, node, "Conv", [x, w]), dy)


def _shifted(op: Builder, node: Forward, place: int, zero: int, dy: ir.Value, axes: list[int]) -> ir.Value:
    """Input `place` less its zero point, in dy's type; `axes`: the zero points' shape where there are several."""
    x, z = node.input(place), node.optional(zero)
    wide = op.Cast(x, to=element_type(dy))
    if z is not None:
        shift = op.Cast(z, to=element_type(dy))
        several = dims(z) not in ((), (1,))
        wide = op.Sub(wide, op.Reshape(shift, axes) if several else shift)
    wide.shape, wide.type = x.shape, dy.type
    return wide


def _in_floats(op: Builder, node: Forward, op_type: str, values: list[ir.Value]) -> Forward:
    """The operator on floats that does the same, as a rule sees it; the node itself is nowhere."""
    _require_straight_through(op, node)
    inner = ir.Node("", op_type, values, node.node.attributes.values(), name=node.name)
    inner.outputs[0].shape, inner.outputs[0].type = node.output().shape, values[0].type
    wanted = {value for n, value in enumerate(values) if node.wants(n)}
    return Forward(inner, wanted, node.version)


def _require_straight_through(op: Builder, node: Forward) -> None:
    if not op.straight_through:
        raise node.unsupported(
            "it rounds, so its derivative is zero almost everywhere. ob.dequantize(model) makes the float model that a "
            "quantised one stands for, with its weights as parameters; straight_through=True differentiates as if it "
            "did not round"
        )


def _axis(node: Forward, scale: ir.Value) -> int | None:
    """The axis that scales lie along, counted from the end; None for one scale."""
    if node.int("block_size", 0):
        raise node.refuse("block_size", node.int("block_size", 0), "of 0 only")
    shape = dims(scale)
    if shape is None or len(shape) > 1:
        raise node.unsupported("the gradient needs a scale of rank 0 or 1, known at conversion")
    if shape in ((), (1,)):
        return None
    rank, axis = node.rank(0, ", for several scales"), node.axis(1)
    return axis if axis < 0 else axis - rank


def _aligned(op: Builder, node: Forward, value: ir.Value, like: ir.Value) -> ir.Value:
    """A scale or zero point in a shape that broadcasts to x."""
    axis = _axis(node, like)
    return op.Reshape(value, [] if axis is None else [-1] + [1] * (-1 - axis))


def _summed(op: Builder, node: Forward, terms: ir.Value, scale: ir.Value) -> ir.Value:
    """Terms of x's shape, summed to the scale's; a length that only the run knows may be 1."""
    axis = _axis(node, scale)
    if axis is None:
        return as_shaped(op, op.ReduceSum(terms, keepdims=0), scale)
    rank = node.rank(0)
    others = [n for n in range(rank) if n != axis + rank]
    sums = sum_over(op, terms, others, dims(node.input(0)) or (), keepdims=0) if others else terms
    if known_lengths(scale) is None:
        sums = op.sum_stretched(sums, op.shape(scale), op.Shape(sums))
    return sums
