"""What a model says about the tensors in it: shapes, as far as inference finds them, and small constants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from onnx_backprop.opset.core.errors import InvalidModelError, OnnxBackpropError
from onnx_backprop.opset.core.op import DOMAIN, Arg, Array, Op
from onnx_backprop.opset.core.schema import type_dims
from onnx_backprop.opset.core.shapes import Dims
from onnx_backprop.opset.functions.long_vectors import infer_shapes

PROTO_LIMIT = 2**31 - 1  # bytes a protobuf message can hold
CONSTANT_LIMIT = 64  # entries; shapes, scales and regions of interest are shorter


class Scope:
    """The tensors that a graph's nodes may name, its own and those of the graphs around it."""

    def __init__(self, graph: GraphProto | None = None, outer: Scope | None = None) -> None:
        self._outer = outer
        self._dims: dict[str, Dims] = {}
        self._constants: dict[str, TensorProto] = {}
        self._types: dict[str, int] = {}
        if graph is None:
            return
        for value in (*graph.input, *graph.output, *graph.value_info):
            self._note(value)
        inputs = {value.name for value in graph.input}
        for tensor in graph.initializer:
            self._dims.setdefault(tensor.name, tuple(tensor.dims))
            self._types.setdefault(tensor.name, tensor.data_type)
            if tensor.name not in inputs:  # another one is a default that the caller may override
                self._constants[tensor.name] = tensor
        for node in graph.node:
            if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
                self._note_constant(node)

    def _note(self, value: ValueInfoProto) -> None:
        if value.type.tensor_type.elem_type:
            self._types[value.name] = value.type.tensor_type.elem_type
        dims = type_dims(value.type)
        if dims is not None:
            self._dims[value.name] = dims

    def _note_constant(self, node: NodeProto) -> None:
        for attribute in node.attribute:
            if attribute.name == "value":
                self._constants[node.output[0]] = attribute.t
            elif attribute.name == "value_ints":
                self._constants[node.output[0]] = helper.make_tensor(
                    "", TensorProto.INT64, [len(attribute.ints)], attribute.ints
                )

    def dims(self, name: str) -> Dims | None:
        """The dimensions of a tensor; None when not even its rank is known."""
        if name in self._dims or self._outer is None:
            return self._dims.get(name)
        return self._outer.dims(name)

    def states_type(self, name: str) -> bool:
        """Whether the graph itself states the element type of one of its tensors."""
        return name in self._types

    def element_type(self, name: str) -> int:
        """The element type of a tensor, 0 where it is unknown."""
        if name in self._types or name in self._dims or self._outer is None:
            return self._types.get(name, 0)
        return self._outer.element_type(name)

    def constant(self, name: str) -> Array | None:
        """A short constant, None when the tensor is none."""
        if name not in self._constants:
            return None if self._outer is None or name in self._dims else self._outer.constant(name)
        tensor = self._constants[name]
        return numpy_helper.to_array(tensor) if prod(tensor.dims) <= CONSTANT_LIMIT else None

    def args(self, op: Op, node: NodeProto) -> list[Arg | None]:
        """What is known about each input of an operator's node; None for an absent one."""
        names = [*node.input, *[""] * (len(op.inputs) - len(node.input))]
        return [
            Arg.of_array(spec, self.dims(name), None if spec.tensor else self.constant(name)) if name else None
            for spec, name in zip(op.inputs, names, strict=True)
        ]


def reads(node: NodeProto) -> Iterator[str]:
    """The names that a node reads, those of its sub-graphs' nodes and results too."""
    yield from node.input
    for attribute in node.attribute:
        for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            for inner in graph.node:
                yield from reads(inner)
            yield from (value.name for value in graph.output)


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


def domain_nodes(model: ModelProto) -> Iterator[tuple[NodeProto, Scope]]:
    """Every node of our domain, in the main graph, its subgraphs and in functions, with what it can see."""
    yield from _walk(model.graph.node, Scope(model.graph))
    for function in model.functions:
        yield from _walk(function.node, Scope())


def _walk(nodes: Sequence[NodeProto], scope: Scope) -> Iterator[tuple[NodeProto, Scope]]:
    for node in nodes:
        if node.domain == DOMAIN:
            yield node, scope
        for attribute in node.attribute:
            graphs: list[GraphProto] = [attribute.g] if attribute.HasField("g") else list(attribute.graphs)
            for graph in graphs:
                yield from _walk(graph.node, Scope(graph, scope))


def infer_missing(model: ModelProto, ops: Mapping[str, Op]) -> None:
    """Write inferred types and shapes into the model where a node of our domain has an input without.

    Raises InvalidModelError for a contradiction. A model too large for a protobuf message stays as it is.
    """
    complete = all(
        not name or scope.dims(name) is not None
        for node, scope in domain_nodes(model)
        for name in node.input
        if node.op_type in ops
    )
    if complete or model.ByteSize() > PROTO_LIMIT:
        return
    try:
        inferred = infer_shapes(model, check_type=False)
    except OnnxBackpropError:
        raise
    except Exception as e:
        raise InvalidModelError(f"shape inference of the model failed: {e}") from e
    model.CopyFrom(inferred)
