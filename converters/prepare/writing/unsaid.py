"""What files need not state of values: types and shapes that inference without numbers tells anew, as onnxruntime does.

They would be a tenth of a small file.
"""

from onnx import GraphProto, ModelProto, TypeProto, helper, shape_inference

from onnx_backprop.converters.prepare.large_weights import set_aside
from onnx_backprop.opset.functions.long_vectors import NAMELESS, is_nameless
from onnx_backprop.opset.graphs.edit import assign, copied
from onnx_backprop.opset.graphs.walk import all_graphs, is_standard


def without_inferred(proto: ModelProto) -> ModelProto:
    """A model without the types and shapes, of values that are no outputs, that plain inference gives it again.

    Those of what operators of other domains make stay, ours too: no schema says them to onnxruntime.
    """
    light, weights = set_aside(proto)
    bare = copied(light)
    for graph in all_graphs(bare.graph):
        foreign = _foreign(graph)
        assign(graph.value_info, [copied(v) for v in graph.value_info if v.name in foreign])
    inferred = shape_inference.infer_shapes(bare)
    for graph, again in zip(all_graphs(light.graph), all_graphs(inferred.graph), strict=True):
        foreign = _foreign(graph)
        stated = [(v, _text(v.type)) for v in graph.value_info]
        names = {v.name for v, _ in stated}
        known = {v.name: _text(v.type) for v in again.value_info if v.name in names and v.name not in foreign}
        known |= {
            t.name: _text(helper.make_tensor_type_proto(t.data_type, t.dims))
            for t in graph.initializer
            if t.name in names
        }
        known |= {v.name: _text(v.type) for v in graph.input if v.name in names}
        assign(graph.value_info, [copied(v) for v, text in stated if known.get(v.name) != text])
    return weights.put_back(light)


def _foreign(graph: GraphProto) -> set[str]:
    return {name for node in graph.node if not is_standard(node) for name in node.output}


def _text(type_: TypeProto) -> bytes:
    """A type, to be compared; lengths that have no name but a number are all the same."""
    text = type_.SerializeToString(deterministic=True)
    if NAMELESS.encode() in text and type_.HasField("tensor_type"):
        type_ = copied(type_)
        for dim in type_.tensor_type.shape.dim:
            if is_nameless(dim.dim_param):
                dim.Clear()
        text = type_.SerializeToString(deterministic=True)
    return text
