"""Sequences that Loops carry: inference gives them the shape of the elements that they begin with, whatever steps add.

onnxruntime infers likewise and folds Shape nodes after that, so it is not enough to know better: the Loop is given a
sequence of elements of unknown shape.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TypeProto, helper

from onnx_backprop.converters.prepare.inference.driver import Correct
from onnx_backprop.opset.graphs.edit import insert
from onnx_backprop.opset.graphs.emit import Emitter
from onnx_backprop.opset.graphs.names import used_names
from onnx_backprop.opset.graphs.walk import called, is_standard, subgraphs

Types = Mapping[str, TypeProto]
_COUNTERS = 2  # iteration and condition, in front of the states


def loose_sequences(_: ModelProto) -> Correct:
    """Such sequences take the place of others."""
    return _corrected


def _corrected(inferred: ModelProto) -> ModelProto | None:
    graphs = list(_with_types(inferred.graph, {}))
    sequences = [
        (graph, node, n, types[name].sequence_type.elem_type.tensor_type)
        for graph, types in graphs
        for node in graph.node
        if is_standard(node, "Loop")
        for n, name in enumerate(node.input[_COUNTERS:], _COUNTERS)
        if name in types and types[name].sequence_type.elem_type.tensor_type.HasField("shape")
    ]
    if not sequences:
        return None
    reserved = used_names(inferred.graph)
    for graph, node, n, element in sequences:
        _exchange(graph, node, n, element, reserved)
    for graph, _ in graphs:
        for value in (*graph.value_info, *graph.output):
            if value.type.sequence_type.elem_type.HasField("tensor_type"):
                value.type.sequence_type.elem_type.tensor_type.ClearField("shape")
    return inferred


def _with_types(graph: GraphProto, outer: Types) -> Iterator[tuple[GraphProto, Types]]:
    """A graph and those inside it, each with the types of what its nodes can see."""
    types = {**outer, **{v.name: v.type for v in (*graph.input, *graph.value_info, *graph.output)}}
    yield graph, types
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _with_types(inner, types)


def _exchange(graph: GraphProto, node: NodeProto, n: int, element: TypeProto.Tensor, reserved: set[str]) -> None:
    """An element of another rank is put in, which leaves no shape to infer, and taken out again."""
    of_other_rank = np.zeros([1] * (not element.shape.dim), helper.tensor_dtype_to_np_dtype(element.elem_type))
    op = Emitter(f"{called(node)}/{node.input[n]}", reserved)
    more = op.SequenceInsert(node.input[n], op.constant(of_other_rank), name="more")
    loose = op.SequenceErase(more, name="any")
    insert(graph, [one is node for one in graph.node].index(True), op.nodes)
    node.input[n] = loose
