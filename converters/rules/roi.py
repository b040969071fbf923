"""Gradients of pooling over regions of interest."""

import onnx_ir as ir

from onnx_backprop.converters.reverse.known import element_type
from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads, gradient
from onnx_backprop.converters.rules.common import cast, count_up, narrow, widen, work_type

COORDINATES = ("half_pixel", "output_half_pixel")


@gradient("RoiAlign", versions=(16, 22), inputs=(0,))
def roi_align(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y[r] = A_r X[b_r] B_rᵀ, the mean of linear samples in each bin  =>  dX[b] = Σ_{r: b_r = b} A_rᵀ dY[r] B_r.

    A_r (rows, H) and B_r (columns, W) hold the weights of the samples along each axis, 0 for a sample further than a
    pixel outside. Shapes: X (N, C, H, W), rois (R, 4), batch_indices (R), Y (R, C, rows, columns). Regions get no
    gradient, as in other frameworks. Half types are computed in float32.
    """
    if node.string("mode", "avg") != "avg":
        handled = "avg only: the max of onnxruntime is not that of the operator's text"
        raise node.refuse("mode", node.string("mode", "avg"), handled)
    half_pixel = node.choice("coordinate_transformation_mode", "half_pixel", COORDINATES) == "half_pixel"
    x, rois, batch = node.every_input()
    corners = op.Mul(cast(op, rois, work_type(x)), node.float("spatial_scale", 1.0))
    corners = op.Sub(corners, 0.5) if half_pixel else corners
    bins, ratio = (node.int("output_height", 1), node.int("output_width", 1)), node.int("sampling_ratio", 0)
    rows, columns = (
        _weights(op, corners, axis, op.length(x, -1 - axis), bins[1 - axis], ratio, half_pixel=half_pixel)
        for axis in (1, 0)
    )

    in_image = op.Equal(op.Unsqueeze(count_up(op, op.length(x, -4)), [1]), op.Unsqueeze(batch, [0]))
    in_image = op.Unsqueeze(op.Cast(in_image, to=work_type(x)), [2, 3])  # (N, R, 1, 1)
    spread = op.Mul(in_image, rows)  # (N, R, rows, H)
    heights = op.Concat(op.length(x, -4), [-1], op.length(x, -2), axis=0)
    spread = op.Transpose(op.Reshape(spread, heights), perm=[0, 2, 1])  # (N, H, R rows)
    widened = op.MatMul(widen(op, dy), op.Unsqueeze(columns, [1]))  # (R, C, rows, W)
    widened = op.Transpose(widened, perm=[0, 2, 1, 3])
    across = op.Mul(op.length(x, -3), op.length(x, -1))
    count = op.Mul(op.Shape(rois, start=0, end=1), [bins[0]])
    dx = op.MatMul(spread, op.Reshape(widened, op.Concat(count, across, axis=0), allowzero=1))  # (N, H, C W)
    shape = op.Concat(*(op.length(x, axis) for axis in (-4, -2, -3, -1)), axis=0)
    dx = op.Transpose(op.Reshape(dx, shape, allowzero=1), perm=[0, 2, 1, 3])
    return narrow(op, dx, x)


def _weights(
    op: Builder, corners: ir.Value, axis: int, n: ir.Value, bins: int, ratio: int, *, half_pixel: bool
) -> ir.Value:
    """(R, bins, n): the weight of each of n pixels in the mean of each bin's samples, in onnxruntime's roundings.

    axis: 0 for x, 1 for y.
    """
    dtype = element_type(corners)
    first, last = (op.Gather(corners, [column], axis=1) for column in (axis, axis + 2))  # (R, 1)
    size = op.Sub(last, first)
    if not half_pixel:
        size = op.Max(size, 1)
    width = op.Div(size, bins)
    samples = op.Add(op.Mul(size, 0), ratio) if ratio > 0 else op.Ceil(width)
    most = op.Max(op.ReduceMax(op.Unsqueeze(samples, [0]), keepdims=0), 1)
    steps = op.Range(0, most, 1)  # (G)
    bin_start = op.Unsqueeze(op.Add(first, op.Mul(width, range(bins))), [2])  # (R, bins, 1)
    within = op.Div(op.Mul(op.Add(steps, 0.5), width), op.Max(samples, 1))  # (R, G)
    points = op.Add(bin_start, op.Unsqueeze(within, [1]))  # (R, bins, G)
    length = op.Cast(n, to=dtype)
    counted = op.Unsqueeze(op.Less(steps, samples), [1])
    inside = op.And(op.GreaterOrEqual(points, -1), op.LessOrEqual(points, length))
    clipped = op.Min(op.Max(points, 0), op.Sub(length, 1))
    # a Range of a length as a float onnxruntime (1.32) takes for one of integers, if it knows the length
    pixels = op.Cast(count_up(op, n), to=dtype)
    distance = op.Abs(op.Sub(op.Unsqueeze(clipped, [3]), pixels))  # (R, bins, G, n)
    weight = op.Where(op.Unsqueeze(op.And(counted, inside), [3]), op.Relu(op.Sub(1, distance)), 0)
    return op.Div(op.ReduceSum(weight, [2], keepdims=0), op.Unsqueeze(op.Max(samples, 1), [2]))
