"""Gradients of matrix products and determinants."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder, dims
from onnx_backprop.converters.reverse.forward import Forward
from onnx_backprop.converters.reverse.registry import Grads, gradient
from onnx_backprop.converters.rules.common import length, narrow, widen, work_type
from onnx_backprop.opset.core.errors import UnsupportedError
from onnx_backprop.opset.core.shapes import Dims


@gradient("MatMul", versions=(13,))
def matmul(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = A · B  =>  dA = dY · Bᵀ, dB = Aᵀ · dY, each summed over the batch axes it was broadcast along.

    Shapes: A (…, M, K), B (…, K, N), Y (…, M, N). A 1-D A is one row, a 1-D B one column, and Y lacks that axis.
    Raises: UnsupportedError where a rank is unknown at conversion.
    """
    a, b = node.input(0), node.input(1)
    shape_a, shape_b = _known_rank(node, 0), _known_rank(node, 1)
    if len(shape_a) == len(shape_b) == 1:
        return op.Mul(dy, b) if node.wants(0) else None, op.Mul(dy, a) if node.wants(1) else None
    if len(shape_a) == 1:
        dy = op.Unsqueeze(dy, op.ints([-2]))
    if len(shape_b) == 1:
        dy = op.Unsqueeze(dy, op.ints([-1]))
    return (
        _gradient_a(op, node, dy, shape_a, shape_b) if node.wants(0) else None,
        _gradient_b(op, node, dy, shape_a, shape_b) if node.wants(1) else None,
    )


def _gradient_a(op: Builder, node: Forward, dy: ir.Value, shape_a: Dims, shape_b: Dims) -> ir.Value:
    a, b = node.input(0), node.input(1)
    column = len(shape_b) == 1
    transposed = op.Unsqueeze(b, op.ints([0])) if column else op.Transpose(b, perm=_swapped(len(shape_b)))
    da = op.MatMul(dy, transposed)
    if len(shape_a) > 1 and len(shape_b) <= 2:
        return da  # B has no batch axes, so A was not broadcast
    return op.unbroadcast(da, a, _batched(node, da, shape_a, shape_b, rows=shape_a))


def _gradient_b(op: Builder, node: Forward, dy: ir.Value, shape_a: Dims, shape_b: Dims) -> ir.Value:
    a, b = node.input(0), node.input(1)
    if len(shape_a) > 1 and len(shape_b) == 2:
        return op.Gemm(op.Flatten(a, axis=-1), op.Flatten(dy, axis=-1), transA=1)  # sums over the batch too
    if len(shape_a) == 1:
        return op.MatMul(op.Unsqueeze(a, op.ints([-1])), dy)  # A has no batch axes, so B was not broadcast
    db = op.MatMul(op.Transpose(a, perm=_swapped(len(shape_a))), dy)
    if len(shape_b) == 1:
        db = op.Squeeze(db, op.ints([-1]))
    return op.unbroadcast(db, b, _batched(node, db, shape_a, shape_b, rows=shape_b))


def _batched(node: Forward, g: ir.Value, shape_a: Dims, shape_b: Dims, *, rows: Dims) -> ir.Value:
    """Note on g the shape it has: the batch axes of Y before the last axes of the input it belongs to."""
    shape_y = dims(node.output())
    if shape_y is not None:
        batch = shape_y[: len(shape_y) - (len(shape_a) > 1) - (len(shape_b) > 1)]
        if rows is shape_a and len(shape_a) == 1:
            tail: Dims = (1, *shape_a)
        else:
            tail = rows[-2:]
        g.type, g.shape = node.output().type, ir.Shape((*batch, *tail))
    return g


def _swapped(rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]


def _known_rank(node: Forward, index: int) -> Dims:
    shape = dims(node.input(index))
    if shape is None:
        raise UnsupportedError(
            f"the gradient needs the rank of input {index} ({node.input(index).name!r}) at conversion, and shape "
            "inference does not find it. Give that value a shape",
            op_type=node.op_type,
            node=node.name,
        )
    return shape


@gradient("Gemm", versions=(13,))
def gemm(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = α · A' · B' + β · C  =>  dA' = α · dY · B'ᵀ, dB' = α · A'ᵀ · dY, dC = β · dY, summed as C was broadcast.

    A' is A, transposed where transA says so; B' likewise.
    """
    a, b, y = node.input(0), node.input(1), node.output()
    trans_a, trans_b = node.int("transA", 0), node.int("transB", 0)
    alpha, beta = node.float("alpha", 1.0), node.float("beta", 1.0)
    da = db = dc = None
    if node.wants(0):
        if trans_a:
            da = op.Gemm(b, dy, alpha=alpha, transA=trans_b, transB=1)
        else:
            da = op.Gemm(dy, b, alpha=alpha, transB=1 - trans_b)
    if node.wants(1):
        if trans_b:
            db = op.Gemm(dy, a, alpha=alpha, transA=1, transB=trans_a)
        else:
            db = op.Gemm(a, dy, alpha=alpha, transA=1 - trans_a)
    if node.wants(2):
        dc = op.unbroadcast(dy, node.input(2), y)
        if beta != 1.0:
            dc = op.Mul(dc, op.scalar(beta, y))
    return (da, db, dc)[: len(node.inputs)]


@gradient("Det", versions=(11, 22))
def determinant(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = det x  =>  dx = dy · C, C_ij = the determinant of x with row i replaced by the j-th unit vector.

    C is the matrix of cofactors, which singular matrices have too. Shapes: x (…, M, M); M² determinants of M × M
    matrices are computed, M⁴ elements for each matrix of x. Half types are computed in float32.
    """
    x, wide = node.input(0), work_type(node.input(0))
    numbers = op.Range(op.constant(np.array(0)), op.Squeeze(length(op, x, -1), op.ints([0])), op.constant(np.array(1)))
    same = op.Equal(op.Unsqueeze(numbers, op.ints([1])), numbers)
    unit_rows = op.Unsqueeze(op.Cast(same, to=wide.value), op.ints([0, 2]))  # (1, j, 1, column)
    replaced = op.Unsqueeze(same, op.ints([1, 3]))  # (i, 1, row, 1)
    matrices = op.Where(replaced, unit_rows, op.Unsqueeze(widen(op, x, x), op.ints([-4, -3])))
    factor = op.Unsqueeze(widen(op, dy, x), op.ints([-2, -1]))
    return (narrow(op, op.Mul(factor, op.Det(matrices)), x),)
