"""Ifs of constant conditions, which exporters leave of what a module decides: the branch that is taken, without the If.

onnxruntime takes them apart too, and loses values of some inside the bodies of loops.
"""

from __future__ import annotations

from collections import Counter

from onnx import GraphProto, ModelProto, NodeProto, helper

from onnx_backprop.opset.graphs.edit import assign
from onnx_backprop.opset.graphs.names import rename, unique, used_names
from onnx_backprop.opset.graphs.scope import Scope, scoped_graphs
from onnx_backprop.opset.graphs.walk import all_graphs, called, defined_in, is_standard


def take_branches(proto: ModelProto) -> None:
    """Put the branch that a constant condition chooses in the place of its If, in place.

    Names stay, but a second value or node of one name gets a number.
    """
    splicer: _Splicer | None = None
    for graph, scope in scoped_graphs(proto.graph):
        if not any(_taken(node, scope) for node in graph.node):
            continue
        splicer = splicer or _Splicer(proto.graph)
        pending, nodes = [*reversed(graph.node)], list[NodeProto]()
        while pending:
            node = pending.pop()
            branch = _taken(node, scope)
            if branch is None:
                nodes.append(node)
            else:
                pending.extend(reversed(splicer.splice(node, branch)))
                graph.initializer.extend(branch.initializer)
        assign(graph.node, nodes)


def _taken(node: NodeProto, scope: Scope) -> GraphProto | None:
    """The branch that is taken whatever a model's inputs are; None if there is none."""
    condition = scope.constant(node.input[0]) if is_standard(node, "If") else None
    if condition is None or condition.size != 1:
        return None
    name = "then_branch" if condition.item() else "else_branch"
    return next(a.g for a in node.attribute if a.name == name)


class _Splicer:
    """The names of a model, and how many graphs have each."""

    def __init__(self, graph: GraphProto) -> None:
        self._names = used_names(graph)
        graphs = list(all_graphs(graph))
        self._values = Counter(name for one in graphs for name in defined_in(one))
        self._nodes = Counter(node.name for one in graphs for node in one.node)

    def splice(self, node: NodeProto, branch: GraphProto) -> list[NodeProto]:
        """The nodes of a branch, with the names that they have outside, which give what the If gave."""
        computed = {name for inner in branch.node for name in inner.output}
        new: dict[str, str] = {}
        for value, result in zip(branch.output, node.output, strict=False):
            if result and value.name in computed and value.name not in new and self._values[result] == 1:
                new[value.name] = result
        for name in sorted(defined_in(branch) - new.keys()):
            if self._values[name] > 1:
                new[name] = unique(name, self._names)
        for tensor in branch.initializer:
            tensor.name = new.get(tensor.name, tensor.name)
        nodes = list(branch.node)
        for value, result in zip(branch.output, node.output, strict=False):
            if result and new.get(value.name) != result:
                name = unique(f"{called(node)}/{result}", self._names)
                nodes.append(helper.make_node("Identity", [value.name], [result], name))
        for inner in nodes:
            rename(inner, new)
            if self._nodes[inner.name] > 1 and inner.name:
                inner.name = unique(inner.name, self._names)
        return nodes
