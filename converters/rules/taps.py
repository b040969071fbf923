"""Which elements of an image a sampled point reads, with which weights, and how these change with the point.

Y(x, y) = Σ_j Σ_i v_j(y) w_i(x) X[j, i]: along each axis a point reads one (nearest), two (linear) or four (cubic)
neighbours. Points lie at numbers of pixels, in float32 or float64, one (N, P) tensor for each axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.rules.common import length

CUBIC_A = -0.75  # onnxruntime's and PyTorch's
# rows: f³, f², f, 1; columns: the neighbours at -1, 0, 1, 2 from the pixel below the point, f above it
CUBIC = np.array(
    [
        [CUBIC_A, CUBIC_A + 2, -CUBIC_A - 2, -CUBIC_A],
        [-2 * CUBIC_A, -CUBIC_A - 3, 2 * CUBIC_A + 3, CUBIC_A],
        [CUBIC_A, 0, -CUBIC_A, 0],
        [0, 1, 0, 0],
    ]
)
NEIGHBOURS = {"nearest": [0], "linear": [0, 1], "cubic": [-1, 0, 1, 2]}


@dataclass(frozen=True)
class AxisTaps:
    """(N, P, t) each: indices, weights and the derivatives of the weights by the coordinate."""

    index: ir.Value
    weight: ir.Value
    slope: ir.Value


@dataclass(frozen=True)
class SampleTaps:
    """The products of the axes' taps, T for each point: row-major positions and weights, both (N, P, T)."""

    op: Builder
    axes: list[AxisTaps]
    index: ir.Value
    weight: ir.Value

    def slope(self, axis: int) -> ir.Value:
        """The derivative of the weights by the coordinate along an axis, (N, P, T)."""
        return _product(self.op, [one.slope if n == axis else one.weight for n, one in enumerate(self.axes)])

    def add_into(self, g: ir.Value, like: ir.Value, dtype: ir.DataType) -> ir.Value:
        """dX (N, C, pixels) from g = dY (N, C, P): each element of g, weighted, added to the elements it read.

        like: X as (N, C, pixels), for its shape.
        """
        op = self.op
        zeros = op.ConstantOfShape(op.Shape(like), value=ir.tensor(np.zeros(1, dtype.numpy())))
        terms = op.Mul(op.Unsqueeze(g, op.ints([-1])), op.Unsqueeze(self.weight, op.ints([1])))
        terms = op.Reshape(terms, op.ints([0, 0, -1]))
        return op.ScatterElements(zeros, self._for_channels(terms), terms, axis=2, reduction="add")

    def read(self, image: ir.Value) -> ir.Value:
        """The elements read, (N, C, P, T), from X as (N, C, pixels)."""
        op = self.op
        count = op.Concat(op.Shape(image, start=0, end=2), op.Shape(self.weight, start=1), axis=0)
        spread = op.Expand(op.Unsqueeze(self.index, op.ints([1])), count)
        values = op.GatherElements(image, op.Reshape(spread, op.ints([0, 0, -1])), axis=2)
        return op.Reshape(values, count, allowzero=1)

    def _for_channels(self, terms: ir.Value) -> ir.Value:
        op = self.op
        flat = op.Unsqueeze(op.Reshape(self.index, op.ints([0, -1])), op.ints([1]))
        return op.Expand(flat, op.Shape(terms))


def taps(
    op: Builder, image: ir.Value, points: Sequence[ir.Value], dtype: ir.DataType, *, mode: str, padding: str
) -> SampleTaps:
    """The taps of points (N, P), one for each spatial axis of the image (N, C, …), first axis first.

    mode: nearest, linear or cubic. padding: what lies outside; zeros, border or reflection_centre (about the middle
    of the first and last pixel) or reflection_edge (about their outer edges).
    """
    rank = len(points) + 2
    lengths = [length(op, image, axis - rank) for axis in range(2, rank)]
    axes = [_axis(op, x, n, dtype, mode, padding) for x, n in zip(points, lengths, strict=True)]
    index = axes[0].index
    for axis, n in zip(axes[1:], lengths[1:], strict=True):
        index = op.Add(op.Unsqueeze(op.Mul(index, n), op.ints([-1])), op.Unsqueeze(axis.index, op.ints([2])))
        index = op.Reshape(index, op.ints([0, 0, -1]))
    return SampleTaps(op, axes, index, _product(op, [axis.weight for axis in axes]))


def _product(op: Builder, factors: list[ir.Value]) -> ir.Value:
    """(N, P, t1), (N, P, t2), … -> (N, P, t1 t2 …), the last axis fastest."""
    result = factors[0]
    for factor in factors[1:]:
        outer = op.Mul(op.Unsqueeze(result, op.ints([-1])), op.Unsqueeze(factor, op.ints([2])))
        result = op.Reshape(outer, op.ints([0, 0, -1]))
    return result


def _axis(op: Builder, x: ir.Value, n: ir.Value, dtype: ir.DataType, mode: str, padding: str) -> AxisTaps:
    base = op.Round(x) if mode == "nearest" else op.Floor(x)
    fraction = op.Unsqueeze(op.Sub(x, base), op.ints([-1]))
    weight, slope = _weights(op, fraction, dtype, mode)
    index = op.Unsqueeze(op.Cast(base, to=ir.DataType.INT64.value), op.ints([-1]))
    index = op.Add(index, op.ints(NEIGHBOURS[mode]))
    zero, one, two = op.constant(np.array(0)), op.constant(np.array(1)), op.constant(np.array(2))
    last = op.Sub(n, one)
    if padding == "reflection_centre":
        period = op.Max(op.Mul(last, two), one)
        place = op.Mod(index, period)
        index = op.Min(place, op.Sub(op.Mul(last, two), place))
    elif padding == "reflection_edge":
        place = op.Mod(index, op.Mul(n, two))
        index = op.Min(place, op.Sub(op.Sub(op.Mul(n, two), one), place))
    else:
        within = op.And(op.GreaterOrEqual(index, zero), op.Less(index, n))
        if padding == "zeros":
            nothing = op.constant(np.array(0, dtype.numpy()))
            weight, slope = op.Where(within, weight, nothing), op.Where(within, slope, nothing)
    index = op.Max(op.Min(index, last), zero)
    return AxisTaps(index, weight, slope)


def _weights(op: Builder, f: ir.Value, dtype: ir.DataType, mode: str) -> tuple[ir.Value, ir.Value]:
    """Weights and slopes of the neighbours of a point that lies f above the pixel below it."""

    def numbers(values: object) -> ir.Value:
        return op.constant(np.array(values, dtype.numpy()))

    if mode == "nearest":
        nothing = op.Mul(f, numbers(0))
        return op.Add(nothing, numbers(1)), nothing
    if mode == "linear":
        slopes = numbers([-1, 1])
        return op.Add(op.Mul(f, slopes), numbers([1, 0])), op.Add(op.Mul(f, numbers(0)), slopes)
    square = op.Mul(f, f)
    one, nothing = op.Add(op.Mul(f, numbers(0)), numbers(1)), op.Mul(f, numbers(0))
    powers = op.Concat(op.Mul(square, f), square, f, one, axis=-1)
    rates = op.Concat(op.Mul(square, numbers(3)), op.Mul(f, numbers(2)), one, nothing, axis=-1)
    return op.MatMul(powers, numbers(CUBIC)), op.MatMul(rates, numbers(CUBIC))
