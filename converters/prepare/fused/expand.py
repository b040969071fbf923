"""`expand_fused`: every fused operator of a model as the standard operators that it stands for."""

from onnx import GraphProto, ModelProto, NodeProto, TypeProto, helper

from onnx_backprop.converters.prepare.fused.composer import Composer, Table, mark_branches
from onnx_backprop.converters.prepare.fused.known import Known
from onnx_backprop.converters.prepare.fused.table import EXPANSIONS, REGISTERED, reason_against
from onnx_backprop.converters.prepare.large_weights import FLOATS
from onnx_backprop.opset import DOMAIN, OPSET_VERSION
from onnx_backprop.opset.core.errors import UnsupportedError
from onnx_backprop.opset.graphs.edit import add_import, assign, copied, without_imports
from onnx_backprop.opset.graphs.names import used_names
from onnx_backprop.opset.graphs.walk import all_graphs, all_nodes, is_standard, reads, subgraphs

REFUSED = "onnx_backprop.refused"  # the metadata that says why a node stays as it is


def with_expansions_written(proto: ModelProto) -> ModelProto:
    """The model with the operators written out that users have registered expansions for; itself where it has none."""
    if not any((node.domain, node.op_type) in REGISTERED for node in all_nodes(proto.graph)):
        return proto
    result = copied(proto)
    expand_fused(
        result, {value.name: value.type for value in proto.graph.value_info}, {k: EXPANSIONS[k] for k in REGISTERED}
    )
    return result


def expand_fused(proto: ModelProto, declared: dict[str, TypeProto], table: Table = EXPANSIONS) -> None:
    """Replace, in place, the nodes that the table knows, in sub-graphs too; outputs keep their names.

    A node in a form that is not handled stays, for it may lie beside every gradient path; the reason stays with it and
    comes out where a gradient would have to pass. `declared`: types to fall back on where inference finds none; the
    type of what such a node makes is added, that of its first tensor, for a path to reach it.
    """
    domains = {domain for domain, _ in table if domain}  # the default one stays imported
    if not any((node.domain, node.op_type) in table or reason_against(node) for node in all_nodes(proto.graph)):
        return
    read = {value.name for graph in all_graphs(proto.graph) for value in graph.output}
    read = read.union(*map(reads, proto.graph.node))
    _Expander(proto, declared, used_names(proto.graph), read, table).graph(proto.graph, None)
    mark_branches(proto.graph)
    left = {node.domain for node in all_nodes(proto)}
    if DOMAIN in left:
        add_import(proto, DOMAIN, OPSET_VERSION)
    for domain in domains - left:
        without_imports(proto, domain)


class _Expander:
    def __init__(
        self, proto: ModelProto, declared: dict[str, TypeProto], taken: set[str], read: set[str], table: Table
    ) -> None:
        self.opsets = list(proto.opset_import)
        self.declared = declared
        self.taken = taken
        self.read = read
        self.table = table

    def graph(self, graph: GraphProto, outer: Known | None) -> Known:
        """Rewrite a graph and those inside it; what is known of its values in the end."""
        known = Known(graph, self.opsets, self.declared, outer)
        nodes: list[NodeProto] = []
        for node in graph.node:
            branches = [self.graph(inner, known) for inner in subgraphs(node)]
            stands_for = self._expanded(graph, node, known)
            if stands_for is None:
                nodes.append(node)
                known.learn(node)
                if is_standard(node, "If"):
                    known.learn_branches(node, branches)
            else:
                nodes += stands_for
        assign(graph.node, nodes)
        return known

    def _expanded(self, graph: GraphProto, node: NodeProto, known: Known) -> list[NodeProto] | None:
        """What a node stands for, all fused operators in it written out too; None where it stays."""
        against = reason_against(node)
        expansion = self.table.get((node.domain, node.op_type))
        if expansion is None or against:
            self._leave(node, against, known)
            return None
        composer = Composer(node, known, self.taken, self.read)
        try:
            results = expansion(composer)
            if results is None:
                composer.check_all_asked(len(node.output) if is_standard(node) else 1)
                return None
            nodes = composer.replace([results] if isinstance(results, str) else results)
        except UnsupportedError as e:
            self._leave(node, e.message, known)
            return None
        graph.initializer.extend(composer.parameters)
        return [deeper for inner in nodes for deeper in self._expanded(graph, inner, known) or [inner]]

    def _leave(self, node: NodeProto, reason: str, known: Known) -> None:
        if not reason:
            return
        node.metadata_props.add(key=REFUSED, value=reason)
        scale_first = node.op_type == "QLinearConcat"  # and its zero point, which has the type of the result
        element = known.element(node.input[int(scale_first)]) if len(node.input) > scale_first else 0
        if element in FLOATS and not self.declared.get(node.output[0], TypeProto()).tensor_type.elem_type:
            self.declared[node.output[0]] = helper.make_tensor_type_proto(element, None)
