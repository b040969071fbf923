"""Which elements of an image a sampled point reads, with which weights, and how these change with the point.

Y(x, y) = Σ_j Σ_i v_j(y) w_i(x) X[j, i]: along each axis a point reads one (nearest), two (linear) or four (cubic)
neighbours. Points lie at numbers of pixels, in float32 or float64, one (N, P) tensor for each axis.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import element_type

CUBIC_A = -0.75  # onnxruntime's and PyTorch's
# rows: f³, f², f, 1; columns: the neighbours at -1, 0, 1, 2 from the pixel below the point, f above it
CUBIC = [
    [CUBIC_A, CUBIC_A + 2, -CUBIC_A - 2, -CUBIC_A],
    [-2 * CUBIC_A, -CUBIC_A - 3, 2 * CUBIC_A + 3, CUBIC_A],
    [CUBIC_A, 0, -CUBIC_A, 0],
    [0, 1, 0, 0],
]
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

    def add_into(self, g: ir.Value, like: ir.Value) -> ir.Value:
        """dX (N, C, pixels) from g = dY (N, C, P): each element of g, weighted, added to the elements it read.

        like: X as (N, C, pixels), for its shape.
        """
        op = self.op
        terms = op.Reshape(op.Mul(op.Unsqueeze(g, [-1]), op.Unsqueeze(self.weight, [1])), [0, 0, -1])
        of_channels = op.Expand(op.Unsqueeze(op.Reshape(self.index, [0, -1]), [1]), op.Shape(terms))
        zeros = op.filled(op.Shape(like), 0, element_type(g))
        return op.ScatterElements(zeros, of_channels, terms, axis=2, reduction="add")

    def read(self, image: ir.Value) -> ir.Value:
        """The elements read, (N, C, P, T), from X as (N, C, pixels)."""
        op = self.op
        count = op.Concat(op.Shape(image, start=0, end=2), op.Shape(self.weight, start=1), axis=0)
        spread = op.Expand(op.Unsqueeze(self.index, [1]), count)
        values = op.GatherElements(image, op.Reshape(spread, [0, 0, -1]), axis=2)
        return op.Reshape(values, count, allowzero=1)


def sample_taps(op: Builder, image: ir.Value, points: Sequence[ir.Value], *, mode: str, padding: str) -> SampleTaps:
    """The taps of points (N, P), one for each spatial axis of the image (N, C, …), first axis first.

    mode: nearest, linear or cubic. padding: what lies outside; zeros, border or reflection_centre (about the middle
    of the first and last pixel) or reflection_edge (about their outer edges).
    """
    rank = len(points) + 2
    lengths = [op.length(image, axis - rank) for axis in range(2, rank)]
    axes = [_axis(op, x, n, mode, padding) for x, n in zip(points, lengths, strict=True)]
    index = axes[0].index
    for axis, n in zip(axes[1:], lengths[1:], strict=True):
        index = op.Add(op.Unsqueeze(op.Mul(index, n), [-1]), op.Unsqueeze(axis.index, [2]))
        index = op.Reshape(index, [0, 0, -1])
    return SampleTaps(op, axes, index, _product(op, [axis.weight for axis in axes]))


def _product(op: Builder, factors: list[ir.Value]) -> ir.Value:
    """(N, P, t1), (N, P, t2), … -> (N, P, t1 t2 …), the last axis fastest."""
    result = factors[0]
    for factor in factors[1:]:
        result = op.Reshape(op.Mul(op.Unsqueeze(result, [-1]), op.Unsqueeze(factor, [2])), [0, 0, -1])
    return result


def _axis(op: Builder, x: ir.Value, n: ir.Value, mode: str, padding: str) -> AxisTaps:
    base = op.Round(x) if mode == "nearest" else op.Floor(x)
    weight, slope = _weights(op, op.Unsqueeze(op.Sub(x, base), [-1]), mode)
    index = op.Unsqueeze(op.Cast(base, to=ir.DataType.INT64), [-1])
    index = op.Add(index, NEIGHBOURS[mode])
    last = op.Sub(n, 1)
    if padding == "reflection_centre":
        place = op.Mod(index, op.Max(op.Mul(last, 2), 1))
        index = op.Min(place, op.Sub(op.Mul(last, 2), place))
    elif padding == "reflection_edge":
        place = op.Mod(index, op.Mul(n, 2))
        index = op.Min(place, op.Sub(op.Sub(op.Mul(n, 2), 1), place))
    elif padding == "zeros":
        within = op.And(op.GreaterOrEqual(index, 0), op.Less(index, n))
        weight, slope = op.Where(within, weight, 0), op.Where(within, slope, 0)
    return AxisTaps(op.Max(op.Min(index, last), 0), weight, slope)


def _weights(op: Builder, f: ir.Value, mode: str) -> tuple[ir.Value, ir.Value]:
    """Weights and slopes of the neighbours of a point that lies f above the pixel below it."""
    nothing = op.Mul(f, 0)
    if mode == "nearest":
        return op.Add(nothing, 1), nothing
    if mode == "linear":
        return op.Add(op.Mul(f, [-1, 1]), [1, 0]), op.Add(nothing, [-1, 1])
    square, one = op.Mul(f, f), op.Add(nothing, 1)
    powers = op.Concat(op.Mul(square, f), square, f, one, axis=-1)
    rates = op.Concat(op.Mul(square, 3), op.Mul(f, 2), one, nothing, axis=-1)
    return op.MatMul(powers, CUBIC), op.MatMul(rates, CUBIC)
