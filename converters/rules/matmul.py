"""Gradients of matrix products and determinants."""

import onnx_ir as ir

from onnx_backprop.converters.reverse.known import dims, element_type
from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads, gradient
from onnx_backprop.converters.rules.common import count_up, narrow, widen


@gradient("MatMul", versions=(13,))
def matmul(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = A · B  =>  dA = dY · Bᵀ, dB = Aᵀ · dY, each summed over the batch axes it was broadcast along.

    Shapes: A (…, M, K), B (…, K, N), Y (…, M, N). A 1-D A is one row, a 1-D B one column, and Y lacks that axis.
    Raises: UnsupportedError where a rank is unknown at conversion.
    """
    rank_a, rank_b = node.rank(0), node.rank(1)
    if rank_a == rank_b == 1:
        return op.Mul(dy, node.input(1)), op.Mul(dy, node.input(0))
    if rank_a == 1:
        dy = op.Unsqueeze(dy, [-2])
    if rank_b == 1:
        dy = op.Unsqueeze(dy, [-1])
    return (
        _gradient_a(op, node, dy, rank_a, rank_b) if node.wants(0) else None,
        _gradient_b(op, node, dy, rank_a, rank_b) if node.wants(1) else None,
    )


def _gradient_a(op: Builder, node: Forward, dy: ir.Value, rank_a: int, rank_b: int) -> ir.Value:
    a, b = node.input(0), node.input(1)
    da = op.MatMul(dy, op.Unsqueeze(b, [0]) if rank_b == 1 else op.Transpose(b, perm=_swapped(rank_b)))
    if rank_a > 1 and rank_b <= 2:
        return da  # B has no batch axes, so A was not broadcast
    return op.unbroadcast(da, a, _batched(node, da, a, (1,) if rank_a == 1 else ()))


def _gradient_b(op: Builder, node: Forward, dy: ir.Value, rank_a: int, rank_b: int) -> ir.Value:
    a, b = node.input(0), node.input(1)
    if rank_a > 1 and rank_b == 2:
        return op.Gemm(op.Flatten(a, axis=-1), op.Flatten(dy, axis=-1), transA=1)  # sums over the batch too
    if rank_a == 1:
        return op.MatMul(op.Unsqueeze(a, [-1]), dy)  # A has no batch axes, so B was not broadcast
    db = op.MatMul(op.Transpose(a, perm=_swapped(rank_a)), dy)
    if rank_b == 1:
        db = op.Squeeze(db, [-1])
    return op.unbroadcast(db, b, _batched(node, db, b))


def _batched(node: Forward, g: ir.Value, x: ir.Value, row: tuple[int, ...] = ()) -> ir.Value:
    """Note on g the shape it has: the batch axes of Y before the last axes of the input x that it belongs to."""
    shape, shape_y = dims(x), dims(node.output())
    if shape is not None and shape_y is not None:
        batch = shape_y[: len(shape_y) - (node.rank(0) > 1) - (node.rank(1) > 1)]
        g.shape = ir.Shape((*batch, *row, *shape[-2:]))
    return g


def _swapped(rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]


@gradient("Gemm", versions=(13,))
def gemm(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = α · A' · B' + β · C  =>  dA' = α · dY · B'ᵀ, dB' = α · A'ᵀ · dY, dC = β · dY, summed as C was broadcast.

    A' is A, transposed where transA says so; B' likewise.
    """
    a, b = node.input(0), node.input(1)
    trans_a, trans_b = node.int("transA", 0), node.int("transB", 0)
    alpha, beta = node.float("alpha", 1.0), node.float("beta", 1.0)
    if trans_a:
        da = op.Gemm(b, dy, alpha=alpha, transA=trans_b, transB=1)
    else:
        da = op.Gemm(dy, b, alpha=alpha, transB=1 - trans_b)
    if trans_b:
        db = op.Gemm(dy, a, alpha=alpha, transA=1, transB=trans_a)
    else:
        db = op.Gemm(a, dy, alpha=alpha, transA=1 - trans_a)
    if not node.has(2):
        return da, db
    dc = op.unbroadcast(dy, node.input(2), node.output())
    return da, db, dc if beta == 1.0 else op.Mul(dc, op.scalar(beta, dy))


@gradient("Det", versions=(11, 22))
def determinant(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = det x  =>  dx = dy · C, C_ij = the determinant of x with row i replaced by the j-th unit vector.

    C is the matrix of cofactors, which singular matrices have too. Shapes: x (…, M, M); M² determinants of M × M
    matrices are computed, M⁴ elements for each matrix of x. Half types are computed in float32.
    """
    x = widen(op, node.input(0))
    numbers = count_up(op, op.length(node.input(0), -1))
    same = op.Equal(op.Unsqueeze(numbers, [1]), numbers)
    unit_rows = op.Unsqueeze(op.Cast(same, to=element_type(x)), [0, 2])  # (1, j, 1, column)
    replaced = op.Unsqueeze(same, [1, 3])  # (i, 1, row, 1)
    matrices = op.Where(replaced, unit_rows, op.Unsqueeze(x, [-4, -3]))
    factor = op.Unsqueeze(widen(op, dy), [-2, -1])
    return narrow(op, op.Mul(factor, op.Det(matrices)), dy)
