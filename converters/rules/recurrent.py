"""Gradients of RNN, GRU and LSTM: backpropagation through time.

What the cells computed is computed again for all time steps at once, from the hidden states that the node puts out;
what remains in sequence, the gradients of the states, is a Scan, so that any length of sequence will do. A reverse
direction is a forward one on reversed sequences. Steps behind the end of a sequence (sequence_lens) keep the state,
put out 0, and have no gradient.

Shapes, per direction: x (T, B, I), W (n H, I), R (n H, H), states (B, H), with n gates. Half types are computed in
float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import onnx_ir as ir

from onnx_backprop.converters.reverse.known import dims
from onnx_backprop.converters.reverse.long_sums import sum_over
from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads, gradient
from onnx_backprop.converters.rules import recurrent_parts as unrolled
from onnx_backprop.converters.rules.cell_activations import activations
from onnx_backprop.converters.rules.scan import scan


@gradient(
    "RNN", versions=(14, 22), all_outputs=True, inputs=(unrolled.X, unrolled.W, unrolled.R, unrolled.BIAS, unrolled.H0)
)
def rnn(op: Builder, node: Forward, dys: unrolled.Dys) -> Grads:
    """h' = f(a), a = W x + R h + b  =>  da = f'(a) · dh', dh = Rᵀ da, dx = Wᵀ da, dW = Σ da xᵀ, dR = Σ da hᵀ."""
    return _differentiate(op, node, dys, ("Tanh",), _rnn_direction)


@gradient(
    "GRU", versions=(14, 22), all_outputs=True, inputs=(unrolled.X, unrolled.W, unrolled.R, unrolled.BIAS, unrolled.H0)
)
def gru(op: Builder, node: Forward, dys: unrolled.Dys) -> Grads:
    """h' = (1 - z) k + z h, z = f(a_z), r = f(a_r), k = g(a_k)  =>  da_k = (1 - z) g'(a_k) · dh',
    da_z = (h - k) f'(a_z) · dh', da_r = f'(a_r) · dr, dh = z dh' + what comes through the gates.

    linear_before_reset = 0: a_k = W_k x + R_k (r h) + b, so dr = h · R_kᵀ da_k;
    otherwise a_k = W_k x + r (R_k h + b_R) + b_W, so dr = (R_k h + b_R) · da_k.
    """
    return _differentiate(op, node, dys, ("Sigmoid", "Tanh"), _gru_direction)


@gradient(
    "LSTM",
    versions=(14, 22),
    all_outputs=True,
    inputs=(unrolled.X, unrolled.W, unrolled.R, unrolled.BIAS, unrolled.H0, unrolled.C0, unrolled.PEEPHOLES),
)
def lstm(op: Builder, node: Forward, dys: unrolled.Dys) -> Grads:
    """c' = f c + i k, h' = o q(c')  =>  da_o = q(c') s'(a_o) · dh', dc' += o q'(c') · dh' + P_o da_o,
    da_i = k s'(a_i) · dc', da_f = c s'(a_f) · dc', da_k = i g'(a_k) · dc', dc = f dc' + P_i da_i + P_f da_f.

    i, o, f = s(a) with a = W x + R h + b + P c (c' for o) and k = g(a_k); input_forget: f = 1 - i, so da_f = 0 and
    da_i = (k - c) s'(a_i) · dc'.
    """
    return _differentiate(op, node, dys, ("Sigmoid", "Tanh", "Tanh"), _lstm_direction)


def _differentiate(
    op: Builder,
    node: Forward,
    dys: unrolled.Dys,
    default_functions: tuple[str, ...],
    direction: Callable[[unrolled.Sequences, Forward], unrolled.DirectionGrads],
) -> Grads:
    """What the three have in common: directions, layout, lengths, optional inputs."""
    name = node.choice("direction", "forward", ("forward", "reverse", "bidirectional"))
    layout = node.int("layout", 0)
    if layout not in (0, 1):
        raise node.refuse("layout", layout, "of 0 and 1")
    clip = node.float("clip", 0.0) if node.given("clip") else None
    if clip is not None and clip <= 0:
        raise node.refuse("clip", clip, "above 0")
    directions = 2 if name == "bidirectional" else 1
    functions = activations(node, default_functions, directions, clip)
    parts = unrolled.Parts(op, node, dys, layout)
    by_direction: list[unrolled.DirectionGrads] = []
    for d in range(directions):
        backwards = name == "reverse" or d == 1
        one = direction(parts.direction(d, backwards, functions[d]), node)
        by_direction.append(one if not backwards else replace(one, x=parts.reversed(one.x)))
    return parts.gradients(by_direction)


def _split(op: Builder, value: ir.Value, parts: int, axis: int = -1) -> Sequence[ir.Value]:
    return op.emit("Split", [value], {"axis": axis, "num_outputs": parts}, outputs=parts)


def _outer_sum(op: Builder, da: ir.Value, value: ir.Value) -> ir.Value:
    """Σ da valueᵀ over steps and batch."""
    return op.Gemm(op.Flatten(da, axis=2), op.Flatten(value, axis=2), transA=1)


def _sum(op: Builder, da: ir.Value) -> ir.Value:
    return sum_over(op, da, [0, 1], dims(da) or (None,) * 3, keepdims=0)


def _direction_grads(s: unrolled.Sequences, da: ir.Value, *, r: ir.Value, h0: ir.Value) -> unrolled.DirectionGrads:
    """What follows from da, the gradients of W x + R h + b in every step, where both biases are added alike."""
    op, db = s.op, _sum(s.op, da)
    bias = op.Concat(db, db, axis=0)
    return unrolled.DirectionGrads(x=op.MatMul(da, s.w), w=_outer_sum(op, da, s.x), r=r, bias=bias, h0=h0)


def _halves(s: unrolled.Sequences) -> Sequence[ir.Value | None]:
    """The bias of W and the bias of R."""
    return (None, None) if s.bias is None else _split(s.op, s.bias, 2, axis=0)


def _rnn_direction(s: unrolled.Sequences, _node: Forward) -> unrolled.DirectionGrads:
    op, h = s.op, s.h_before
    of_w, of_r = _halves(s)
    slope = s.masked(s.functions[0].slope(op, op.Add(s.gates(s.x, s.w, of_w), s.gates(h, s.r, of_r))))

    def step(op: Builder, states: list[ir.Value], inputs: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
        da = op.Mul(op.Add(states[0], inputs[0]), inputs[1])
        return [op.MatMul(da, s.r)], [da]

    (dh0,), (da,) = scan(op, [s.dh_last], [s.dh, slope], step, outputs=1, backwards=True, running=s.running)
    return _direction_grads(s, da, r=_outer_sum(op, da, h), h0=dh0)


def _gru_direction(s: unrolled.Sequences, node: Forward) -> unrolled.DirectionGrads:
    op, h = s.op, s.h_before
    f, g = s.functions
    linear = node.int("linear_before_reset", 0) != 0
    of_w, of_r = _halves(s)
    x_z, x_r, x_k = _split(op, s.gates(s.x, s.w, of_w), 3)
    r_z, r_r, r_k = _split(op, s.r, 3, axis=0)
    b_z, b_r, b_k = (None, None, None) if of_r is None else _split(op, of_r, 3, axis=0)
    a_z, a_r = op.Add(x_z, s.gates(h, r_z, b_z)), op.Add(x_r, s.gates(h, r_r, b_r))
    z, r = f.value(op, a_z), f.value(op, a_r)
    reset = op.Mul(r, h)
    recurrent = s.gates(h if linear else reset, r_k, b_k)
    a_k = op.Add(x_k, op.Mul(r, recurrent) if linear else recurrent)
    k = g.value(op, a_k)

    to_k = s.masked(op.Mul(op.Sub(1, z), g.slope(op, a_k)))
    to_z = s.masked(op.Mul(op.Sub(h, k), f.slope(op, a_z)))
    to_r = s.masked(op.Mul(recurrent if linear else h, f.slope(op, a_r)))

    def step(op: Builder, states: list[ir.Value], inputs: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
        dy, to_k, to_z, to_r, z, r = inputs
        dh = op.Add(states[0], dy)
        da_k, da_z = op.Mul(dh, to_k), op.Mul(dh, to_z)
        if linear:
            da_r = op.Mul(da_k, to_r)
            through_k = op.MatMul(op.Mul(da_k, r), r_k)
        else:
            d_reset = op.MatMul(da_k, r_k)
            da_r = op.Mul(d_reset, to_r)
            through_k = op.Mul(d_reset, r)
        through = op.accumulate([op.Mul(dh, z), through_k, op.MatMul(da_z, r_z), op.MatMul(da_r, r_r)])
        return [through], [da_z, da_r, da_k]

    inputs = [s.dh, to_k, to_z, to_r, s.masked(z), s.masked(r)]
    (dh0,), (da_z, da_r, da_k) = scan(op, [s.dh_last], inputs, step, outputs=3, backwards=True, running=s.running)
    da = op.Concat(da_z, da_r, da_k, axis=-1)
    da_recurrent = op.Mul(da_k, s.masked(r)) if linear else da_k
    dr = [_outer_sum(op, da_z, h), _outer_sum(op, da_r, h), _outer_sum(op, da_recurrent, h if linear else reset)]
    db = [_sum(op, da), _sum(op, op.Concat(da_z, da_r, da_recurrent, axis=-1))]
    return replace(_direction_grads(s, da, r=op.Concat(*dr, axis=0), h0=dh0), bias=op.Concat(*db, axis=0))


def _lstm_direction(s: unrolled.Sequences, node: Forward) -> unrolled.DirectionGrads:
    op, h = s.op, s.h_before
    f, g, q = s.functions
    q = replace(q, clip=None)  # the clip bounds what enters the gates, not the cell state
    coupled = node.int("input_forget", 0) != 0
    if s.c0 is None or s.dc_last is None:
        raise node.invalid("an LSTM has a cell state")
    of_w, of_r = _halves(s)
    a_i, a_o, a_f, a_k = _split(op, op.Add(s.gates(s.x, s.w, of_w), s.gates(h, s.r, of_r)), 4)
    p_i, p_o, p_f = (None, None, None) if s.peepholes is None else _split(op, s.peepholes, 3, axis=0)
    k = g.value(op, a_k)

    def peeped(op: Builder, a: ir.Value, p: ir.Value | None, c: ir.Value) -> ir.Value:
        return a if p is None else op.Add(a, op.Mul(p, c))

    def cell(op: Builder, states: list[ir.Value], inputs: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
        (c,), (a_i, a_f, k) = states, inputs
        i = f.value(op, peeped(op, a_i, p_i, c))
        forget = op.Sub(1, i) if coupled else f.value(op, peeped(op, a_f, p_f, c))
        after = op.Add(op.Mul(forget, c), op.Mul(i, k))
        return [after], [op.Identity(after)]

    _, (c_after,) = scan(op, [s.c0], [a_i, a_f, k], cell, outputs=1, backwards=False)
    c_after = s.masked(c_after)
    c = unrolled.shifted(op, s.c0, c_after)
    a_i, a_o, a_f = peeped(op, a_i, p_i, c), peeped(op, a_o, p_o, c_after), peeped(op, a_f, p_f, c)
    i, o = f.value(op, a_i), f.value(op, a_o)
    forget = op.Sub(1, i) if coupled else f.value(op, a_f)

    to_o = s.masked(op.Mul(q.value(op, c_after), f.slope(op, a_o)))
    to_c = s.masked(op.Mul(o, q.slope(op, c_after)))
    to_k = s.masked(op.Mul(i, g.slope(op, a_k)))
    to_i = s.masked(op.Mul(op.Sub(k, c) if coupled else k, f.slope(op, a_i)))
    to_f = op.Mul(0, to_i) if coupled else s.masked(op.Mul(c, f.slope(op, a_f)))

    def step(op: Builder, states: list[ir.Value], inputs: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
        (dh, dc), (dy, to_o, to_c, to_k, to_i, to_f, forget) = states, inputs
        dh = op.Add(dh, dy)
        da_o = op.Mul(dh, to_o)
        dc = peeped(op, op.Add(dc, op.Mul(dh, to_c)), p_o, da_o)
        da_i, da_f, da_k = op.Mul(dc, to_i), op.Mul(dc, to_f), op.Mul(dc, to_k)
        before = peeped(op, peeped(op, op.Mul(dc, forget), p_i, da_i), p_f, da_f)
        da = op.Concat(da_i, da_o, da_f, da_k, axis=-1)
        return [op.MatMul(da, s.r), before], [da]

    inputs = [s.dh, to_o, to_c, to_k, to_i, to_f, s.masked(forget)]
    (dh0, dc0), (da,) = scan(op, [s.dh_last, s.dc_last], inputs, step, outputs=1, backwards=True, running=s.running)
    da_i, da_o, da_f, _ = _split(op, da, 4)
    dp = op.Concat(_sum(op, op.Mul(da_i, c)), _sum(op, op.Mul(da_o, c_after)), _sum(op, op.Mul(da_f, c)), axis=0)
    return replace(_direction_grads(s, da, r=_outer_sum(op, da, h), h0=dh0), c0=dc0, peepholes=dp)
