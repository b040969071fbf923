"""Inference that does not take the elements of a sequence for tensors of one shape.

onnx's inference gives the elements one shape with one name for each unknown length, so that two of different lengths
seem to be equal, and of a sequence that a Loop carries it keeps the shape of the elements before the first step.
"""

from onnx import GraphProto, ModelProto, TypeProto, ValueInfoProto

from onnx_backprop.converters.prepare.inference.driver import Correct
from onnx_backprop.opset.functions.long_vectors import is_nameless
from onnx_backprop.opset.graphs.edit import assign, copied
from onnx_backprop.opset.graphs.hide import hide, show
from onnx_backprop.opset.graphs.walk import all_graphs, all_nodes, is_standard

_HIDDEN = "onnx_backprop.element"
_READING = ("ConcatFromSequence", "OptionalGetElement", "SequenceAt")


def ranked_elements(proto: ModelProto) -> Correct:
    """What is read from a sequence has a rank only; none where a Loop carries sequences."""
    if not any(node.op_type in _READING for node in all_nodes(proto)):
        return lambda _: None

    first = [True]

    def correct(inferred: ModelProto) -> ModelProto | None:
        if first:
            first.clear()
            return _hidden(proto, inferred)
        _shown(inferred)
        return None

    return correct


def _hidden(proto: ModelProto, first: ModelProto) -> ModelProto:
    """A copy of a model in which nothing is inferred of what is read from sequences, but what is stated of it."""
    graphs = list(all_graphs(first.graph))
    carried = {name for graph in graphs for node in graph.node if node.op_type == "Loop" for name in node.output}
    infos = (info for graph in graphs for info in (*graph.value_info, *graph.output) if info.name in carried)
    ranked = not any(_is_held(info.type) for info in infos)
    work = copied(proto)
    pairs = [(node, graph) for graph in all_graphs(work.graph) for node in graph.node]
    known_in = [graph for graph in graphs for _ in graph.node]
    for (node, graph), known in zip(pairs, known_in, strict=True):
        if not is_standard(node, *_READING):
            continue
        info = _info(known, node.output[0])
        if info is None or not info.type.tensor_type.elem_type:
            continue
        hide(work, [node], _HIDDEN)
        given = _info(graph, node.output[0])
        if given is not None and given.type.tensor_type.HasField("shape"):
            continue
        stated = _rank_of(info, ranked=ranked)
        if all(v.name != info.name for v in graph.output):
            assign(graph.value_info, [*(v for v in graph.value_info if v.name != info.name), stated])
        else:
            next(v for v in graph.output if v.name == info.name).CopyFrom(stated)
    return work


def _shown(result: ModelProto) -> None:
    """Let the nodes be what they were."""
    show(result, _HIDDEN)
    for graph in all_graphs(result.graph):
        for info in (*graph.value_info, *graph.output):
            if info.type.WhichOneof("value") != "sequence_type":
                continue
            for dim in info.type.sequence_type.elem_type.tensor_type.shape.dim:
                if is_nameless(dim.dim_param):  # onnxruntime, too, would take them for equal
                    dim.Clear()


def _info(graph: GraphProto, name: str) -> ValueInfoProto | None:
    return next((v for v in (*graph.value_info, *graph.output) if v.name == name), None)


def _is_held(type_: TypeProto) -> bool:
    return type_.WhichOneof("value") in ("sequence_type", "optional_type")


def _rank_of(info: ValueInfoProto, *, ranked: bool) -> ValueInfoProto:
    result = copied(info)
    for dim in result.type.tensor_type.shape.dim if result.type.tensor_type.HasField("shape") else ():
        dim.Clear()
    if not ranked:
        result.type.tensor_type.ClearField("shape")
    return result
