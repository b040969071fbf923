"""The names in models: which are taken, which are free, and other names for what nodes read and make."""

from __future__ import annotations

from collections.abc import Mapping

from onnx import GraphProto, NodeProto

from onnx_backprop.opset.graphs.lazy import ir
from onnx_backprop.opset.graphs.walk import made_in, subgraphs


def used_names(graph: GraphProto | ir.Graph) -> set[str]:
    """The names of all values and nodes of a graph and the graphs inside it."""
    if isinstance(graph, GraphProto):
        return names_in(graph)
    names = {str(v.name) for v in (*graph.inputs, *graph.initializers.values())}
    for node in graph:
        names.add(str(node.name))
        names.update(str(v.name) for v in node.outputs)
        for inner in subgraphs(node):
            names |= used_names(inner)
    return names


def names_in(graph: GraphProto) -> set[str]:
    """The names of all values and nodes of a graph and of the graphs inside it."""
    names = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        names |= {node.name, *node.output}
        for attribute in node.attribute:
            for inner in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                names |= names_in(inner)
    return names


def unique(name: str, taken: set[str]) -> str:
    """`name`, with a number behind it where it is taken; it is taken from then on."""
    candidate, n = name, 1
    while candidate in taken:
        n += 1
        candidate = f"{name}_{n}"
    taken.add(candidate)
    return candidate


def rename(node: NodeProto, new: Mapping[str, str]) -> None:
    """Rename what a node reads, also from within its sub-graphs, and what it makes."""
    node.input[:] = [new.get(name, name) for name in node.input]
    node.output[:] = [new.get(name, name) for name in node.output]
    for graph in subgraphs(node):
        outer = {name: other for name, other in new.items() if name not in made_in(graph)}
        for inner in graph.node:
            rename(inner, outer)
        for value in graph.output:
            value.name = outer.get(value.name, value.name)
