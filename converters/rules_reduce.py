"""Gradients of reductions: what was summed is spread out again."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .builder import Builder
from .forward import Forward
from .registry import Grads, gradient


@gradient("ReduceSum", versions=(13,))
def reduce_sum(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = Σ_axes x  =>  dx = dy, repeated along the axes."""
    return _grads(node, _spread(op, node, dy))


@gradient("ReduceMean", versions=(18,))
def reduce_mean(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = 1/n · Σ_axes x  =>  dx = dy / n, repeated along the axes; n = number of elements of x over those of y."""
    x = node.input(0)
    count = op.Div(op.Size(x), op.Max(op.Size(node.output()), op.constant(np.array(1))))
    return _grads(node, _spread(op, node, op.Div(dy, op.CastLike(count, x))))


def _grads(node: Forward, dx: ir.Value) -> Grads:
    """dx, and nothing for the axes input."""
    return (dx, *(None,) * (len(node.inputs) - 1))


def _spread(op: Builder, node: Forward, dy: ir.Value) -> ir.Value:
    """dy brought to the rank of x, then repeated to its shape.

    noop_with_empty_axes with no axes leaves x as it is: expanding to the same shape does nothing then.
    """
    x = node.input(0)
    if node.int("keepdims", 1) == 0 and not _no_op(node):
        dy = _with_reduced_axes(op, node, dy)
    return op.Expand(dy, op.shape(x))


def _no_op(node: Forward) -> bool:
    return node.int("noop_with_empty_axes", 0) == 1 and not node.has(1)


def _with_reduced_axes(op: Builder, node: Forward, dy: ir.Value) -> ir.Value:
    """dy with length 1 on every reduced axis."""
    axes = node.constant(1)
    if axes is not None and axes.size:
        return op.Unsqueeze(dy, op.ints([int(a) for a in axes]))
    if not node.has(1) or (axes is not None and node.int("noop_with_empty_axes", 0) == 0):
        return dy  # reduced to one element of rank 0, which expands to any shape
    if axes is not None:  # empty, and that means: reduce nothing
        return dy
    if node.int("noop_with_empty_axes", 0) == 0:
        raise node.refuse("keepdims", 0, "1 when the axes are known only to the run and may be empty")
    return op.Unsqueeze(dy, node.input(1))
