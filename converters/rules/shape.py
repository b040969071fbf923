"""Gradients of operators that move elements between shapes: each is undone by another of its kind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder, dims
from onnx_backprop.converters.reverse.forward import Forward
from onnx_backprop.converters.reverse.registry import Grads, gradient
from onnx_backprop.converters.rules.common import length, lengths_from


@gradient("Reshape", versions=(14, 19, 21, 23, 24, 25))
def reshape(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x in another shape  =>  dx = dy in the shape of x."""
    return _as_input(op, node, dy), None


@gradient("Flatten", versions=(13, 21, 23, 24, 25))
def flatten(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x as a matrix  =>  dx = dy in the shape of x."""
    return (_as_input(op, node, dy),)


@gradient("Squeeze", versions=(13, 21, 23, 24, 25))
def squeeze(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x without some axes of length 1  =>  dx = dy in the shape of x."""
    return (_as_input(op, node, dy), None)[: len(node.inputs)]


@gradient("Unsqueeze", versions=(13, 21, 23, 24, 25))
def unsqueeze(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x with further axes of length 1  =>  dx = dy in the shape of x."""
    return _as_input(op, node, dy), None


def _as_input(op: Builder, node: Forward, dy: ir.Value) -> ir.Value:
    return op.Reshape(dy, op.shape(node.input(0)), allowzero=1)


@gradient("Transpose", versions=(13, 21, 23, 24, 25))
def transpose(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x with its axes permuted by perm  =>  dx = dy permuted by the inverse of perm (absent: reversed)."""
    perm = node.ints("perm")
    return (op.Transpose(dy, perm=None if perm is None else [int(axis) for axis in np.argsort(perm)]),)


@gradient("Concat", versions=(13,))
def concat(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = [x_0, x_1, …] along an axis  =>  dx_i = the part of dy where x_i went."""
    axis, inputs = node.int("axis", 0), [node.input(n) for n in range(len(node.inputs))]
    if len(inputs) == 1:
        return (dy,)
    lengths = [length(op, x, axis) for x in inputs]
    known = [None if shape is None else shape[axis] for shape in map(dims, inputs)]
    numbers = [n for n in known if isinstance(n, int)]
    sizes = op.ints(numbers) if len(numbers) == len(inputs) else op.Concat(*lengths, axis=0)
    parts = op.emit("Split", [dy, sizes], {"axis": axis}, outputs=len(inputs))
    return [part if node.wants(n) else None for n, part in enumerate(parts)]


@gradient("Split", versions=(18,), all_outputs=True)
def split(op: Builder, node: Forward, dys: Sequence[ir.Value | None]) -> Grads:
    """Y_0, Y_1, … = parts of x along an axis  =>  dx = [dy_0, dy_1, …], zeros for an output nothing depends on."""
    parts = []
    for n, dy in enumerate(dys):
        y = node.output(n)
        parts.append(op.zeros(op.shape(y), y) if dy is None else dy)
    return (op.Concat(*parts, axis=node.int("axis", 0)), None)[: len(node.inputs)]


@gradient("Expand", versions=(13,))
def expand(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x broadcast to a shape  =>  dx = dy summed over the axes that were broadcast."""
    return op.unbroadcast(dy, node.input(0), node.output()), None


@gradient("Tile", versions=(13,))
def tile(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x repeated r_i times along axis i  =>  dx = Σ over the repeats of dy.

    dy is seen in the shape (r_0, n_0, r_1, n_1, …), where the sum runs over every other axis.
    """
    x, column = node.input(0), op.ints([1])
    pairs = op.Concat(op.Unsqueeze(node.input(1), column), op.Unsqueeze(op.shape(x), column), axis=1)
    known = dims(x)
    if known is None:
        rank = op.Size(op.shape(x))
        zero, two = op.constant(np.array(0)), op.constant(np.array(2))
        axes = op.Range(zero, op.Mul(rank, two), two)
    else:
        axes = op.ints(range(0, 2 * len(known), 2))
    repeats = op.Reshape(dy, op.Reshape(pairs, op.ints([-1])), allowzero=1)
    return op.ReduceSum(repeats, axes, keepdims=0, noop_with_empty_axes=1), None


@gradient("SpaceToDepth", versions=(13,))
def space_to_depth(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = b × b blocks moved into channels  =>  dx = DepthToSpace(dy) with the same b, mode DCR."""
    return (op.DepthToSpace(dy, blocksize=node.int("blocksize", 0), mode="DCR"),)


@gradient("DepthToSpace", versions=(13,))
def depth_to_space(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = channels moved into b × b blocks  =>  dx = SpaceToDepth(dy), for CRD with its channels reordered.

    SpaceToDepth leaves channel (i, j, c) of block cell (i, j); CRD wants them as (c, i, j).
    """
    mode, block = node.string("mode", "DCR"), node.int("blocksize", 0)
    dx = op.SpaceToDepth(dy, blocksize=block)
    if mode == "DCR":
        return (dx,)
    if mode != "CRD":
        raise node.refuse("mode", mode, "DCR and CRD")
    x = node.input(0)
    cells = op.ints([block * block])
    channels = op.Div(length(op, x, 1), cells)
    cells_first = op.Concat(length(op, x, 0), cells, channels, lengths_from(op, x, 2), axis=0)
    dx = op.Transpose(op.Reshape(dx, cells_first, allowzero=1), perm=[0, 2, 1, 3, 4])
    return (op.Reshape(dx, op.shape(x), allowzero=1),)
