"""Gradients of reductions. The axes may be a constant, an input of the run, or absent."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder, element_type
from onnx_backprop.converters.reverse.forward import Forward
from onnx_backprop.converters.reverse.registry import Grads, gradient
from onnx_backprop.converters.rules.common import cast, narrow, size_ratio, widen, work_type


@gradient("ReduceSum", versions=(13,))
def reduce_sum(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = Σ x over axes  =>  dx = dy, repeated along them."""
    return _grads(node, _repeat(op, node, dy))


@gradient("ReduceMean", versions=(18,))
def reduce_mean(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = Σ x / n over axes  =>  dx = dy / n, repeated along them.

    Half types divide in float32, since n may lie beyond their range.
    """
    x, y = node.input(0), node.output()
    share = op.Mul(widen(op, dy, x), size_ratio(op, y, x))
    return _grads(node, _repeat(op, node, narrow(op, share, x)))


@gradient("ReduceMax", versions=(18, 20))
def reduce_max(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = max x over axes  =>  dx = dy / (number of x that equal Y) where x = Y, else 0: ties share equally."""
    return _extremum(op, node, dy)


@gradient("ReduceMin", versions=(18, 20))
def reduce_min(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = min x over axes  =>  dx = dy / (number of x that equal Y) where x = Y, else 0: ties share equally."""
    return _extremum(op, node, dy)


@gradient("ReduceSumSquare", versions=(18,))
def reduce_sum_square(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = Σ x² over axes  =>  dx = 2 x · dy."""
    _refuse_noop(node)
    x = node.input(0)
    return _grads(node, op.Mul(op.Mul(op.scalar(2.0, x), x), _restore(op, node, dy)))


@gradient("ReduceL1", versions=(18,))
def reduce_l1(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = Σ |x| over axes  =>  dx = dy · sign x, 0 at x = 0."""
    _refuse_noop(node)
    return _grads(node, op.Mul(op.Sign(node.input(0)), _restore(op, node, dy)))


@gradient("ReduceL2", versions=(18,))
def reduce_l2(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = √(Σ x²) over axes  =>  dx = dy · x / Y, 0 where Y = 0."""
    _refuse_noop(node)
    x, y = node.input(0), node.output()
    zero = op.scalar(0.0, y)
    share = op.Where(op.Equal(y, zero), zero, op.Div(dy, y))
    return _grads(node, op.Mul(x, _restore(op, node, share)))


@gradient("ReduceLogSumExp", versions=(18,))
def reduce_log_sum_exp(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = ln Σ e^x over axes  =>  dx = dy · e^(x - Y)."""
    _refuse_noop(node)
    x, y = node.input(0), node.output()
    share = op.Exp(op.Sub(x, _restore(op, node, y)))
    return _grads(node, op.Mul(share, _restore(op, node, dy)))


@gradient("ReduceProd", versions=(18,))
def reduce_prod(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = Π x over axes  =>  dx = dy · (product of the others) = dy · (product of those that are not 0) / x.

    Edge: beside one 0 only that entry has a gradient, beside two or more none has. Computed in float64, where products
    of float32 neither vanish nor overflow unless Y does by far.
    """
    _refuse_noop(node)
    x, own = node.input(0), element_type(node.input(0))
    factors = cast(op, x, own, ir.DataType.DOUBLE)
    one, zero = (op.constant(np.array(number, np.float64)) for number in (1.0, 0.0))
    axes = [node.input(1)] if node.has(1) else []
    is_zero = op.Equal(factors, zero)
    rest = op.Where(is_zero, one, factors)
    product = op.ReduceProd(rest, *axes, keepdims=1)
    zeros = op.ReduceSum(op.Cast(is_zero, to=ir.DataType.DOUBLE.value), *axes, keepdims=1)
    others = op.Sub(zeros, op.Cast(is_zero, to=ir.DataType.DOUBLE.value))  # zeros among the other factors
    share = op.Where(op.Greater(others, zero), zero, op.Div(product, rest))
    g = cast(op, _restore(op, node, dy), own, ir.DataType.DOUBLE)
    return _grads(node, cast(op, op.Mul(share, g), ir.DataType.DOUBLE, own))


def _refuse_noop(node: Forward) -> None:
    """Without axes the operator still squares or takes logarithms by the standard, but not in every runtime."""
    axes = node.constant(1)
    if node.int("noop_with_empty_axes", 0) and (axes is None or axes.size == 0):
        raise node.refuse("noop_with_empty_axes", 1, "where the axes are a constant that is not empty")


def _grads(node: Forward, dx: ir.Value) -> Grads:
    return (dx, None)[: len(node.inputs)]


def _restore(op: Builder, node: Forward, value: ir.Value) -> ir.Value:
    """A value of Y's shape, with the axes that Y has lost back as length 1, so that it broadcasts to x."""
    if node.int("keepdims", 1) or not node.has(1):
        return value  # without axes Y is 0-D or (noop_with_empty_axes) shaped like x
    axes = node.constant(1)
    if axes is not None and axes.size == 0:
        return value
    return op.Unsqueeze(value, node.input(1))


def _repeat(op: Builder, node: Forward, value: ir.Value) -> ir.Value:
    """A value of Y's shape, in the shape of x."""
    return op.Expand(_restore(op, node, value), op.shape(node.input(0)))


def _extremum(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    x, y = node.input(0), node.output()
    hit = op.Equal(x, _restore(op, node, y))
    wide = work_type(x)
    axes = [node.input(1)] if node.has(1) else []
    noop = node.int("noop_with_empty_axes", 0) or None
    count = op.ReduceSum(op.Cast(hit, to=wide.value), *axes, keepdims=1, noop_with_empty_axes=noop)
    share = narrow(op, op.Div(widen(op, _restore(op, node, dy), x), count), x)
    return _grads(node, op.Where(hit, share, op.scalar(0.0, x)))
