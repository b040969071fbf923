"""Inference that does not take the elements of a sequence for tensors of one shape.

onnx's inference gives the elements one shape with one name for each unknown length, so that two of different lengths
seem to be equal, and of a sequence that a Loop carries it keeps the shape of the elements before the first step.
"""

from collections.abc import Callable, Iterator

from onnx import GraphProto, ModelProto, NodeProto, TypeProto, ValueInfoProto

from onnx_backprop.converters.prepare.graphs import all_nodes, assign, copied, scoped_graphs, subgraphs, without_imports
from onnx_backprop.opset.functions.long_vectors import NAMELESS

Infer = Callable[[ModelProto], ModelProto]
_HIDDEN = "onnx_backprop.element"
_READING = ("ConcatFromSequence", "OptionalGetElement", "SequenceAt")


def infer_elements(proto: ModelProto, infer: Infer) -> ModelProto:
    """`infer(proto)`, where what is read from a sequence has a rank only; none where a Loop carries sequences."""
    if not any(node.op_type in _READING for node in all_nodes(proto)):
        return infer(proto)
    first = infer(proto)
    ranked = not any(_is_held(info.type) for node, graph in _nodes(first.graph) if node.op_type == "Loop"
                     for info in (*graph.value_info, *graph.output) if info.name in node.output)  # fmt: skip
    work = copied(proto)
    work.opset_import.add(domain=_HIDDEN, version=1)
    for (node, graph), (_, known) in zip(list(_nodes(work.graph)), list(_nodes(first.graph)), strict=True):
        if node.op_type not in _READING or node.domain:
            continue
        info = _info(known, node.output[0])
        if info is None or not info.type.tensor_type.elem_type:
            continue
        node.domain = _HIDDEN
        given = _info(graph, node.output[0])
        if given is not None and given.type.tensor_type.HasField("shape"):
            continue
        stated = _rank_of(info, ranked=ranked)
        if all(v.name != info.name for v in graph.output):
            assign(graph.value_info, [*(v for v in graph.value_info if v.name != info.name), stated])
        else:
            next(v for v in graph.output if v.name == info.name).CopyFrom(stated)
    result = infer(work)
    for node in all_nodes(result):
        if node.domain == _HIDDEN:
            node.domain = ""
    for graph, _ in scoped_graphs(result.graph):
        for info in (*graph.value_info, *graph.output):
            for dim in info.type.sequence_type.elem_type.tensor_type.shape.dim if _is_sequence(info.type) else ():
                if dim.dim_param.startswith(NAMELESS):  # onnxruntime, too, would take them for equal
                    dim.Clear()
    without_imports(result, _HIDDEN)
    return result


def _nodes(graph: GraphProto) -> Iterator[tuple[NodeProto, GraphProto]]:
    """Every node with its graph."""
    for node in graph.node:
        yield node, graph
        for inner in subgraphs(node):
            yield from _nodes(inner)


def _info(graph: GraphProto, name: str) -> ValueInfoProto | None:
    return next((v for v in (*graph.value_info, *graph.output) if v.name == name), None)


def _is_sequence(type_: TypeProto) -> bool:
    return type_.WhichOneof("value") == "sequence_type"


def _is_held(type_: TypeProto) -> bool:
    return type_.WhichOneof("value") in ("sequence_type", "optional_type")


def _rank_of(info: ValueInfoProto, *, ranked: bool) -> ValueInfoProto:
    result = copied(info)
    for dim in result.type.tensor_type.shape.dim if result.type.tensor_type.HasField("shape") else ():
        dim.Clear()
    if not ranked:
        result.type.tensor_type.ClearField("shape")
    return result
