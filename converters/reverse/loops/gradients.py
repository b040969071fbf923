"""Scan and Loop: states s and steps (s, y) = f(s, x, c), with slices x, outputs y and captured outer values c.

    ds_k, dx_k = (∂f/∂(s, x))ᵀ (ds_k+1, dy_k),   dc = Σ_k (∂f/∂c)ᵀ (ds_k+1, dy_k)

goes from the last step to the first: a Scan for a Scan, a Loop for a Loop, of as many steps as the forward has made.
Each step is computed again from the states that it began with, which the forward node puts out as further stacked
outputs; sequences, which cannot be stacked, come of the steps before it, run again. Rows of an outer value, taken by
Gather, have their gradients stacked and scattered once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.prepare.inference.loop_lengths import shape_changes
from onnx_backprop.converters.reverse import registry
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.expand import Expansion, drop_unread, prune_and_name
from onnx_backprop.converters.reverse.forward import Forward, unsupported
from onnx_backprop.converters.reverse.known import element_type
from onnx_backprop.converters.reverse.loops.states import states_at
from onnx_backprop.converters.reverse.loops.steps import Active, Pairs, Steps, copy_of, source_of, stack_of
from onnx_backprop.converters.reverse.sequences import held_type, is_sequence
from onnx_backprop.converters.reverse.widened import HALF
from onnx_backprop.opset.graphs.walk import is_standard, values_read

Walk = Callable[[Mapping[ir.Value, ir.Value], Builder], dict[ir.Value, ir.Value]]


class Pick(NamedTuple):
    """Rows of an outer value, whose gradients are stacked to be scattered once."""

    source: ir.Value
    rows: ir.Value


@dataclass(frozen=True)
class LoopPlan:
    """Which gradients the steps carry from one to the next, and which of the stacked outputs' they read."""

    steps: Steps  # a copy
    picks: dict[ir.Value, Pick]
    start: set[ir.Value]  # what a step is given and the gradient may flow to
    of: list[ir.Value]  # what a step makes and gradients arrive at
    carried: list[int]
    stacked: list[int]
    unchanged: list[int]

    @property
    def nodes(self) -> list[ir.Node]:
        """Those that gradients may flow through."""
        return [node for node in self.steps.nodes if node.outputs[0] not in self.picks]


def plan_loop(node: ir.Node, active: set[ir.Value], between: Active) -> LoopPlan:
    """What has to be done for the gradients that arrive at the active outputs of a node.

    between(nodes, of, wrt): the values on a path.
    """
    steps = copy_of(node)
    read = values_read(node) & active
    picks = {n.outputs[0]: pick for n in steps.nodes if (pick := _pick(n, read)) is not None}
    nodes = [n for n in steps.nodes if n.outputs[0] not in picks]
    outer = read | set(picks)
    rest = Steps(node, nodes, steps.body_inputs, steps.body_outputs)
    start = rest.started(outer, between)
    unchanged = [i for i, (a, x) in enumerate(zip(steps.after, steps.initial, strict=True)) if source_of(a) is x]
    arriving = {i for i, y in enumerate(steps.final) if y in active and i not in unchanged}
    stacked = [j for j, (y, _) in enumerate(steps.stacked) if y in active]
    while True:
        of = [steps.after[i] for i in sorted(arriving)] + [steps.stacked[j][1] for j in stacked]
        inside = between(nodes, of, outer | start)
        more = {i for i, b in enumerate(steps.before) if b in inside and b in start and i not in unchanged} - arriving
        if not more:
            break
        arriving |= more
    unchanged = [i for i in unchanged if steps.final[i] in active]
    return LoopPlan(steps, picks, start | outer, of, sorted(arriving), stacked, unchanged)


def _pick(node: ir.Node, outside: set[ir.Value]) -> Pick | None:
    """What a node takes of a value from outside, where a gradient would have the size of the whole."""
    axis = node.attributes.get("axis")
    if not is_standard(node, "Gather") or (axis is not None and axis.as_int() != 0):
        return None
    source, index = node.inputs
    return Pick(source, index) if source in outside and source is not None and index is not None else None


def loop_gradients(plan: LoopPlan, dys: Sequence[ir.Value | None], op: Builder, walk: Walk) -> Pairs:
    """Emit the steps back; the gradients of what the node reads."""
    return _Back(plan, dys, op).emit(walk)


class _Back:
    def __init__(self, plan: LoopPlan, dys: Sequence[ir.Value | None], op: Builder) -> None:
        self.plan, self.steps, self.op = plan, plan.steps, op
        self.node = plan.steps.node
        self.dys = list(dys)
        self.inner = op.inside()
        self.inner.prefix = f"{op.prefix}/step"
        self.ways_in = self.steps.ways("input", len(self.steps.sliced))
        self.ways_out = self.steps.ways("output", len(self.steps.stacked))

    def emit(self, walk: Walk) -> Pairs:
        plan, steps, inner, op = self.plan, self.steps, self.inner, self.op
        states = [self._argument("state", steps.after[i]) for i in plan.carried]
        rows = [self._argument("row", steps.stacked[j][1]) for j in plan.stacked]
        inner.nodes.extend(steps.nodes)
        seeds: dict[ir.Value, list[ir.Value]] = {}
        for y, dy in zip(plan.of, (*states, *rows), strict=True):
            seeds.setdefault(y, []).append(dy)
        grads = walk({y: inner.accumulate(values) for y, values in seeds.items()}, inner)
        inner.prefix = f"{op.prefix}/step"

        outside = values_read(self.node)
        summed = sorted((c for c in grads if c in outside), key=lambda value: str(value.name))
        sums = [self._argument("sum", c, wide=True) for c in summed]
        slices = [n for n, (_, part) in enumerate(steps.sliced) if part in grads]
        picks = [pick for pick in plan.picks if pick in grads]
        copied = set(steps.nodes)
        produced = [
            (grads.get(s := steps.before[i]) or inner.zeros_like(state), s)
            for i, state in zip(plan.carried, states, strict=True)
        ]
        produced += [(self._sum(total, grads[c]), total) for total, c in zip(sums, summed, strict=True)]
        produced += [(grads[part], part) for part in (steps.sliced[n][1] for n in slices)]
        produced += [(v, v) for pick in picks for v in (plan.picks[pick].rows, inner.like(grads[pick], pick))]
        emitted = set(inner.nodes)
        outputs: list[ir.Value] = []
        for value, like in produced:
            node = value.producer()
            fresh = node in emitted and node not in copied and value not in outputs
            outputs.append(inner.like(value if fresh else inner.Identity(value), like))
        prune_and_name(Expansion(steps.nodes, []), inner, self.node, list(inner.nodes), outputs)
        drop_unread(inner.nodes, outputs)

        self._require_same_shapes([*plan.carried, *(n - steps.counters for n in self._read(steps.body_inputs))])
        starts = [self.dys[i] or op.zeros_like(self._final(i)) for i in plan.carried]
        starts += [op.zeros_like(c) if is_sequence(c) else op.filled(op.shape(c), 0, _wide(c)) for c in summed]
        along = [self._sliced(n) for n in self._read(steps.body_inputs) if not is_sequence(steps.body_inputs[n])]
        for n in self._read(rows):
            j = plan.stacked[n]
            dy = self.dys[steps.count + j] or op.zeros_like(steps.stacked[j][0])
            along.append(_Sliced(dy, rows[n], *self.ways_out[j]))
        carried = list(zip(starts, [*states, *sums], strict=True))
        ends = [(self.ways_in[n][0], 1 - self.ways_in[n][1]) for n in slices] + [(0, 1)] * (2 * len(picks))
        results = self._scan(carried, along, outputs, ends) if steps.is_scan else self._loop(carried, along, outputs)

        targets = [*(steps.initial[i] for i in plan.carried), *summed, *(steps.sliced[n][0] for n in slices)]
        pairs = [(x, self._like(dx, x)) for x, dx in zip(targets, results, strict=False)]
        picked = results[len(targets) :]
        for pick, index, g in zip(picks, picked[::2], picked[1::2], strict=True):
            source = plan.picks[pick].source
            pairs.append((source, _rows_back(op, source, index, g)))
        pairs += [(steps.initial[i], dy) for i in plan.unchanged if (dy := self.dys[i]) is not None]
        left = [x for n, (x, part) in enumerate(steps.sliced) if part in plan.start and n not in slices]
        return pairs + [(x, op.zeros_like(x)) for x in left]

    def _final(self, i: int) -> ir.Value:
        """The last value of a state; where the node leaves it out, the first, which has its shape."""
        return self.steps.final[i] if self.steps.final[i].name else self.steps.initial[i]

    def _argument(self, name: str, like: ir.Value, *, wide: bool = False) -> ir.Value:
        """An input of the body of the loop back."""
        result = ir.Value(name=self.inner.unique(f"{self.inner.prefix}/{name}"), type=held_type(like), shape=like.shape)
        if wide and not is_sequence(like):
            result.type = ir.TensorType(_wide(like))
        return result

    def _sum(self, total: ir.Value, g: ir.Value) -> ir.Value:
        g = g if g.dtype == total.dtype else self.inner.Cast(g, to=element_type(total))
        return self.inner.typed(self.inner.accumulate([total, g]), total)

    def _like(self, g: ir.Value, x: ir.Value) -> ir.Value:
        return self.op.like(g if g.dtype == x.dtype else self.op.Cast(g, to=element_type(x)), x)

    def _read(self, values: Sequence[ir.Value]) -> list[int]:
        """The indices of the values that the steps back read."""
        read = set[ir.Value]().union(*map(values_read, self.inner.nodes))
        return [n for n, value in enumerate(values) if value in read]

    def _require_same_shapes(self, states: Collection[int]) -> None:
        for state, how in shape_changes(self.node).items():
            if state in states:
                raise unsupported(
                    self.node,
                    f"the gradient stacks the states of all steps, so each must keep its shape; state {how}. Give it "
                    "its largest shape from the start, or put out what a step adds as a scan output",
                )

    def _sliced(self, n: int) -> _Sliced:
        """What gives the n-th value that a step is given, step by step."""
        steps, given = self.steps, self.steps.body_inputs[n]
        first = steps.counters + steps.count
        if n >= first:
            return _Sliced(steps.sliced[n - first][0], given, *self.ways_in[n - first])
        return _Sliced(stack_of(self.node, n, self.op), given)

    def _scan(
        self, carried: Pairs, along: list[_Sliced], outputs: Sequence[ir.Value], ends: Sequence[tuple[int, int]]
    ) -> list[ir.Value]:
        inner = self.inner
        for value in outputs:
            if value.shape is None:
                raise unsupported(
                    self.node,
                    f"the gradient needs the rank of {value.name!r} at conversion, and shape inference does not find "
                    "it. Give what the body reads a shape, or write the node as a Loop",
                )
            if is_sequence(value):
                raise unsupported(
                    self.node, "it reads a sequence, whose gradient no Scan can carry. Write it as a Loop"
                )
        along = along or [self._sliced(self.steps.count)]  # the number of steps
        self._rename(one.part for one in along)
        given = [value for _, value in carried] + [one.part for one in along]
        body = ir.Graph(given, outputs, nodes=inner.nodes, name=inner.unique(f"{inner.prefix}/body"))
        attributes: dict[str, object] = {
            "body": body,
            "num_scan_inputs": len(along),
            "scan_input_axes": [one.axis for one in along],
            "scan_input_directions": [1 - one.direction for one in along],
        }
        if ends:
            attributes |= {f"scan_output_{w}": [end[n] for end in ends] for n, w in enumerate(("axes", "directions"))}
        inputs = [*(value for value, _ in carried), *(one.whole for one in along)]
        return self._noted(self.op.emit("Scan", inputs, attributes, outputs=len(outputs)), outputs, len(carried))

    def _loop(self, carried: Pairs, along: Sequence[_Sliced], outputs: Sequence[ir.Value]) -> list[ir.Value]:
        op, inner = self.op, self.inner
        count = op.Squeeze(op.Shape(stack_of(self.node, 0, op), start=0, end=1), [0])
        backwards = op.Range(op.Sub(count, 1), -1, -1)
        n, go = (ir.Value(name=inner.unique(f"{inner.prefix}/{name}"), type=ir.TensorType(dtype), shape=ir.Shape([]))
                 for name, dtype in (("n", ir.DataType.INT64), ("go", ir.DataType.BOOL)))  # fmt: skip
        read = self._read(self.steps.body_inputs)
        rest, inner.nodes = inner.nodes, []
        place = inner.Gather(backwards, n)
        for one in along:
            one.part.replace_all_uses_with(inner.typed(inner.Gather(one.whole, place), one.part))
        if sequences := [n - self.steps.counters for n in read if is_sequence(self.steps.body_inputs[n])]:
            for i, value in zip(sequences, states_at(self.node, sequences, place, inner), strict=True):
                self.steps.before[i].replace_all_uses_with(value)
        inner.nodes += rest
        given = [n, go, *(value for _, value in carried)]
        results = [inner.Identity(go), *outputs]
        body = ir.Graph(given, results, nodes=inner.nodes, name=inner.unique(f"{inner.prefix}/body"))
        inputs = [count, op.constant(np.array(True)), *(value for value, _ in carried)]
        return self._noted(op.emit("Loop", inputs, {"body": body}, outputs=len(outputs)), outputs, len(carried))

    def _rename(self, values: Iterable[ir.Value]) -> None:
        for value in values:
            value.name = self.inner.unique(f"{self.inner.prefix}/{value.name}")

    def _noted(self, results: Sequence[ir.Value], outputs: Sequence[ir.Value], states: int) -> list[ir.Value]:
        """The results of the loop back, with their types and, of the states, shapes."""
        for n, (result, value) in enumerate(zip(results, outputs, strict=True)):
            result.type, result.shape = value.type, value.shape if n < states else None
        return list(results)


@dataclass(frozen=True)
class _Sliced:
    """What the steps back are given one part of each: of which value, along which axis, in which forward direction."""

    whole: ir.Value
    part: ir.Value
    axis: int = 0
    direction: int = 0


def _wide(c: ir.Value) -> ir.DataType:
    """The type to add up in."""
    return ir.DataType.FLOAT if c.dtype in HALF else element_type(c)


def _rows_back(op: Builder, c: ir.Value, indices: ir.Value, g: ir.Value) -> ir.Value:
    """The gradient of c where rows of it were taken one after the other, by the rule of Gather."""
    rule = registry.RULES["", "Gather", 13]
    taken = ir.Node("", "Gather", [c, indices], name=op.prefix)
    grads = rule.function(op, Forward(taken, {c}, 13), g)
    grad = grads if isinstance(grads, ir.Value) else grads[0]
    assert grad is not None
    taken.replace_input_with(0, None)
    taken.replace_input_with(1, None)
    return op.like(grad, c)
