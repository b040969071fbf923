"""Gradients of activation functions and of the operators that are the identity outside training."""

from __future__ import annotations

from math import pi, sqrt

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder, element_type
from onnx_backprop.converters.reverse.forward import Forward
from onnx_backprop.converters.reverse.registry import Grads, gradient
from onnx_backprop.converters.rules.common import DOMAIN_TYPES, cast, widen, work_type

GELU_CUBIC = 0.044715  # of the tanh approximation, from the operator's definition
SELU_ALPHA, SELU_GAMMA = 1.6732632423543772, 1.0507009873554805  # the operator's defaults
GELU_SATURATED = 30.0  # beyond this |x| the slope is 0 or 1 in every float type


@gradient("Relu", versions=(14,))
def relu(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = max(x, 0)  =>  dx = dy where Y > 0, else 0 (also at x = 0)."""
    if node.output().dtype in DOMAIN_TYPES:
        return (op.domain.ReLUBackward(node.output(), dy),)
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


@gradient("Selu", versions=(6, 22))
def selu(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = γ x where x > 0, else γ α (e^x - 1)  =>  dx = γ · dy where x > 0, else dy · (Y + γ α)."""
    x, y = node.input(0), node.output()
    alpha, gamma = node.float("alpha", SELU_ALPHA), node.float("gamma", SELU_GAMMA)
    slope = op.Where(op.Greater(x, op.scalar(0.0, x)), op.scalar(gamma, x), op.Add(y, op.scalar(alpha * gamma, x)))
    return (op.Mul(dy, slope),)


@gradient("Celu", versions=(12,))
def celu(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = max(x, 0) + min(α (e^(x/α) - 1), 0)  =>  dx = dy where x > 0, else dy · (Y/α + 1)."""
    x, y = node.input(0), node.output()
    one = op.scalar(1.0, x)
    slope = op.Add(op.Div(y, op.scalar(node.float("alpha", 1.0), x)), one)
    return (op.Mul(dy, op.Where(op.Greater(x, op.scalar(0.0, x)), one, slope)),)


@gradient("ThresholdedRelu", versions=(10, 22))
def thresholded_relu(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x where x > α, else 0  =>  dx = dy where x > α, else 0. The jump at x = α is left out."""
    x = node.input(0)
    kept = op.Greater(x, op.scalar(node.float("alpha", 1.0), x))
    return (op.Where(kept, dy, op.scalar(0.0, x)),)


@gradient("Shrink", versions=(9,))
def shrink(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x + β where x < -λ, x - β where x > λ, else 0  =>  dx = dy where x < -λ or x > λ, else 0."""
    x, limit = node.input(0), node.float("lambd", 0.5)
    kept = op.Or(op.Less(x, op.scalar(-limit, x)), op.Greater(x, op.scalar(limit, x)))
    return (op.Where(kept, dy, op.scalar(0.0, x)),)


@gradient("Softsign", versions=(1, 22))
def softsign(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x / (1 + |x|)  =>  dx = dy / (1 + |x|)²."""
    x = node.input(0)
    share = op.Reciprocal(op.Add(op.scalar(1.0, x), op.Abs(x)))
    return (op.Mul(op.Mul(dy, share), share),)


@gradient("Swish", versions=(24,))
def swish(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x · s, s = sigmoid(α x)  =>  dx = dy · (s + α · Y · (1 - s))."""
    x = node.input(0)
    alpha = op.scalar(node.float("alpha", 1.0), x)
    s = op.Sigmoid(op.Mul(alpha, x))
    rest = op.Mul(op.Mul(alpha, node.output()), op.Sub(op.scalar(1.0, x), s))
    return (op.Mul(dy, op.Add(s, rest)),)


@gradient("Mish", versions=(18, 22))
def mish(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x · t, t = tanh(ln(1 + e^x))  =>  dx = dy · (t + x · sigmoid(x) · (1 - t²))."""
    x = node.input(0)
    t = op.Tanh(op.Softplus(x))
    bend = op.Mul(op.Sigmoid(x), op.Sub(op.scalar(1.0, x), op.Mul(t, t)))
    return (op.Mul(dy, op.Add(t, op.Mul(x, bend))),)


@gradient("Identity", versions=(16, 19, 21, 23, 24, 25))
def identity(_op: Builder, _node: Forward, dy: ir.Value) -> Grads:
    """Y = x  =>  dx = dy."""
    return (dy,)


@gradient("Dropout", versions=(13, 22))
def dropout(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x · mask / (1 - r) in training, x outside  =>  dx = dy · mask / (1 - r), dr = Σ dy · Y / (1 - r); dx = dy.

    The mask is the forward node's own second output, added to it where it has none, so the gradient drops what this
    run dropped. Training may be decided at run time. Edge: dr leaves out that the mask depends on r, in steps.
    """
    grads: list[ir.Value | None] = [None] * len(node.inputs)
    mode = node.constant(2)
    if not node.has(2) or (mode is not None and not mode.any()):
        grads[0] = dy
        return grads
    x, y = node.input(0), node.output()
    wide, own = work_type(x), element_type(x)
    one, zero = (op.constant(np.array(number).astype(wide.numpy())) for number in (1, 0))
    if node.has(1):
        ratio = cast(op, node.input(1), element_type(node.input(1)), wide)
    else:
        ratio = op.constant(np.array(0.5).astype(wide.numpy()))
    scale = op.Reciprocal(op.Sub(one, ratio))
    training = None if mode is not None else node.input(2)
    if node.wants(0):
        dropped = op.Where(_mask(op, node), op.Mul(widen(op, dy, x), scale), zero)
        dropped = cast(op, dropped, wide, own)
        grads[0] = dropped if training is None else op.Where(training, dropped, dy)
    if node.wants(1):
        total = op.ReduceSum(op.Mul(op.Mul(widen(op, dy, x), widen(op, y, x)), scale), keepdims=0)
        total = total if training is None else op.Where(training, total, zero)
        shaped = op.Reshape(total, op.shape(node.input(1)), allowzero=1)
        grads[1] = cast(op, shaped, wide, element_type(node.input(1)))
    return grads


def _mask(op: Builder, node: Forward) -> ir.Value:
    """Dropout's second output: what it kept."""
    if len(node.node.outputs) < 2:
        node.node.resize_outputs(2)
    mask = node.output(1)
    if not mask.name:
        mask.name = op.unique(f"{node.name}_mask")
    mask.dtype, mask.shape = ir.DataType.BOOL, node.output().shape
    return mask
