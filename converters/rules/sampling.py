"""Gradients of operators that sample an image at given points."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder, dims, element_type
from onnx_backprop.converters.reverse.forward import Forward
from onnx_backprop.converters.reverse.registry import Grads, gradient
from onnx_backprop.converters.rules.common import cast, length, work_type
from onnx_backprop.converters.rules.taps import taps
from onnx_backprop.opset.core.errors import UnsupportedError

MODES = {"bilinear": "linear", "bicubic": "cubic", "linear": "linear", "cubic": "cubic", "nearest": "nearest"}


@gradient("GridSample", versions=(16, 20, 22))
def grid_sample(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y[p] = Σ_t w_t(g_p) X[t]  =>  dX[t] = Σ_p w_t(g_p) dy[p], dg_p = Σ_c dy[p] Σ_t w_t'(g_p) X[t] · dx/dg.

    A grid of -1 … 1 spans the image from the outer edges of its first and last pixels, or with align_corners from
    their centres: x = ((g + 1) n - 1) / 2 or (g + 1) (n - 1) / 2, computed in float32 as onnxruntime does, so that
    ties of nearest fall alike. Shapes: X (N, C, …), grid (N, …, d) with the last axis of X first.
    Edges: with mode nearest the slope by the grid is zero almost everywhere, and no gradient flows there. At whole
    pixels, where a linear weight has a kink, the slope is the one to the right.
    """
    x, grid = node.input(0), node.input(1)
    mode, padding = node.string("mode", "linear"), node.string("padding_mode", "zeros")
    aligned = node.int("align_corners", 0) != 0
    spatial = _spatial_rank(node)
    if mode not in MODES:
        raise node.refuse("mode", mode, "linear (bilinear), nearest and cubic (bicubic)")
    if MODES[mode] == "cubic" and spatial != 2:
        raise node.refuse("mode", mode, "for 2 spatial axes, as onnxruntime does")
    if padding not in ("zeros", "border", "reflection"):
        raise node.refuse("padding_mode", padding, "zeros, border and reflection")
    if padding == "reflection":
        padding = "reflection_centre" if aligned else "reflection_edge"
    own, own_grid, wide = element_type(x), element_type(grid), work_type(x)
    image = cast(op, x, own, wide)
    flat_grid = op.Reshape(cast(op, grid, own_grid, wide), op.ints([0, -1, spatial]))
    points, rates = [], []
    for axis in range(spatial):
        g = op.Gather(flat_grid, op.constant(np.array(spatial - 1 - axis)), axis=2)
        point, rate = _pixels(op, g, length(op, x, axis - spatial), wide, aligned=aligned)
        points.append(point)
        rates.append(rate)
    at = taps(op, x, points, wide, mode=MODES[mode], padding=padding)
    flat = op.Reshape(image, op.ints([0, 0, -1]))
    g = op.Reshape(cast(op, dy, own, wide), op.ints([0, 0, -1]))
    dx = dgrid = None
    if node.wants(0):
        dx = cast(op, op.Reshape(at.add_into(g, flat, wide), op.shape(x), allowzero=1), wide, own)
    if node.wants(1) and MODES[mode] != "nearest":
        read = op.ReduceSum(op.Mul(at.read(flat), op.Unsqueeze(g, op.ints([-1]))), op.ints([1]), keepdims=0)
        by_axis = []
        for axis in reversed(range(spatial)):
            slope = op.ReduceSum(op.Mul(read, at.slope(axis)), op.ints([2]), keepdims=1)
            by_axis.append(op.Mul(slope, rates[axis]))
        dgrid = op.Reshape(op.Concat(*by_axis, axis=-1), op.shape(grid), allowzero=1)
        dgrid = cast(op, dgrid, wide, own_grid)
    return dx, dgrid


def _pixels(op: Builder, g: ir.Value, n: ir.Value, wide: ir.DataType, *, aligned: bool) -> tuple[ir.Value, ir.Value]:
    """Where grid values lie in pixels, in the order of onnxruntime's roundings, and the slope of that map."""
    one, two = op.constant(np.array(1, wide.numpy())), op.constant(np.array(2, wide.numpy()))
    count = op.Cast(n, to=wide.value)
    moved = op.Add(g, one)
    if aligned:
        steps = op.Sub(count, one)
        return op.Mul(op.Div(moved, two), steps), op.Div(steps, two)
    return op.Div(op.Sub(op.Mul(moved, count), one), two), op.Div(count, two)


def _spatial_rank(node: Forward) -> int:
    for index in (0, 1):
        known = dims(node.input(index))
        if known is not None:
            return len(known) - 2
    raise UnsupportedError(
        "the gradient needs the rank of X at conversion, and shape inference does not find it. Give X a shape",
        op_type=node.op_type,
        node=node.name,
    )


@gradient("AffineGrid", versions=(20,), inputs=(0,))
def affine_grid(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y[p] = θ · (p, 1), p the points of a regular grid  =>  dθ = Σ_p dy[p] (p, 1)ᵀ.

    The points are those of the operator itself with θ the identity. Shapes: θ (N, d, d + 1), Y (N, …, d).
    """
    theta, size = node.input(0), node.input(1)
    own, wide = element_type(theta), work_type(theta)
    known = dims(theta)
    spatial = None if known is None else known[1]
    if not isinstance(spatial, int):
        known = dims(node.output())
        spatial = None if known is None else len(known) - 2
    if spatial is None:
        raise UnsupportedError(
            "the gradient needs the number of spatial axes at conversion, and shape inference does not find it. Give "
            "theta a shape",
            op_type=node.op_type,
            node=node.name,
        )
    dtype = wide.numpy()
    batch = op.Concat(op.Shape(theta, start=0, end=1), op.ints([spatial, spatial + 1]), axis=0)
    identity = op.Expand(op.constant(np.eye(spatial, spatial + 1).astype(dtype)), batch)
    points = op.AffineGrid(identity, size, align_corners=node.int("align_corners", 0))
    points = op.Reshape(points, op.ints([0, -1, spatial]))
    ones = op.Add(
        op.Mul(op.Slice(points, op.ints([0]), op.ints([1]), op.ints([2])), op.constant(np.array(0, dtype))),
        op.constant(np.array(1, dtype)),
    )
    g = op.Reshape(cast(op, dy, own, wide), op.ints([0, -1, spatial]))
    dtheta = op.MatMul(op.Transpose(g, perm=[0, 2, 1]), op.Concat(points, ones, axis=-1))
    return cast(op, dtheta, wide, own), None
