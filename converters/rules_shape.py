"""Gradients of operators that move or repeat elements: their adjoint moves them back, adding up copies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ..opset.errors import UnsupportedError
from .builder import Builder, dims
from .forward import Forward
from .registry import Grads, gradient

SINCE_13 = (13, 21, 23, 24, 25)


def _alone(node: Forward, dx: ir.Value) -> Grads:
    """dx for the first input, nothing for the shapes, axes and indices behind it."""
    return (dx, *(None,) * (len(node.inputs) - 1))


def _like_input(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """dy in the shape of x: the adjoint of everything that only changes the shape."""
    return _alone(node, op.Reshape(dy, op.shape(node.input(0)), allowzero=1))


@gradient("Reshape", versions=(14, 19, 21, 23, 24, 25))
def reshape(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = x in another shape  =>  dx = dy in the shape of x."""
    return _like_input(op, node, dy)


@gradient("Flatten", versions=SINCE_13)
def flatten(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = x as a matrix  =>  dx = dy in the shape of x."""
    return _like_input(op, node, dy)


@gradient("Squeeze", versions=SINCE_13)
def squeeze(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = x without axes of length 1  =>  dx = dy in the shape of x."""
    return _like_input(op, node, dy)


@gradient("Unsqueeze", versions=SINCE_13)
def unsqueeze(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = x with more axes of length 1  =>  dx = dy in the shape of x."""
    return _like_input(op, node, dy)


@gradient("Transpose", versions=SINCE_13)
def transpose(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = x with axes in the order perm  =>  dx = dy with axes in the inverse order; without perm, reversed again."""
    perm = node.ints("perm")
    return (op.Transpose(dy, perm=None if perm is None else [int(i) for i in np.argsort(perm)]),)


@gradient("Expand", versions=(13,))
def expand(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = x repeated to a shape  =>  dx = Σ dy over the copies."""
    return _alone(node, op.unbroadcast(dy, node.input(0), node.output()))


@gradient("Concat", versions=(13,))
def concat(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = a, b, … along an axis  =>  each gets its part of dy."""
    axis = node.int("axis", 0)
    wanted = [n for n in range(len(node.inputs)) if node.wants(n)]
    lengths = [_length(op, node.input(n), axis) for n in range(len(node.inputs))]
    grads: list[ir.Value | None] = [None] * len(node.inputs)
    start = op.ints([0])
    for n, length in enumerate(lengths[: wanted[-1] + 1]):
        end = op.Add(start, length)
        if n in wanted:
            grads[n] = op.Slice(dy, start, end, op.ints([axis]))
        start = end
    return grads


def _length(op: Builder, value: ir.Value, axis: int) -> ir.Value:
    """The length of one axis as a 1-D int64 tensor of one element."""
    known = dims(value)
    if known is not None and isinstance(known[axis], int):
        return op.ints([int(str(known[axis]))])
    return op.Gather(op.shape(value), op.ints([axis]))


@gradient("Split", versions=(18,), all_outputs=True)
def split(op: Builder, node: Forward, dys: Sequence[ir.Value | None]) -> Grads:
    """y_1, y_2, … = parts of x along an axis  =>  dx = dy_1, dy_2, … joined, zeros for a part nobody used."""
    parts = [op.zeros(op.shape(node.output(n)), node.input(0)) if dy is None else dy for n, dy in enumerate(dys)]
    return _alone(node, op.Concat(*parts, axis=node.int("axis", 0)))


@gradient("Slice", versions=(13,))
def slice_(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = x[start:end:step]  =>  dx = dy at the places read, 0 elsewhere.

    The places are found by slicing the running number of each element in the same way, which covers negative
    starts and steps, clamping, and bounds that only the run knows.
    """
    x = node.input(0)
    count = op.Size(x)
    numbers = op.Range(op.constant(np.array(0)), count, op.constant(np.array(1)))
    places = op.Slice(op.Reshape(numbers, op.shape(x), allowzero=1), *node.inputs[1:])
    return _alone(node, scatter_back(op, x, places, dy))


@gradient("Gather", versions=(13,))
def gather(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = x[…, indices, …] along an axis  =>  dx[…, i, …] = Σ dy over the places whose index is i."""
    x = node.input(0)
    axis = node.int("axis", 0)
    numbers = op.Range(op.constant(np.array(0)), op.Size(x), op.constant(np.array(1)))
    places = op.Gather(op.Reshape(numbers, op.shape(x), allowzero=1), node.input(1), axis=axis)
    return _alone(node, scatter_back(op, x, places, dy))


def scatter_back(op: Builder, x: ir.Value, places: ir.Value, dy: ir.Value) -> ir.Value:
    """Zeros shaped as x, with dy added at `places`, running numbers of elements of x."""
    flat = op.zeros(op.Reshape(op.Size(x), op.ints([1])), x)
    everything = op.ints([-1])
    added = op.ScatterElements(
        flat, op.Reshape(places, everything), op.Reshape(dy, everything), axis=0, reduction="add"
    )
    return op.Reshape(added, op.shape(x), allowzero=1)


@gradient("Pad", versions=(18, 19, 21, 23, 24, 25))
def pad(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = x between constants  =>  dx = dy without them; a negative pad cut x, where dx is 0.

    The constant gets Σ dy over the border. Other modes than constant are refused.
    """
    mode = node.string("mode", "constant")
    if mode != "constant":
        raise node.refuse("mode", mode, "constant")
    pads = op.Neg(node.input(1))
    axes = [node.input(3)] if node.has(3) else []
    dx = op.Pad(dy, pads, None, *axes, mode="constant")
    grads: list[ir.Value | None] = [dx if node.wants(0) else None, *[None] * (len(node.inputs) - 1)]
    if node.wants(2):
        value = node.input(2)
        inside = op.fill(op.shape(node.input(0)), 0.0, value)
        border = op.Pad(inside, node.input(1), op.fill(op.ints([]), 1.0, value), *axes, mode="constant")
        grads[2] = op.Reshape(op.ReduceSum(op.Mul(dy, border), keepdims=0), op.shape(value), allowzero=1)
    return grads


@gradient("Tile", versions=(13,))
def tile(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = x repeated along each axis  =>  dx = Σ dy over the repeats."""
    known = dims(node.input(0))
    if known is None:
        raise UnsupportedError("the rank of the input is unknown; give it a shape", op_type="Tile", node=node.name)
    rank = len(known)
    if rank == 0:
        return _alone(node, dy)
    # (r0·d0, r1·d1, …) seen as (r0, d0, r1, d1, …), summed over the r
    pairs = op.Concat(
        op.Unsqueeze(node.input(1), op.ints([1])), op.Unsqueeze(op.shape(node.input(0)), op.ints([1])), axis=1
    )
    unfolded = op.Reshape(dy, op.Reshape(pairs, op.ints([-1])), allowzero=1)
    return _alone(node, op.ReduceSum(unfolded, op.ints(range(0, 2 * rank, 2)), keepdims=0))


@gradient("DepthToSpace", versions=(13,))
def depth_to_space(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = x with channels moved into blocks of pixels  =>  dx = dy with the blocks moved back."""
    size = node.int("blocksize", 0)
    back = op.SpaceToDepth(dy, blocksize=size)
    if node.string("mode", "DCR") == "DCR":
        return (back,)
    # CRD keeps the channel outside the block, SpaceToDepth puts it inside: (b·b, c) -> (c, b·b)
    shape = op.Shape(back)
    n, rest = op.Slice(shape, op.ints([0]), op.ints([1])), op.Slice(shape, op.ints([2]), op.ints([4]))
    split_channels = op.Reshape(back, op.Concat(n, op.ints([size * size, -1]), rest, axis=0))
    return (op.Reshape(op.Transpose(split_channels, perm=[0, 2, 1, 3, 4]), shape),)


@gradient("SpaceToDepth", versions=(13,))
def space_to_depth(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = x with blocks of pixels moved into channels  =>  dx = dy with the channels moved back."""
    return (op.DepthToSpace(dy, blocksize=node.int("blocksize", 0), mode="DCR"),)
