"""Gradients of operators that sample an image at given points."""

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.known import dims, known_lengths
from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads, gradient
from onnx_backprop.converters.rules.common import as_shaped, cast, narrow, widen, work_type
from onnx_backprop.converters.rules.taps import sample_taps

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
    spatial = (node.rank(0) if dims(x) is not None else node.rank(1)) - 2
    mode = MODES[node.choice("mode", "linear", MODES)]
    ranks = {len(shape) for shape in map(dims, (x, grid)) if shape is not None}
    if ranks != {spatial + 2} or spatial < 1:
        raise node.invalid(f"expected X and grid of one rank, 3 or more, got {' and '.join(map(str, sorted(ranks)))}")
    if mode == "cubic" and spatial != 2:
        raise node.refuse("mode", node.string("mode", "linear"), "for 2 spatial axes, as onnxruntime does")
    padding = node.choice("padding_mode", "zeros", ("zeros", "border", "reflection"))
    aligned = node.int("align_corners", 0) != 0
    if padding == "reflection":
        padding = "reflection_centre" if aligned else "reflection_edge"
    flat_grid = op.Reshape(cast(op, grid, work_type(x)), [0, -1, spatial])
    points, rates = [], []
    for axis in range(spatial):
        g = op.Gather(flat_grid, spatial - 1 - axis, axis=2)
        point, rate = _pixels(op, g, op.Cast(op.length(x, axis - spatial), to=work_type(x)), aligned=aligned)
        points.append(point)
        rates.append(rate)
    samples = sample_taps(op, x, points, mode=mode, padding=padding)
    flat, g = (op.Reshape(widen(op, value, x), [0, 0, -1]) for value in (x, dy))
    dx = narrow(op, as_shaped(op, samples.add_into(g, flat), x), x)
    if mode == "nearest":
        return dx
    read = op.ReduceSum(op.Mul(samples.read(flat), op.Unsqueeze(g, [-1])), [1], keepdims=0)
    slopes = [op.ReduceSum(op.Mul(read, samples.slope(axis)), [2], keepdims=1) for axis in range(spatial)]
    by_axis = [op.Mul(slope, rate) for slope, rate in zip(slopes, rates, strict=True)]
    return dx, narrow(op, as_shaped(op, op.Concat(*reversed(by_axis), axis=-1), grid), grid)


def _pixels(op: Builder, g: ir.Value, n: ir.Value, *, aligned: bool) -> tuple[ir.Value, ir.Value]:
    """Where grid values lie in n pixels, in the order of onnxruntime's roundings, and the slope of that map."""
    moved = op.Add(g, 1)
    if aligned:
        steps = op.Sub(n, 1)
        return op.Mul(op.Div(moved, 2), steps), op.Div(steps, 2)
    return op.Div(op.Sub(op.Mul(moved, n), 1), 2), op.Div(n, 2)


@gradient("AffineGrid", versions=(20,), inputs=(0,))
def affine_grid(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y[p] = θ · (p, 1), p the points of a regular grid  =>  dθ = Σ_p dy[p] (p, 1)ᵀ.

    The points are those of the operator itself with θ the identity. Shapes: θ (N, d, d + 1), Y (N, …, d).
    """
    theta, size = node.input(0), node.input(1)
    stated, y = known_lengths(theta, 1, 2), dims(node.output())
    if not stated and y is None:
        raise node.unsupported(
            "the gradient needs the number of spatial axes at conversion, and shape inference does not find it. Give "
            "theta a shape"
        )
    spatial = stated[0] if stated else len(y or ()) - 2
    batch = op.Concat(op.Shape(theta, start=0, end=1), [spatial, spatial + 1], axis=0)
    identity = op.Expand(np.eye(spatial, spatial + 1).astype(work_type(theta).numpy()), batch)
    points = op.AffineGrid(identity, size, align_corners=node.int("align_corners", 0))
    points = op.Reshape(points, [0, -1, spatial])
    ones = op.Add(op.Mul(op.Slice(points, [0], [1], [2]), 0), 1)
    g = op.Reshape(widen(op, dy), [0, -1, spatial])
    dtheta = op.MatMul(op.Transpose(g, perm=[0, 2, 1]), op.Concat(points, ones, axis=-1))
    return narrow(op, dtheta, theta)
