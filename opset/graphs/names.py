"""The names in models: which are taken, which are free, and other names for what nodes read and make."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from onnx import GraphProto, NodeProto

from onnx_backprop.opset.graphs.lazy import ir
from onnx_backprop.opset.graphs.walk import all_graphs, defined_in, subgraphs

RENEWED = "onnx_backprop.renewed"  # a node's metadata: the running statistic whose value after a run it gives


class Names(set[str]):
    """Names that are taken, and the last number that `unique` has put behind each: counting goes on from there."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        super().__init__(names)
        self.numbers: dict[str, int] = {}


def used_names(graph: GraphProto | ir.Graph) -> Names:
    """The names of all values and nodes of a graph and the graphs inside it."""
    names = Names()
    if isinstance(graph, GraphProto):
        for one in all_graphs(graph):
            names.update(value.name for value in (*one.input, *one.initializer))
            names.update(name for node in one.node for name in (node.name, *node.output))
        return names
    for one in (graph, *graph.subgraphs()):
        names.update(str(value.name) for value in (*one.inputs, *one.initializers.values()))
        names.update(str(named.name) for node in one for named in (node, *node.outputs))
    return names


def unique(name: str, taken: set[str]) -> str:
    """`name`, with a number behind it where it is taken; it is taken from then on."""
    numbers = taken.numbers if isinstance(taken, Names) else {}
    candidate = name
    while candidate in taken:
        numbers[name] = numbers.get(name, 1) + 1
        candidate = f"{name}_{numbers[name]}"
    taken.add(candidate)
    return candidate


def named_after(name: str, op_type: str) -> str | None:
    """What a node was named after when it was emitted: "p_grad" of the Mul "p_grad/Mul_2"; None of another name."""
    match = re.fullmatch(rf"(.*)/{re.escape(op_type)}(_\d+)?", name, re.DOTALL)
    return match[1] if match else None


def rename(node: NodeProto, new: Mapping[str, str]) -> None:
    """Rename what a node reads, also from within its sub-graphs, and what it makes."""
    node.input[:] = [new.get(name, name) for name in node.input]
    node.output[:] = [new.get(name, name) for name in node.output]
    for graph in subgraphs(node):
        outer = {name: other for name, other in new.items() if name not in defined_in(graph)}
        for inner in graph.node:
            rename(inner, outer)
        for value in graph.output:
            value.name = outer.get(value.name, value.name)
