"""Operators that work element by element: rows are one more axis, and ranks are made equal behind it."""

import onnx_ir as ir

from onnx_backprop.converters.reverse.batching.folding import elementwise_folded
from onnx_backprop.converters.reverse.batching.registry import Answer, Rows, Shared, batching
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import constant_value
from onnx_backprop.opset import DOMAIN
from onnx_backprop.opset.graphs.facts import ELEMENTWISE, IN_PLACE, Fact

# An element of the result depends on those at the same place of the inputs alone, which broadcast.
POINTWISE = ELEMENTWISE | IN_PLACE | Fact("Acosh And Asinh Atan BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor")
POINTWISE |= Fact("CastLike Ceil Celu Cosh Equal Erf Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish Identity")
POINTWISE |= Fact("IsInf IsNaN Less LessOrEqual Mish Mod Not Or PRelu RegexFullMatch Round Selu Shrink Sign Sinh")
POINTWISE |= Fact("Softplus Softsign StringConcat Swish ThresholdedRelu Xor")


def aligned(op: Builder, node: Rows, index: int, rank: int) -> ir.Value | None:
    """An input as an operand of rows that have a given rank: axes of length 1 behind that of the rows."""
    value, value_rank = node.value(index), node.static_rank(index)
    if value is None or not node.is_batched(index) or value_rank is None or value_rank == rank:
        return value
    return op.Unsqueeze(value, list(range(1, 1 + rank - value_rank)))


@batching(*POINTWISE)
def pointwise(op: Builder, node: Rows) -> Answer:
    """y_n = f(a_n, b_n, …), each row broadcasting as it did."""
    if (y := elementwise_folded(op, node)) is not None:
        return y
    if node.count == 1:
        return node.again(node.values())
    if node.op_type == "Clip" and not node.only(0):
        return None  # limits have no axes
    if node.op_type in ("Clip", "CastLike"):
        results = node.again(node.values())
        return results if node.is_batched(0) else Shared(results[0])
    ranks = [node.static_rank(n) for n in range(node.count) if node.has(n)]
    known = [rank for rank in ranks if rank is not None]
    if len(known) < len(ranks):
        return None
    rank = max(known)
    values = [aligned(op, node, n, rank) for n in range(node.count)]
    if node.op_type == "PRelu" and not node.is_batched(0):
        values[0] = node.rows(0)
    return node.again(values)


@batching("ReLUBackward", domain=DOMAIN)
def equal_shapes(op: Builder, node: Rows) -> Answer:
    """The same of operands that do not broadcast; where one is shared, the operators of the body do."""
    if (y := elementwise_folded(op, node)) is not None and all(node.is_batched(n) for n in range(node.count)):
        return y
    return node.again(node.values()) if all(node.is_batched(n) for n in range(node.count)) else None


@batching("Dropout")
def dropout(op: Builder, node: Rows) -> Answer:
    """x where nothing is dropped; what draws does so for each row."""
    mode = constant_value(node.optional(2))
    if not node.only(0) or (node.has(2) and (mode is None or mode.any())):
        return None
    return node.again(node.values())
