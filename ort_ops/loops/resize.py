"""ResizeGrad: dX = W_0ᵀ · W_1ᵀ · … · dY, one matrix W per axis, as onnxruntime's Resize has them.

Where an axis has its source coordinate x is computed in float32, operation by operation as the forward does; the
weights are in float64.
"""

from collections.abc import Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from onnx_backprop.opset.core.op import Attributes, Float64Array
from onnx_backprop.opset.maths.resize import ResizeAxis
from onnx_backprop.opset.operators.resize_grad import resized_axes
from onnx_backprop.ort_ops.loops.axis import transposed

ONE, TWO, HALF = np.float32(1), np.float32(2), np.float32(0.5)
TIE = np.float32(1e-6)  # x is a tie for onnxruntime when it is as close to one


@njit(cache=True, nogil=True)
def coordinate(o, length, out, scale, coordinates, start, end):
    """x of destination index o, all of them float32."""
    if coordinates == "asymmetric":
        return o / scale
    if coordinates == "tf_half_pixel_for_nn":
        return (o + HALF) / scale
    if coordinates == "half_pixel_symmetric":  # here onnxruntime adds up in float64
        offset = length / TWO * (ONE - out / (scale * length))
        return np.float32(np.float64(offset) + np.float64(o + HALF) / np.float64(scale) - 0.5)
    if coordinates == "tf_crop_and_resize":
        if out > ONE:
            return start * (length - ONE) + o * (end - start) * (length - ONE) / (out - ONE)
        return HALF * (start + end) * (length - ONE)
    if coordinates == "half_pixel" or (coordinates == "pytorch_half_pixel" and out > ONE):
        return (o + HALF) / scale - HALF
    if coordinates == "align_corners" and out > ONE:
        return o * (length - ONE) / (out - ONE)
    return o * np.float32(0)


@njit(cache=True, nogil=True)
def rounded(x, nearest_mode):
    """The nearest pixel to x, in float32."""
    below = np.floor(x)
    tie = abs(x - below - HALF) <= TIE
    if nearest_mode == "floor" or (tie and nearest_mode == "round_prefer_floor"):
        return below
    if nearest_mode == "ceil":
        return np.ceil(x)
    if tie:
        return below + ONE
    return np.floor(x + HALF)


@njit(cache=True, nogil=True)
def kernel(t, cubic, a):
    """The weight of a pixel at distance t."""
    if not cubic:
        return max(1.0 - t, 0.0)
    if t <= 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * (t**3 - 5 * t**2 + 8 * t - 4) if t < 2 else 0.0


@njit(cache=True, nogil=True)
def place(length, out, scale, mode, coordinates, nearest_mode, a, exclude_outside, antialias, start, end, copied):
    """Index and weight of the taps of every destination index."""
    last = length - 1
    reach = 2.0 if mode == "cubic" else 1.0
    narrow = min(np.float64(scale), 1.0) if antialias else 1.0
    count = 1 if mode == "nearest" or copied else int(np.ceil(2 * reach / narrow)) + 2
    index, weight = np.zeros((out, count), np.int64), np.zeros((out, count))
    for o in range(out):
        everywhere = np.float32(o)
        if scale != ONE:
            everywhere = coordinate(np.float32(o), np.float32(length), np.float32(out), scale, coordinates, start, end)
        if mode == "nearest" or copied:
            near = np.float32(o) if copied else rounded(everywhere, nearest_mode)
            index[o, 0], weight[o, 0] = int(min(max(near, np.float32(0)), np.float32(last))), 1.0
        else:
            x = np.float64(everywhere)
            if mode == "linear" and not antialias:
                x = min(max(x, 0.0), float(last))
            first = np.floor(x - reach / narrow)
            for t in range(count):
                i = first + t
                index[o, t] = int(min(max(i, 0.0), float(last)))
                if 0 <= i <= last or not exclude_outside:
                    weight[o, t] = kernel(abs(i - x) * narrow, mode == "cubic", a)
            total = weight[o].sum()
            for t in range(count):
                weight[o, t] = weight[o, t] / total if total != 0 else 0.0
            if antialias and not meets(everywhere, np.float32(length), scale, np.float32(reach)):
                weight[o, :] = 0.0
        if coordinates == "tf_crop_and_resize" and not 0 <= everywhere <= last:
            weight[o, :] = 0.0  # extrapolation_value stands there, a constant
    return index, weight


@njit(cache=True, nogil=True)
def meets(x, length, scale, reach):
    """Whether a window of antialias, from floor(x - r) + 1 to floor(x + r), has a pixel of the source; in float32."""
    radius = max(ONE / scale, ONE) * reach
    centre = x + HALF
    return np.floor(centre - radius + HALF) < length and np.floor(centre + radius + HALF) > 0


def taps(axis: ResizeAxis) -> tuple[NDArray[np.int64], Float64Array]:
    """Index and weight of the taps of one axis, (O, taps)."""
    f = np.float32
    numbers = (axis.mode, axis.coordinates, axis.nearest_mode, float(axis.cubic_coeff_a))
    flags = (bool(axis.exclude_outside), bool(axis.antialias))
    start, end = axis.roi
    return place(int(axis.length), int(axis.out), f(axis.scale), *numbers, *flags, f(start), f(end), bool(axis.copied))


def reference(
    attrs: Attributes,
    out: tuple[int, ...],
    dy: Float64Array,
    _x: tuple[int, ...],
    roi: Sequence[float] | None,
    scales: Sequence[float] | None,
    sizes: Sequence[int] | None,
) -> Float64Array:
    if dy.size == 0:  # O/I is no scale then
        return np.zeros(out)
    dx = dy
    for axis, resized in enumerate(resized_axes(attrs, out, dy.shape, roi=roi, scales=scales, sizes=sizes)):
        if resized is not None:
            dx = transposed(taps(resized), dx, axis, out[axis])
    return dx


REFERENCES = {"ResizeGrad": reference}
