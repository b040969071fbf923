"""Weights that a file keeps in Constant nodes and in the branches of If, made initializers of the graph.

Exporters that know no initializers (every older Paddle file), and those that write a model twice, once per branch,
leave them there. As initializers they have names that a caller can train them by.
"""

from collections import Counter
from collections.abc import Iterator

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from onnx_backprop.converters.prepare.graphs import DEFAULT_DOMAINS, copied, made_in, rename, subgraphs, unique
from onnx_backprop.converters.prepare.large_weights import FLOATS, constant_of

_GIVEN = "/weight"  # behind the name of what a branch gives out


def lift_weights(proto: ModelProto) -> None:
    """Turn float Constants into initializers, those of If branches, with the branches' own, into the main graph's.

    They keep their names; where two branches use one name, the second gets a number.
    """
    graphs = list(_graphs(proto.graph))
    defined = Counter(name for graph in graphs for name in made_in(graph))
    lifted = [(graph, _take(graph, main=graph is graphs[0])) for graph in graphs]
    defined.subtract(tensor.name for _, tensors in lifted for tensor in tensors)
    taken = {name for name, count in defined.items() if count > 0}
    for graph, tensors in lifted:
        new: dict[str, str] = {}
        for tensor in tensors:
            name = unique(tensor.name, taken)
            if name != tensor.name:
                new[tensor.name] = name
                tensor.name = name
        for node in graph.node if new else ():
            rename(node, new)
        proto.graph.initializer.extend(tensors)


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """A graph and the branches in it."""
    yield graph
    for node in graph.node:
        if node.op_type == "If" and node.domain in DEFAULT_DOMAINS:
            for branch in subgraphs(node):
                yield from _graphs(branch)


def _take(graph: GraphProto, *, main: bool) -> list[TensorProto]:
    """Take float tensors out of a graph, in place, since the graphs of its nodes are held on to.

    What the main graph gives out as it is stays; of what a branch gives out an Identity of the tensor is left.
    """
    given = {value.name for value in graph.output}
    kept = {value.name for value in graph.input} | (given if main else set())
    taken: list[TensorProto] = []
    for n, node in reversed(list(enumerate(graph.node))):
        tensor = constant_of(node)
        if tensor is None or not isinstance(node.output[0], str) or node.output[0] in kept:
            continue
        taken.append(_named(tensor, node.output[0]))
        if node.output[0] in given:
            taken[-1].name += _GIVEN
            node.CopyFrom(_identity(node.output[0]))
        else:
            del graph.node[n]
    for n, tensor in () if main else reversed(list(enumerate(graph.initializer))):
        if tensor.data_type not in FLOATS or tensor.name in kept:
            continue
        taken.append(_named(tensor, tensor.name))
        if tensor.name in given:
            taken[-1].name += _GIVEN
            graph.node.append(_identity(tensor.name))
        del graph.initializer[n]
    return taken[::-1]


def _named(tensor: TensorProto, name: str) -> TensorProto:
    result = copied(tensor)
    result.name = name
    return result


def _identity(name: str) -> NodeProto:
    return helper.make_node("Identity", [name + _GIVEN], [name], name=name)
