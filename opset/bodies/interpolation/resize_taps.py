"""The taps of `maths.resize.resize_taps` at run time, in the same types and the same order of operations."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from onnx_backprop.opset.bodies.builder import DOUBLE, FLOAT, INT64, Body
from onnx_backprop.opset.bodies.interpolation.forms import Truth
from onnx_backprop.opset.bodies.interpolation.lengths import Length, scalar
from onnx_backprop.opset.bodies.interpolation.taps import destinations, double, last_index
from onnx_backprop.opset.maths.interpolation import Taps
from onnx_backprop.opset.maths.resize import TIE_TOLERANCE, ResizeAxis, resize_taps

Number = float | str
"""A float32: known, or the name of a 1-D tensor with one entry."""


@dataclass(frozen=True)
class ResizeRule:
    """`resize_taps`, in which the scale, the region and whether the axis is copied may be known to the run alone.

    `axis` holds the attributes. `unchanged`: dX = dY along the axis; the taps are those of an axis that is not.
    `copied`: dX = dY but for the pixels outside the region of tf_crop_and_resize.
    """

    axis: ResizeAxis
    scale: Number
    region: tuple[Number, Number]
    unchanged: Truth
    copied: Truth

    def taps(self, length: int, out: int) -> Taps | None:
        start, end = self.region
        if self.unchanged is True:
            return Taps(np.arange(out)[:, None], np.ones((out, 1)), length)
        if not isinstance(self.scale, float) or not isinstance(start, float) or not isinstance(end, float):
            return None
        if isinstance(self.copied, str):
            return None
        axis = replace(self.axis, length=length, out=out, scale=self.scale, roi=(start, end), copied=self.copied)
        return resize_taps(axis)

    def same(self, _b: Body, _length: Length, _out: Length) -> Truth:
        return self.unchanged

    def emit(self, b: Body, length: Length, out: Length, along: int) -> tuple[str, str]:
        o = b.Cast(destinations(b, out, along), to=FLOAT)
        last = b.Cast(last_index(b, length), to=FLOAT)
        coordinates = self._coordinates(b, o, length, out)
        x = select(b, self.copied, o, coordinates)
        if self.axis.mode == "nearest":
            index = b.Min(b.Max(self._nearest(b, x), b.float_scalar(0)), last)
            indices, weights = b.Cast(index, to=INT64), b.Expand(b.float_scalar(1), b.Shape(index))
        else:
            indices, weights = self._weighted(b, b.Cast(x, to=DOUBLE), b.Cast(last, to=DOUBLE), along)
        if self.axis.coordinates != "tf_crop_and_resize":
            return indices, weights
        inside = b.And(b.GreaterOrEqual(coordinates, b.float_scalar(0)), b.LessOrEqual(coordinates, last))
        return indices, b.Where(inside, weights, b.float_scalar(0))

    def _coordinates(self, b: Body, o: str, length: Length, out: Length) -> str:
        half, one, zero = b.float_scalar(0.5), b.float_scalar(1), b.float_scalar(0)
        scale = number(b, self.scale)
        sizes = (b.Cast(scalar(b, length), to=FLOAT), b.Cast(scalar(b, out), to=FLOAT))
        several = out > 1 if isinstance(out, int) else b.Greater(out, b.int_scalar(1))
        match self.axis.coordinates:
            case "half_pixel":
                return b.Sub(b.Div(b.Add(o, half), scale), half)
            case "pytorch_half_pixel":
                return select(b, several, b.Sub(b.Div(b.Add(o, half), scale), half), b.Mul(o, zero))
            case "half_pixel_symmetric":
                cropped = b.Sub(one, b.Div(sizes[1], b.Mul(scale, sizes[0])))
                offset = b.Mul(b.Div(sizes[0], b.float_scalar(2)), cropped)
                x = b.Div(b.Cast(b.Add(o, half), to=DOUBLE), b.Cast(scale, to=DOUBLE))
                return b.Cast(b.Sub(b.Add(b.Cast(offset, to=DOUBLE), x), double(b, 0.5)), to=FLOAT)
            case "align_corners":
                x = b.Div(b.Mul(o, b.Sub(sizes[0], one)), b.Sub(sizes[1], one))
                return select(b, several, x, b.Mul(o, zero))
            case "asymmetric":
                return b.Div(o, scale)
            case "tf_half_pixel_for_nn":
                return b.Div(b.Add(o, half), scale)
            case "tf_crop_and_resize":
                start, end = (number(b, value) for value in self.region)
                end_index = b.Sub(sizes[0], one)
                step = b.Div(b.Mul(b.Mul(o, b.Sub(end, start)), end_index), b.Sub(sizes[1], one))
                middle = b.Mul(b.Mul(half, b.Add(start, end)), end_index)
                return select(b, several, b.Add(b.Mul(start, end_index), step), b.Expand(middle, b.Shape(o)))
        raise AssertionError(self.axis.coordinates)

    def _nearest(self, b: Body, x: str) -> str:
        half, below = b.float_scalar(0.5), b.Floor(x)
        tie = b.LessOrEqual(b.Abs(b.Sub(b.Sub(x, below), half)), b.constant(np.array(TIE_TOLERANCE)))
        match self.axis.nearest_mode:
            case "round_prefer_floor":
                return b.Where(tie, below, b.Floor(b.Add(x, half)))
            case "round_prefer_ceil":
                return b.Where(tie, b.Add(below, b.float_scalar(1)), b.Floor(b.Add(x, half)))
            case "floor":
                return below
            case "ceil":
                return b.Ceil(x)
        raise AssertionError(self.axis.nearest_mode)

    def _weighted(self, b: Body, x: str, last: str, along: int) -> tuple[str, str]:
        axis, zero, one = self.axis, double(b, 0), double(b, 1)
        reach = 1 if axis.mode == "linear" else 2
        narrow = one
        if axis.antialias:
            narrow = select(b, self.copied, one, b.Min(b.Cast(number(b, self.scale), to=DOUBLE), one))
        radius = b.Div(double(b, reach), narrow)
        if axis.mode == "linear" and not axis.antialias:
            x = b.Min(b.Max(x, zero), last)
        # 0-D, as Range wants it; the scale is one entry of a 1-D tensor
        count = b.Reshape(b.Add(b.Cast(b.Ceil(b.Mul(radius, double(b, 2))), to=INT64), b.int_scalar(2)), b.ints([]))
        taps = b.Unsqueeze(b.Range(b.int_scalar(0), count, b.int_scalar(1)), b.ints([along]))
        neighbours = b.Add(b.Floor(b.Sub(x, radius)), b.Cast(taps, to=DOUBLE))
        distance = b.Mul(b.Abs(b.Sub(neighbours, x)), narrow)
        weights = b.Max(b.Sub(one, distance), zero) if axis.mode == "linear" else self._cubic(b, distance)
        if axis.exclude_outside:
            inside = b.And(b.GreaterOrEqual(neighbours, zero), b.LessOrEqual(neighbours, last))
            weights = b.Where(inside, weights, zero)
        total = b.ReduceSum(weights, b.ints([1 - along]), keepdims=1)
        weights = b.Where(b.Equal(total, zero), zero, b.Div(weights, total))
        if axis.antialias:
            weights = b.Where(self._meets(b, b.Cast(x, to=FLOAT), b.Cast(last, to=FLOAT), reach), weights, zero)
        indices = b.Cast(b.Min(b.Max(neighbours, zero), last), to=INT64)
        return indices, b.Cast(weights, to=FLOAT)

    def _meets(self, b: Body, x: str, last: str, reach: int) -> str:
        """Whether any tap lies inside the source, in float32."""
        half, one = b.float_scalar(0.5), b.float_scalar(1)
        radius = b.Mul(b.Max(b.Div(one, number(b, self.scale)), one), b.float_scalar(reach))
        centre = b.Add(x, half)
        first, end = (b.Floor(b.Add(edge, half)) for edge in (b.Sub(centre, radius), b.Add(centre, radius)))
        return b.And(b.LessOrEqual(first, last), b.Greater(end, b.float_scalar(0)))

    def _cubic(self, b: Body, t: str) -> str:
        a, one = self.axis.cubic_coeff_a, double(b, 1)
        near = b.Mul(b.Mul(b.Sub(b.Mul(t, double(b, a + 2)), double(b, a + 3)), t), t)
        far = b.Sub(b.Mul(t, double(b, a)), double(b, 5 * a))
        far = b.Sub(b.Mul(b.Add(b.Mul(far, t), double(b, 8 * a)), t), double(b, 4 * a))
        far = b.Where(b.Less(t, double(b, 2)), far, double(b, 0))
        return b.Where(b.LessOrEqual(t, one), b.Add(near, one), far)


def number(b: Body, value: Number) -> str:
    """A float32 as a tensor with one entry."""
    return value if isinstance(value, str) else b.float_scalar(value)


def either(b: Body, x: Truth, y: Truth) -> Truth:
    """X or y."""
    if x is True or y is True:
        return True
    if isinstance(x, str) and isinstance(y, str):
        return b.Or(x, y)
    return x if isinstance(x, str) else y


def both(b: Body, x: Truth, y: Truth) -> Truth:
    """X and y."""
    if x is False or y is False:
        return False
    if isinstance(x, str) and isinstance(y, str):
        return b.And(x, y)
    return x if isinstance(x, str) else y


def select(b: Body, condition: Truth, x: str, y: str) -> str:
    """X where the condition holds, else y."""
    if isinstance(condition, str):
        return b.Where(condition, x, y)
    return x if condition else y
