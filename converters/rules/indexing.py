"""Gradients of operators that pick, pad or place elements."""

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.known import dims
from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads, gradient
from onnx_backprop.converters.rules.common import (
    as_shaped,
    narrow,
    padded,
    positions,
    put_back,
    scatter_add,
    size,
    widen,
    work_type,
)


@gradient("Slice", versions=(13,))
def slice_(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x[start:end:step, …]  =>  dx = zeros with dy at [start:end:step, …]."""
    x, steps = node.input(0), node.constant_list(4)
    if node.has(4) and (steps is None or (steps != 1).any()):
        return put_back(op, x, op.Slice(positions(op, x), *node.inputs[1:]), dy)
    return padded(op, dy, *_around_slice(op, node, dy))


def _around_slice(op: Builder, node: Forward, dy: ir.Value) -> tuple[ir.Value, ir.Value]:
    """What a slice with steps of 1 left out before and behind, as the pads and axes of a Pad."""
    x, shape, out = node.input(0), dims(node.input(0)), dims(node.output())
    starts, axes = node.constant_list(1), node.constant_list(3)
    if axes is None and not node.has(3) and starts is not None:
        axes = np.arange(starts.size)
    if starts is not None and axes is not None and shape is not None and out is not None:
        before, behind = [], []
        for start, axis in zip(starts.tolist(), axes.tolist(), strict=True):
            n, kept = shape[axis], out[axis]
            if isinstance(n, int) and isinstance(kept, int):
                before.append(min(max(start + n if start < 0 else start, 0), n))
                behind.append(n - before[-1] - kept)
        if len(before) == starts.size:
            return op.ints([*before, *behind]), op.ints(axes.tolist())
    return _around_slice_at_run_time(op, node, x, dy)


def _around_slice_at_run_time(op: Builder, node: Forward, x: ir.Value, dy: ir.Value) -> tuple[ir.Value, ir.Value]:
    start = op.Cast(node.input(1), to=ir.DataType.INT64)
    axes = op.Cast(node.input(3), to=ir.DataType.INT64) if node.has(3) else op.Range(0, op.count(start), 1)
    n, kept = op.Gather(op.Shape(x), axes), op.Gather(op.Shape(dy), axes)
    start = op.Where(op.Less(start, 0), op.Add(start, n), start)
    before = op.Min(op.Max(start, 0), n)
    behind = op.Sub(op.Sub(n, before), kept)
    return op.Concat(before, behind, axis=0), axes


@gradient("Pad", versions=(18, 19, 21, 23, 24, 25))
def pad(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x with cells added (pads > 0) or cut off (pads < 0)  =>  dx = dy with the pads reversed.

    Mode constant: dx = Pad(dy, -pads), and the constant gets the sum of dy over the cells it filled. Modes reflect,
    edge and wrap fill cells with copies of others: dx sums dy over the copies of each element.
    """
    x, mode = node.input(0), node.choice("mode", "constant", ("constant", "reflect", "edge", "wrap"))
    axes = node.optional(3)
    if mode != "constant":
        return put_back(op, x, padded(op, positions(op, x), node.input(1), axes, mode=mode), dy)
    pads = node.constant_list(1)
    dx = padded(op, dy, op.Neg(node.input(1)) if pads is None else op.ints((-pads).tolist()), axes)
    if not node.has(2):
        return dx
    filled = padded(op, op.zeros(op.shape(x), x), node.input(1), axes, op.scalar(1.0, x))
    return dx, None, as_shaped(op, op.ReduceSum(op.Mul(dy, filled), keepdims=0), node.input(2))


@gradient("Gather", versions=(13,))
def gather(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y[…, j…, …] = x[…, i[j…], …] along an axis  =>  dx = zeros with dy added at the indices; repeated ones add up.

    Shapes: x (before…, n, behind…), indices (j…), dy (before…, j…, behind…). Negative indices count from the end.
    """
    x, indices, axis = node.input(0), node.input(1), node.axis(0)
    known = dims(x)
    if known is not None and axis >= 0:
        axis -= len(known)
    before, behind = op.Shape(x, start=0, end=axis), op.lengths(x, axis + 1) if axis != -1 else op.ints([])
    count = size(op, indices)
    ones = op.ints([1] * (-1 - axis)) if axis < 0 else op.filled(op.Shape(behind), 1)
    shape = op.Concat(before, count, behind, axis=0)
    column = op.Reshape(indices, op.Concat(count, ones, axis=0), allowzero=1)
    g = op.Reshape(dy, shape, allowzero=1)
    return scatter_add(op, op.shape(x), op.Expand(column, shape), g, like=x, axis=axis)


@gradient("GatherElements", versions=(13,))
def gather_elements(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x at the indices along an axis  =>  dx = zeros with dy added at the indices; repeated ones add up."""
    x = node.input(0)
    return scatter_add(op, op.shape(x), node.input(1), dy, like=x, axis=node.axis(0))


@gradient("Trilu", versions=(14,))
def trilu(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x above (or below) a diagonal, else 0  =>  dx = dy above (or below) the same diagonal."""
    return op.Trilu(dy, node.optional(1), **node.written)


@gradient("OneHot", versions=(11,))
def one_hot(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = values[1] at the indices, values[0] elsewhere  =>  dvalues = [Σ dy elsewhere, Σ dy at the indices]."""
    hot = op.OneHot(node.input(0), node.input(1), [0.0, 1.0], axis=node.axis(-1, node.output()))
    hot = op.Cast(hot, to=ir.DataType.BOOL)
    sums = [op.ReduceSum(picked, keepdims=0) for picked in (op.Where(hot, 0, dy), op.Where(hot, dy, 0))]
    return None, None, op.Concat(*(op.Reshape(s, [1]) for s in sums), axis=0)


@gradient("TopK", versions=(11, 24))
def top_k(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = the k largest (or smallest) of x along an axis, at the indices I  =>  dx = zeros with dy at I."""
    x = node.input(0)
    return op.ScatterElements(op.zeros(op.shape(x), x), node.output(1), dy, axis=node.axis(-1))


@gradient("Compress", versions=(11,))
def compress(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x where the condition holds along an axis (absent: x in row-major order)  =>  dx = zeros with dy there."""
    x = node.input(0)
    return put_back(op, x, op.Compress(positions(op, x), node.input(1), **node.written), dy)


@gradient("Unique", versions=(11,))
def unique(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = the different elements (or slices along an axis) of x  =>  dx = dy of the own one over how often it occurs.

    Equal elements share equally. The jump in the length of Y where two become equal is left out.
    """
    x, axis = node.input(0), node.written.get("axis")
    _, _, inverse, counts = op.emit("Unique", [x], node.written, outputs=4)
    share = op.Gather(op.Cast(counts, to=work_type(x)), inverse)
    if axis is None:
        return as_shaped(op, narrow(op, op.Div(op.Gather(widen(op, dy), inverse), share), x), x)
    if axis < 0:
        column = op.Reshape(share, [-1] + [1] * (-1 - axis))
    else:
        ones = op.filled(op.Shape(op.Shape(x, start=axis + 1)), 1)
        column = op.Reshape(share, op.Concat([-1], ones, axis=0))
    return narrow(op, op.Div(op.Gather(widen(op, dy), inverse, axis=axis), column), x)


@gradient("ReverseSequence", versions=(10,))
def reverse_sequence(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = the first l_b steps of each sequence b of x in reverse order  =>  dx = dy, reversed in the same way."""
    return op.ReverseSequence(dy, node.input(1), **node.written)


@gradient("CenterCropPad", versions=(18,))
def center_crop_pad(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x cropped or padded with zeros to a shape, about its centre  =>  dx = dy cropped or padded to the shape of x.

    Where x and Y differ by an odd number both put the larger half behind. A Pad, whose negative pads crop, since
    onnxruntime writes CenterCropPad out under the same names in a graph and in its bodies, and mixes them up.
    """
    more = op.Sub(op.shape(node.input(0)), op.shape(node.output()))
    before = op.Div(more, 2)
    return op.Pad(dy, op.Concat(before, op.Sub(more, before), axis=0))
