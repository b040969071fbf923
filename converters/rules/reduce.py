"""Gradients of reductions. The axes may be a constant, an input of the run, or absent."""

import onnx_ir as ir

from onnx_backprop.converters.reverse.divisors import mark_divisor
from onnx_backprop.converters.reverse.known import element_type
from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads, gradient
from onnx_backprop.converters.rules.common import cast, divided, narrow, size_ratio, widen, work_type
from onnx_backprop.converters.rules.factors import product_and_others


@gradient("ReduceSum", versions=(13,))
def reduce_sum(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = Σ x over axes  =>  dx = dy, repeated along them."""
    return op.Expand(_restore(op, node, dy), op.shape(node.input(0)))


@gradient("ReduceMean", versions=(18,))
def reduce_mean(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = Σ x / n over axes  =>  dx = dy / n, repeated along them.

    Half types divide in float32, since n may lie beyond their range.
    """
    x, y = node.input(0), node.output()
    ratio = mark_divisor(size_ratio(op, y, x), y)
    return reduce_sum(op, node, narrow(op, op.Mul(widen(op, dy, x), ratio), x))


@gradient("ReduceMax", versions=(18, 20))
@gradient("ReduceMin", versions=(18, 20))
def reduce_extreme(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = max (min) x over axes  =>  dx = dy / (number of x that equal Y) where x = Y, else 0: ties share equally.

    Edge: torch's max(dim) gives all to the first of them.
    """
    x, noop = node.input(0), node.int("noop_with_empty_axes", 0) or None
    hit = op.Equal(x, _restore(op, node, node.output()))
    if node.is_torch("max.dim", "min.dim") and node.has(1):  # one axis, which a vmap may have moved
        place = op.CumSum(op.Cast(hit, to=ir.DataType.INT64), op.Squeeze(node.input(1)))
        return op.Where(op.And(hit, op.Equal(place, 1)), _restore(op, node, dy), 0)
    count = op.ReduceSum(op.Cast(hit, to=work_type(x)), *_axes(node), keepdims=1, noop_with_empty_axes=noop)
    return op.Where(hit, narrow(op, op.Div(widen(op, _restore(op, node, dy), x), count), x), 0)


@gradient("ReduceSumSquare", versions=(18,))
def reduce_sum_square(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = Σ x² over axes  =>  dx = 2 x · dy."""
    _refuse_noop(node)
    return op.Mul(op.Mul(2, node.input(0)), _restore(op, node, dy))


@gradient("ReduceL1", versions=(18,))
def reduce_l1(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = Σ |x| over axes  =>  dx = dy · sign x, 0 at x = 0."""
    _refuse_noop(node)
    return op.Mul(op.Sign(node.input(0)), _restore(op, node, dy))


@gradient("ReduceL2", versions=(18,))
def reduce_l2(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = √(Σ x²) over axes  =>  dx = dy · x / Y, 0 where Y = 0."""
    _refuse_noop(node)
    return op.Mul(node.input(0), _restore(op, node, divided(op, dy, node.output())))


@gradient("ReduceLogSumExp", versions=(18,))
def reduce_log_sum_exp(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = ln Σ e^x over axes  =>  dx = dy · e^(x - Y)."""
    _refuse_noop(node)
    share = op.Exp(op.Sub(node.input(0), _restore(op, node, node.output())))
    return op.Mul(share, _restore(op, node, dy))


@gradient("ReduceProd", versions=(18,))
def reduce_prod(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = Π x over axes  =>  dx = dy · (product of the others).

    Edge: beside one 0 only that entry has a gradient, beside two or more none has; second derivatives are right there,
    too (`factors`). Computed in float64, where products of float32 neither vanish nor overflow unless Y does by far.
    """
    _refuse_noop(node)
    double, reduce = ir.DataType.DOUBLE, {"mul": op.ReduceProd, "add": op.ReduceSum, "min": op.ReduceMin}
    factors = cast(op, node.input(0), double)
    _, others = product_and_others(
        op, factors, lambda how, value: reduce[how](value, *_axes(node), keepdims=1), lambda value: value
    )
    return cast(op, op.Mul(others, cast(op, _restore(op, node, dy), double)), element_type(node.input(0)))


def _refuse_noop(node: Forward) -> None:
    """Without axes the operator still squares or takes logarithms by the standard, but not in every runtime."""
    axes = node.constant(1)
    if node.int("noop_with_empty_axes", 0) and (axes is None or axes.size == 0):
        raise node.refuse("noop_with_empty_axes", 1, "where the axes are a constant that is not empty")


def _axes(node: Forward) -> list[ir.Value]:
    return [node.input(1)] if node.has(1) else []


def _restore(op: Builder, node: Forward, value: ir.Value) -> ir.Value:
    """A value of Y's shape, with the axes that Y has lost back as length 1, so that it broadcasts to x."""
    if node.int("keepdims", 1) or not node.has(1):
        return value  # without axes Y is 0-D or (noop_with_empty_axes) shaped like x
    axes = node.constant(1)
    return value if axes is not None and axes.size == 0 else op.Unsqueeze(value, node.input(1))
