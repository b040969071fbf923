"""Walking models: the graphs inside nodes, what nodes read, names that are free, and copies of messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar, overload

import numpy as np
from onnx import (
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TypeProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from onnx_backprop.opset.core.lazy import ir
from onnx_backprop.opset.functions.scope import Scope, names_in
from onnx_backprop.opset.functions.scope import unique as unique

Message = TypeVar("Message", ModelProto, GraphProto, NodeProto, TensorProto, TypeProto, ValueInfoProto)
DEFAULT_DOMAINS = ("", "ai.onnx")
_CONSTANT_TYPES = {"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32}
DEFINES = "onnx_backprop.defines"  # a node's metadata "index: what": an input that is no parameter though it is float

CHANGES = "onnx_backprop.changes"  # a Loop's metadata, "state: how" in lines: states whose shape its steps change


@overload
def subgraphs(node: NodeProto) -> list[GraphProto]: ...
@overload
def subgraphs(node: ir.Node) -> list[ir.Graph]: ...
def subgraphs(node: NodeProto | ir.Node) -> list[GraphProto] | list[ir.Graph]:
    """The graphs in a node's attributes."""
    if isinstance(node, NodeProto):
        return [graph for a in node.attribute for graph in ([a.g] if a.HasField("g") else a.graphs)]
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


def scoped_graphs(graph: GraphProto, outer: Scope | None = None) -> Iterator[tuple[GraphProto, Scope]]:
    """A graph and those inside it, each with what its nodes can see."""
    scope = Scope(graph, outer)
    yield graph, scope
    for node in graph.node:
        for inner in subgraphs(node):
            yield from scoped_graphs(inner, scope)


def reads(node: NodeProto) -> set[str]:
    """The names of everything a node reads: its inputs, and what its sub-graphs capture from outside."""
    names = {name for name in node.input if name}
    for graph in subgraphs(node):
        names |= {v.name for v in graph.output}.union(*map(reads, graph.node)) - made_in(graph)
    return names


def values_read(node: ir.Node) -> set[ir.Value]:
    """Everything a node reads: its inputs, and what its sub-graphs capture from outside."""
    values = {value for value in node.inputs if value is not None}
    for graph in subgraphs(node):
        made = {*graph.inputs, *graph.initializers.values()}.union(*(inner.outputs for inner in graph))
        values |= set(graph.outputs).union(*map(values_read, graph)) - made
    return values


def made_in(graph: GraphProto) -> set[str]:
    """The names of a graph's inputs and initializers, and of what its nodes make."""
    names = {v.name for v in graph.input} | {t.name for t in graph.initializer}
    return names.union(*(node.output for node in graph.node))


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


def called(node: NodeProto) -> str:
    """What to call a node in messages: its name, or that of its first output."""
    return node.name or next(filter(None, node.output), "")


def attributes_of(node: NodeProto) -> dict[str, Any]:
    """The attributes that are written on a node."""
    return {a.name: helper.get_attribute_value(a) for a in node.attribute if not a.ref_attr_name}


def constant_tensor(node: NodeProto) -> TensorProto | None:
    """What a Constant node holds, whichever attribute says it; None for a sparse tensor, texts and other nodes."""
    if node.op_type != "Constant" or node.domain not in DEFAULT_DOMAINS or not node.attribute:
        return None
    attribute = node.attribute[0]
    if attribute.ref_attr_name:  # in a function, whose caller says it
        return None
    if attribute.name == "value":
        return attribute.t
    dtype = _CONSTANT_TYPES.get(attribute.name)
    return dtype and numpy_helper.from_array(np.array(helper.get_attribute_value(attribute), dtype))


def copied(message: Message) -> Message:
    """A copy of a message."""
    result = type(message)()
    result.CopyFrom(message)
    return result


def replace_values(tensor: TensorProto, array: np.ndarray) -> None:
    """Give an initializer another array; its name and metadata stay."""
    metadata = list(tensor.metadata_props)
    name = tensor.name
    tensor.CopyFrom(numpy_helper.from_array(array, name))
    tensor.metadata_props.extend(metadata)


def assign(field: Any, values: Iterable[Any]) -> None:
    """Put other values, some of its own among them, in the place of a repeated field's."""
    new = list(values)
    del field[:]
    field.extend(new)


def without_imports(model: ModelProto, domain: str) -> None:
    """Take an opset import out of a model."""
    assign(model.opset_import, [o for o in model.opset_import if o.domain != domain])


def without_tensors(model: ModelProto, names: Collection[str]) -> ModelProto:
    """A copy of a model without the initializers and Constant nodes of given names, which are not copied meanwhile."""
    result = ModelProto()
    for target, source, left_out in ((result, model, ("graph",)), (result.graph, model.graph, ("initializer", "node"))):
        for field, value in source.ListFields():
            if field.name in left_out:
                continue
            if hasattr(value, "MergeFrom"):
                getattr(target, field.name).MergeFrom(value)
            else:
                setattr(target, field.name, value)
    result.graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name not in names)
    result.graph.node.extend(n for n in model.graph.node if n.op_type != "Constant" or n.output[0] not in names)
    return result
