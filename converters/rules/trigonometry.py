"""Gradients of trigonometric and hyperbolic functions and their inverses. Angles are in radians."""

from __future__ import annotations

import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.forward import Forward
from onnx_backprop.converters.reverse.registry import Grads, gradient
from onnx_backprop.converters.rules.common import narrow, widen, work_type


@gradient("Sin", versions=(7, 22))
def sine(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = sin x  =>  dx = dy · cos x."""
    return (op.Mul(dy, op.Cos(node.input(0))),)


@gradient("Cos", versions=(7, 22))
def cosine(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = cos x  =>  dx = -dy · sin x."""
    return (op.Neg(op.Mul(dy, op.Sin(node.input(0)))),)


@gradient("Tan", versions=(7, 22))
def tangent(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = tan x  =>  dx = dy · (1 + Y²)."""
    y = node.output()
    return (op.Mul(dy, op.Add(op.Mul(y, y), op.scalar(1.0, y))),)


@gradient("Sinh", versions=(9, 22))
def hyperbolic_sine(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = sinh x  =>  dx = dy · cosh x."""
    return (op.Mul(dy, op.Cosh(node.input(0))),)


@gradient("Cosh", versions=(9, 22))
def hyperbolic_cosine(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = cosh x  =>  dx = dy · sinh x."""
    return (op.Mul(dy, op.Sinh(node.input(0))),)


@gradient("Asin", versions=(7, 22))
def inverse_sine(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = arcsin x  =>  dx = dy / √(1 - x²); infinite at |x| = 1."""
    return (op.Div(dy, _half_chord(op, node.input(0))),)


@gradient("Acos", versions=(7, 22))
def inverse_cosine(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = arccos x  =>  dx = -dy / √(1 - x²); infinite at |x| = 1."""
    return (op.Neg(op.Div(dy, _half_chord(op, node.input(0)))),)


@gradient("Atan", versions=(7, 22))
def inverse_tangent(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = arctan x  =>  dx = dy / (1 + x²)."""
    x = node.input(0)
    wide = widen(op, x, x)
    return (narrow(op, op.Div(widen(op, dy, x), _one_and(op, op.Mul(wide, wide), x)), x),)


@gradient("Asinh", versions=(9, 22))
def inverse_hyperbolic_sine(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = arsinh x  =>  dx = dy / √(1 + x²)."""
    x = node.input(0)
    wide = widen(op, x, x)
    root = op.Sqrt(_one_and(op, op.Mul(wide, wide), x))
    return (narrow(op, op.Div(widen(op, dy, x), root), x),)


@gradient("Acosh", versions=(9, 22))
def inverse_hyperbolic_cosine(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = arcosh x  =>  dx = dy / (√(x - 1) √(x + 1)); infinite at x = 1."""
    x = node.input(0)
    one = op.scalar(1.0, x)
    return (op.Div(dy, op.Mul(op.Sqrt(op.Sub(x, one)), op.Sqrt(op.Add(x, one)))),)


@gradient("Atanh", versions=(9, 22))
def inverse_hyperbolic_tangent(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = artanh x  =>  dx = dy / (1 - x²); infinite at |x| = 1."""
    return (op.Div(dy, _one_less_square(op, node.input(0))),)


def _one_less_square(op: Builder, x: ir.Value) -> ir.Value:
    """1 - x² as (1 - x)(1 + x), which keeps its digits near |x| = 1."""
    one = op.scalar(1.0, x)
    return op.Mul(op.Sub(one, x), op.Add(one, x))


def _half_chord(op: Builder, x: ir.Value) -> ir.Value:
    return op.Sqrt(_one_less_square(op, x))


def _one_and(op: Builder, value: ir.Value, like: ir.Value) -> ir.Value:
    """1 + value, in the type to sum in: the square of a half-precision number may lie beyond its range."""
    return op.Add(value, op.constant(work_type(like).numpy().type(1)))
