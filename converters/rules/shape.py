"""Gradients of operators that move elements between shapes: each is undone by another of its kind."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.known import dims, known_lengths
from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads, gradient
from onnx_backprop.converters.rules.common import as_shaped


@gradient("Reshape", versions=(14, 19, 21, 23, 24, 25))
@gradient("Flatten", versions=(13, 21, 23, 24, 25))
@gradient("Squeeze", versions=(13, 21, 23, 24, 25))
@gradient("Unsqueeze", versions=(13, 21, 23, 24, 25))
def reshape(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x in another shape: any, a matrix, without or with axes of length 1  =>  dx = dy in the shape of x."""
    return as_shaped(op, dy, node.input(0))


@gradient("Transpose", versions=(13, 21, 23, 24, 25))
def transpose(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x with its axes permuted by perm  =>  dx = dy permuted by the inverse of perm (absent: reversed)."""
    perm = node.ints("perm")
    return op.Transpose(dy, perm=None if perm is None else np.argsort(perm).tolist())


@gradient("Concat", versions=(13,))
def concat(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = [x_0, x_1, …] along an axis  =>  dx_i = the part of dy where x_i went."""
    axis, inputs = node.axis(0), node.every_input()
    if len(inputs) == 1:
        return dy
    known = [known_lengths(x, axis, axis + 1 or None) for x in inputs]
    numbers = [n for lengths in known if lengths is not None for n in lengths]
    sizes = numbers if len(numbers) == len(inputs) else op.Concat(*(op.length(x, axis) for x in inputs), axis=0)
    return op.emit("Split", [dy, sizes], {"axis": axis}, outputs=len(inputs))


@gradient("Split", versions=(18,), all_outputs=True)
def split(op: Builder, node: Forward, dys: Sequence[ir.Value | None]) -> Grads:
    """Y_0, Y_1, … = parts of x along an axis  =>  dx = [dy_0, dy_1, …], zeros for an output nothing depends on."""
    outputs = [node.output(n) for n in range(len(dys))]
    parts = [op.zeros(op.shape(y), y) if dy is None else dy for y, dy in zip(outputs, dys, strict=True)]
    return op.Concat(*parts, axis=node.axis(0))


@gradient("Expand", versions=(13,))
def expand(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x broadcast to a shape  =>  dx = dy summed over the axes that were broadcast."""
    return op.unbroadcast(dy, node.input(0), node.output())


@gradient("Tile", versions=(13,))
def tile(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x repeated r_i times along axis i  =>  dx = Σ over the repeats of dy.

    dy is seen in the shape (r_0, n_0, r_1, n_1, …), where the sum runs over every other axis.
    """
    x, known = node.input(0), dims(node.input(0))
    pairs = op.Concat(op.Unsqueeze(node.input(1), [1]), op.Unsqueeze(op.shape(x), [1]), axis=1)
    axes = op.Range(0, op.Mul(op.rank(x), 2), 2) if known is None else range(0, 2 * len(known), 2)
    repeats = op.Reshape(dy, op.Reshape(pairs, [-1]), allowzero=1)
    return op.ReduceSum(repeats, axes, keepdims=0, noop_with_empty_axes=1)


@gradient("SpaceToDepth", versions=(13, 28))
def space_to_depth(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = b × b blocks moved into channels  =>  dx = DepthToSpace(dy) with the same b and mode."""
    mode = node.choice("mode", "DCR", ("DCR", "CRD"))
    return op.DepthToSpace(dy, blocksize=node.int("blocksize", 0), mode=mode)


@gradient("DepthToSpace", versions=(13,))
def depth_to_space(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = channels moved into b × b blocks  =>  dx = SpaceToDepth(dy), for CRD with its channels reordered.

    SpaceToDepth leaves channel (i, j, c) of block cell (i, j); CRD wants them as (c, i, j).
    """
    x, mode, block = node.input(0), node.choice("mode", "DCR", ("DCR", "CRD")), node.int("blocksize", 0)
    dx = op.SpaceToDepth(dy, blocksize=block)
    if mode == "DCR":
        return dx
    channels = op.Div(op.length(x, 1), [block * block])
    cells_first = op.Concat(op.length(x, 0), [block * block], channels, op.lengths(x, 2), axis=0)
    return as_shaped(op, op.Transpose(op.Reshape(dx, cells_first, allowzero=1), perm=[0, 2, 1, 3, 4]), x)
