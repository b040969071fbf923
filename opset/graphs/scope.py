"""What the nodes of a graph can see: the shapes, types and constants of its values and of the graphs around it."""

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
from onnx import FunctionProto, GraphProto, TensorProto, ValueInfoProto, numpy_helper

from onnx_backprop.opset.graphs.types import Dims, shape_dims
from onnx_backprop.opset.graphs.walk import constant_tensor, subgraphs

CONSTANT_LIMIT = 64  # entries; shapes, scales and regions of interest are shorter


class Scope:
    """The tensors that a graph's nodes may name, its own and those of the graphs around it."""

    def __init__(self, graph: GraphProto | None = None, outer: "Scope | None" = None) -> None:
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
            if (constant := constant_tensor(node)) is not None:
                self._constants[node.output[0]] = constant

    def _note(self, value: ValueInfoProto) -> None:
        name, tensor = value.name, value.type.tensor_type
        if element := tensor.elem_type:
            self._types[name] = element
        if tensor.HasField("shape"):
            self._dims[name] = shape_dims(tensor.shape)

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

    def constant(self, name: str) -> np.ndarray | None:
        """A short constant, None when the tensor is none."""
        if name not in self._constants:
            return None if self._outer is None or name in self._dims else self._outer.constant(name)
        tensor = self._constants[name]
        return numpy_helper.to_array(tensor) if prod(tensor.dims) <= CONSTANT_LIMIT else None


def scoped_graphs(graph: GraphProto | FunctionProto, outer: Scope | None = None) -> Iterator[tuple[Any, Scope]]:
    """A graph or a function and the graphs inside it, each with what its nodes can see: of a function's nothing."""
    scope = Scope(graph if isinstance(graph, GraphProto) else None, outer)
    yield graph, scope
    for node in graph.node:
        for inner in subgraphs(node):
            yield from scoped_graphs(inner, scope)
