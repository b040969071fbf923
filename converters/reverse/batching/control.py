"""Branches and loops whose course is the same for all rows: their bodies are batched, in the place of a Scan over rows.

The states of a loop differ between rows from the first step on, equal ones where they begin alike.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnx_backprop.converters.reverse.batching.together import is_tensor, spans
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.opset.core.shapes import Dim
from onnx_backprop.opset.graphs.order import descendants
from onnx_backprop.opset.graphs.walk import is_standard

# rows of a graph: given its builder and what differs in it, what takes the place of its outputs
Batched = Callable[[ir.Graph, Builder, dict[ir.Value, ir.Value], Sequence[ir.Value]], list[ir.Value]]


@dataclass(frozen=True)
class Control:
    """An If, Loop or Scan, whose inputs before `first` decide its course, and whose outputs before `free` do."""

    node: ir.Node
    first: int
    states: int
    free: int

    @property
    def bodies(self) -> dict[str, ir.Graph]:
        return {name: a.as_graph() for name, a in self.node.attributes.items() if a.type == ir.AttributeType.GRAPH}

    def differing(self, body: ir.Graph, batched: Iterable[ir.Value]) -> set[ir.Value]:
        """The values of a body that differ between rows where they come in."""
        outer = set(batched)
        read = {n for n, value in enumerate(self.node.inputs) if value in outer}
        states = range(self.first, self.first + self.states)
        return outer | {value for n, value in enumerate(body.inputs) if n in read or n in states}


def comes_apart(node: ir.Node, differing: Collection[ir.Value]) -> bool:
    """Whether a node with sub-graphs has rows by its bodies."""
    return control_of(node, differing) is not None


def control_of(node: ir.Node, batched: Collection[ir.Value]) -> Control | None:
    """What a node with sub-graphs is, where its course is the same for all rows and every value has rows."""
    if is_standard(node, "If"):
        control = Control(node, 1, 0, 0)
    elif is_standard(node, "Loop"):
        control = Control(node, 2, max(len(node.inputs) - 2, 0), 1)
    elif is_standard(node, "Scan"):
        control = Control(node, 0, len(node.inputs) - node.attributes["num_scan_inputs"].as_int(), 0)
    else:
        return None
    if any(value in batched for value in node.inputs[: control.first]):
        return None
    if not all(value is None or is_tensor(value) for value in (*node.inputs, *node.outputs)):
        return None
    for body in control.bodies.values():
        begin = control.differing(body, batched)
        nodes = list(body)
        reached = {value for inner in descendants(nodes, begin) for value in inner.outputs} | begin
        _, _, loose = spans(nodes, begin, comes_apart)
        if reached.intersection(body.outputs[: control.free]) or loose.intersection(body.outputs):
            return None
        if any(value.shape is None for value in (*body.inputs[control.first :], *body.outputs[control.free :])):
            return None
        if any(value.shape is None for value in node.outputs):
            return None
    return control


def batch_control(
    op: Builder,
    control: Control,
    values: Sequence[ir.Value | None],
    states: Sequence[ir.Value],
    symbol: Dim,
    inside: Batched,
) -> Sequence[ir.Value]:
    """The node for all rows. values: its inputs as they are, or with rows; states: those of a loop, with rows."""
    node, first = control.node, control.first
    inputs = [*values[:first], *states, *values[first + control.states :]]
    rows = [n for n, (new, old) in enumerate(zip(inputs, node.inputs, strict=True)) if new is not old]
    attributes = {name: a.value for name, a in node.attributes.items()}
    for name, body in control.bodies.items():
        begin: dict[ir.Value, ir.Value] = {}
        starts: list[ir.Value] = []
        for n, value in enumerate(body.inputs):
            start = value
            if n in rows or first <= n < first + control.states:
                start = ir.Value(name=op.unique(f"{value.name}_rows"), type=value.type)
                start.shape = None if value.shape is None else ir.Shape([symbol, *value.shape])
                begin[value] = start
            starts.append(start)
        inner, ends = op.inside(), list(body.outputs)
        inner.prefix = op.prefix
        initializers = list(body.initializers.values())
        body.outputs.clear()
        results = [*ends[: control.free], *inside(body, inner, begin, ends[control.free :])]
        kept = list(body)
        body.remove(kept)
        body.inputs.clear()
        body.initializers.clear()
        produced = {value for one in (*kept, *inner.nodes) for value in one.outputs}
        outputs: list[ir.Value] = []
        for n, value in enumerate(results):
            new = value
            if value not in produced or value in outputs:
                new = inner.typed(inner.Identity(value), value)
            if n >= control.free and (shape := ends[n].shape) is not None:
                new.type, new.shape = ends[n].type, ir.Shape([symbol, *shape])
            outputs.append(new)
        nodes = [*kept, *inner.nodes]
        attributes[name] = ir.Graph(
            starts, outputs, nodes=nodes, initializers=initializers, name=op.unique(f"{op.prefix}/rows")
        )
    if node.op_type == "Scan":
        count = len(inputs) - control.states
        attributes["scan_input_axes"] = _axes(attributes.get("scan_input_axes"), count, rows, control.states)
        stacked = len(node.outputs) - control.states
        attributes["scan_output_axes"] = _axes(attributes.get("scan_output_axes"), stacked, range(stacked), 0)
    results = op.emit(node.op_type, inputs, attributes, outputs=len(node.outputs))
    if node.op_type != "Loop":
        return results
    count = op.Shape(states[0], end=1) if states else None
    return [
        y if n < control.states else _rows_first(op, y, row, count)
        for n, (y, row) in enumerate(zip(results, node.outputs, strict=True))
    ]


def _axes(given: Sequence[int] | None, count: int, moved: Iterable[int], start: int) -> list[int] | None:
    """The axes along which a Scan steps, behind that of the rows where there is one; None where there are none."""
    axes, places = list(given or [0] * count), set(moved)
    return [axis + 1 if n + start in places and axis >= 0 else axis for n, axis in enumerate(axes)] or None


def _rows_first(op: Builder, value: ir.Value, row: ir.Value, count: ir.Value | None) -> ir.Value:
    """What a Loop stacks, (step, n, …), as (n, step, …).

    Of no steps onnxruntime stacks as many rows as the body declares, which is 0 where it says no number.
    count: of rows.
    """
    rank = len(row.shape or ())
    turned = op.Transpose(value, perm=[1, 0, *range(2, rank + 1)])
    if count is None:
        return turned
    return op.Reshape(turned, op.joined(count, op.Shape(turned, start=1)), allowzero=1)
