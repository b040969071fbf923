"""A Scan or a Loop in one form: its states, what its steps are given and what they make, and stacks of the former."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from onnx_backprop.converters.prepare.exporters.detached import is_stop
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.expand import graph_copy
from onnx_backprop.converters.reverse.forward import label, unsupported
from onnx_backprop.opset.core.errors import InvalidModelError
from onnx_backprop.opset.graphs.walk import is_standard

Active = Callable[[Sequence[ir.Node], Iterable[ir.Value], Iterable[ir.Value]], set[ir.Value]]
Pairs = list[tuple[ir.Value, ir.Value]]
_STACKS = "onnx_backprop.stacks"  # metadata: how many of its last outputs a node has for its gradient


def is_loop(node: ir.Node) -> bool:
    """Whether a node is a Scan or a Loop."""
    return is_standard(node, "Loop", "Scan")


@dataclass
class Steps:
    """A Scan or a Loop in one form: the nodes of its body, their inputs and outputs, perhaps of a copy."""

    node: ir.Node
    nodes: list[ir.Node]
    body_inputs: list[ir.Value]  # iteration and condition of a Loop, then states, then slices
    body_outputs: list[ir.Value]  # the condition of a Loop, then states, then what is stacked

    @property
    def is_scan(self) -> bool:
        return self.node.op_type == "Scan"

    @cached_property
    def counters(self) -> int:
        """How many values a step is given in front of the states."""
        return 0 if self.is_scan else 2

    @cached_property
    def count(self) -> int:
        """The number of states."""
        sliced = self.node.attributes["num_scan_inputs"].as_int() if self.is_scan else 0
        return max(len(self.node.inputs) - self.counters - sliced, 0)

    @property
    def initial(self) -> list[ir.Value]:
        """The states before the first step, outside."""
        values = self.node.inputs[self.counters : self.counters + self.count]
        return [value for value in values if value is not None]

    @property
    def final(self) -> list[ir.Value]:
        """The states after the last step, outside."""
        return list(self.node.outputs[: self.count])

    @property
    def before(self) -> list[ir.Value]:
        """The states that a step begins with."""
        return self.body_inputs[self.counters : self.counters + self.count]

    @property
    def after(self) -> list[ir.Value]:
        """The states that a step leaves."""
        return self.body_outputs[self.counters // 2 :][: self.count]

    @property
    def sliced(self) -> Pairs:
        """Each scan input, and its slice."""
        values = self.node.inputs[self.counters + self.count :]
        slices = self.body_inputs[self.counters + self.count :]
        return [(x, part) for x, part in zip(values, slices, strict=True) if x is not None]

    @property
    def stacked(self) -> Pairs:
        """Each scan output, and what a step adds to it."""
        parts = self.body_outputs[self.counters // 2 + self.count :]
        return list(zip(self.node.outputs[self.count : self.count + len(parts)], parts, strict=True))

    def ways(self, of: str, count: int) -> list[tuple[int, int]]:
        """The axis and the direction of every scan "input" or "output"."""
        columns: list[list[int]] = []
        for what in ("axes", "directions"):
            attribute = self.node.attributes.get(f"scan_{of}_{what}")
            columns.append([0] * count if attribute is None else list(attribute.as_ints()))
            if len(columns[-1]) != count:
                message = f"attribute scan_{of}_{what}: expected {count} numbers"
                raise InvalidModelError(message, op_type=self.node.op_type, node=label(self.node))
        return list(zip(*columns, strict=True))

    def started(self, read: set[ir.Value], active: Active) -> set[ir.Value]:
        """What a step is given that depends on values outside; `active`: what lies between two sets of values."""
        start = {part for x, part in (*zip(self.initial, self.before, strict=True), *self.sliced) if x in read}
        while True:
            inside = active(self.nodes, self.body_outputs, read | start)
            more = {b for b, a in zip(self.before, self.after, strict=True) if a in inside} - start
            if not more:
                return start
            start |= more


def steps_of(node: ir.Node) -> Steps:
    """The steps of a node, with its own nodes."""
    body = body_of(node)
    return _checked(Steps(node, list(body), list(body.inputs), list(body.outputs)))


def copy_of(node: ir.Node) -> Steps:
    """The steps with a copy of the nodes, where states that no step changes are what they are outside."""
    body, inputs = graph_copy(body_of(node))
    result = _checked(Steps(node, body.nodes, inputs, [value for value in body.outputs if value is not None]))
    for before, after, outside in zip(result.before, result.after, result.initial, strict=True):
        if source_of(after) is before:
            before.replace_all_uses_with(outside)
            result.body_outputs = [outside if value is before else value for value in result.body_outputs]
    return result


def is_unchanged(steps: Steps, n: int) -> bool:
    """Whether no step changes a state, of a node's own steps."""
    return source_of(steps.after[n]) is steps.before[n]


def source_of(value: ir.Value) -> ir.Value:
    """What a value is a copy of, its gradient included."""
    while (node := value.producer()) is not None and is_standard(node, "Identity"):
        if is_stop(node):
            break
        (source,) = node.inputs
        if source is None:
            break
        value = source
    return value


def body_of(node: ir.Node) -> ir.Graph:
    if "body" not in node.attributes:
        raise InvalidModelError("expected a body", op_type=node.op_type, node=label(node))
    return node.attributes["body"].as_graph()


def _checked(steps: Steps) -> Steps:
    node = steps.node
    sliced = max(len(node.inputs) - steps.counters - steps.count, 0)
    given, outputs = steps.counters + steps.count + sliced, len(node.outputs) + steps.counters // 2
    scanned = node.attributes["num_scan_inputs"].as_int() if steps.is_scan else 0
    if scanned not in range(steps.is_scan, len(node.inputs) + 1):
        message = f"attribute num_scan_inputs: expected 1 to {len(node.inputs)}, got {scanned}"
        raise InvalidModelError(message, op_type=node.op_type, node=label(node))
    if len(steps.body_inputs) != given or len(steps.body_outputs) != outputs:
        raise InvalidModelError(
            f"a body of {len(steps.body_inputs)} inputs and {len(steps.body_outputs)} outputs does not fit a node of "
            f"{len(node.inputs)} inputs, {sliced} of them to scan, and {len(node.outputs)} outputs",
            op_type=node.op_type,
            node=label(node),
        )
    if any(value is None for value in node.inputs[steps.counters :]):
        raise InvalidModelError("a state or a scan input is missing", op_type=node.op_type, node=label(node))
    steps.ways("input", sliced)
    steps.ways("output", len(steps.stacked))
    return steps


def stack_of(node: ir.Node, n: int, op: Builder) -> ir.Value:
    """What a step is given as its n-th value, of all steps along a first axis: one more output of the node."""
    whole = steps_of(node)
    given, body = whole.body_inputs[n], body_of(node)
    if not isinstance(given.type, ir.TensorType):
        raise unsupported(
            node,
            f"its gradient reads {given.name!r} of every step, a sequence that grows or changes. Read it outside "
            "of the loop, or carry a tensor",
        )
    ways = whole.ways("output", len(whole.stacked))
    for (y, part), way in zip(whole.stacked, ways, strict=True):
        if part is not given and source_of(part) is given and way == (0, 0) and y.name:
            return y
    copy = ir.node("Identity", [given], name=op.unique(f"{label(node)}/{given.name}/each"))
    copy.outputs[0].name = copy.name
    op.typed(copy.outputs[0], given)
    body.append(copy)
    body.outputs.append(copy.outputs[0])
    node.resize_outputs(len(node.outputs) + 1)
    for m, what in enumerate(("axes", "directions")):
        name = f"scan_output_{what}"
        if name in node.attributes:
            node.attributes[name] = ir.AttrInt64s(name, [*(way[m] for way in ways), 0])
    node.metadata_props[_STACKS] = str(int(node.metadata_props.get(_STACKS, "0")) + 1)
    y = node.outputs[-1]
    y.name, y.type = op.unique(f"{label(node)}/{given.name}/all"), given.type
    y.shape = None if given.shape is None else ir.Shape([None, *given.shape])
    return y


def drop_stacks(graph: ir.Graph) -> None:
    """Take the outputs away that Loops and Scans have for a gradient that is not there any more."""
    for node in graph:
        count = int(node.metadata_props.get(_STACKS, "0"))
        added = node.outputs[len(node.outputs) - count :]
        if not count or any(value.uses() or value.is_graph_output() for value in added):
            continue
        body = body_of(node)
        copies = [value.producer() for value in body.outputs[len(body.outputs) - count :]]
        del body.outputs[len(body.outputs) - count :]
        body.remove([copy for copy in copies if copy is not None], safe=True)
        node.resize_outputs(len(node.outputs) - count)
        for name in ("scan_output_axes", "scan_output_directions"):
            if name in node.attributes:
                node.attributes[name] = ir.AttrInt64s(name, list(node.attributes[name].as_ints())[:-count])
        del node.metadata_props[_STACKS]
