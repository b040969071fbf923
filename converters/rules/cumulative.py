"""Gradients along a sequence: the cumulative product, and the cache that TensorScatter writes to."""

import onnx_ir as ir

from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads, gradient
from onnx_backprop.converters.rules.common import as_shaped, count_up, narrow, widen, work_type
from onnx_backprop.converters.rules.scan import scan


@gradient("CumProd", versions=(26,))
def cum_prod(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y_j = Π_{k ≤ j} x_k  =>  dx_i = P_i R_i with P_i = Π_{k < i} x_k and R_i = dy_i + x_{i+1} R_{i+1}.

    exclusive: Y_j = Π_{k < j} x_k, R_i = dy_{i+1} + x_{i+1} R_{i+1}. reverse: the same from the other end. Nothing is
    divided, so factors of 0 need no care. R runs along the axis one step after the other.
    """
    x, axis = node.input(0), node.input(1)
    exclusive, reverse = node.int("exclusive", 0), node.int("reverse", 0)
    factors = widen(op, x)
    before = op.CumProd(factors, axis, exclusive=1, reverse=reverse)
    folded = _folded(op, x, axis)
    sequences = [
        op.Transpose(op.Reshape(value, folded, allowzero=1), perm=[1, 0, 2]) for value in (factors, widen(op, dy))
    ]
    one_step = op.Squeeze(op.Slice(op.Shape(sequences[0]), [1], [3]))

    def step(op: Builder, states: list[ir.Value], inputs: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
        (carried,), (factor, g) = states, inputs
        if exclusive:
            return [op.Add(g, op.Mul(factor, carried))], [op.Identity(carried)]
        total = op.Add(g, carried)
        return [op.Mul(factor, total)], [total]

    nothing = op.filled(one_step, 0, work_type(x))
    _, (after,) = scan(op, [nothing], sequences, step, outputs=1, backwards=not reverse)
    return narrow(op, op.Mul(before, as_shaped(op, op.Transpose(after, perm=[1, 0, 2]), x)), x)


def _folded(op: Builder, x: ir.Value, axis: ir.Value) -> ir.Value:
    """The shape (lengths before the axis, its length, lengths behind it) of x."""
    lengths = op.shape(x)
    rank = op.Shape(lengths)
    place = op.Mod(op.Cast(op.Reshape(axis, [1]), to=ir.DataType.INT64), rank)
    behind = op.Add(place, [1])
    return op.Concat(
        op.ReduceProd(op.Slice(lengths, [0], place), keepdims=1),
        op.Gather(lengths, place),
        op.ReduceProd(op.Slice(lengths, behind, rank), keepdims=1),
        axis=0,
    )


@gradient("TensorScatter", versions=(24,))
def tensor_scatter(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = past with u written at w + 0, w + 1, … along the axis  =>  dpast = dy where nothing was written, else 0;
    du = dy where it was written.

    Shapes: past and Y (B, …, S, …), u (B, …, T, …) with T ≤ S, w (B). Circular: places count modulo S, none is
    written twice.
    """
    past, update, begin, rank = node.input(0), node.input(1), node.optional(2), node.rank(0)
    axis, mode = node.axis(-2) % rank, node.string("mode", "linear")
    dpast = op.TensorScatter(dy, op.zeros(op.shape(update), update), begin, axis=axis, mode=mode)
    places = count_up(op, op.length(update, axis))
    places = op.Reshape(places, [-1 if n == axis else 1 for n in range(rank)])
    if begin is not None:
        places = op.Add(places, op.Reshape(begin, [-1] + [1] * (rank - 1)))
    if mode == "circular":
        places = op.Mod(places, op.length(past, axis))
    return dpast, op.GatherElements(dy, op.Expand(places, op.shape(update)), axis=axis)
