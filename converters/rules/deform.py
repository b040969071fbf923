"""The gradient of DeformConv."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder, dims, element_type
from onnx_backprop.converters.reverse.forward import Forward
from onnx_backprop.converters.reverse.registry import Grads, gradient
from onnx_backprop.converters.rules.common import cast, work_type
from onnx_backprop.converters.rules.taps import SampleTaps, taps


@gradient("DeformConv", versions=(19, 22))
def deform_conv(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = W · V + b, V[c, k, p] = m[k, p] X[c](p_k + Δ[k, p]), X(…) read linearly, 0 outside  =>  dV = Wᵀ · dY,
    dW = Σ dY Vᵀ, db = Σ dY, dm = Σ_c dV V / m, dX = dV m added at what was read, dΔ = Σ_c dV m X'(p_k + Δ).

    Shapes: X (N, C, H, W), W (M, C / g, kH, kW), Δ (N, 2 o kH kW, oH, oW) with y before x, m (N, o kH kW, oH, oW),
    for g groups and o groups of offsets. Half types are computed in float32.
    """
    kernel = _kernel(op, node)
    groups, offset_groups = node.int("group", 1), node.int("offset_group", 1)
    x, weights, offset = node.input(0), node.input(1), node.input(2)
    own, wide = element_type(x), work_type(x)
    x_wide, w_wide, offset_wide, dy = (cast(op, value, own, wide) for value in (x, weights, offset, dy))
    taken = op.ReduceProd(kernel, keepdims=1)
    out = op.Shape(offset, start=2)

    # one image for each group of offsets; K P points in each: every output position under every kernel position
    split = op.Concat(op.ints([-1]), op.Div(op.Shape(x, start=1, end=2), op.ints([offset_groups])), axis=0)
    images = op.Reshape(x_wide, op.Concat(split, op.Shape(x, start=2), axis=0))
    images.type, images.shape = ir.TensorType(wide), ir.Shape([None] * 4)
    at = taps(op, images, _points(op, node, offset_wide, kernel, out, wide), wide, mode="linear", padding="zeros")
    flat = op.Reshape(images, op.ints([0, 0, -1]))
    read = at.read(flat)  # (N o, C / o, K P, 4)
    values = op.ReduceSum(op.Mul(read, op.Unsqueeze(at.weight, op.ints([1]))), op.ints([3]), keepdims=0)
    mask = None
    if node.has(4):
        mask = op.Reshape(
            cast(op, node.input(4), own, wide), op.Concat(op.Shape(at.weight, end=1), op.ints([1, -1]), axis=0)
        )

    # (N, g, M / g, P) and (N, g, C K / g, P)
    positions = op.Reshape(op.ReduceProd(out, keepdims=1), op.ints([1]))
    batch = op.Shape(x, start=0, end=1)
    by_group = op.Concat(batch, op.ints([groups, -1]), positions, axis=0)
    g = op.Reshape(dy, by_group)
    columns = op.Reshape(values if mask is None else op.Mul(values, mask), by_group)
    filters = op.Reshape(w_wide, op.Concat(op.ints([groups, -1]), _columns_per_group(op, weights, taken), axis=0))
    grads: list[ir.Value | None] = [None] * len(node.inputs)
    if node.wants(1):
        dw = op.ReduceSum(op.MatMul(g, op.Transpose(columns, perm=[0, 1, 3, 2])), op.ints([0]), keepdims=0)
        grads[1] = op.Reshape(dw, op.shape(weights), allowzero=1)
    if node.wants(3):
        grads[3] = op.ReduceSum(dy, op.ints([0, 2, 3]), keepdims=0)
    dv = op.Reshape(op.MatMul(op.Transpose(filters, perm=[0, 2, 1]), g), op.Shape(values), allowzero=1)
    if node.wants(4):
        dm = op.ReduceSum(op.Mul(dv, values), op.ints([1]), keepdims=0)
        grads[4] = op.Reshape(dm, op.shape(node.input(4)), allowzero=1)
    dv = dv if mask is None else op.Mul(dv, mask)
    if node.wants(0):
        grads[0] = op.Reshape(at.add_into(dv, flat, wide), op.shape(x), allowzero=1)
    if node.wants(2):
        grads[2] = _offsets(
            op,
            at,
            op.ReduceSum(op.Mul(read, op.Unsqueeze(dv, op.ints([3]))), op.ints([1]), keepdims=0),
            taken,
            positions,
            op.shape(offset),
        )
    return [None if grad is None else cast(op, grad, wide, own) for grad in grads]


def _columns_per_group(op: Builder, weights: ir.Value, taken: ir.Value) -> ir.Value:
    return op.Mul(op.Shape(weights, start=1, end=2), taken)


def _offsets(
    op: Builder, at: SampleTaps, read: ir.Value, taken: ir.Value, positions: ir.Value, shape: ir.Value
) -> ir.Value:
    """From what was read, weighted by its gradient, (N o, K P, 4)."""
    by_axis = []
    for axis in range(2):
        slope = op.ReduceSum(op.Mul(read, at.slope(axis)), op.ints([2]), keepdims=0)
        slope = op.Reshape(slope, op.Concat(op.ints([-1]), taken, op.ints([1]), positions, axis=0))
        by_axis.append(slope)
    return op.Reshape(op.Concat(*by_axis, axis=2), shape, allowzero=1)


def _points(
    op: Builder, node: Forward, offset: ir.Value, kernel: ir.Value, out: ir.Value, wide: ir.DataType
) -> list[ir.Value]:
    """Where the kernel reads, in pixels: y and x, (N o, K P) each."""
    strides = node.ints("strides", [1, 1]) or [1, 1]
    dilations = node.ints("dilations", [1, 1]) or [1, 1]
    pads = node.ints("pads", [0, 0, 0, 0]) or [0, 0, 0, 0]
    taken = op.ReduceProd(kernel, keepdims=1)
    offsets = op.Reshape(offset, op.Concat(op.ints([-1]), taken, op.ints([2]), out, axis=0))
    zero, one = op.constant(np.array(0)), op.constant(np.array(1))
    grid = op.Concat(kernel, out, axis=0)
    points = []
    for axis in range(2):
        steps = op.Range(zero, op.Squeeze(op.Gather(out, op.ints([axis])), op.ints([0])), one)
        starts = op.Sub(op.Mul(steps, op.ints([strides[axis]])), op.ints([pads[axis]]))
        starts = op.Unsqueeze(starts, op.ints([0, 1, 3]) if axis == 0 else op.ints([0, 1, 2]))
        cells = op.Range(zero, op.Squeeze(op.Gather(kernel, op.ints([axis])), op.ints([0])), one)
        inside = op.Mul(cells, op.ints([dilations[axis]]))
        inside = op.Unsqueeze(inside, op.ints([1, 2, 3]) if axis == 0 else op.ints([0, 2, 3]))
        regular = op.Expand(op.Add(starts, inside), grid)
        regular = op.Reshape(regular, op.Concat(taken, out, axis=0), allowzero=1)
        moved = op.Add(op.Cast(regular, to=wide.value), op.Gather(offsets, op.constant(np.array(axis)), axis=2))
        points.append(op.Reshape(moved, op.ints([0, -1])))
    return points


def _kernel(op: Builder, node: Forward) -> ir.Value:
    """The two lengths of the kernel: constants where conversion knows them, else those of the run's W."""
    kernel: list[int] | None = node.ints("kernel_shape")
    known = dims(node.input(1))
    if kernel is None and known is not None and all(isinstance(n, int) for n in known[2:]):
        kernel = [n for n in known[2:] if isinstance(n, int)]
    if (2 if known is None else len(known) - 2) != 2 or (kernel is not None and len(kernel) != 2):
        raise node.refuse("kernel_shape", kernel, "of two axes, as onnxruntime does")
    return op.Shape(node.input(1), start=2) if kernel is None else op.ints(kernel)
