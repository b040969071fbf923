"""Gradients of arithmetic that works element by element, with broadcasting."""

import onnx_ir as ir

from onnx_backprop.converters.reverse.known import element_type
from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads, gradient
from onnx_backprop.converters.rules.common import FLOAT_TYPES, cast, positions


@gradient("Add", versions=(14,), broadcasts=True)
@gradient("Sum", versions=(13,), broadcasts=True)
def add(_op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = a + b + …  =>  da = db = … = dy, each summed over the axes it was broadcast along."""
    return [dy] * len(node.inputs)


@gradient("Sub", versions=(14,), broadcasts=True)
def sub(op: Builder, _node: Forward, dy: ir.Value) -> Grads:
    """Y = a - b  =>  da = dy, db = -dy, each summed over the axes it was broadcast along."""
    return dy, op.Neg(dy)


@gradient("Mul", versions=(14,), broadcasts=True)
def mul(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = a · b  =>  da = dy · b, db = dy · a, each summed over the axes it was broadcast along."""
    return op.Mul(dy, node.input(1)), op.Mul(dy, node.input(0))


@gradient("Div", versions=(14,), broadcasts=True)
def div(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = a / b  =>  da = dy / b, db = -Y · dy / b, each summed over the axes it was broadcast along."""
    da = op.Div(dy, node.input(1))
    return da, op.Neg(op.Mul(da, node.output()))


@gradient("Mod", versions=(13, 28), broadcasts=True)
def mod(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = a - b · q, q = trunc(a / b)  =>  da = dy, db = -dy · q. The jumps where a / b is whole are left out.

    With fmod=0, which takes floats from version 28 on, q = floor(a / b).
    """
    quotient = op.Round(op.Div(op.Sub(node.input(0), node.output()), node.input(1)))
    return dy, op.Neg(op.Mul(dy, quotient))


@gradient("Pow", versions=(15,))
def power(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x^p  =>  dx = dy · p · x^(p-1), dp = dy · Y · ln x.

    Edge: where p = 0, dx is 0, also at x = 0; where x = 0 and p >= 0, dp is 0. For x < 0 the power exists for whole p
    only and has no derivative by p: dp is NaN there. At x = 0 and p < 1 (p not 0), dx is infinite, as it should be.
    """
    x, p, y, constant = node.input(0), node.input(1), node.output(), node.constant(1)
    exponent = cast(op, p, element_type(x))
    dx = dp = None
    if node.wants(0):
        slope = op.Mul(exponent, op.Pow(x, op.Sub(exponent, 1)))
        if constant is None or (constant == 0).any():
            slope = op.Where(op.Equal(exponent, 0), 0, slope)
        elif (constant == 2).all():
            slope = op.Mul(exponent, x)
        dx = op.unbroadcast(op.Mul(dy, slope), x, y)
    if node.wants(1):  # an exponent of integers has no gradient
        flat = op.And(op.Equal(x, 0), op.GreaterOrEqual(exponent, 0))
        slope = op.Where(flat, 0, op.Mul(y, op.Log(op.Where(flat, 1, x))))  # 1: second derivatives are finite there
        dp = cast(op, op.unbroadcast(op.Mul(dy, slope), p, y), element_type(p))
    return dx, dp


@gradient("Mean", versions=(13,), broadcasts=True)
def mean(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = Σ_i x_i / n  =>  dx_i = dy / n, summed over the axes x_i was broadcast along."""
    return [op.Div(dy, len(node.inputs))] * len(node.inputs)


_CLAMPS = (
    "clamp.default",
    "clamp.Tensor",
    "clamp_max.default",
    "clamp_max.Tensor",
    "clamp_min.default",
    "clamp_min.Tensor",
)


@gradient("Max", versions=(13,), broadcasts=True)
@gradient("Min", versions=(13,), broadcasts=True)
def extreme(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = max_i (min_i) x_i  =>  dx_i = dy / (number of inputs that equal Y) where x_i = Y: ties share equally.

    Edge: torch's clamp(x, limit) has the whole gradient by x there.
    """
    if len(node.inputs) == 1:
        return dy
    if len(node.inputs) == 2 and node.is_torch(*_CLAMPS):
        passes = op.Equal(node.input(0), node.output())
        return op.Where(passes, dy, 0), op.Where(passes, 0, dy)
    hits = [op.Equal(x, node.output()) for x in node.every_input()]
    one, zero = op.scalar(1, dy), op.scalar(0, dy)
    share = op.Div(dy, op.Sum(*(op.Where(hit, one, zero) for hit in hits)))
    return [op.Where(hit, share, 0) for hit in hits]


@gradient("Clip", versions=(13,))
def clip(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = min(max(x, lo), hi)  =>  dx = dy where lo <= x <= hi; dlo = Σ dy where Y is lo, dhi = Σ dy where Y is hi.

    Edge: at x = lo and x = hi the gradient is x's; with the limits 0 and 6, which exporters write ReLU6 as, it is 0
    there, as that of Relu at 0, and so it is of torch's hardtanh. Where lo > hi, Y is hi everywhere.
    """
    x, y, low, high = node.input(0), node.output(), node.optional(1), node.optional(2)
    dx, dlow, dhigh = dy, None, None
    limits = [value.item() for n in (1, 2) if (value := node.constant(n)) is not None and value.size == 1]
    is_open = limits == [0, 6] or (node.is_torch("hardtanh.default") and node.has(1) and node.has(2))
    if is_open and not node.wants(1) and not node.wants(2):
        return op.Where(op.And(op.Greater(x, low or 0), op.Less(x, high or 6)), dy, 0), None, None
    if low is not None:
        below = op.Less(x, low)
        dx, dlow = op.Where(below, 0, dx), op.Where(below, dy, 0)
    if high is not None:
        above = op.Greater(x if low is None else op.Max(x, low), high)
        dx, dhigh = op.Where(above, 0, dx), op.unbroadcast(op.Where(above, dy, 0), high, y)
        dlow = None if dlow is None else op.Where(above, 0, dlow)
    return dx, None if low is None or dlow is None else op.unbroadcast(dlow, low, y), dhigh


@gradient("Where", versions=(16,))
def where(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = a where c, else b  =>  da = dy where c, else 0; db = 0 where c, else dy; each summed as broadcast."""
    condition, a, b = node.every_input()
    da, db = op.Where(condition, dy, 0), op.Where(condition, 0, dy)
    return None, op.unbroadcast(da, a, node.output()), op.unbroadcast(db, b, node.output())


@gradient("Neg", versions=(13,))
def neg(op: Builder, _node: Forward, dy: ir.Value) -> Grads:
    """Y = -x  =>  dx = -dy."""
    return op.Neg(dy)


@gradient("CastLike", versions=(15, 19, 21, 23, 24, 25), inputs=(0,))
def cast_like(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x in the float type of the second input  =>  dx = dy in the type of x. Rounding counts as the identity."""
    x, target = element_type(node.input(0)), element_type(node.output())
    for dtype in (x, target):
        if dtype not in FLOAT_TYPES:
            raise node.refuse(
                "the type of target_type", f"{x.name} to {target.name}", "between float types of 16 bits and more"
            )
    return cast(op, dy, x)


@gradient("CumSum", versions=(14,))
def cumulative_sum(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = running sum of x along an axis  =>  dx = running sum of dy from the other end, exclusive if Y is."""
    reverse = 1 - node.int("reverse", 0)
    return op.CumSum(dy, node.input(1), exclusive=node.int("exclusive", 0), reverse=reverse)


@gradient("Range", versions=(11, 27))
def range_(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y_i = start + i · delta  =>  dstart = Σ dy, ddelta = Σ i · dy; limit only sets the length."""
    index = op.Cast(positions(op, node.output()), to=element_type(dy))
    start, delta = op.ReduceSum(dy, keepdims=0), op.ReduceSum(op.Mul(dy, index), keepdims=0)
    return op.Reshape(start, op.shape(node.input(0))), None, op.Reshape(delta, op.shape(node.input(2)))
