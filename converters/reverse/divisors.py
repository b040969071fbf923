"""Which node of a gradient divides by the number of what a mean is of: that of a whole batch may take its place."""

from collections.abc import Sequence

import onnx_ir as ir
from onnx import NodeProto

_DIVIDES_FOR = "onnx_backprop.divides_for"  # metadata of a Div: the mean whose gradient its second operand divides


def mark_divisor(quotient: ir.Value, mean: ir.Value) -> ir.Value:
    """State that all of the gradient of `mean` goes through `quotient`, where that is one at run time; returns it."""
    node = quotient.producer()
    if node is not None and node.op_type == "Div":
        node.metadata_props[_DIVIDES_FOR] = str(mean.name)
    return quotient


def divisions_for(mean: str, nodes: Sequence[NodeProto]) -> list[int]:
    """The positions of the nodes that `mark_divisor` has marked for a mean."""
    return [n for n, node in enumerate(nodes) for e in node.metadata_props if (e.key, e.value) == (_DIVIDES_FOR, mean)]
