"""Weights that a file keeps in Constant nodes and in the branches of If, made initializers of the graph.

Exporters that know no initializers (every older Paddle file), and those that write a model twice, once per branch,
leave them there. As initializers they have names that a caller can train them by.
"""

from collections import Counter
from collections.abc import Iterator

from onnx import GraphProto, ModelProto, TensorProto

from onnx_backprop.converters.prepare.graphs import DEFAULT_DOMAINS, assign, copied, made_in, rename, subgraphs, unique
from onnx_backprop.converters.prepare.large_weights import FLOATS, constant_of


def lift_weights(proto: ModelProto) -> None:
    """Turn float Constants into initializers, those of If branches, with the branches' own, into the main graph's.

    They keep their names; where two branches use one name, the second gets a number.
    """
    graphs = list(_graphs(proto.graph))
    defined = Counter(name for graph in graphs for name in made_in(graph))
    lifted = [(graph, list(_take(graph, main=graph is proto.graph))) for graph in graphs]
    defined.subtract(tensor.name for _, tensors in lifted for tensor in tensors)
    taken = {name for name, count in defined.items() if count}
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


def _take(graph: GraphProto, *, main: bool) -> Iterator[TensorProto]:
    """Take float tensors out of a graph; what it gives out as it is has to stay."""
    kept_names = {value.name for value in (*graph.output, *graph.input)}
    nodes, initializers = list(graph.node), list(graph.initializer)
    for node in list(nodes):
        tensor = constant_of(node)
        if tensor is not None and isinstance(node.output[0], str) and node.output[0] not in kept_names:
            nodes.remove(node)
            named = copied(tensor)
            named.name = node.output[0]
            yield named
    for tensor in () if main else list(initializers):
        if tensor.data_type in FLOATS and tensor.name not in kept_names:
            initializers.remove(tensor)
            yield copied(tensor)
    if len(nodes) < len(graph.node):
        assign(graph.node, nodes)
    if len(initializers) < len(graph.initializer):
        assign(graph.initializer, initializers)
