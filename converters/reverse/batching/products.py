"""Products: the rows are one more batch of matrices, or more rows of the first matrix where the second is shared."""

import re
import string

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.batching.folding import fold, unfold
from onnx_backprop.converters.reverse.batching.registry import Answer, Rows, batching
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import dims, known_lengths


@batching("MatMul", "MatMulInteger")
def mat_mul(op: Builder, node: Rows) -> Answer:
    """y_n = a_n · b_n. A vector is a matrix of one row or one column meanwhile."""
    ranks = [node.static_rank(n) for n in range(2)]
    if None in ranks or not node.only(0, 1):
        return None
    if any(node.has(n) and node.static_rank(n) != 0 for n in (2, 3)):
        return None  # a zero point for each row of a matrix
    sizes = [rank for rank in ranks if rank is not None]
    operands, drop = list[ir.Value | None](), list[int]()
    for n, axis in ((0, -2), (1, -1)):
        value = node.value(n)
        if sizes[n] == 1 and not (n == 0 and not node.is_batched(1) and sizes[1] == 2):
            value, sizes[n] = op.Unsqueeze(value, [axis]), 2
            drop.append(axis)
        operands.append(value)
    rank = max(sizes)
    for n in range(2):
        if node.is_batched(n) and sizes[n] < rank and sizes[n] > 1:
            operands[n] = op.Unsqueeze(operands[n], list(range(1, 1 + rank - sizes[n])))
    inputs = [*operands, *node.values()[2:]]
    y = _outer(op, node, inputs) if not drop and len(inputs) == 2 else None
    y = node.again(inputs)[0] if y is None else y
    return op.Squeeze(y, drop) if drop else y


def _outer(op: Builder, node: Rows, inputs: list[ir.Value | None]) -> ir.Value | None:
    """A column times a row as a product of numbers, which costs less than as many small products of matrices."""
    shape = dims(node.input(0))
    if node.op_type == "MatMul" and shape and len(shape) > 1 and shape[-1] == 1 and not node.only(0):
        return op.Mul(*inputs)
    return None


def _transposed(op: Builder, value: ir.Value | None, *, batched: bool) -> ir.Value:
    return op.Transpose(value, perm=[0, 2, 1] if batched else [1, 0])


@batching("Gemm")
def gemm(op: Builder, node: Rows) -> Answer:
    """y_n = α · A_n · B_n + β · C_n; where A alone differs between rows, it has as many more rows itself."""
    trans_a, trans_b = node.int("transA", 0), node.int("transB", 0)
    c = dims(node.input(2)) if node.has(2) else ()
    if c is None:
        return None
    if node.only(0) and not trans_a and (len(c) < 2 or c[0] == 1):
        (y,) = node.again([fold(op, node, 0), *node.values()[1:]])
        return unfold(op, node, y, node.output(), node.lengths(0, 0, 1))
    operands: list[ir.Value | None] = []
    for n, transpose in ((0, trans_a), (1, trans_b)):
        value = node.value(n)
        operands.append(_transposed(op, value, batched=node.is_batched(n)) if transpose else value)
    contracted = known_lengths(node.input(0))
    single = contracted is not None and contracted[0 if trans_a else 1] == 1
    y = op.Mul(*operands) if single else op.MatMul(*operands)
    y = _times(op, y, node.float("alpha", 1.0))
    if node.has(2):
        added = node.value(2)
        if node.is_batched(2) and len(c) < 2:
            added = op.Unsqueeze(added, list(range(1, 3 - len(c))))
        y = op.Add(y, _times(op, added, node.float("beta", 1.0)))
    return y


def _times(op: Builder, value: ir.Value | None, factor: float) -> ir.Value:
    assert value is not None
    return value if factor == 1 else op.Mul(value, np.float64(factor))


@batching("Einsum")
def einsum(op: Builder, node: Rows) -> Answer:
    """A letter that no term has stands for the rows, in front of the terms that differ between them."""
    equation = re.sub(r"\s", "", node.string("equation", ""))
    terms, arrow, result = equation.partition("->")
    if not arrow:
        letters = [letter for letter in sorted(set(terms)) if letter.isalpha() and terms.count(letter) == 1]
        result = ("..." if "..." in terms else "") + "".join(letters)
    free = next((letter for letter in string.ascii_letters if letter not in equation), None)
    parts = terms.split(",")
    if free is None or len(parts) != node.count:
        return None
    parts = [free + part if node.is_batched(n) else part for n, part in enumerate(parts)]
    return node.again(node.values(), equation=f"{','.join(parts)}->{free}{result}")
