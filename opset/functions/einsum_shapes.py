"""Einsum nodes whose output onnx's shape inference gets wrong.

Of a letter or an axis of the ellipsis that several operands have, it takes the length of one of them, though any may
be 1 and be stretched to another: where they are symbols that differ, the run alone tells.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from onnx import GraphProto, NodeProto, ValueInfoProto

from onnx_backprop.opset.graphs.edit import copied
from onnx_backprop.opset.graphs.types import Dims, shapes_of
from onnx_backprop.opset.graphs.walk import is_standard


def misread(graph: GraphProto) -> set[int]:
    """All Einsum nodes of a graph, by position, where one of them is misread: others may read what that one makes."""
    nodes = {n: node for n, node in enumerate(graph.node) if is_standard(node, "Einsum")}
    if not nodes:
        return set()
    known = shapes_of(graph)
    return set(nodes) if any(_is_misread(node, known) for node in nodes.values()) else set()


def without_guesses(value: ValueInfoProto) -> ValueInfoProto:
    """The shape of an Einsum's output as far as it is certain: lengths that no operand can stretch."""
    result = copied(value)
    for dim in result.type.tensor_type.shape.dim:
        if dim.HasField("dim_param") or dim.dim_value == 1:
            dim.Clear()
    return result


def _is_misread(node: NodeProto, known: Mapping[str, Dims]) -> bool:
    equation = next((a.s.decode(errors="replace") for a in node.attribute if a.name == "equation"), "")
    axes: defaultdict[object, set[object]] = defaultdict(set)
    for name, term in zip(node.input, equation.replace(" ", "").partition("->")[0].split(","), strict=False):
        lengths = known.get(name)
        if lengths is None:
            continue
        for axis, length in zip(_axes(term, len(lengths)), lengths, strict=False):
            axes[axis].add(length)
    return any(len(lengths) > 1 and not all(isinstance(n, int) for n in lengths) for lengths in axes.values())


def _axes(term: str, rank: int) -> Iterator[object]:
    """What each axis of an operand is called: a letter, or its place from the end of the ellipsis."""
    before, dots, behind = term.partition("...")
    yield from before
    if dots:
        yield from range(len(before) + len(behind) - rank, 0)
    yield from behind
