"""Weights that a file keeps in Constant nodes, branches and bodies of loops, made initializers of the graph.

Exporters that know no initializers (every older Paddle file), and those that write a model twice, once per branch,
leave them there. As initializers they have names that a caller can train them by.
"""

from collections import Counter
from collections.abc import Iterable

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from onnx_backprop.converters.prepare.large_weights import FLOATS, constant_of
from onnx_backprop.opset.graphs.edit import copied
from onnx_backprop.opset.graphs.names import rename, unique
from onnx_backprop.opset.graphs.walk import all_graphs, all_nodes, defined_in, is_standard

_ORIGIN = "onnx_backprop.function"  # in metadata: the function and the tensor's name there
_GIVEN = "/weight"  # behind the name of what a branch gives out


def mark_constants(functions: Iterable[FunctionProto]) -> None:
    """Say where each Constant of a function comes from: a function that is called twice is inlined twice."""
    for n, function in enumerate(functions):
        for node in all_nodes(function):
            if node.op_type == "Constant" and node.output:
                node.metadata_props.add(key=_ORIGIN, value=f"{n}/{node.output[0]}")


def lift_weights(proto: ModelProto) -> None:
    """Turn float Constants into initializers, those of branches and bodies, with their own, into the main graph's.

    They keep their names; where two graphs use one name, the second gets a number. Copies of one Constant of a
    function are one weight.
    """
    graphs = list(all_graphs(proto.graph, lambda node: is_standard(node, "If", "Loop", "Scan")))
    defined = Counter(name for graph in graphs for name in defined_in(graph))
    lifted = [(graph, _take(graph, main=graph is graphs[0])) for graph in graphs]
    defined.subtract(tensor.name for _, tensors in lifted for tensor, _ in tensors)
    taken = {name for name, count in defined.items() if count > 0}
    first: dict[str, str] = {}
    for graph, tensors in lifted:
        new: dict[str, str] = {}
        for tensor, origin in tensors:
            known = first.get(origin) if origin else None
            name = known or unique(tensor.name, taken)
            if origin:
                first[origin] = name
            if name != tensor.name:
                new[tensor.name] = name
                tensor.name = name
            if known is None:
                proto.graph.initializer.append(tensor)
        for node in graph.node if new else ():
            rename(node, new)


def _take(graph: GraphProto, *, main: bool) -> list[tuple[TensorProto, str]]:
    """Take float tensors out of a graph, in place, since the graphs of its nodes are held on to; and their origins.

    What the main graph gives out as it is stays; of what a branch gives out an Identity of the tensor is left.
    """
    given = {value.name for value in graph.output}
    kept = {value.name for value in graph.input} | (given if main else set())
    taken: list[tuple[TensorProto, str]] = []
    for n, node in reversed(list(enumerate(graph.node))):
        tensor = constant_of(node)
        if tensor is None or not isinstance(node.output[0], str) or node.output[0] in kept:
            continue
        origin = next((p.value for p in node.metadata_props if p.key == _ORIGIN), "")
        taken.append((_named(tensor, node.output[0]), origin))
        if node.output[0] in given:
            taken[-1][0].name += _GIVEN
            node.CopyFrom(_identity(node.output[0]))
        else:
            del graph.node[n]
    for n, tensor in () if main else reversed(list(enumerate(graph.initializer))):
        if tensor.data_type not in FLOATS or tensor.name in kept:
            continue
        taken.append((_named(tensor, tensor.name), ""))
        if tensor.name in given:
            taken[-1][0].name += _GIVEN
            graph.node.append(_identity(tensor.name))
        del graph.initializer[n]
    return taken[::-1]


def _named(tensor: TensorProto, name: str) -> TensorProto:
    result = copied(tensor)
    result.name = name
    return result


def _identity(name: str) -> NodeProto:
    return helper.make_node("Identity", [name + _GIVEN], [name], name=name)
