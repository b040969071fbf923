"""Several seeds in one run: what depends on them becomes the body of a Scan along a new leading axis."""

from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.expand import function_body, rename
from onnx_backprop.converters.reverse.forward import label
from onnx_backprop.converters.reverse.known import known_lengths
from onnx_backprop.opset import DOMAIN
from onnx_backprop.opset.graphs.names import named_after, used_names
from onnx_backprop.opset.graphs.order import descendants
from onnx_backprop.opset.graphs.walk import is_standard

AXIS = "seeds"  # the symbol of the leading axis


def _constants_of(graph: ir.Graph, nodes: Collection[ir.Node]) -> list[ir.Node]:
    """The Constants of a graph that only these nodes read; inference sees their numbers where they are beside them."""
    return [
        node
        for node in graph
        if is_standard(node, "Constant")
        and not node.outputs[0].is_graph_output()
        and node.outputs[0].uses()
        and all(reader in nodes for reader, _ in node.outputs[0].uses())
    ]


def write_out(graph: ir.Graph, seeds: Sequence[ir.Value], opsets: Mapping[str, int]) -> None:
    """Put the body of each MaxPoolBackward of known lengths in its place, in which no seed decides who wins.

    The winners are found once then, not for every row. Bodies for unknown lengths ask the seed for its own; other
    operators of the domain do little without a seed, and as nodes they can change their kernels.
    """
    op = Builder(used_names(graph))
    for node in descendants(graph, seeds):
        if node.domain != DOMAIN or node.op_type != "MaxPoolBackward":
            continue
        if any(value is None or known_lengths(value) is None for value in node.inputs):
            continue
        body = function_body(node, opsets)
        assert body is not None
        graph.insert_before(node, body.nodes)
        for inner in body.nodes:
            rename(inner, named_after(label(node), node.op_type) or label(node), op.unique)
        (y,), (dx,) = node.outputs, body.outputs
        assert dx is not None
        y.replace_all_uses_with(dx, replace_graph_outputs=True)
        dx.name, y.name = y.name, None
        graph.remove(node, safe=True)


def batch(
    graph: ir.Graph,
    op: Builder,
    seeds: Sequence[ir.Value],
    results: Sequence[ir.Value],
    stacked: Sequence[ir.Value] | None = None,
) -> list[ir.Value]:
    """One result for every entry of the seeds along a new axis 0.

    seeds: graph inputs, which get that axis; results: graph outputs. What does not depend on the seeds is computed
    once. stacked: values with that axis, in the place of the seeds, which go from the inputs. Returns what takes the
    place of the results, among the outputs too, under their names.
    """
    inside = descendants(graph, seeds)
    inside = [*_constants_of(graph, set(inside)), *inside]
    graph.remove(inside)
    rows: list[ir.Value] = []
    for seed in seeds:
        row = ir.Value(name=op.unique(f"{seed.name}_row"), type=seed.type, shape=seed.shape)
        seed.replace_all_uses_with(row)
        rows.append(row)
        if stacked is not None:
            graph.inputs.remove(seed)
        elif row.shape is not None:
            seed.shape = ir.Shape([AXIS, *row.shape])
    own = {value for node in inside for value in node.outputs}
    places = [list(graph.outputs).index(value) for value in results]
    for value in results:
        graph.outputs.remove(value)
    body = op.inside()
    body.nodes.extend(inside)
    body.prefix = op.prefix
    ends: list[ir.Value] = []
    for value in results:
        ends.append(value if value in own and value not in ends else body.typed(body.Identity(value), value))
    step = ir.Graph(rows, ends, nodes=body.nodes, name=op.unique(f"{op.prefix}/row"))
    made = op.emit("Scan", stacked or seeds, {"body": step, "num_scan_inputs": len(seeds)}, outputs=len(results))
    for place, value, new in sorted(zip(places, results, made, strict=True), key=lambda one: one[0]):
        new.type, new.shape = value.type, None if value.shape is None else ir.Shape([AXIS, *value.shape])
        new.name, value.name = value.name, op.unique(f"{value.name}_row")
        graph.outputs.insert(place, new)
    return list(made)
