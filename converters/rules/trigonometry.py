"""Gradients of trigonometric and hyperbolic functions and their inverses. Angles are in radians."""

from __future__ import annotations

import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.forward import Forward
from onnx_backprop.converters.reverse.registry import Grads, gradient
from onnx_backprop.converters.rules.common import narrow, widen


@gradient("Sin", versions=(7, 22))
def sine(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = sin x  =>  dx = dy · cos x."""
    return op.Mul(dy, op.Cos(node.input(0)))


@gradient("Cos", versions=(7, 22))
def cosine(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = cos x  =>  dx = -dy · sin x."""
    return op.Neg(op.Mul(dy, op.Sin(node.input(0))))


@gradient("Tan", versions=(7, 22))
def tangent(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = tan x  =>  dx = dy · (1 + Y²)."""
    y = node.output()
    return op.Mul(dy, op.Add(op.Mul(y, y), 1))


@gradient("Sinh", versions=(9, 22))
def hyperbolic_sine(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = sinh x  =>  dx = dy · cosh x."""
    return op.Mul(dy, op.Cosh(node.input(0)))


@gradient("Cosh", versions=(9, 22))
def hyperbolic_cosine(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = cosh x  =>  dx = dy · sinh x."""
    return op.Mul(dy, op.Sinh(node.input(0)))


@gradient("Asin", versions=(7, 22))
def inverse_sine(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = arcsin x  =>  dx = dy / √(1 - x²); infinite at |x| = 1."""
    return op.Div(dy, op.Sqrt(_one_less_square(op, node.input(0))))


@gradient("Acos", versions=(7, 22))
def inverse_cosine(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = arccos x  =>  dx = -dy / √(1 - x²); infinite at |x| = 1."""
    return op.Neg(op.Div(dy, op.Sqrt(_one_less_square(op, node.input(0)))))


@gradient("Atan", versions=(7, 22))
def inverse_tangent(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = arctan x  =>  dx = dy / (1 + x²)."""
    return _divided(op, dy, _one_and_square(op, node.input(0)))


@gradient("Asinh", versions=(9, 22))
def inverse_hyperbolic_sine(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = arsinh x  =>  dx = dy / √(1 + x²)."""
    return _divided(op, dy, op.Sqrt(_one_and_square(op, node.input(0))))


@gradient("Acosh", versions=(9, 22))
def inverse_hyperbolic_cosine(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = arcosh x  =>  dx = dy / (√(x - 1) √(x + 1)); infinite at x = 1."""
    x = node.input(0)
    return op.Div(dy, op.Mul(op.Sqrt(op.Sub(x, 1)), op.Sqrt(op.Add(x, 1))))


@gradient("Atanh", versions=(9, 22))
def inverse_hyperbolic_tangent(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = artanh x  =>  dx = dy / (1 - x²); infinite at |x| = 1."""
    return op.Div(dy, _one_less_square(op, node.input(0)))


def _one_less_square(op: Builder, x: ir.Value) -> ir.Value:
    """1 - x² as (1 - x)(1 + x), which keeps its digits near |x| = 1."""
    return op.Mul(op.Sub(1, x), op.Add(1, x))


def _one_and_square(op: Builder, x: ir.Value) -> ir.Value:
    """1 + x², in the type to sum in: the square of a half-precision number may lie beyond its range."""
    x = widen(op, x)
    return op.Add(op.Mul(x, x), 1)


def _divided(op: Builder, dy: ir.Value, divisor: ir.Value) -> ir.Value:
    return narrow(op, op.Div(widen(op, dy), divisor), dy)
