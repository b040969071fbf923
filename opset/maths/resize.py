"""Where ONNX's Resize places its taps along one axis.

I is the source length, O the destination length, s the scale (given, or O/I), o a destination index and x the
source coordinate of o, in source pixels. All seven coordinate_transformation_modes, nearest, linear and cubic, with
antialias and exclude_outside.

x is computed in float32, operation by operation as onnxruntime's forward does: nearest decides by comparing x with
a half, and where float32 falls on the other side of a tie than exact arithmetic, the gradient must follow the forward
that ran.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnx_backprop.opset.core.op import Attributes
from onnx_backprop.opset.maths.interpolation import Placed, Taps, destinations

COORDINATES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_half_pixel_for_nn",
    "tf_crop_and_resize",
)
NEAREST_MODES = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
MODES = ("nearest", "linear", "cubic")
POLICIES = ("stretch", "not_larger", "not_smaller")

# onnxruntime takes x for a tie when it is this close to one (found on all lengths up to 63, where it is exact)
TIE_TOLERANCE = np.float32(1e-6)


@dataclass(frozen=True)
class ResizeAxis:
    """One axis of one Resize: lengths, scale and the attributes that place the taps. `roi` is (start, end).

    In a body, lengths, scale, roi and `copied` may be vectors of one entry.

    `copied`: the forward copies the axis as it keeps its length, whatever the scale; only what lies outside the roi of
    tf_crop_and_resize is overwritten.
    """

    length: Any
    out: Any
    scale: Any
    mode: str = "nearest"
    coordinates: str = "half_pixel"
    nearest_mode: str = "round_prefer_floor"
    cubic_coeff_a: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    roi: tuple[Any, Any] = (0.0, 1.0)
    copied: Any = False


def axis_settings(attrs: Attributes) -> ResizeAxis:
    """The settings that all axes share, from the attributes of ResizeGrad; length, out and scale are placeholders."""
    return ResizeAxis(
        length=0,
        out=0,
        scale=1.0,
        mode=attrs["mode"],
        coordinates=attrs["coordinate_transformation_mode"],
        nearest_mode=attrs["nearest_mode"],
        cubic_coeff_a=attrs["cubic_coeff_a"],
        exclude_outside=attrs["exclude_outside"] != 0,
        antialias=attrs["antialias"] != 0,
    )


def coordinates(axis: ResizeAxis, xp: Any = np) -> Any:
    """X of every destination index, in float32, as a column."""
    f = xp.float32
    o = f(destinations(axis.out, xp))
    scale, length, out = f(axis.scale), f(axis.length), f(axis.out)
    several, steps = axis.out > 1, xp.maximum(out - 1, 1)
    match axis.coordinates:
        case "half_pixel":
            return (o + 0.5) / scale - 0.5
        case "pytorch_half_pixel":
            return xp.where(several, (o + 0.5) / scale - 0.5, o * 0)
        case "half_pixel_symmetric":
            # here onnxruntime adds up in float64 and rounds once
            offset = length / 2 * (1 - out / (scale * length))
            return f(xp.float64(offset) + xp.float64(o + 0.5) / xp.float64(scale) - 0.5)
        case "align_corners":
            return xp.where(several, o * (length - 1) / steps, o * 0)
        case "asymmetric":
            return o / scale
        case "tf_half_pixel_for_nn":
            return (o + 0.5) / scale
        case "tf_crop_and_resize":
            start, end = (f(edge) for edge in axis.roi)
            along = start * (length - 1) + o * (end - start) * (length - 1) / steps
            return xp.where(several, along, 0.5 * (start + end) * (length - 1) + o * 0)
    raise AssertionError(axis.coordinates)


def policy_scale(policy: str, ratios: Sequence[np.float32]) -> np.float32:
    """The scale that keeps the aspect ratio: the smallest (not_larger) or largest (not_smaller) of sizes / lengths."""
    return min(ratios) if policy == "not_larger" else max(ratios)


def policy_length(scale: float, length: int) -> int:
    """The length that this scale leads to: rounded, halves away from 0."""
    return int(np.floor(np.float32(scale) * np.float32(length) + np.float32(0.5)))


def resize_taps(axis: ResizeAxis) -> Taps:
    """The taps of one axis: row o of the forward's matrix W."""
    with np.errstate(divide="ignore", invalid="ignore"):  # what divides by 0 is chosen nowhere
        return Taps(*place_resize(axis, np), axis.length)


def place_resize(axis: ResizeAxis, xp: Any) -> Placed:
    """Indices and weights of the taps, for numbers in `axis` or what a run knows of them."""
    f = xp.float32
    o, last = f(destinations(axis.out, xp)), f(axis.length) - 1
    everywhere = o if axis.scale == 1 else coordinates(axis, xp)
    x = xp.where(axis.copied, o, everywhere)
    if axis.mode == "nearest" or axis.copied is True:
        indices = xp.int64(xp.minimum(xp.maximum(_nearest(x, axis.nearest_mode, xp), 0.0), last))
        weights = xp.ones_like(indices, dtype=np.float64)
    else:
        indices, weights = _weighted(axis, x, xp)
    if axis.coordinates == "tf_crop_and_resize":
        # outside there is the constant extrapolation_value: no gradient
        weights = xp.where((everywhere >= 0) & (everywhere <= last), weights, 0.0)
    return indices, weights


def _nearest(x: Any, nearest_mode: str, xp: Any) -> Any:
    below = xp.floor(x)
    tie = abs(x - below - 0.5) <= TIE_TOLERANCE
    match nearest_mode:
        case "round_prefer_floor":
            return xp.where(tie, below, xp.floor(x + 0.5))
        case "round_prefer_ceil":
            return xp.where(tie, below + 1, xp.floor(x + 0.5))
        case "floor":
            return below
        case "ceil":
            return xp.ceil(x)
    raise AssertionError(nearest_mode)


def _weighted(axis: ResizeAxis, column: Any, xp: Any) -> Placed:
    """Linear and cubic: kernel weights of the neighbours, normalised, then moved inside the source.

    With q = min(s, 1) when antialiasing and 1 otherwise, a tap at i weighs k((i - x)·q). exclude_outside drops taps
    beyond the source before normalising; otherwise they read the edge pixel, except that with antialias onnxruntime
    makes 0 of a row none of whose taps lies inside. A copied axis has a tap of weight 1, whatever its scale.
    """
    x, last, linear = xp.float64(column), xp.float64(axis.length) - 1, axis.mode == "linear"
    narrow: Any = 1.0
    if axis.antialias:
        narrow = xp.where(axis.copied, 1.0, xp.minimum(xp.float64(axis.scale), 1.0))
    elif linear:
        x = xp.minimum(xp.maximum(x, 0.0), last)
    radius = (1.0 if linear else 2.0) / narrow
    count = xp.int64(xp.ceil(2 * radius)) + 2
    neighbours = xp.floor(x - radius) + xp.float64(xp.arange(count))
    distance = abs(neighbours - x) * narrow
    weights = xp.maximum(1.0 - distance, 0.0) if linear else _cubic(axis.cubic_coeff_a, distance, xp)
    if axis.exclude_outside:
        weights = xp.where((neighbours >= 0) & (neighbours <= last), weights, 0.0)
    total = weights.sum(axis=1, keepdims=True)
    weights = xp.where(xp.equal(total, 0.0), 0.0, weights / total)
    if axis.antialias:
        weights = xp.where(_meets(axis, xp.float32(x), xp), weights, 0.0)
    return xp.int64(xp.minimum(xp.maximum(neighbours, 0.0), last)), weights


def _meets(axis: ResizeAxis, x: Any, xp: Any) -> Any:
    """Whether any of the taps of a row, from floor(x - r) + 1 to floor(x + r), lies inside the source; r in float32."""
    f = xp.float32
    radius = xp.maximum(1 / f(axis.scale), f(1)) * (1 if axis.mode == "linear" else 2)
    centre = x + 0.5
    first, end = xp.floor(centre - radius + 0.5), xp.floor(centre + radius + 0.5)
    return (first < f(axis.length)) & (end > 0)


def _cubic(a: float, t: Any, xp: Any) -> Any:
    """Keys' cubic convolution kernel."""
    near = ((a + 2) * t - (a + 3)) * t * t + 1
    far = ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
    return xp.where(t <= 1, near, xp.where(t < 2, far, 0.0))
