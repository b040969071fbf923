"""Gradients of operators that work element by element.

In the formulas · is the product element by element; with two inputs each gradient is also summed over the axes its
input was broadcast along.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir

from .builder import Builder
from .forward import Forward
from .registry import Grads, gradient

# ----- two inputs -----


@gradient("Add", versions=(14,))
def add(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = a + b  =>  da = dy, db = dy."""
    return _each(op, node, lambda _: dy)


@gradient("Sub", versions=(14,))
def sub(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = a - b  =>  da = dy, db = -dy."""
    return _each(op, node, lambda n: op.Neg(dy) if n else dy)


@gradient("Mul", versions=(14,))
def mul(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = a · b  =>  da = dy · b, db = dy · a."""
    return _each(op, node, lambda n: op.Mul(dy, node.input(1 - n)))


@gradient("Div", versions=(14,))
def div(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = a / b  =>  da = dy / b, db = -dy · y / b."""
    b = node.input(1)
    return _each(op, node, lambda n: op.Div(op.Neg(op.Mul(dy, node.output())) if n else dy, b))


@gradient("Pow", versions=(15,))
def power(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = a^b  =>  da = dy · b · a^(b-1), db = dy · y · ln a.

    Edge cases: da = 0 where b = 0, also at a = 0; db = 0 where y = 0 (its limit for a -> 0, b > 0) and where
    a < 0, where a^b exists for whole b only and has no derivative in b. a and b may differ in type.
    """
    a, b, y = node.input(0), node.input(1), node.output()
    zero_a, zero_b = op.scalar(0.0, a), op.scalar(0.0, b)

    def by(n: int) -> ir.Value:
        if n == 0:
            constant = op.Equal(b, zero_b)
            exponent = op.Where(constant, op.scalar(1.0, b), b)  # keeps 0^(-1) out of the product
            slope = op.Mul(op.CastLike(exponent, a), op.Pow(a, op.Sub(exponent, op.scalar(1.0, b))))
            return op.Where(constant, zero_a, op.Mul(dy, slope))
        positive = op.Greater(a, zero_a)
        logarithm = op.Log(op.Where(positive, a, op.scalar(1.0, a)))
        return op.CastLike(op.Mul(dy, op.Mul(y, logarithm)), b)

    return _each(op, node, by)


@gradient("PRelu", versions=(16,))
def prelu(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = x where x >= 0, slope · x below  =>  dx = dy or dy · slope, dslope = dy · min(x, 0)."""
    x, slope = node.input(0), node.input(1)
    zero = op.scalar(0.0, x)

    def by(n: int) -> ir.Value:
        if n == 0:
            return op.Where(op.Less(x, zero), op.Mul(dy, slope), dy)
        return op.Mul(dy, op.Min(x, zero))

    return _each(op, node, by)


@gradient("Sum", versions=(13,))
def sum_(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = a + b + …  =>  each gets dy."""
    return _each(op, node, lambda _: dy)


@gradient("Where", versions=(16,))
def where(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = a where c, b elsewhere  =>  da = dy where c, db = dy elsewhere; the condition gets nothing."""
    condition, zero = node.input(0), op.scalar(0.0, node.output())

    def by(n: int) -> ir.Value:
        return op.Where(condition, dy, zero) if n == 1 else op.Where(condition, zero, dy)

    return (None, *_each(op, node, by)[1:])


def _each(op: Builder, node: Forward, by: Callable[[int], ir.Value]) -> Grads:
    """The gradient `by(n)` of every wanted input n, with its broadcasting undone."""
    return [
        op.unbroadcast(by(n), node.input(n), node.output()) if node.wants(n) else None for n in range(len(node.inputs))
    ]


# ----- one input, linear pieces -----


@gradient("Identity", versions=(16, 19, 21, 23, 24, 25))
def identity(_op: Builder, _node: Forward, dy: ir.Value) -> Grads:
    """y = x  =>  dx = dy."""
    return (dy,)


@gradient("Neg", versions=(13,))
def neg(op: Builder, _node: Forward, dy: ir.Value) -> Grads:
    """y = -x  =>  dx = -dy."""
    return (op.Neg(dy),)


@gradient("Abs", versions=(13,))
def abs_(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = |x|  =>  dx = dy · sign(x), 0 at x = 0."""
    return (op.Mul(dy, op.Sign(node.input(0))),)


@gradient("Relu", versions=(14,))
def relu(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = max(x, 0)  =>  dx = dy where y > 0, else 0 (also at x = 0)."""
    zero = op.scalar(0.0, node.output())
    return (op.Where(op.Greater(node.output(), zero), dy, zero),)


@gradient("LeakyRelu", versions=(16,))
def leaky_relu(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = x where x >= 0, alpha · x below  =>  dx = dy or alpha · dy."""
    x = node.input(0)
    below = op.Mul(dy, op.scalar(node.float("alpha", 0.01), x))
    return (op.Where(op.Less(x, op.scalar(0.0, x)), below, dy),)


@gradient("Clip", versions=(13,))
def clip(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = min(max(x, lo), hi)  =>  dx = dy where lo <= x <= hi; dlo = Σ dy where x < lo, dhi = Σ dy where x > hi.

    Edge case: with lo > hi, y = hi everywhere and hi gets all of dy.
    """
    x = node.input(0)
    zero = op.scalar(0.0, x)
    lower, upper = (node.input(n) if node.has(n) else None for n in (1, 2))
    above = op.Greater(x, upper) if upper is not None else None
    below = op.Less(x, lower) if lower is not None else None
    if lower is not None and upper is not None:
        crossed = op.Greater(lower, upper)
        above, below = op.Or(above, crossed), op.And(below, op.Not(crossed))
    inside = dy
    for outside in (below, above):
        if outside is not None:
            inside = op.Where(outside, zero, inside)
    grads: list[ir.Value | None] = [inside if node.wants(0) else None]
    for n, side in ((1, below), (2, above)):
        if n < len(node.inputs):
            wanted = node.wants(n) and side is not None
            grads.append(op.ReduceSum(op.Where(side, dy, zero), keepdims=0) if wanted else None)
    return grads


# ----- one input, smooth -----


@gradient("Sigmoid", versions=(13,))
def sigmoid(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = 1 / (1 + e⁻ˣ)  =>  dx = dy · y · (1 - y)."""
    y = node.output()
    return (op.Mul(dy, op.Mul(y, op.Sub(op.scalar(1.0, y), y))),)


@gradient("Tanh", versions=(13,))
def tanh(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = tanh x  =>  dx = dy · (1 - y²)."""
    y = node.output()
    return (op.Mul(dy, op.Sub(op.scalar(1.0, y), op.Mul(y, y))),)


@gradient("Sqrt", versions=(13,))
def sqrt(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = √x  =>  dx = dy / (2y), +inf · sign(dy) at x = 0."""
    y = node.output()
    return (op.Div(dy, op.Add(y, y)),)


@gradient("Exp", versions=(13,))
def exp(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = eˣ  =>  dx = dy · y."""
    return (op.Mul(dy, node.output()),)


@gradient("Log", versions=(13,))
def log(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = ln x  =>  dx = dy / x."""
    return (op.Div(dy, node.input(0)),)


@gradient("Reciprocal", versions=(13,))
def reciprocal(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = 1 / x  =>  dx = -dy · y²."""
    y = node.output()
    return (op.Neg(op.Mul(dy, op.Mul(y, y))),)


@gradient("Softplus", versions=(1, 22))
def softplus(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = ln(1 + eˣ)  =>  dx = dy · sigmoid(x)."""
    return (op.Mul(dy, op.Sigmoid(node.input(0))),)


@gradient("Erf", versions=(13,))
def erf(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = erf x  =>  dx = dy · 2/√π · e^(-x²)."""
    x = node.input(0)
    bell = op.Exp(op.Neg(op.Mul(x, x)))
    return (op.Mul(dy, op.Mul(bell, op.scalar(2 / math.sqrt(math.pi), x))),)


@gradient("Elu", versions=(6, 22))
def elu(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = x where x >= 0, alpha · (eˣ - 1) below  =>  dx = dy or dy · (y + alpha)."""
    x, y = node.input(0), node.output()
    below = op.Mul(dy, op.Add(y, op.scalar(node.float("alpha", 1.0), y)))
    return (op.Where(op.Less(x, op.scalar(0.0, x)), below, dy),)
