"""Short integer constants, copied into the bodies of Loop and Scan that read them.

onnx's inference follows axes and lengths, but not from outside into a graph, and so loses the rank of what is
unsqueezed or reshaped there.
"""

from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from onnx_backprop.converters.prepare.graphs import (
    DEFAULT_DOMAINS,
    all_nodes,
    assign,
    made_in,
    reads,
    rename,
    subgraphs,
    unique,
    used_names,
)
from onnx_backprop.opset.functions.scope import Scope

_LOOPS = ("Loop", "Scan")


def copy_constants(proto: ModelProto) -> None:
    """Give every body of a Loop or a Scan, in place, its own Constants for those that it reads from outside."""
    if any(node.op_type in _LOOPS for node in all_nodes(proto.graph)):
        _walk(proto.graph, Scope(proto.graph), used_names(proto.graph))


def _walk(graph: GraphProto, scope: Scope, taken: set[str]) -> None:
    for node in graph.node:
        for body in subgraphs(node):
            if node.op_type in _LOOPS and node.domain in DEFAULT_DOMAINS:
                _copy_into(body, scope, taken)
            _walk(body, Scope(body, scope), taken)


def _copy_into(body: GraphProto, scope: Scope, taken: set[str]) -> None:
    read = set[str]().union(*map(reads, body.node)) - made_in(body)
    new: dict[str, str] = {}
    constants: list[NodeProto] = []
    for name in sorted(read):
        array = scope.constant(name)
        if array is not None and array.dtype.kind == "i":
            new[name] = unique(f"{name}/inside", taken)
            value = numpy_helper.from_array(array)
            constants.append(helper.make_node("Constant", [], [new[name]], name=new[name], value=value))
    for node in body.node if new else ():
        rename(node, new)
    assign(body.node, [*constants, *body.node])
