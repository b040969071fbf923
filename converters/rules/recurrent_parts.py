"""The inputs, outputs and gradients of RNN, GRU and LSTM, taken apart by direction and put together again."""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnx_backprop.converters.reverse.known import dims
from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads
from onnx_backprop.converters.rules.cell_activations import CellActivation
from onnx_backprop.converters.rules.common import narrow, widen, work_type

FAR = 2**31 - 1
X, W, R, BIAS, LENGTHS, H0, C0, PEEPHOLES = range(8)  # the inputs
Dys = Sequence[ir.Value | None]


@dataclass(frozen=True)
class Sequences:
    """One direction of a recurrent node, in the order its steps are taken, in the type to compute in."""

    op: Builder
    x: ir.Value
    w: ir.Value
    r: ir.Value
    bias: ir.Value | None  # (2 n H): that of W, then that of R
    peepholes: ir.Value | None  # (3 H)
    h: ir.Value  # hidden states after each step (T, B, H)
    h0: ir.Value
    c0: ir.Value | None
    dh: ir.Value  # gradients of all hidden states, (T, B, H), and of the last states, (B, H)
    dh_last: ir.Value
    dc_last: ir.Value | None
    running: ir.Value | None  # (T, B, 1): which steps lie within their sequence; None for all
    functions: list[CellActivation]

    @property
    def h_before(self) -> ir.Value:
        return shifted(self.op, self.h0, self.h)

    def gates(self, of: ir.Value, weights: ir.Value, bias: ir.Value | None) -> ir.Value:
        """of · weightsᵀ + bias."""
        product = self.op.MatMul(of, self.op.Transpose(weights, perm=[1, 0]))
        return product if bias is None else self.op.Add(product, bias)

    def masked(self, value: ir.Value) -> ir.Value:
        """The value within the sequences, 0 behind their ends."""
        return value if self.running is None else self.op.Where(self.running, value, 0)


@dataclass(frozen=True)
class DirectionGrads:
    """The gradients of one direction; those of the biases and the peepholes may be missing."""

    x: ir.Value
    w: ir.Value
    r: ir.Value
    bias: ir.Value
    h0: ir.Value
    c0: ir.Value | None = None
    peepholes: ir.Value | None = None


class Parts:
    """Takes the inputs, outputs and gradients of a node apart, and the gradients of its inputs together."""

    def __init__(self, op: Builder, node: Forward, dys: Dys, layout: int) -> None:
        self.op = op
        self.node = node
        self.dys = (*dys, None, None, None)[:3]
        self.batch_first = layout == 1
        self.wide = work_type(node.input(X))
        self.x = self._time_first(_ranked(op, widen(op, node.input(X))))
        self.y = widen(op, _output(op, node))
        if self.batch_first:
            self.y = op.Transpose(self.y, perm=[1, 2, 0, 3])  # (B, T, D, H) -> (T, D, B, H)
        self.lengths = op.Cast(node.input(LENGTHS), to=ir.DataType.INT64) if node.has(LENGTHS) else None
        self.running, self.begun = self._within_lengths()

    def direction(self, d: int, backwards: bool, functions: list[CellActivation]) -> Sequences:
        op, node = self.op, self.node
        turn = self.reversed if backwards else lambda value: value
        h = op.Gather(self.y, d, axis=1)
        zero = op.filled(op.lengths(h, 1), 0, self.wide)
        has_cell = node.op_type == "LSTM"
        return Sequences(
            op,
            x=turn(self.x),
            w=self._weights(W, d),
            r=self._weights(R, d),
            bias=self._weights(BIAS, d) if node.has(BIAS) else None,
            peepholes=self._weights(PEEPHOLES, d) if has_cell and node.has(PEEPHOLES) else None,
            h=turn(h),
            h0=self._state(node.optional(H0), d, zero),
            c0=self._state(node.optional(C0), d, zero) if has_cell else None,
            dh=turn(self._dy(d, h)),
            dh_last=self._last(1, d, zero),
            dc_last=self._last(2, d, zero) if has_cell else None,
            running=self.running,
            functions=functions,
        )

    def reversed(self, value: ir.Value) -> ir.Value:
        """The sequences (T, B, …) from their ends to their beginnings."""
        op = self.op
        if self.lengths is not None:
            return op.ReverseSequence(value, self.lengths, time_axis=0, batch_axis=1)
        return op.Slice(value, [-1], [-FAR], [0], [-1])

    def gradients(self, by_direction: list[DirectionGrads]) -> Grads:
        """One gradient for each input of the node."""
        grads: list[ir.Value | None] = [None] * len(self.node.inputs)
        grads[X] = self._time_first(self.op.accumulate([one.x for one in by_direction]))
        by_input = {
            W: [one.w for one in by_direction],
            R: [one.r for one in by_direction],
            BIAS: [one.bias for one in by_direction],
            H0: [one.h0 for one in by_direction],
            C0: [one.c0 for one in by_direction if one.c0 is not None],
            PEEPHOLES: [one.peepholes for one in by_direction if one.peepholes is not None],
        }
        for index, values in by_input.items():
            if self.node.has(index) and values:
                grads[index] = self._stacked(values, axis=1 if index in (H0, C0) and self.batch_first else 0)
        return [None if g is None else narrow(self.op, g, self.node.input(X)) for g in grads]

    def _stacked(self, values: list[ir.Value], *, axis: int) -> ir.Value:
        stacked = [self.op.Unsqueeze(value, [axis]) for value in values]
        return self.op.Concat(*stacked, axis=axis) if len(stacked) > 1 else stacked[0]

    def _time_first(self, value: ir.Value) -> ir.Value:
        """(B, T, I) -> (T, B, I) and back, where layout is 1."""
        return self.op.Transpose(value, perm=[1, 0, 2]) if self.batch_first else value

    def _weights(self, index: int, d: int) -> ir.Value:
        return self.op.Gather(widen(self.op, self.node.input(index)), d, axis=0)

    def _state(self, value: ir.Value | None, d: int, zero: ir.Value) -> ir.Value:
        if value is None:
            return zero
        return self.op.Gather(_ranked(self.op, widen(self.op, value)), d, axis=1 if self.batch_first else 0)

    def _dy(self, d: int, h: ir.Value) -> ir.Value:
        op, dy = self.op, self.dys[0]
        if dy is None:
            return op.filled(op.Shape(h), 0, self.wide)
        g = self._time_first(op.Gather(widen(op, dy), d, axis=2 if self.batch_first else 1))
        return g if self.running is None else op.Where(self.running, g, 0)

    def _last(self, index: int, d: int, zero: ir.Value) -> ir.Value:
        g = self._state(self.dys[index], d, zero)
        return g if self.begun is None or g is zero else self.op.Where(self.begun, g, 0)

    def _within_lengths(self) -> tuple[ir.Value | None, ir.Value | None]:
        """(T, B, 1): which steps lie within their sequence; (B, 1): which sequences have any step.

        The last state of an empty sequence is 0 in onnxruntime, not the initial one.
        """
        if self.lengths is None:
            return None, None
        op = self.op
        steps = op.Range(0, op.Gather(op.Shape(self.x), 0), 1)
        lengths = op.Unsqueeze(self.lengths, [-1])
        return op.Less(op.Unsqueeze(steps, [1, 2]), lengths), op.Greater(lengths, 0)


def _ranked(op: Builder, value: ir.Value) -> ir.Value:
    """A sequence or the states, with the three axes that a second derivative asks for where inference finds none."""
    if dims(value) is not None:
        return value
    return op.Reshape(value, op.Reshape(op.Shape(value), [3]), allowzero=1)


def _output(op: Builder, node: Forward) -> ir.Value:
    """The hidden states of all steps; a node that does not put them out is made to."""
    y = node.output(0)
    if not y.name:
        y.name = op.unique(f"{node.name}_states")
        y.type = node.input(X).type
    return y


def shifted(op: Builder, first: ir.Value, states: ir.Value) -> ir.Value:
    """The states before each step: the initial one, then all but the last."""
    return op.Concat(op.Unsqueeze(first, [0]), op.Slice(states, [0], [-1], [0]), axis=0)
