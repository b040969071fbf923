"""Gradients of weights first: what they read need not be kept while the rest of the backward pass runs.

onnxruntime runs nodes as late as it can, gradients of weights last of all, and keeps every dy for them until then. Here
whatever leads on to other layers waits for the weights' gradients along the same dy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import dims

STANDS_FOR = (
    "onnx_backprop.stands_for"  # on a node of the forward pass that gives a value rounded, or as it is: its name
)
_END = 2**31  # beyond the last axis
WAITS = "onnx_backprop.waits"  # on a node that gives its first input as it is, once others are there


def waiting(op: Builder, x: ir.Value, gates: Sequence[ir.Value]) -> ir.Value:
    """The same value, once the gates are there: Reshape(x, 0 · Size(gate)), zeros being the lengths that x has."""
    size = op.Size(gates[0])
    for gate in gates[1:]:
        size = op.Add(size, op.Size(gate))
    shape = dims(x)
    y = op.Reshape(x, op.Mul(op.Shape(x) if shape is None else [1] * len(shape), op.Mul(size, 0)))
    op.nodes[-1].metadata_props[WAITS] = ""
    return op.typed(y, x)


def dependent(nodes: Iterable[ir.Node], values: Iterable[ir.Value]) -> set[ir.Value]:
    """Some values, and all that nodes make of them."""
    found = set(values)
    for node in nodes:
        if not found.isdisjoint(node.inputs):
            found.update(node.outputs)
    return found


def weights_first(
    graph: ir.Graph, op: Builder, nodes: Sequence[ir.Node], gradients: Mapping[ir.Value, ir.Value]
) -> None:
    """Reorder the backward pass. nodes: those of it, in order; gradients: by what they are the gradient of."""
    place = {node: n for n, node in enumerate(nodes)}
    late = dependent(nodes, [g for g in gradients.values() if g.producer() in place and not is_constant(g)])
    inner = {g for x, g in gradients.items() if x.producer() is not None}
    leads: dict[ir.Node, bool] = {}
    for node in reversed(nodes):
        readers = [r for y in node.outputs for r, _ in y.uses()]
        leads[node] = not inner.isdisjoint(node.outputs) or any(leads.get(r, True) for r in readers)
    for x, g in gradients.items():
        if g.shape is None:
            g.shape = x.shape
    for g in sorted((g for g in inner if g in late), key=lambda g: place[_maker(g)]):
        uses = [(reader, n) for reader, n in g.uses() if reader in place]
        on = [(reader, n) for reader, n in uses if leads[reader]]
        ends = dict.fromkeys(_end(r, late) for r, _ in uses if not leads[r] and _alone(r, g, late))
        if on and ends:
            y = waiting(op, g, list(ends))
            graph.insert_before(on[0][0], op.nodes)
            op.nodes.clear()
            for reader, n in on:
                reader.replace_input_with(n, y)
    graph.sort()


def is_constant(value: ir.Value) -> bool:
    """Whether no run changes a value of the backward pass."""
    node = value.producer()
    return node is None or node.op_type == "Constant"


def shapes_first(graph: ir.Graph, op: Builder, forward: Sequence[ir.Node]) -> None:
    """Take the shapes that the backward pass asks for early, of values that it does not read.

    What the forward pass goes on with is Reshape(x, Shape(x)), so that x need not be there until the gradient is.
    """
    known = set(forward)
    for node in forward:
        for x in node.outputs:
            uses = list(x.uses())
            late = [(reader, n) for reader, n in uses if reader not in known]
            early = [(reader, n) for reader, n in uses if reader in known and reader.op_type != "Shape"]
            if not late or not early or any(reader.op_type != "Shape" for reader, _ in late):
                continue
            shape = op.Shape(x)
            y = op.typed(op.Reshape(x, shape), x)
            op.nodes[-1].metadata_props[STANDS_FOR] = str(x.name)
            graph.insert_after(node, op.nodes)
            op.nodes.clear()
            for reader, n in early:
                reader.replace_input_with(n, y)
            for reader, _ in late:
                start, end = (reader.attributes.get_int(name, None) for name in ("start", "end"))
                part = (
                    shape
                    if start is None and end is None
                    else op.Slice(shape, [start or 0], [_END if end is None else end])
                )
                graph.insert_before(reader, op.nodes)
                op.nodes.clear()
                reader.outputs[0].replace_all_uses_with(part)
                graph.remove(reader, safe=True)


def in_float32(graph: ir.Graph) -> None:
    """Let everything read values themselves in the place of what stands for them."""
    made = {str(v.name): v for node in graph for v in node.outputs}
    made |= {str(v.name): v for v in (*graph.inputs, *graph.initializers.values())}
    for node in graph:
        if STANDS_FOR in node.metadata_props:
            node.outputs[0].replace_all_uses_with(made[node.metadata_props[STANDS_FOR]], replace_graph_outputs=True)


def _maker(value: ir.Value) -> ir.Node:
    node = value.producer()
    assert node is not None
    return node


def _alone(node: ir.Node, g: ir.Value, late: set[ir.Value]) -> bool:
    return all(x is g for x in node.inputs if x in late)


def _end(node: ir.Node, late: set[ir.Value]) -> ir.Value:
    """The last value of a chain of nodes that read nothing else of the backward pass."""
    y = node.outputs[0]
    while True:
        readers = {reader for reader, _ in y.uses()}
        if len(readers) != 1 or not _alone(reader := readers.pop(), y, late):
            return y
        y = reader.outputs[0]
