"""Several seeds in one run: what depends on them becomes the body of a Scan along a new leading axis."""

from collections.abc import Sequence

import onnx_ir as ir

from onnx_backprop.converters.prepare.graphs import values_read
from onnx_backprop.converters.reverse.builder import Builder

AXIS = "seeds"  # the symbol of the leading axis


def dependents(graph: ir.Graph, values: Sequence[ir.Value]) -> list[ir.Node]:
    """The nodes that depend on any of the values, in the order of the graph."""
    reached, found = set(values), []
    for node in graph:
        if not reached.isdisjoint(values_read(node)):
            found.append(node)
            reached.update(node.outputs)
    return found


def batch(graph: ir.Graph, op: Builder, seeds: Sequence[ir.Value], results: Sequence[ir.Value]) -> list[ir.Value]:
    """One result for every entry of the seeds along a new axis 0.

    seeds: graph inputs, or values without a producer, which get the leading axis; results: graph outputs that depend
    on them linearly. What does not depend on the seeds is computed once. Returns what takes the place of the results,
    among the outputs too, under their names.
    """
    inside = dependents(graph, seeds)
    graph.remove(inside)
    rows: list[ir.Value] = []
    for seed in seeds:
        row = ir.Value(name=op.unique(f"{seed.name}_row"), type=seed.type, shape=seed.shape)
        seed.replace_all_uses_with(row)
        seed.shape = None if row.shape is None else ir.Shape([AXIS, *row.shape])
        rows.append(row)
    made = {value for node in inside for value in node.outputs}
    places = [list(graph.outputs).index(value) for value in results]
    for value in results:
        graph.outputs.remove(value)
    body = op.inside()
    body.nodes.extend(inside)
    body.prefix = op.prefix
    ends: list[ir.Value] = []
    for value in results:
        ends.append(value if value in made and value not in ends else body.typed(body.Identity(value), value))
    step = ir.Graph(rows, ends, nodes=body.nodes, name=op.unique(f"{op.prefix}/row"))
    stacked = op.emit("Scan", seeds, {"body": step, "num_scan_inputs": len(seeds)}, outputs=len(results))
    for place, value, new in sorted(zip(places, results, stacked, strict=True), key=lambda one: one[0]):
        new.type, new.shape = value.type, None if value.shape is None else ir.Shape([AXIS, *value.shape])
        new.name, value.name = value.name, op.unique(f"{value.name}_row")
        graph.outputs.insert(place, new)
    return list(stacked)
