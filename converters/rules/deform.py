"""The gradient of DeformConv."""

import onnx_ir as ir

from onnx_backprop.converters.reverse.known import dims, element_type, known_lengths
from onnx_backprop.converters.reverse.long_sums import sum_over
from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads, gradient
from onnx_backprop.converters.rules.common import as_shaped, count_up, narrow, widen
from onnx_backprop.converters.rules.taps import SampleTaps, sample_taps


@gradient("DeformConv", versions=(19, 22))
def deform_conv(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = W · V + b, V[c, k, p] = m[k, p] X[c](p_k + Δ[k, p]), X(…) read linearly, 0 outside  =>  dV = Wᵀ · dY,
    dW = Σ dY Vᵀ, db = Σ dY, dm = Σ_c dV V / m, dX = dV m added at what was read, dΔ = Σ_c dV m X'(p_k + Δ).

    Shapes: X (N, C, H, W), W (M, C / g, kH, kW), Δ (N, 2 o kH kW, oH, oW) with y before x, m (N, o kH kW, oH, oW),
    for g groups and o groups of offsets. Half types are computed in float32.

    Edge: zeros where Δ is known to have no cells, which cannot be divided into axes.
    """
    if 0 in (dims(node.input(2)) or ()):
        return [None if x is None else op.zeros_like(x) for x in node.node.inputs]
    kernel = _kernel(op, node)
    groups, offset_groups = node.int("group", 1), node.int("offset_group", 1)
    x, weights, offset = node.input(0), node.input(1), node.input(2)
    mask = None if node.optional(4) is None else widen(op, node.input(4))
    taken, out = op.ReduceProd(kernel, keepdims=1), op.Shape(offset, start=2)
    dy = widen(op, dy)

    # one image for each group of offsets; K P points in each: every output position under every kernel position
    split = op.Concat([-1], op.Div(op.Shape(x, start=1, end=2), [offset_groups]), axis=0)
    images = op.Reshape(widen(op, x), op.Concat(split, op.Shape(x, start=2), axis=0))
    images.shape = ir.Shape([None] * 4)
    points = _points(op, node, widen(op, offset), kernel, out)
    samples = sample_taps(op, images, points, mode="linear", padding="zeros")
    flat = op.Reshape(images, [0, 0, -1])
    read = samples.read(flat)  # (N o, C / o, K P, 4)
    values = op.ReduceSum(op.Mul(read, op.Unsqueeze(samples.weight, [1])), [3], keepdims=0)
    if mask is not None:
        mask = op.Reshape(mask, op.Concat(op.Shape(samples.weight, end=1), [1, -1], axis=0))

    # (N, g, M / g, P) and (N, g, C K / g, P)
    positions = op.Reshape(op.ReduceProd(out, keepdims=1), [1])
    by_group = op.Concat(op.Shape(x, start=0, end=1), [groups, -1], positions, axis=0)
    g = op.Reshape(dy, by_group)
    columns = op.Reshape(values if mask is None else op.Mul(values, mask), by_group)
    per_group = op.Mul(op.Shape(weights, start=1, end=2), taken)
    filters = op.Reshape(widen(op, weights), op.Concat([groups, -1], per_group, axis=0))
    dw = op.ReduceSum(op.MatMul(g, op.Transpose(columns, perm=[0, 1, 3, 2])), [0], keepdims=0)
    dv = op.Reshape(op.MatMul(op.Transpose(filters, perm=[0, 2, 1]), g), op.Shape(values), allowzero=1)
    dmask = op.ReduceSum(op.Mul(dv, values), [1], keepdims=0)
    dv = dv if mask is None else op.Mul(dv, mask)
    weighted = op.ReduceSum(op.Mul(read, op.Unsqueeze(dv, [3])), [1], keepdims=0)
    grads = (
        as_shaped(op, samples.add_into(dv, flat), x),
        as_shaped(op, dw, weights),
        _offsets(op, samples, weighted, taken, positions, op.shape(offset)),
        sum_over(op, dy, [0, 2, 3], (None,) * 4, keepdims=0),
        None if mask is None else as_shaped(op, dmask, node.input(4)),
    )
    return [None if grad is None else narrow(op, grad, x) for grad in grads]


def _offsets(
    op: Builder, samples: SampleTaps, read: ir.Value, taken: ir.Value, positions: ir.Value, shape: ir.Value
) -> ir.Value:
    """From what was read, weighted by its gradient, (N o, K P, 4)."""
    by_axis = []
    for axis in range(2):
        slope = op.ReduceSum(op.Mul(read, samples.slope(axis)), [2], keepdims=0)
        by_axis.append(op.Reshape(slope, op.Concat([-1], taken, [1], positions, axis=0)))
    return op.Reshape(op.Concat(*by_axis, axis=2), shape, allowzero=1)


def _points(op: Builder, node: Forward, offset: ir.Value, kernel: ir.Value, out: ir.Value) -> list[ir.Value]:
    """Where the kernel reads, in pixels: y and x, (N o, K P) each."""
    strides, dilations = node.ints("strides", [1, 1]), node.ints("dilations", [1, 1])
    pads = node.ints("pads", [0, 0, 0, 0])
    taken = op.ReduceProd(kernel, keepdims=1)
    offsets = op.Reshape(offset, op.Concat([-1], taken, [2], out, axis=0))
    grid = op.Concat(kernel, out, axis=0)
    points = []
    for axis in range(2):
        steps, cells = (count_up(op, op.Gather(lengths, [axis])) for lengths in (out, kernel))
        starts = op.Sub(op.Mul(steps, [strides[axis]]), [pads[axis]])
        starts = op.Unsqueeze(starts, [0, 1, 3] if axis == 0 else [0, 1, 2])
        inside = op.Mul(cells, [dilations[axis]])
        inside = op.Unsqueeze(inside, [1, 2, 3] if axis == 0 else [0, 2, 3])
        regular = op.Expand(op.Add(starts, inside), grid)
        regular = op.Reshape(regular, op.Concat(taken, out, axis=0), allowzero=1)
        moved = op.Add(op.Cast(regular, to=element_type(offset)), op.Gather(offsets, axis, axis=2))
        points.append(op.Reshape(moved, [0, -1]))
    return points


def _kernel(op: Builder, node: Forward) -> ir.Value:
    """The two lengths of the kernel: constants where conversion knows them, else those of the run's W."""
    kernel, static_shape = node.ints("kernel_shape"), dims(node.input(1))
    kernel = known_lengths(node.input(1), 2) if kernel is None else kernel
    if (2 if static_shape is None else len(static_shape) - 2) != 2 or (kernel is not None and len(kernel) != 2):
        raise node.refuse("kernel_shape", kernel, "of two axes, as onnxruntime does")
    return op.Shape(node.input(1), start=2) if kernel is None else op.ints(kernel)
