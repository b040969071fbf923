"""checkpoint=k: a loop as a loop over segments of k steps, so that its gradient stores one state a segment.

    states, y = Loop(n / k) { Loop(k) { step } }, then Loop(n mod k) { step }

is differentiated in the place of the node, like a function body: the outer Loop stacks the states that the segments
begin with, and each step of its gradient runs one segment again, whose states are stacked then. That is n / k + k
states in the place of n, least for k = √n, for one more run of the forward steps.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.expand import Expansion
from onnx_backprop.converters.reverse.forward import unsupported
from onnx_backprop.converters.reverse.known import dims
from onnx_backprop.converters.reverse.loops.steps import Steps, copy_of, is_unchanged, stack_of, steps_of
from onnx_backprop.converters.reverse.sequences import is_sequence

_SEGMENT = "onnx_backprop.segment"  # on a Loop that is one of these already


def has_segments(node: ir.Node) -> bool:
    """Whether a loop can be cut into segments: it is no segment itself and carries tensors only."""
    return _SEGMENT not in node.metadata_props and not any(map(is_sequence, node.outputs))


def segmented(node: ir.Node, length: int, op: Builder) -> Expansion:
    """The nodes that a loop of segments of a given length consists of."""
    return _Segments(node, length, op).expansion()


class _Segments:
    def __init__(self, node: ir.Node, length: int, op: Builder) -> None:
        self.node, self.length = node, length
        self.steps = steps_of(node)
        self.unchanged = [i for i in range(self.steps.count) if is_unchanged(self.steps, i)]
        self.states = [i for i in range(self.steps.count) if i not in self.unchanged]
        self.stacked = [j for j, (y, _) in enumerate(self.steps.stacked) if y.name]
        self.op = op.inside()
        self.op.prefix = f"{op.prefix}/segments"
        self.counter = None if self.steps.is_scan else stack_of(node, 0, op)

    def expansion(self) -> Expansion:
        op, steps = self.op, self.steps
        ways = steps.ways("input", len(steps.sliced))
        if self.counter is None:
            (x, _), (axis, _) = steps.sliced[0], ways[0]
            count = op.length(x, axis)
        else:
            count = op.Shape(self.counter, start=0, end=1)
        count = op.Squeeze(count, [0])
        whole = op.Div(count, self.length)
        covered = op.Mul(whole, self.length)
        rows = [self._rows(x, *way) for (x, _), way in zip(steps.sliced, ways, strict=True)]
        initial = [steps.initial[i] for i in self.states]
        states, first = self._over_segments(whole, initial, rows)
        rest = op.Range(covered, count, 1)
        states, second = self._run(op, op.Sub(count, covered), covered, states, [op.Gather(x, rest) for x in rows])
        outputs: list[ir.Value | None] = [None] * len(self.node.outputs)
        for i, value in zip(self.states, states, strict=True):
            outputs[i] = op.like(op.Identity(value), steps.final[i])
        for i in self.unchanged:
            outputs[i] = op.like(op.Identity(steps.initial[i]), steps.final[i])
        ends = steps.ways("output", len(steps.stacked))
        for j, a, b in zip(self.stacked, first, second, strict=True):
            outputs[steps.count + j] = self._joined(steps.stacked[j][0], a, b, covered, count, *ends[j])
        return Expansion(op.nodes, outputs)

    def _rows(self, x: ir.Value, axis: int, direction: int) -> ir.Value:
        """A scan input with the steps along the first axis, in their order."""
        op, shape = self.op, dims(x)
        if axis and shape is None:
            raise unsupported(
                self.node,
                f"checkpoint needs the rank of {x.name!r}, which is scanned along axis {axis}, and shape inference "
                "does not find it. Give that value a shape",
            )
        if shape is not None and axis % len(shape):
            axis %= len(shape)
            x = op.Transpose(x, perm=[axis, *(n for n in range(len(shape)) if n != axis)])
        return _reversed(op, x) if direction else x

    def _joined(
        self, y: ir.Value, a: ir.Value, b: ir.Value, covered: ir.Value, count: ir.Value, axis: int, direction: int
    ) -> ir.Value:
        """What the segments and the rest have stacked, as the node puts it out."""
        op, shape = self.op, dims(y)
        lengths = op.Shape(y)
        at = axis if shape is None else axis % len(shape)
        lengths = op.Concat(op.Slice(lengths, [0], [at]), op.Slice(lengths, [at + 1], [2**31]), axis=0)
        parts = [(a, covered), (b, op.Sub(count, covered))]
        shaped = [op.Reshape(part, op.Concat(op.Reshape(n, [1]), lengths, axis=0), allowzero=1) for part, n in parts]
        joined = op.Concat(*shaped, axis=0)
        if direction:
            joined = _reversed(op, joined)
        if at:
            joined = op.Transpose(joined, perm=[*range(1, at + 1), 0, *range(at + 1, len(shape or ()))])
        return op.like(joined, y)

    def _over_segments(
        self, count: ir.Value, initial: Sequence[ir.Value], rows: Sequence[ir.Value]
    ) -> tuple[list[ir.Value], list[ir.Value]]:
        inner = self.op.inside()
        inner.prefix = f"{self.op.prefix}/segment"
        n, go = _counters(inner)
        before = [_argument(inner, self.steps.before[i]) for i in self.states]
        base = inner.Mul(n, self.length)
        places = inner.Add(inner.constant(np.arange(self.length)), base)
        taken = [inner.Gather(x, places) for x in rows]
        after, stacked = self._run(inner, inner.constant(np.array(self.length)), base, before, taken)
        return self._loop(self.op, inner, count, initial, [n, go, *before], [go, *after, *stacked])

    def _run(
        self, op: Builder, count: ir.Value, base: ir.Value, initial: Sequence[ir.Value], rows: Sequence[ir.Value]
    ) -> tuple[list[ir.Value], list[ir.Value]]:
        """Some steps from the step `base` on; the states behind them, and what they stack."""
        copy: Steps = copy_of(self.node)
        inner = op.inside()
        inner.prefix = f"{op.prefix}/step"
        n, go = _counters(inner)
        new = [inner.typed(inner.Gather(x, n), part) for x, (_, part) in zip(rows, copy.sliced, strict=True)]
        given = list(copy.body_inputs)
        before = [_argument(inner, copy.before[i]) for i in self.states]
        replaced = {copy.before[i]: value for i, value in zip(self.states, before, strict=True)}
        replaced |= {part: value for (_, part), value in zip(copy.sliced, new, strict=True)}
        if copy.counters:
            replaced |= {given[0]: inner.typed(inner.Add(n, base), given[0]), given[1]: go}
        for old, value in replaced.items():
            old.replace_all_uses_with(value)
        inner.nodes += copy.nodes
        outputs = [copy.after[i] for i in self.states] + [copy.stacked[j][1] for j in self.stacked]
        outputs = [replaced.get(value, value) for value in outputs]
        return self._loop(op, inner, count, initial, [n, go, *before], [go, *outputs])

    def _loop(
        self,
        op: Builder,
        inner: Builder,
        count: ir.Value,
        initial: Sequence[ir.Value],
        given: Sequence[ir.Value],
        produced: Sequence[ir.Value],
    ) -> tuple[list[ir.Value], list[ir.Value]]:
        outputs = [inner.typed(inner.Identity(value), value) for value in produced]
        body = ir.Graph(given, outputs, nodes=inner.nodes, name=inner.unique(f"{inner.prefix}/body"))
        results = list(
            op.emit("Loop", [count, op.constant(np.array(True)), *initial], {"body": body}, outputs=len(produced) - 1)
        )
        op.nodes[-1].metadata_props[_SEGMENT] = ""
        for n, (result, value) in enumerate(zip(results, outputs[1:], strict=True)):
            state = n < len(initial)
            result.type = value.type
            result.shape = value.shape if state or value.shape is None else ir.Shape([None, *value.shape])
        return results[: len(initial)], results[len(initial) :]


def _reversed(op: Builder, x: ir.Value) -> ir.Value:
    """The rows from the last to the first; as a Gather by a Range onnxruntime would slice from the last to the last."""
    return op.Slice(x, [-1], [-(2**63)], [0], [-1])


def _counters(op: Builder) -> tuple[ir.Value, ir.Value]:
    n, go = (ir.Value(name=op.unique(f"{op.prefix}/{name}"), type=ir.TensorType(dtype), shape=ir.Shape([]))
             for name, dtype in (("n", ir.DataType.INT64), ("go", ir.DataType.BOOL)))  # fmt: skip
    return n, go


def _argument(op: Builder, like: ir.Value) -> ir.Value:
    return ir.Value(name=op.unique(f"{op.prefix}/{like.name}"), type=like.type, shape=like.shape)
