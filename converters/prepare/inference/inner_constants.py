"""Short integer constants, copied into the bodies of Loop and Scan that read them.

onnx's inference follows axes and lengths, but not from outside into a graph, and so loses the rank of what is
unsqueezed or reshaped there.
"""

from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from onnx_backprop.opset.graphs.edit import assign
from onnx_backprop.opset.graphs.names import rename, unique, used_names
from onnx_backprop.opset.graphs.scope import Scope, scoped_graphs
from onnx_backprop.opset.graphs.walk import defined_in, is_standard, reads, subgraphs


def copy_constants(proto: ModelProto) -> None:
    """Give every body of a Loop or a Scan, in place, its own Constants for those that it reads from outside."""
    reserved = used_names(proto.graph)
    for graph, scope in scoped_graphs(proto.graph):
        for body in (body for node in graph.node if is_standard(node, "Loop", "Scan") for body in subgraphs(node)):
            _copy_into(body, scope, reserved)


def _copy_into(body: GraphProto, scope: Scope, reserved: set[str]) -> None:
    read = set[str]().union(*map(reads, body.node)) - defined_in(body)
    new: dict[str, str] = {}
    constants: list[NodeProto] = []
    for name in sorted(read):
        array = scope.constant(name)
        if array is not None and array.dtype.kind == "i":
            new[name] = unique(f"{name}/inside", reserved)
            value = numpy_helper.from_array(array)
            constants.append(helper.make_node("Constant", [], [new[name]], name=new[name], value=value))
    for node in body.node if new else ():
        rename(node, new)
    assign(body.node, [*constants, *body.node])
