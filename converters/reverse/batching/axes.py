"""Operators that work along axes: the axes of a row move up by one."""

from collections.abc import Mapping

import onnx_ir as ir

from onnx_backprop.converters.reverse.batching.elementwise import aligned
from onnx_backprop.converters.reverse.batching.folding import elementwise_folded
from onnx_backprop.converters.reverse.batching.registry import (
    Answer,
    Rows,
    batching,
    in_shape,
    product,
    repeated,
    shift,
    shifted,
)
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import element_type, known_lengths
from onnx_backprop.opset import DOMAIN

REDUCTIONS = "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare"
# The attribute `axis` and its default; only the first input has the axes of a row.
ALONG: Mapping[str, int] = {
    "ArgMax": 0, "ArgMin": 0, "Hardmax": -1, "LogSoftmax": -1, "LpNormalization": -1, "OneHot": -1, "Softmax": -1,
    "Split": 0, "TopK": -1,
}  # fmt: skip


@batching(*ALONG)
def along(op: Builder, node: Rows) -> Answer:
    """y_n = f(x_n, axis)."""
    if not node.only(0):
        return None
    return node.again(node.values(), axis=shift(node.int("axis", ALONG[node.op_type])))


@batching("LayerNormalization", "RMSNormalization")
def normalise(op: Builder, node: Rows) -> Answer:
    """y_n = scale_n · normalised(x_n) + bias_n; a scale of a row broadcasts to x, along the other axes too."""
    axis, rank = node.int("axis", -1), node.static_rank(0)
    if node.only(0):
        return node.again(node.values(), axis=shift(axis))
    if rank is None or any(node.has(n) and node.static_rank(n) is None for n in (1, 2)):
        return None
    ones = op.filled(node.lengths(0, axis % rank), 1, element_type(node.input(1)))
    y, *others = node.again([node.value(0), ones], axis=shift(axis) if node.is_batched(0) else axis)
    y = op.Mul(y, aligned(op, node, 1, rank))
    y = op.Add(y, aligned(op, node, 2, rank)) if node.has(2) else y
    return [y, *(other if node.is_batched(0) else repeated(op, other, node.length) for other in others)]


@batching("SoftMaxBackward", domain=DOMAIN)
def softmax_backward(op: Builder, node: Rows) -> Answer:
    """Where one operand is shared, the operators of the body broadcast it."""
    both = node.is_batched(0) and node.is_batched(1)
    return node.again(node.values(), axis=shift(node.int("axis", 1))) if both else None


@batching("LayerNormBackward", domain=DOMAIN)
def layer_norm_backward(op: Builder, node: Rows) -> Answer:
    """dx_n; the gradients of gamma and beta are sums over a row, which the body has."""
    if any(node.is_read(n) for n in range(1, len(node.node.outputs))):
        return None
    if not node.only(0, 1, 2, 3) or not all(node.is_batched(n) or not node.has(n) for n in range(4)):
        return None
    outputs = node.again(node.values(), begin_norm_axis=shift(node.int("begin_norm_axis", -1)))
    for value in outputs[1:]:
        value.name = ""
    return outputs


@batching("QuantizeLinear", "DequantizeLinear")
def quantize(op: Builder, node: Rows) -> Answer:
    """One scale, or one for each entry along an axis; one that differs between rows is one along theirs."""
    rank = node.static_rank(1)
    if rank == 0 and node.is_batched(1):
        return node.again([node.rows(n) if node.has(n) else None for n in range(node.count)], axis=0, block_size=None)
    if not node.only(0) or rank is None or rank > 1 or node.int("block_size", 0):
        return None
    if rank == 0 and (y := elementwise_folded(op, node)) is not None:
        return y
    return node.again(node.values(), axis=shift(node.int("axis", 1)))


@batching(*(f"Reduce{kind}" for kind in REDUCTIONS.split()))
def reduce(op: Builder, node: Rows) -> Answer:
    """y_n = Σ over axes of x_n; all of a row's where none are given."""
    if not node.only(0):
        return None
    x, axes, rank = node.value(0), node.optional(1), node.static_rank(0)
    count = [0] if axes is None else known_lengths(axes)
    if axes is not None and (count is None or count == [0]) and node.constant(1) is None:
        return node.again([x, shifted(op, axes)]) if node.int("noop_with_empty_axes", 0) else None
    if axes is not None and count != [0]:
        return node.again([x, shifted(op, axes)])
    if node.int("noop_with_empty_axes", 0):
        return node.again([x])
    if rank is None:
        return None
    if rank == 0:
        return node.again([op.Unsqueeze(x, [1]), op.ints([1])], keepdims=0)
    return node.again([x, op.ints(list(range(1, rank + 1)))])


@batching("CumSum", "CumProd")
def cumulative(op: Builder, node: Rows) -> Answer:
    return node.again([node.value(0), shifted(op, node.input(1))]) if node.only(0) else None


@batching("Concat")
def concat(op: Builder, node: Rows) -> Answer:
    return node.again([node.rows(n) for n in range(node.count)], axis=shift(node.int("axis", 0)))


@batching("Compress")
def compress(op: Builder, node: Rows) -> Answer:
    """Along an axis, or of a row's elements; a condition that differs between rows leaves rows of several lengths."""
    if not node.only(0):
        return None
    if node.given("axis"):
        return node.again(node.values(), axis=shift(node.int("axis", 0)))
    return node.again([flat(op, node), node.value(1)], axis=1)


def flat(op: Builder, node: Rows, index: int = 0) -> ir.Value:
    """The elements of each row, one after the other."""
    return in_shape(op, node.rows(index), node.length, product(op, node.lengths(index, 0)))


@batching("Trilu", "Det")
def last_two(op: Builder, node: Rows) -> Answer:
    """Matrices are the last two axes."""
    return node.again(node.values()) if node.only(0) else None
