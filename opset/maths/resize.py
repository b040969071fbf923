"""Where ONNX's Resize places its taps along one axis.

I is the source length, O the destination length, s the scale (given, or O/I), o a destination index and x the
source coordinate of o, in source pixels. All seven coordinate_transformation_modes, nearest, linear and cubic, with
antialias and exclude_outside.

x is computed in float32, operation by operation as onnxruntime's forward does: nearest decides by comparing x with
a half, and where float32 falls on the other side of a tie than exact arithmetic, the gradient must follow the forward
that ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnx_backprop.opset.core.op import Float64Array
from onnx_backprop.opset.maths.interpolation import Taps

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

Float32Array = NDArray[np.float32]


@dataclass(frozen=True)
class ResizeAxis:
    """One axis of one Resize: lengths, scale and the attributes that place the taps. `roi` is (start, end).

    `copied`: the forward copies the axis as it keeps its length, whatever the scale; only what lies outside the roi of
    tf_crop_and_resize is overwritten.
    """

    length: int
    out: int
    scale: float
    mode: str = "nearest"
    coordinates: str = "half_pixel"
    nearest_mode: str = "round_prefer_floor"
    cubic_coeff_a: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    roi: tuple[float, float] = (0.0, 1.0)
    copied: bool = False


def coordinates(axis: ResizeAxis) -> Float32Array:
    """X of every destination index, in float32."""
    f = np.float32
    o = np.arange(axis.out, dtype=f)
    scale, length, out = f(axis.scale), f(axis.length), f(axis.out)
    half, one = f(0.5), f(1)
    match axis.coordinates:
        case "half_pixel":
            return (o + half) / scale - half
        case "pytorch_half_pixel":
            return (o + half) / scale - half if axis.out > 1 else np.zeros(axis.out, f)
        case "half_pixel_symmetric":
            # here onnxruntime adds up in float64 and rounds once
            offset = length / f(2) * (one - out / (scale * length))
            return (offset + (o + half) / np.float64(scale) - 0.5).astype(f)
        case "align_corners":
            return o * (length - one) / (out - one) if axis.out > 1 else np.zeros(axis.out, f)
        case "asymmetric":
            return o / scale
        case "tf_half_pixel_for_nn":
            return (o + half) / scale
        case "tf_crop_and_resize":
            start, end = f(axis.roi[0]), f(axis.roi[1])
            if axis.out > 1:
                return start * (length - one) + o * (end - start) * (length - one) / (out - one)
            return np.full(axis.out, half * (start + end) * (length - one), f)
    raise AssertionError(axis.coordinates)


def policy_scale(policy: str, ratios: Sequence[np.float32]) -> np.float32:
    """The scale that keeps the aspect ratio: the smallest (not_larger) or largest (not_smaller) of sizes / lengths."""
    return min(ratios) if policy == "not_larger" else max(ratios)


def policy_length(scale: float, length: int) -> int:
    """The length that this scale leads to: rounded, halves away from 0."""
    return int(np.floor(np.float32(scale) * np.float32(length) + np.float32(0.5)))


def resize_taps(axis: ResizeAxis) -> Taps:
    """The taps of one axis: row o of the forward's matrix W."""
    x = np.arange(axis.out, dtype=np.float32) if axis.scale == 1 else coordinates(axis)
    if axis.copied:
        taps = Taps(np.arange(axis.out)[:, None], np.ones((axis.out, 1)), axis.length)
    elif axis.mode == "nearest":
        index = np.clip(_nearest(x, axis.nearest_mode), 0, axis.length - 1)
        taps = Taps(index.astype(np.intp)[:, None], np.ones((axis.out, 1)), axis.length)
    else:
        taps = _weighted(axis, x.astype(np.float64))
    if axis.coordinates != "tf_crop_and_resize":
        return taps
    outside = (x < 0) | (x > axis.length - 1)  # these take the constant extrapolation_value: no gradient
    return Taps(taps.indices, np.where(outside[:, None], 0.0, taps.weights), axis.length)


def _nearest(x: Float32Array, nearest_mode: str) -> Float32Array:
    half, below = np.float32(0.5), np.floor(x)
    tie = np.abs(x - below - half) <= TIE_TOLERANCE
    match nearest_mode:
        case "round_prefer_floor":
            return np.where(tie, below, np.floor(x + half))
        case "round_prefer_ceil":
            return np.where(tie, below + 1, np.floor(x + half))
        case "floor":
            return np.floor(x)
        case "ceil":
            return np.ceil(x)
    raise AssertionError(nearest_mode)


def _weighted(axis: ResizeAxis, x: Float64Array) -> Taps:
    """Linear and cubic: kernel weights of the neighbours, normalised, then moved inside the source.

    With q = min(s, 1) when antialiasing and 1 otherwise, a tap at i weighs k((i - x)·q). exclude_outside drops taps
    beyond the source before normalising; otherwise they read the edge pixel, except that with antialias onnxruntime
    makes 0 of a row none of whose taps lies inside.
    """
    narrow = min(axis.scale, 1.0) if axis.antialias else 1.0
    radius = (1 if axis.mode == "linear" else 2) / narrow
    if axis.mode == "linear" and not axis.antialias:
        x = np.clip(x, 0, axis.length - 1)
    first = np.floor(x - radius)
    count = int(np.ceil(2 * radius)) + 2
    neighbours = first[:, None] + np.arange(count)
    kernel = _linear_kernel if axis.mode == "linear" else _cubic_kernel(axis.cubic_coeff_a)
    weights = kernel(np.abs(neighbours - x[:, None]) * narrow)
    if axis.exclude_outside:
        weights = np.where((neighbours < 0) | (neighbours >= axis.length), 0.0, weights)
    total = weights.sum(axis=1, keepdims=True)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total != 0)
    if axis.antialias:
        weights[_misses(axis, x)] = 0
    indices = np.clip(neighbours, 0, axis.length - 1).astype(np.intp)
    return Taps(indices, weights, axis.length)


def _misses(axis: ResizeAxis, x: Float64Array) -> NDArray[np.bool_]:
    """The rows whose taps, from floor(x - r) + 1 to floor(x + r), all lie outside the source; r in float32."""
    f = np.float32
    radius = max(f(1) / f(axis.scale), f(1)) * f(1 if axis.mode == "linear" else 2)
    centre = x.astype(f) + f(0.5)
    first, end = np.floor(centre - radius + f(0.5)), np.floor(centre + radius + f(0.5))
    return (first >= axis.length) | (end <= 0)


def _linear_kernel(t: Float64Array) -> Float64Array:
    return np.maximum(0.0, 1.0 - t)


def _cubic_kernel(a: float):
    """Keys' cubic convolution kernel."""

    def kernel(t: Float64Array) -> Float64Array:
        near = ((a + 2) * t - (a + 3)) * t * t + 1
        far = ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
        return np.where(t <= 1, near, np.where(t < 2, far, 0.0))

    return kernel
