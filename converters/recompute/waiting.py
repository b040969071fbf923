"""What the backward pass need not keep: values to compute again behind a gradient, and shapes to take early."""

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onnx_backprop.converters.recompute.marks import DROPPED, ROUNDED
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import dims

_END = 2**31  # beyond the last axis


def waiting(op: Builder, x: ir.Value, gates: Sequence[ir.Value]) -> ir.Value:
    """The same value, once the gates are there: Reshape(x, 0 · Size(gate)), zeros being the lengths that x has."""
    size = op.Size(gates[0])
    for gate in gates[1:]:
        size = op.Add(size, op.Size(gate))
    shape = dims(x)
    return op.typed(op.Reshape(x, op.Mul(op.Shape(x) if shape is None else [1] * len(shape), op.Mul(size, 0))), x)


def dependent(nodes: Iterable[ir.Node], values: Iterable[ir.Value]) -> set[ir.Value]:
    """Some values, and all that nodes make of them."""
    result = set(values)
    for node in nodes:
        if not result.isdisjoint(node.inputs):
            result.update(node.outputs)
    return result


class Backward:
    """The backward pass of a graph: which nodes it has, in which order, and what of it depends on a gradient."""

    def __init__(self, graph: ir.Graph, forward: Sequence[ir.Node], gradients: Iterable[ir.Value]) -> None:
        """forward: all other nodes. gradients: those that reach the nodes."""
        known = set(forward)
        self.nodes = [node for node in graph if node not in known]
        self.place = {node: n for n, node in enumerate(self.nodes)}
        arrived = [g for g in gradients if g.producer() in self.place and not is_constant(g)]
        self.late = dependent(self.nodes, arrived)

    def gate(self, node: ir.Node) -> ir.Value | None:
        """A gradient that a node is read with, and that is there before it; None where there is none."""
        seen, left = {node}, [node]
        while left:
            one = left.pop(0)
            for g in one.inputs:
                while g is not None and g in self.late:
                    producer = _maker(g)
                    if self.place.get(producer, -1) < self.place[node]:
                        return g
                    g = next((x for x in producer.inputs if x in self.late), None)
            readers = {r for y in one.outputs for r, _ in y.uses() if r in self.place and r not in seen}
            seen |= readers
            left += sorted(readers, key=self.place.__getitem__)
        return None


def dropped_again(graph: ir.Graph, op: Builder, backward: Backward) -> None:
    """What Dropout has made of a value that the backward pass reads anyway is computed again there, not kept.

    Of the probabilities of attention, P for the gradient of Softmax and Dropout(P) for that of the product with the
    values, P and the mask stay.
    """
    for drop in [node for node in graph if DROPPED in node.metadata_props]:
        y, (dropped, zero, scaled) = drop.outputs[0], drop.inputs
        assert scaled is not None
        x, factor = _maker(scaled).inputs
        assert x is not None
        uses = [(r, n) for r, n in y.uses() if r in backward.place and r.op_type != "Shape"]
        if all(r not in backward.place or r.op_type == "Shape" for r, _ in x.uses()):
            continue
        for reader, n in uses:
            gate = backward.gate(reader)
            if gate is not None:
                again = op.Where(dropped, zero, op.Mul(waiting(op, x, [gate]), factor))
                reader.replace_input_with(n, op.typed(again, y))
                graph.insert_before(reader, op.nodes)
                op.nodes.clear()


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
            op.nodes[-1].metadata_props[ROUNDED] = str(x.name)
            graph.insert_after(node, op.nodes)
            op.nodes.clear()
            for reader, n in early:
                reader.replace_input_with(n, y)
            for reader, _ in late:
                start, end = (reader.attributes.get_int(name, None) for name in ("start", "end"))
                here = op.inside()  # whose constants no node outside of the reader's body, or before it, can read
                part = (
                    shape
                    if start is None and end is None
                    else here.Slice(shape, [start or 0], [_END if end is None else end])
                )
                if reader.outputs[0].is_graph_output():  # of a body, which hands on nothing from outside
                    part = here.Identity(part)
                place = reader.graph or graph
                place.insert_before(reader, here.nodes)
                reader.outputs[0].replace_all_uses_with(part, replace_graph_outputs=True)
                place.remove(reader, safe=True)


def _maker(value: ir.Value) -> ir.Node:
    node = value.producer()
    assert node is not None
    return node
