"""Gradients of activation functions and of the operators that are the identity outside training."""

from __future__ import annotations

from math import pi, sqrt

import onnx_ir as ir

from .builder import Builder
from .forward import Forward
from .registry import Grads, gradient

GELU_CUBIC = 0.044715  # of the tanh approximation, from the operator's definition
GELU_SATURATED = 30.0  # beyond this |x| the slope is 0 or 1 in every float type


@gradient("Relu", versions=(14,))
def relu(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = max(x, 0)  =>  dx = dy where Y > 0, else 0 (also at x = 0)."""
    zero = op.scalar(0.0, node.output())
    return (op.Where(op.Greater(node.output(), zero), dy, zero),)


@gradient("LeakyRelu", versions=(16,))
def leaky_relu(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x where x > 0, else α · x  =>  dx = dy where x > 0, else α · dy (also at x = 0)."""
    x = node.input(0)
    alpha = op.scalar(node.float("alpha", 0.01), x)
    return (op.Where(op.Greater(x, op.scalar(0.0, x)), dy, op.Mul(dy, alpha)),)


@gradient("PRelu", versions=(16,))
def prelu(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x where x > 0, else s · x  =>  dx = dy where x > 0, else s · dy; ds = Σ x · dy where x <= 0.

    Shapes: the slope s broadcasts to x; ds is summed over the axes it was broadcast along.
    """
    x, slope, y = node.input(0), node.input(1), node.output()
    zero = op.scalar(0.0, x)
    positive = op.Greater(x, zero)
    return (
        op.Where(positive, dy, op.Mul(dy, slope)) if node.wants(0) else None,
        op.unbroadcast(op.Where(positive, zero, op.Mul(dy, x)), slope, y) if node.wants(1) else None,
    )


@gradient("Elu", versions=(6, 22))
def elu(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x where x > 0, else α (e^x - 1)  =>  dx = dy where x > 0, else dy · (Y + α)."""
    x, y = node.input(0), node.output()
    slope = op.Add(y, op.scalar(node.float("alpha", 1.0), x))
    return (op.Where(op.Greater(x, op.scalar(0.0, x)), dy, op.Mul(dy, slope)),)


@gradient("Sigmoid", versions=(13,))
def sigmoid(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = 1 / (1 + e^-x)  =>  dx = dy · Y · (1 - Y)."""
    y = node.output()
    return (op.Mul(dy, op.Mul(y, op.Sub(op.scalar(1.0, y), y))),)


@gradient("HardSigmoid", versions=(6, 22))
def hard_sigmoid(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = min(max(α x + β, 0), 1)  =>  dx = α · dy where 0 < Y < 1, else 0."""
    y = node.output()
    zero, one = op.scalar(0.0, y), op.scalar(1.0, y)
    inside = op.And(op.Greater(y, zero), op.Less(y, one))
    return (op.Where(inside, op.Mul(dy, op.scalar(node.float("alpha", 0.2), y)), zero),)


@gradient("HardSwish", versions=(14, 22))
def hard_swish(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x · min(max(x/6 + 1/2, 0), 1)  =>  dx = 0 for x <= -3, dy for x >= 3, dy · (x/3 + 1/2) between."""
    x = node.input(0)
    slope = op.Add(op.Div(x, op.scalar(3.0, x)), op.scalar(0.5, x))
    high = op.Where(op.GreaterOrEqual(x, op.scalar(3.0, x)), dy, op.Mul(dy, slope))
    return (op.Where(op.LessOrEqual(x, op.scalar(-3.0, x)), op.scalar(0.0, x), high),)


@gradient("Tanh", versions=(13,))
def tanh(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = tanh x  =>  dx = dy · (1 - Y²)."""
    y = node.output()
    return (op.Mul(dy, op.Sub(op.scalar(1.0, y), op.Mul(y, y))),)


@gradient("Softplus", versions=(1, 22))
def softplus(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = ln(1 + e^x)  =>  dx = dy · sigmoid(x)."""
    return (op.Mul(dy, op.Sigmoid(node.input(0))),)


@gradient("Gelu", versions=(20,))
def gelu(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x · Φ(x)  =>  dx = dy · (Φ(x) + x · Φ'(x)).

    approximate none: Φ(x) = (1 + erf(x/√2)) / 2, the normal distribution; tanh: Φ(x) = (1 + tanh u) / 2 with
    u = √(2/π) (x + 0.044715 x³). Edge: x is clipped first where the slope no longer changes, so no square overflows.
    """
    approximate = node.string("approximate", "none")
    if approximate not in ("none", "tanh"):
        raise node.refuse("approximate", approximate, "none and tanh")
    x = node.input(0)
    x = op.Min(op.Max(x, op.scalar(-GELU_SATURATED, x)), op.scalar(GELU_SATURATED, x))
    slope = _gelu_exact(op, x, node.input(0)) if approximate == "none" else _gelu_tanh(op, x, node.input(0))
    return (op.Mul(dy, slope),)


def _gelu_exact(op: Builder, x: ir.Value, like: ir.Value) -> ir.Value:
    half, one = op.scalar(0.5, like), op.scalar(1.0, like)
    share = op.Mul(half, op.Add(one, op.Erf(op.Mul(x, op.scalar(sqrt(0.5), like)))))
    bell = op.Exp(op.Mul(op.Mul(x, x), op.scalar(-0.5, like)))
    return op.Add(share, op.Mul(x, op.Mul(bell, op.scalar(1 / sqrt(2 * pi), like))))


def _gelu_tanh(op: Builder, x: ir.Value, like: ir.Value) -> ir.Value:
    half, one, root = op.scalar(0.5, like), op.scalar(1.0, like), op.scalar(sqrt(2 / pi), like)
    square = op.Mul(x, x)
    u = op.Mul(op.Mul(root, x), op.Add(one, op.Mul(op.scalar(GELU_CUBIC, like), square)))
    du = op.Mul(root, op.Add(one, op.Mul(op.scalar(3 * GELU_CUBIC, like), square)))
    t = op.Tanh(u)
    share = op.Mul(half, op.Add(one, t))
    return op.Add(share, op.Mul(op.Mul(half, x), op.Mul(op.Sub(one, op.Mul(t, t)), du)))


@gradient("Identity", versions=(16, 19, 21, 23, 24, 25))
def identity(_op: Builder, _node: Forward, dy: ir.Value) -> Grads:
    """Y = x  =>  dx = dy."""
    return (dy,)


@gradient("Dropout", versions=(13, 22))
def dropout(_op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x outside training  =>  dx = dy, whatever the ratio.

    In training mode the mask is drawn anew in every run and belongs to the forward node; that is refused.
    """
    if node.has(2):
        mode = node.constant(2)
        if mode is None or mode.any():
            value = "decided at run time" if mode is None else True
            raise node.refuse("training_mode", value, "of false only; disconnect the input or make it a false constant")
    return (dy, None, None)[: len(node.inputs)]
