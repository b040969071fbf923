"""Gradients of softmax, of normalisation with given statistics, and of Dropout at inference."""

from __future__ import annotations

import onnx_ir as ir

from ..opset.errors import UnsupportedError
from .builder import Builder, dims
from .forward import Forward
from .registry import Grads, gradient


@gradient("Softmax", versions=(13,))
def softmax(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = softmax(x, axis)  =>  dx = y · (dy - Σ_axis dy · y)."""
    y = node.output()
    total = op.ReduceSum(op.Mul(dy, y), op.ints([node.int("axis", -1)]), keepdims=1)
    return (op.Mul(y, op.Sub(dy, total)),)


@gradient("LogSoftmax", versions=(13,))
def log_softmax(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = ln softmax(x, axis)  =>  dx = dy - e^y · Σ_axis dy."""
    total = op.ReduceSum(dy, op.ints([node.int("axis", -1)]), keepdims=1)
    return (op.Sub(dy, op.Mul(op.Exp(node.output()), total)),)


@gradient("BatchNormalization", versions=(15,))
def batch_normalization(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = scale · x̂ + bias, x̂ = (x - mean) · r, r = 1/√(var + epsilon), with given mean and var (inference).

    dx = dy · scale · r, dscale = Σ dy · x̂, dbias = Σ dy, dmean = -scale · r · Σ dy, dvar = -scale · r² / 2 · Σ dy · x̂,
    the sums over every axis but the channels. training_mode 1 is refused.
    """
    if node.int("training_mode", 0):
        raise node.refuse("training_mode", 1, "0 (frozen statistics)")
    x, scale, mean, var = (node.input(n) for n in (0, 1, 3, 4))
    known = dims(x)
    if known is None:
        raise UnsupportedError("the rank of X is unknown; give it a shape", op_type=node.op_type, node=node.name)
    rank = len(known)
    others = op.ints([axis for axis in range(rank) if axis != 1])
    per_channel = op.ints(range(1, rank - 1))  # (C) -> (C, 1, …), which broadcasts against (N, C, …)

    def along(v: ir.Value) -> ir.Value:
        return op.Unsqueeze(v, per_channel) if rank > 2 else v

    def total(v: ir.Value) -> ir.Value:
        return op.ReduceSum(v, others, keepdims=0) if rank > 1 else v

    r = op.Reciprocal(op.Sqrt(op.Add(var, op.scalar(node.float("epsilon", 1e-5), var))))
    slope = op.Mul(scale, op.CastLike(r, scale))
    dx = op.Mul(dy, along(op.CastLike(slope, x))) if node.wants(0) else None
    dscale = dbias = dmean = dvar = None
    if node.wants(1) or node.wants(4):
        centred = op.Sub(x, along(op.CastLike(mean, x)))
        dscale = op.Mul(op.CastLike(total(op.Mul(dy, centred)), r), r)
    if node.wants(2) or node.wants(3):
        dbias = op.CastLike(total(dy), node.input(2))
    if node.wants(3):
        dmean = op.Neg(op.Mul(op.CastLike(slope, mean), op.CastLike(dbias, mean)))
    if node.wants(4):
        half = op.Mul(op.CastLike(scale, var), op.Mul(op.Mul(r, r), op.scalar(-0.5, var)))
        dvar = op.Mul(half, op.CastLike(dscale, var))
    return (
        dx,
        op.CastLike(dscale, scale) if node.wants(1) else None,
        dbias if node.wants(2) else None,
        dmean,
        dvar,
    )


@gradient("Dropout", versions=(13, 22))
def dropout(_op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = x (inference)  =>  dx = dy. A training_mode that is true, or known to the run only, is refused."""
    mode = node.constant(2)
    if node.has(2) and (mode is None or bool(mode)):
        got = "an input" if mode is None else "true"
        raise node.refuse("training_mode", got, "false")
    return (dy, *(None,) * (len(node.inputs) - 1))
