"""Gradients along a sequence: the cumulative product, and the cache that TensorScatter writes to."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder, dims, element_type
from onnx_backprop.converters.reverse.forward import Forward
from onnx_backprop.converters.reverse.registry import Grads, gradient
from onnx_backprop.converters.rules.cell_activations import Arithmetic
from onnx_backprop.converters.rules.common import cast, length, work_type
from onnx_backprop.converters.rules.scan import scan
from onnx_backprop.opset.core.errors import UnsupportedError


@gradient("CumProd", versions=(26,))
def cum_prod(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y_j = Π_{k ≤ j} x_k  =>  dx_i = P_i R_i with P_i = Π_{k < i} x_k and R_i = dy_i + x_{i+1} R_{i+1}.

    exclusive: Y_j = Π_{k < j} x_k, R_i = dy_{i+1} + x_{i+1} R_{i+1}. reverse: the same from the other end. Nothing is
    divided, so factors of 0 need no care. R runs along the axis one step after the other.
    """
    x, axis = node.input(0), node.input(1)
    own, wide = element_type(x), work_type(x)
    exclusive, reverse = node.int("exclusive", 0), node.int("reverse", 0)
    factors = cast(op, x, own, wide)
    before = op.CumProd(factors, axis, exclusive=1, reverse=reverse)
    folded = _folded(op, x, axis)
    sequences = [
        op.Transpose(op.Reshape(value, folded, allowzero=1), perm=[1, 0, 2])
        for value in (factors, cast(op, dy, own, wide))
    ]
    one_step = op.Squeeze(op.Slice(op.Shape(sequences[0]), op.ints([1]), op.ints([3])))
    nothing = op.ConstantOfShape(one_step, value=ir.tensor(np.zeros(1, wide.numpy())))

    def step(m: Arithmetic, states: list[ir.Value], inputs: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
        (carried,), (factor, g) = states, inputs
        if exclusive:
            return [m.total(g, m.product(factor, carried))], [m.op.Identity(carried)]
        total = m.total(g, carried)
        return [m.product(factor, total)], [total]

    _, (after,) = scan(Arithmetic(op, wide), [nothing], sequences, step, outputs=1, backwards=not reverse)
    after = op.Reshape(op.Transpose(after, perm=[1, 0, 2]), op.shape(x), allowzero=1)
    return (cast(op, op.Mul(before, after), wide, own), None)


def _folded(op: Builder, x: ir.Value, axis: ir.Value) -> ir.Value:
    """The shape (lengths before the axis, its length, lengths behind it) of x."""
    lengths = op.shape(x)
    rank = op.Shape(lengths)
    place = op.Mod(op.Cast(op.Reshape(axis, op.ints([1])), to=ir.DataType.INT64.value), rank)
    behind = op.Add(place, op.ints([1]))
    return op.Concat(
        op.ReduceProd(op.Slice(lengths, op.ints([0]), place), keepdims=1),
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
    past, update = node.input(0), node.input(1)
    shape = dims(past)
    if shape is None:
        raise UnsupportedError(
            "the gradient needs the rank of the cache at conversion, and shape inference does not find it. Give that "
            "value a shape",
            op_type=node.op_type,
            node=node.name,
        )
    axis = node.int("axis", -2) % len(shape)
    begin = [node.input(2)] if node.has(2) else []
    grads: list[ir.Value | None] = [None] * len(node.inputs)
    if node.wants(0):
        nothing = op.zeros(op.shape(update), update)
        mode = node.string("mode", "linear")
        grads[0] = op.TensorScatter(dy, nothing, *begin, axis=axis, mode=mode)
    if node.wants(1):
        zero, one = (op.constant(np.array(number)) for number in (0, 1))
        places = op.Range(zero, op.Squeeze(length(op, update, axis), op.ints([0])), one)
        places = op.Reshape(places, op.ints([-1 if n == axis else 1 for n in range(len(shape))]))
        if begin:
            places = op.Add(places, op.Reshape(begin[0], op.ints([-1] + [1] * (len(shape) - 1))))
        if node.string("mode", "linear") == "circular":
            places = op.Mod(places, length(op, past, axis))
        grads[1] = op.GatherElements(dy, op.Expand(places, op.shape(update)), axis=axis)
    return grads
