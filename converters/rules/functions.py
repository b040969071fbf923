"""Smooth functions of one input, element by element: a table of derivatives. Angles are in radians."""

from collections.abc import Callable
from math import pi, sqrt

import onnx_ir as ir

from onnx_backprop.converters.reverse.known import element_type
from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads, gradient
from onnx_backprop.converters.rules.common import cast, narrow, widen

Slope = Callable[[Builder, ir.Value, ir.Value], ir.Value]  # of x and Y = f(x)


def _times(op_type: str, versions: tuple[int, ...], formula: str, slope: Slope) -> None:
    """A function with dx = dy · slope; `formula` is the rule's docstring."""

    def rule(op: Builder, node: Forward, dy: ir.Value) -> Grads:
        return op.Mul(dy, slope(op, node.input(0), node.output()))

    rule.__name__, rule.__doc__ = op_type.lower(), formula
    gradient(op_type, versions=versions)(rule)


def _over(op_type: str, versions: tuple[int, ...], formula: str, divisor: Slope) -> None:
    """A function with dx = dy / divisor, in the type of the divisor; `formula` is the rule's docstring."""

    def rule(op: Builder, node: Forward, dy: ir.Value) -> Grads:
        rate = divisor(op, node.input(0), node.output())
        return narrow(op, op.Div(cast(op, dy, element_type(rate)), rate), dy)

    rule.__name__, rule.__doc__ = op_type.lower(), formula
    gradient(op_type, versions=versions)(rule)


def _one_less_square(op: Builder, x: ir.Value) -> ir.Value:
    """1 - x² as (1 - x)(1 + x), which keeps its digits near |x| = 1."""
    return op.Mul(op.Sub(1, x), op.Add(1, x))


def _one_and_square(op: Builder, x: ir.Value) -> ir.Value:
    """1 + x², in the type to sum in: the square of a half-precision number may lie beyond its range."""
    x = widen(op, x)
    return op.Add(op.Mul(x, x), 1)


def _erf(op: Builder, x: ir.Value, _: ir.Value) -> ir.Value:
    return op.Mul(2 / sqrt(pi), op.Exp(op.Neg(op.Mul(x, x))))


def _mish(op: Builder, x: ir.Value, _: ir.Value) -> ir.Value:
    t = op.Tanh(op.Softplus(x))
    return op.Add(t, op.Mul(x, op.Mul(op.Sigmoid(x), op.Sub(1, op.Mul(t, t)))))


def _acosh(op: Builder, x: ir.Value, _: ir.Value) -> ir.Value:
    return op.Mul(op.Sqrt(op.Sub(x, 1)), op.Sqrt(op.Add(x, 1)))


_times("Abs", (13,), "Y = |x|  =>  dx = dy · sign x, 0 at x = 0.", lambda op, x, _: op.Sign(x))
_times("Reciprocal", (13,), "Y = 1 / x  =>  dx = -dy · Y².", lambda op, _, y: op.Neg(op.Mul(y, y)))
_times("Exp", (13,), "Y = e^x  =>  dx = dy · Y.", lambda _op, _, y: y)
_times("Erf", (13,), "Y = erf x  =>  dx = dy · 2/√π · e^(-x²).", _erf)
_times("Sin", (7, 22), "Y = sin x  =>  dx = dy · cos x.", lambda op, x, _: op.Cos(x))
_times("Cos", (7, 22), "Y = cos x  =>  dx = -dy · sin x.", lambda op, x, _: op.Neg(op.Sin(x)))
_times("Tan", (7, 22), "Y = tan x  =>  dx = dy · (1 + Y²).", lambda op, _, y: op.Add(op.Mul(y, y), 1))
_times("Sinh", (9, 22), "Y = sinh x  =>  dx = dy · cosh x.", lambda op, x, _: op.Cosh(x))
_times("Cosh", (9, 22), "Y = cosh x  =>  dx = dy · sinh x.", lambda op, x, _: op.Sinh(x))
_times("Tanh", (13,), "Y = tanh x  =>  dx = dy · (1 - Y²).", lambda op, _, y: op.Sub(1, op.Mul(y, y)))
_times("Sigmoid", (13,), "Y = 1 / (1 + e^-x)  =>  dx = dy · Y · (1 - Y).", lambda op, _, y: op.Mul(y, op.Sub(1, y)))
_times("Softplus", (1, 22), "Y = ln(1 + e^x)  =>  dx = dy · sigmoid(x).", lambda op, x, _: op.Sigmoid(x))
_times("Mish", (18, 22), "Y = x · t, t = tanh(ln(1 + e^x))  =>  dx = dy · (t + x · sigmoid(x) · (1 - t²)).", _mish)
_over("Log", (13,), "Y = ln x  =>  dx = dy / x.", lambda _op, x, _: x)
_over("Sqrt", (13,), "Y = √x  =>  dx = dy / (2 Y); infinite at x = 0, NaN if dy = 0.", lambda op, _, y: op.Mul(2, y))
_over("Asin", (7, 22), "Y = arcsin x  =>  dx = dy / √(1 - x²); infinite at |x| = 1.",
      lambda op, x, _: op.Sqrt(_one_less_square(op, x)))  # fmt: skip
_over("Acos", (7, 22), "Y = arccos x  =>  dx = -dy / √(1 - x²); infinite at |x| = 1.",
      lambda op, x, _: op.Neg(op.Sqrt(_one_less_square(op, x))))  # fmt: skip
_over("Atan", (7, 22), "Y = arctan x  =>  dx = dy / (1 + x²).", lambda op, x, _: _one_and_square(op, x))
_over("Asinh", (9, 22), "Y = arsinh x  =>  dx = dy / √(1 + x²).", lambda op, x, _: op.Sqrt(_one_and_square(op, x)))
_over("Acosh", (9, 22), "Y = arcosh x  =>  dx = dy / (√(x - 1) √(x + 1)); infinite at x = 1.", _acosh)
_over("Atanh", (9, 22), "Y = artanh x  =>  dx = dy / (1 - x²); infinite at |x| = 1.",
      lambda op, x, _: _one_less_square(op, x))  # fmt: skip
