"""A Squeeze with an empty list of axes loses the list.

onnxruntime makes every axis of length 1 of it, as without a list; onnx's inference makes none.
"""

from onnx import ModelProto

from onnx_backprop.opset.graphs.edit import assign
from onnx_backprop.opset.graphs.scope import scoped_graphs
from onnx_backprop.opset.graphs.walk import is_standard


def without_empty_axes(proto: ModelProto) -> None:
    """Change the nodes in place; a list that is computed or fed stays."""
    for graph, scope in scoped_graphs(proto.graph):
        for node in (node for node in graph.node if is_standard(node, "Squeeze")):
            axes = scope.constant(node.input[1]) if len(node.input) > 1 else None
            if axes is not None and not axes.size:
                del node.input[1:]
            assign(node.attribute, [attribute for attribute in node.attribute if attribute.ints])
