"""Gradients of operators that work element by element."""

from __future__ import annotations

import onnx_ir as ir

from .builder import Builder
from .forward import Forward
from .registry import Grads, gradient


@gradient("Mul", versions=(14,))
def mul(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = a · b  =>  da = dy · b, db = dy · a, each summed over the axes it was broadcast along."""
    a, b, y = node.input(0), node.input(1), node.output()
    return (
        op.unbroadcast(op.Mul(dy, b), a, y) if node.wants(0) else None,
        op.unbroadcast(op.Mul(dy, a), b, y) if node.wants(1) else None,
    )


@gradient("Relu", versions=(14,))
def relu(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = max(x, 0)  =>  dx = dy where y > 0, else 0 (also at x = 0)."""
    zero = op.scalar(0.0, node.output())
    return (op.Where(op.Greater(node.output(), zero), dy, zero),)
