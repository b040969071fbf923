"""Sequences that Loops carry: inference gives them the shape of the elements that they begin with, whatever steps add.

onnxruntime infers likewise and folds Shape nodes after that, so it is not enough to know better: the Loop is given a
sequence of elements of unknown shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TypeProto, helper, numpy_helper

from onnx_backprop.converters.prepare.graphs import DEFAULT_DOMAINS, called, subgraphs, unique, used_names

Infer = Callable[[ModelProto], ModelProto]
Types = Mapping[str, TypeProto]
_COUNTERS = 2  # iteration and condition, in front of the states


def infer_with_sequences(proto: ModelProto, infer: Infer) -> ModelProto:
    """`infer(proto)`, with such sequences in the place of others."""
    inferred = infer(proto)
    graphs = list(_with_types(inferred.graph, {}))
    found = [
        (graph, node, n, types[name].sequence_type.elem_type.tensor_type)
        for graph, types in graphs
        for node in graph.node
        if node.op_type == "Loop" and node.domain in DEFAULT_DOMAINS
        for n, name in enumerate(node.input[_COUNTERS:], _COUNTERS)
        if name in types and types[name].sequence_type.elem_type.tensor_type.HasField("shape")
    ]
    if not found:
        return inferred
    taken = used_names(inferred.graph)
    for graph, node, n, element in found:
        _exchange(graph, node, n, element, taken)
    for graph, _ in graphs:
        for value in (*graph.value_info, *graph.output):
            if value.type.sequence_type.elem_type.HasField("tensor_type"):
                value.type.sequence_type.elem_type.tensor_type.ClearField("shape")
    return infer_with_sequences(inferred, infer)


def _with_types(graph: GraphProto, outer: Types) -> Iterator[tuple[GraphProto, Types]]:
    """A graph and those inside it, each with the types of what its nodes can see."""
    types = {**outer, **{v.name: v.type for v in (*graph.input, *graph.value_info, *graph.output)}}
    yield graph, types
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _with_types(inner, types)


def _exchange(graph: GraphProto, node: NodeProto, n: int, element: TypeProto.Tensor, taken: set[str]) -> None:
    """An element of another rank is put in, which leaves no shape to infer, and taken out again."""
    other, more, loose = (unique(f"{called(node)}/{node.input[n]}/{part}", taken) for part in ("other", "more", "any"))
    of_other_rank = np.zeros([1] * (not element.shape.dim), helper.tensor_dtype_to_np_dtype(element.elem_type))
    nodes = [
        helper.make_node("Constant", [], [other], name=other, value=numpy_helper.from_array(of_other_rank)),
        helper.make_node("SequenceInsert", [node.input[n], other], [more], name=more),
        helper.make_node("SequenceErase", [more], [loose], name=loose),
    ]
    position = [one is node for one in graph.node].index(True)
    for one in reversed(nodes):
        graph.node.insert(position, one)
    node.input[n] = loose
