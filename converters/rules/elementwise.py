"""Gradients of arithmetic that works element by element, with broadcasting."""

from __future__ import annotations

from math import pi, sqrt

import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder, element_type
from onnx_backprop.converters.reverse.forward import Forward
from onnx_backprop.converters.reverse.registry import Grads, gradient
from onnx_backprop.converters.rules.common import cast, positions

FLOAT_TYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE)


@gradient("Add", versions=(14,))
def add(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = a + b  =>  da = db = dy, each summed over the axes it was broadcast along."""
    y = node.output()
    return [op.unbroadcast(dy, node.input(n), y) if node.wants(n) else None for n in range(2)]


@gradient("Sub", versions=(14,))
def sub(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = a - b  =>  da = dy, db = -dy, each summed over the axes it was broadcast along."""
    a, b, y = node.input(0), node.input(1), node.output()
    return (
        op.unbroadcast(dy, a, y) if node.wants(0) else None,
        op.Neg(op.unbroadcast(dy, b, y)) if node.wants(1) else None,
    )


@gradient("Mul", versions=(14,))
def mul(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = a · b  =>  da = dy · b, db = dy · a, each summed over the axes it was broadcast along."""
    a, b, y = node.input(0), node.input(1), node.output()
    return (
        op.unbroadcast(op.Mul(dy, b), a, y) if node.wants(0) else None,
        op.unbroadcast(op.Mul(dy, a), b, y) if node.wants(1) else None,
    )


@gradient("Div", versions=(14,))
def div(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = a / b  =>  da = dy / b, db = -Y · dy / b, each summed over the axes it was broadcast along."""
    a, b, y = node.input(0), node.input(1), node.output()
    da = op.Div(dy, b)
    return (
        op.unbroadcast(da, a, y) if node.wants(0) else None,
        op.unbroadcast(op.Neg(op.Mul(da, y)), b, y) if node.wants(1) else None,
    )


@gradient("Mod", versions=(13,))
def mod(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = a - b · trunc(a / b)  =>  da = dy, db = -dy · trunc(a / b). The jumps where a / b is whole are left out."""
    a, b, y = node.input(0), node.input(1), node.output()
    quotient = op.Round(op.Div(op.Sub(a, y), b))
    return (
        op.unbroadcast(dy, a, y) if node.wants(0) else None,
        op.unbroadcast(op.Neg(op.Mul(dy, quotient)), b, y) if node.wants(1) else None,
    )


@gradient("Pow", versions=(15,))
def power(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x^p  =>  dx = dy · p · x^(p-1), dp = dy · Y · ln x.

    Edge: where p = 0, dx is 0, also at x = 0; where x = 0 and p >= 0, dp is 0. For x < 0 the power exists for whole p
    only and has no derivative by p: dp is NaN there. At x = 0 and p < 1 (p not 0), dx is infinite, as it should be.
    """
    x, p, y = node.input(0), node.input(1), node.output()
    exponent = cast(op, p, element_type(p), element_type(x))
    zero, one = op.scalar(0.0, x), op.scalar(1.0, x)
    dx = dp = None
    if node.wants(0):
        constant = node.constant(1)
        slope = op.Mul(exponent, op.Pow(x, op.Sub(exponent, one)))
        if constant is None or (constant == 0).any():
            slope = op.Where(op.Equal(exponent, zero), zero, slope)
        elif (constant == 2).all():
            slope = op.Mul(exponent, x)
        dx = op.unbroadcast(op.Mul(dy, slope), x, y)
    if node.wants(1):
        flat = op.And(op.Equal(x, zero), op.GreaterOrEqual(exponent, zero))
        slope = op.Where(flat, zero, op.Mul(y, op.Log(x)))
        dp = cast(op, op.unbroadcast(op.Mul(dy, slope), p, y), element_type(x), element_type(p))
    return dx, dp


@gradient("Sum", versions=(13,))
def sum_(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = Σ_i x_i  =>  dx_i = dy, summed over the axes x_i was broadcast along."""
    y = node.output()
    return [op.unbroadcast(dy, node.input(n), y) if node.wants(n) else None for n in range(len(node.inputs))]


@gradient("Mean", versions=(13,))
def mean(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = Σ_i x_i / n  =>  dx_i = dy / n, summed over the axes x_i was broadcast along."""
    y, count = node.output(), len(node.inputs)
    share = op.Div(dy, op.scalar(count, y))
    return [op.unbroadcast(share, node.input(n), y) if node.wants(n) else None for n in range(count)]


@gradient("Max", versions=(13,))
def maximum(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = max_i x_i  =>  dx_i = dy / (number of inputs that equal Y) where x_i = Y, else 0: ties share equally."""
    return _extremum(op, node, dy)


@gradient("Min", versions=(13,))
def minimum(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = min_i x_i  =>  dx_i = dy / (number of inputs that equal Y) where x_i = Y, else 0: ties share equally."""
    return _extremum(op, node, dy)


def _extremum(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    y, inputs = node.output(), [node.input(n) for n in range(len(node.inputs))]
    if len(inputs) == 1:
        return [dy]
    hits = [op.Equal(x, y) for x in inputs]
    one, zero = op.scalar(1.0, y), op.scalar(0.0, y)
    count = op.Sum(*(op.Where(hit, one, zero) for hit in hits))
    share = op.Div(dy, count)
    return [
        op.unbroadcast(op.Where(hit, share, zero), x, y) if node.wants(n) else None
        for n, (hit, x) in enumerate(zip(hits, inputs, strict=True))
    ]


@gradient("Clip", versions=(13,))
def clip(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = min(max(x, lo), hi)  =>  dx = dy where lo <= x <= hi; dlo = Σ dy where Y is lo, dhi = Σ dy where Y is hi.

    Edge: at x = lo and x = hi the gradient is x's. Where lo > hi, Y is hi everywhere.
    """
    x, y = node.input(0), node.output()
    zero = op.scalar(0.0, y)
    low = node.input(1) if node.has(1) else None
    high = node.input(2) if node.has(2) else None
    below = None if low is None else op.Less(x, low)
    above = None if high is None else op.Greater(x if low is None else op.Max(x, low), high)

    dx, dlow, dhigh = (dy if node.wants(0) else None), None, None
    for outside in (below, above):
        if dx is not None and outside is not None:
            dx = op.Where(outside, zero, dx)
    if low is not None and below is not None and node.wants(1):
        at_low = op.Where(below, dy, zero)
        at_low = at_low if above is None else op.Where(above, zero, at_low)
        dlow = op.unbroadcast(at_low, low, y)
    if high is not None and above is not None and node.wants(2):
        dhigh = op.unbroadcast(op.Where(above, dy, zero), high, y)
    return (dx, dlow, dhigh)[: len(node.inputs)]


@gradient("Where", versions=(16,))
def where(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = a where c, else b  =>  da = dy where c, else 0; db = 0 where c, else dy; each summed as broadcast."""
    condition, a, b, y = node.input(0), node.input(1), node.input(2), node.output()
    zero = op.scalar(0.0, y)
    return (
        None,
        op.unbroadcast(op.Where(condition, dy, zero), a, y) if node.wants(1) else None,
        op.unbroadcast(op.Where(condition, zero, dy), b, y) if node.wants(2) else None,
    )


@gradient("Neg", versions=(13,))
def neg(op: Builder, _node: Forward, dy: ir.Value) -> Grads:
    """Y = -x  =>  dx = -dy."""
    return (op.Neg(dy),)


@gradient("Abs", versions=(13,))
def absolute(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = |x|  =>  dx = dy · sign x, 0 at x = 0."""
    return (op.Mul(dy, op.Sign(node.input(0))),)


@gradient("Reciprocal", versions=(13,))
def reciprocal(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = 1 / x  =>  dx = -dy · Y²."""
    y = node.output()
    return (op.Neg(op.Mul(dy, op.Mul(y, y))),)


@gradient("Sqrt", versions=(13,))
def square_root(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = √x  =>  dx = dy / (2 Y); infinite at x = 0 (and NaN there when dy is 0 too)."""
    y = node.output()
    return (op.Div(op.Mul(dy, op.scalar(0.5, y)), y),)


@gradient("Exp", versions=(13,))
def exponential(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = e^x  =>  dx = dy · Y."""
    return (op.Mul(dy, node.output()),)


@gradient("Log", versions=(13,))
def logarithm(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = ln x  =>  dx = dy / x."""
    return (op.Div(dy, node.input(0)),)


@gradient("Erf", versions=(13,))
def erf(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = erf x  =>  dx = dy · 2/√π · e^(-x²)."""
    x = node.input(0)
    bell = op.Exp(op.Neg(op.Mul(x, x)))
    return (op.Mul(dy, op.Mul(op.scalar(2 / sqrt(pi), x), bell)),)


@gradient("CastLike", versions=(15, 19, 21, 23, 24, 25))
def cast_like(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x in the float type of the second input  =>  dx = dy in the type of x. Rounding counts as the identity."""
    x, target = element_type(node.input(0)), element_type(node.output())
    for dtype in (x, target):
        if dtype not in FLOAT_TYPES:
            raise node.refuse(
                "the type of target_type", f"{x.name} to {target.name}", "between float types of 16 bits and more"
            )
    return cast(op, dy, target, x), None


@gradient("CumSum", versions=(14,))
def cumulative_sum(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = running sum of x along an axis  =>  dx = running sum of dy from the other end, exclusive if Y is."""
    reverse = 1 - node.int("reverse", 0)
    return op.CumSum(dy, node.input(1), exclusive=node.int("exclusive", 0), reverse=reverse), None


@gradient("Range", versions=(11,))
def range_(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y_i = start + i · delta  =>  dstart = Σ dy, ddelta = Σ i · dy; limit only sets the length."""
    y = node.output()
    dstart = ddelta = None
    if node.wants(0):
        dstart = op.Reshape(op.ReduceSum(dy, keepdims=0), op.shape(node.input(0)))
    if node.wants(2):
        index = op.Cast(positions(op, y), to=element_type(y).value)
        ddelta = op.Reshape(op.ReduceSum(op.Mul(dy, index), keepdims=0), op.shape(node.input(2)))
    return dstart, None, ddelta
