"""Walking models: the graphs inside nodes, the nodes of graphs, and what nodes read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, overload

import numpy as np
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backprop.opset.graphs.lazy import ir

DEFAULT_DOMAINS = ("", "ai.onnx")
WITH_SUBGRAPHS = frozenset({"If", "Loop", "Scan", "SequenceMap"})  # of the default domain, whose nodes are most
_CONSTANT_TYPES = {"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32}


def is_standard(node: NodeProto | ir.Node, *op_types: str) -> bool:
    """Whether a node is of ONNX's own domain, and one of these operators where any are named."""
    return node.domain in DEFAULT_DOMAINS and (not op_types or node.op_type in op_types)


@overload
def subgraphs(node: NodeProto) -> list[GraphProto]: ...
@overload
def subgraphs(node: ir.Node) -> list[ir.Graph]: ...
def subgraphs(node: NodeProto | ir.Node) -> list[GraphProto] | list[ir.Graph]:
    """The graphs in a node's attributes."""
    if node.op_type not in WITH_SUBGRAPHS and node.domain in DEFAULT_DOMAINS:
        return []
    if isinstance(node, NodeProto):
        return [graph for a in node.attribute for graph in (*([a.g] if a.HasField("g") else ()), *a.graphs)]
    one, several = ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS
    given = [a for a in node.attributes.values() if a.type in (one, several) and not a.is_ref()]
    return [graph for a in given for graph in ([a.as_graph()] if a.type == one else a.as_graphs())]


@overload
def all_nodes(nodes: Iterable[NodeProto] | GraphProto | FunctionProto | ModelProto) -> Iterator[NodeProto]: ...
@overload
def all_nodes(nodes: Iterable[ir.Node]) -> Iterator[ir.Node]: ...
def all_nodes(nodes: Any) -> Iterator[Any]:
    """Some nodes and those of the graphs inside them, the outer before the inner; of a model, its functions' too."""
    if isinstance(nodes, ModelProto):
        for container in (nodes.graph, *nodes.functions):
            yield from all_nodes(container)
        return
    for node in nodes.node if isinstance(nodes, GraphProto | FunctionProto) else nodes:
        yield node
        for graph in subgraphs(node):
            yield from all_nodes(graph)


def all_graphs(
    owner: GraphProto | FunctionProto | ModelProto, enters: Callable[[NodeProto], bool] = lambda _: True
) -> Iterator[GraphProto]:
    """A graph and those inside it, the outer before the inner; of a model, those inside its functions too.

    enters: whether to go into the graphs of a node.
    """
    if isinstance(owner, ModelProto):
        for container in (owner.graph, *owner.functions):
            yield from all_graphs(container, enters)
        return
    if isinstance(owner, GraphProto):
        yield owner
    for node in filter(enters, owner.node):
        for graph in subgraphs(node):
            yield from all_graphs(graph, enters)


def reads(node: NodeProto) -> set[str]:
    """The names of everything a node reads: its inputs, and what its sub-graphs capture from outside."""
    names = {name for name in node.input if name}
    for graph in subgraphs(node):
        names |= {v.name for v in graph.output}.union(*map(reads, graph.node)) - defined_in(graph)
    return names


def values_read(node: ir.Node) -> set[ir.Value]:
    """Everything a node reads: its inputs, and what its sub-graphs capture from outside."""
    values = {value for value in node.inputs if value is not None}
    for graph in subgraphs(node):
        defined = {*graph.inputs, *graph.initializers.values()}.union(*(inner.outputs for inner in graph))
        values |= set(graph.outputs).union(*map(values_read, graph)) - defined
    return values


def defined_in(graph: GraphProto) -> set[str]:
    """The names of a graph's inputs and initializers, and of what its nodes make."""
    names = {v.name for v in graph.input} | {t.name for t in graph.initializer}
    return names.union(*(node.output for node in graph.node)) - {""}


def called(node: NodeProto) -> str:
    """What to call a node in messages: its name, or that of its first output."""
    return node.name or next(filter(None, node.output), "")


def attributes_of(node: NodeProto) -> dict[str, Any]:
    """The attributes that are written on a node."""
    return {a.name: helper.get_attribute_value(a) for a in node.attribute if not a.ref_attr_name}


def constant_tensor(node: NodeProto) -> TensorProto | None:
    """What a Constant node holds, whichever attribute says it; None for a sparse tensor, texts and other nodes."""
    if not is_standard(node, "Constant") or not node.attribute:
        return None
    attribute = node.attribute[0]
    if attribute.ref_attr_name:  # in a function, whose caller says it
        return None
    if attribute.name == "value":
        return attribute.t
    dtype = _CONSTANT_TYPES.get(attribute.name)
    return dtype and numpy_helper.from_array(np.array(helper.get_attribute_value(attribute), dtype))
