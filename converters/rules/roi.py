"""Gradients of pooling over regions of interest."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder, element_type
from onnx_backprop.converters.reverse.forward import Forward
from onnx_backprop.converters.reverse.registry import Grads, gradient
from onnx_backprop.converters.rules.common import cast, length, work_type


@gradient("RoiAlign", versions=(16, 22), inputs=(0,))
def roi_align(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y[r] = A_r X[b_r] B_rᵀ, the mean of linear samples in each bin  =>  dX[b] = Σ_{r: b_r = b} A_rᵀ dY[r] B_r.

    A_r (rows, H) and B_r (columns, W) hold the weights of the samples along each axis, 0 for a sample further than a
    pixel outside. Shapes: X (N, C, H, W), rois (R, 4), batch_indices (R), Y (R, C, rows, columns). Regions get no
    gradient, as in other frameworks. Half types are computed in float32.
    """
    mode = node.string("mode", "avg")
    if mode != "avg":
        raise node.refuse("mode", mode, "avg only: the max of onnxruntime is not that of the operator's text")
    coordinates = node.string("coordinate_transformation_mode", "half_pixel")
    if coordinates not in ("half_pixel", "output_half_pixel"):
        raise node.refuse("coordinate_transformation_mode", coordinates, "half_pixel and output_half_pixel")
    x, rois, batch = node.input(0), node.input(1), node.input(2)
    own, wide = element_type(x), work_type(x)
    corners = cast(op, rois, element_type(rois), wide)
    rows = _weights(op, node, corners, length(op, x, -2), wide, axis="y", bins=node.int("output_height", 1))
    columns = _weights(op, node, corners, length(op, x, -1), wide, axis="x", bins=node.int("output_width", 1))

    zero, one = op.constant(np.array(0)), op.constant(np.array(1))
    images = op.Range(zero, op.Squeeze(length(op, x, -4), op.ints([0])), one)
    in_image = op.Equal(op.Unsqueeze(images, op.ints([1])), op.Unsqueeze(batch, op.ints([0])))
    in_image = op.Unsqueeze(op.Cast(in_image, to=wide.value), op.ints([2, 3]))  # (N, R, 1, 1)
    spread = op.Mul(in_image, rows)  # (N, R, rows, H)
    heights = op.Concat(length(op, x, -4), op.ints([-1]), length(op, x, -2), axis=0)
    spread = op.Transpose(op.Reshape(spread, heights), perm=[0, 2, 1])  # (N, H, R rows)
    widened = op.MatMul(cast(op, dy, own, wide), op.Unsqueeze(columns, op.ints([1])))  # (R, C, rows, W)
    widened = op.Transpose(widened, perm=[0, 2, 1, 3])
    across = op.Mul(length(op, x, -3), length(op, x, -1))
    count = op.Mul(op.Shape(rois, start=0, end=1), op.ints([node.int("output_height", 1)]))
    dx = op.MatMul(spread, op.Reshape(widened, op.Concat(count, across, axis=0), allowzero=1))  # (N, H, C W)
    shape = op.Concat(*(length(op, x, axis) for axis in (-4, -2, -3, -1)), axis=0)
    dx = op.Transpose(op.Reshape(dx, shape, allowzero=1), perm=[0, 2, 1, 3])
    return cast(op, dx, wide, own), None, None


def _weights(
    op: Builder, node: Forward, rois: ir.Value, n: ir.Value, wide: ir.DataType, *, axis: str, bins: int
) -> ir.Value:
    """(R, bins, n): the weight of each of n pixels in the mean of each bin's samples, in onnxruntime's roundings."""
    half_pixel = node.string("coordinate_transformation_mode", "half_pixel") == "half_pixel"

    def number(value: float) -> ir.Value:
        return op.constant(np.array(value, wide.numpy()))

    def edge(column: int) -> ir.Value:
        scaled = op.Mul(op.Gather(rois, op.ints([column]), axis=1), number(node.float("spatial_scale", 1.0)))
        return op.Sub(scaled, number(0.5)) if half_pixel else scaled

    first, last = (edge(0), edge(2)) if axis == "x" else (edge(1), edge(3))  # (R, 1)
    size = op.Sub(last, first)
    if not half_pixel:
        size = op.Max(size, number(1.0))
    width = op.Div(size, number(bins))
    ratio = node.int("sampling_ratio", 0)
    samples = op.Add(op.Mul(size, number(0)), number(ratio)) if ratio > 0 else op.Ceil(width)
    most = op.Max(op.ReduceMax(op.Unsqueeze(samples, op.ints([0])), keepdims=0), number(1.0))
    steps = op.Range(number(0.0), most, number(1.0))  # (G)
    bin_start = op.Mul(width, op.constant(np.arange(bins).astype(wide.numpy())))  # (R, bins)
    bin_start = op.Unsqueeze(op.Add(first, bin_start), op.ints([2]))
    within = op.Div(op.Mul(op.Add(steps, number(0.5)), width), op.Max(samples, number(1.0)))  # (R, G)
    at = op.Add(bin_start, op.Unsqueeze(within, op.ints([1])))  # (R, bins, G)
    length_ = op.Cast(n, to=wide.value)
    counted = op.Unsqueeze(op.Less(steps, samples), op.ints([1]))
    inside = op.And(op.GreaterOrEqual(at, number(-1.0)), op.LessOrEqual(at, length_))
    clipped = op.Min(op.Max(at, number(0.0)), op.Sub(length_, number(1.0)))
    pixels = op.Range(number(0.0), op.Squeeze(length_, op.ints([0])), number(1.0))
    distance = op.Abs(op.Sub(op.Unsqueeze(clipped, op.ints([3])), pixels))  # (R, bins, G, n)
    weight = op.Relu(op.Sub(number(1.0), distance))
    weight = op.Where(op.Unsqueeze(op.And(counted, inside), op.ints([3])), weight, number(0.0))
    total = op.ReduceSum(weight, op.ints([2]), keepdims=0)
    return op.Div(total, op.Unsqueeze(op.Max(samples, number(1.0)), op.ints([2])))
