"""Gradients of matrix products."""

from __future__ import annotations

import onnx_ir as ir

from ..opset.errors import UnsupportedError
from .builder import Builder, dims
from .forward import Forward
from .registry import Grads, gradient


@gradient("MatMul", versions=(13,))
def matmul(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = A · B  =>  dA = dY · Bᵀ, dB = Aᵀ · dY, summed over the batch axes that were broadcast.

    A vector on the left is a row, one on the right a column, as in the forward.
    """
    a, b = node.input(0), node.input(1)
    rank_a, rank_b = _rank(node, a), _rank(node, b)
    if rank_b == 1:
        dy = op.Unsqueeze(dy, op.ints([-1]))
    if rank_a == 1:
        dy = op.Unsqueeze(dy, op.ints([-2]))
    row = op.Unsqueeze(a, op.ints([0])) if rank_a == 1 else a
    column = op.Unsqueeze(b, op.ints([1])) if rank_b == 1 else b
    da = db = None
    if node.wants(0):
        da = _sum_batch(op, op.MatMul(dy, _transposed(op, column, max(rank_b, 2))), a, rank_a, rank_b)
    if node.wants(1):
        db = _sum_batch(op, op.MatMul(_transposed(op, row, max(rank_a, 2)), dy), b, rank_b, rank_a)
    return (da, db)


@gradient("Gemm", versions=(13,))
def gemm(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = alpha · A' · B' + beta · C  =>  dA' = alpha · dY · B'ᵀ, dB' = alpha · A'ᵀ · dY, dC = beta · dY.

    A' is A, or its transpose with transA; then dA is the transpose of dA'. Likewise B.
    """
    a, b = node.input(0), node.input(1)
    alpha, beta = node.float("alpha", 1.0), node.float("beta", 1.0)
    trans_a, trans_b = node.int("transA", 0), node.int("transB", 0)
    grads: list[ir.Value | None] = [None] * len(node.inputs)
    if node.wants(0):
        if trans_a:
            grads[0] = op.Gemm(b, dy, alpha=alpha, transA=trans_b, transB=1)
        else:
            grads[0] = op.Gemm(dy, b, alpha=alpha, transB=1 - trans_b)
    if node.wants(1):
        if trans_b:
            grads[1] = op.Gemm(dy, a, alpha=alpha, transA=1, transB=trans_a)
        else:
            grads[1] = op.Gemm(a, dy, alpha=alpha, transA=1 - trans_a)
    if node.wants(2):
        dc = dy if beta == 1 else op.Mul(dy, op.scalar(beta, a))
        grads[2] = op.unbroadcast(dc, node.input(2), node.output())
    return grads


def _rank(node: Forward, value: ir.Value) -> int:
    known = dims(value)
    if known is None:
        raise UnsupportedError(
            f"the rank of {value.name!r} is unknown; give it a shape", op_type=node.op_type, node=node.name
        )
    return len(known)


def _transposed(op: Builder, value: ir.Value, rank: int) -> ir.Value:
    """The last two axes exchanged."""
    return op.Transpose(value, perm=[*range(rank - 2), rank - 1, rank - 2])


def _sum_batch(op: Builder, grad: ir.Value, like: ir.Value, rank: int, other_rank: int) -> ir.Value:
    """The gradient in the shape of `like`: batch axes that `like` lacks, or has with length 1, summed.

    `like` is a vector (then grad is a stack of rows or columns), a matrix, or a stack of matrices.
    """
    if rank == 1:
        stack = op.Reshape(grad, op.Concat(op.ints([-1]), op.shape(like), axis=0))
        return op.ReduceSum(stack, op.ints([0]), keepdims=0)
    if rank == 2:
        return op.ReduceSum(grad, op.ints(range(other_rank - 2)), keepdims=0) if other_rank > 2 else grad
    return op.unbroadcast(grad, like, grad) if other_rank > 2 else grad
