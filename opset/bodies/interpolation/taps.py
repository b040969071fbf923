"""The taps of `interpolation.spec_taps` and `resample_taps` at run time, by the same arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnx_backprop.opset.bodies.builder import DOUBLE, FLOAT, INT64, Body
from onnx_backprop.opset.bodies.interpolation.forms import Truth
from onnx_backprop.opset.bodies.interpolation.lengths import Length, scalar, vector
from onnx_backprop.opset.maths.interpolation import Taps, resample_taps, spec_taps


@dataclass(frozen=True)
class SpecRule:
    """`spec_taps`: oneDNN's, in integers. ONNX's division truncates; none here has a negative operand."""

    mode: str
    coordinates: str

    def taps(self, length: int, out: int) -> Taps:
        return spec_taps(self.mode, self.coordinates, length, out)

    def same(self, b: Body, length: Length, out: Length) -> Truth:
        return equal(b, length, out)

    def emit(self, b: Body, length: Length, out: Length, along: int) -> tuple[str, str]:
        o, size, last = destinations(b, out, along), scalar(b, length), last_index(b, length)
        one, two = b.int_scalar(1), b.int_scalar(2)
        if self.coordinates == "half_pixel":
            # not below 1, for an empty tensor divided by 0 is an error too
            denominator = b.Max(b.Mul(scalar(b, out), two), two)
            numerator = b.Sub(b.Mul(b.Add(b.Mul(o, two), one), size), scalar(b, out))
        else:
            denominator = b.Max(b.Sub(scalar(b, out), one), one)
            numerator = b.Mul(o, last)
        if self.mode == "nearest":
            index = b.Div(b.Add(b.Mul(numerator, two), denominator), b.Mul(denominator, two))
            return one_tap(b, b.Min(index, last))
        numerator = b.Min(b.Max(numerator, b.int_scalar(0)), b.Mul(last, denominator))
        left = b.Div(numerator, denominator)
        rest = b.Sub(numerator, b.Mul(left, denominator))
        weight = b.Div(b.Cast(rest, to=DOUBLE), b.Cast(denominator, to=DOUBLE))
        return two_taps(b, left, weight, last, along)


@dataclass(frozen=True)
class ResampleRule:
    """`resample_taps`: DirectML's, in float64."""

    mode: str
    scale: float | None
    input_offset: float
    output_offset: float

    def taps(self, length: int, out: int) -> Taps:
        return resample_taps(self.mode, length, out, self.scale, self.input_offset, self.output_offset)

    def same(self, b: Body, length: Length, out: Length) -> Truth:
        if self.scale not in (None, 1) or self.input_offset + self.output_offset != 0:
            return False
        return equal(b, length, out)

    def emit(self, b: Body, length: Length, out: Length, along: int) -> tuple[str, str]:
        last = last_index(b, length)
        end = b.Cast(last, to=DOUBLE)
        o = b.Sub(b.Cast(destinations(b, out, along), to=DOUBLE), double(b, self.output_offset))
        if self.scale is None:
            x = b.Div(b.Mul(o, b.Cast(scalar(b, length), to=DOUBLE)), b.Cast(scalar(b, out), to=DOUBLE))
        else:
            x = b.Div(o, double(b, self.scale))
        x = b.Sub(x, double(b, self.input_offset))
        if self.mode == "NEAREST_NEIGHBOR":
            x = b.Ceil(b.Sub(x, double(b, 0.5)))
            return one_tap(b, b.Cast(b.Min(b.Max(x, double(b, 0)), end), to=INT64))
        x = b.Min(b.Max(x, double(b, 0)), end)
        left = b.Floor(x)
        return two_taps(b, b.Cast(left, to=INT64), b.Sub(x, left), last, along)


def destinations(b: Body, out: Length, along: int) -> str:
    """0 … O-1 on one of two axes, int64."""
    o = b.Range(b.int_scalar(0), scalar(b, out), b.int_scalar(1))
    return b.Unsqueeze(o, b.ints([1 - along]))


def equal(b: Body, length: Length, out: Length) -> Truth:
    """Whether two lengths are the same."""
    if isinstance(length, int) and isinstance(out, int):
        return length == out
    return b.Equal(vector(b, length), vector(b, out))


def last_index(b: Body, length: Length) -> str:
    """I - 1, 0-D int64."""
    return b.int_scalar(length - 1) if isinstance(length, int) else b.Sub(scalar(b, length), b.int_scalar(1))


def one_tap(b: Body, index: str) -> tuple[str, str]:
    """Taps of weight 1."""
    return index, b.Expand(b.float_scalar(1), b.Shape(index))


def two_taps(b: Body, left: str, weight: str, last: str, along: int) -> tuple[str, str]:
    """Taps at `left` and the next index, which the last one has no more; `weight` is that of the second."""
    indices = b.Concat(left, b.Min(b.Add(left, b.int_scalar(1)), last), axis=1 - along)
    return indices, b.Cast(b.Concat(b.Sub(double(b, 1), weight), weight, axis=1 - along), to=FLOAT)


def double(b: Body, value: float) -> str:
    """A 0-D float64 constant."""
    return b.constant(np.array(value, np.float64))
