"""Interpolation along one axis as a sparse matrix, and its transpose.

Every interpolation operator is separable: along each axis it is y = W·x with an (O, I) matrix W that has a few
taps (source index, weight) per row, and its gradient is dx = Wᵀ·dy, axis by axis in any order. Operators differ
only in how they place the taps. Rows sum to 1, hence Σ dx = Σ dy.

Here I is the source length, O the destination length, o a destination index and x the source coordinate of o,
in source pixels; pixel centres lie on integers.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx_backprop.opset.core.op import Float64Array

IntArray = NDArray[np.intp]
Placed = tuple[Any, Any]
"""Indices and weights of taps, (O, taps): arrays where `xp` is numpy, tensors of a body where it is `bodies.Numpy`."""


@dataclass(frozen=True)
class Taps:
    """Row o of W: weights[o, t] at column indices[o, t]; a column may occur twice. `length` is I."""

    indices: IntArray
    weights: Float64Array
    length: int


def onednn_taps(mode: str, coordinates: str, length: int, out: int) -> Taps:
    """Taps of oneDNN's Interpolate, as `place_onednn` places them."""
    return Taps(*place_onednn(mode, coordinates, length, out, np), length)


def place_onednn(mode: str, coordinates: str, length: Any, out: Any, xp: Any) -> Placed:
    """Taps of oneDNN's Interpolate along one axis of `length`, for `out` results; xp: numpy or `bodies.Numpy`.

    In integer arithmetic, so that ties and borders are exact.

    nearest: x rounded, ties up. linear: taps floor(x) and floor(x)+1 of x clamped to [0, I-1].
    half_pixel: x = (o + 1/2)·I/O - 1/2. align_corners: x = o·(I-1)/(O-1), 0 when O = 1.
    """
    o, last = destinations(out, xp), length - 1
    if coordinates == "half_pixel":
        # not below 1, for an empty tensor divided by 0 is an error in a session
        numerator, denominator = (2 * o + 1) * length - out, xp.maximum(2 * out, 2)
    else:
        numerator, denominator = o * last, xp.maximum(out - 1, 1)
    if mode == "nearest":
        # floor(x + 1/2) with x = numerator / denominator
        return _one_tap(xp.minimum((2 * numerator + denominator) // (2 * denominator), last), xp)
    numerator = xp.minimum(xp.maximum(numerator, 0), last * denominator)
    left = numerator // denominator
    return _two_taps(left, xp.float64(numerator - left * denominator) / xp.float64(denominator), last, xp)


def resample_taps(
    mode: str, length: int, out: int, scale: float | None, input_offset: float, output_offset: float
) -> Taps:
    """Taps of DirectML's RESAMPLE, as `place_resample` places them."""
    return Taps(*place_resample(mode, scale, input_offset, output_offset, length, out, np), length)


def place_resample(
    mode: str, scale: float | None, input_offset: float, output_offset: float, length: Any, out: Any, xp: Any
) -> Placed:
    """x = (o - output_offset) / scale - input_offset, the given scale as it is.

    NEAREST_NEIGHBOR: x rounded, ties down. LINEAR: as above. Beyond the borders the edge pixel repeats.
    No scale means O/I, as a fraction: rounding the quotient first would move ties (I = 14, O = 17).
    """
    o = xp.float64(destinations(out, xp)) - output_offset
    x = (o * xp.float64(length) / xp.float64(out) if scale is None else o / scale) - input_offset
    last = length - 1
    if mode == "NEAREST_NEIGHBOR":
        return _one_tap(xp.int64(xp.minimum(xp.maximum(xp.ceil(x - 0.5), 0.0), xp.float64(last))), xp)
    x = xp.minimum(xp.maximum(x, 0.0), xp.float64(last))
    left = xp.floor(x)
    return _two_taps(xp.int64(left), x - left, last, xp)


def destinations(out: Any, xp: Any) -> Any:
    """0 … O-1 as a column."""
    return xp.expand_dims(xp.arange(out), 1)


def _one_tap(index: Any, xp: Any) -> Placed:
    return index, xp.ones_like(index, dtype=np.float64)


def _two_taps(left: Any, weight: Any, last: Any, xp: Any) -> Placed:
    """Taps at `left` and the next index, which the last one has no more; `weight` is that of the second."""
    indices = xp.concatenate((left, xp.minimum(left + 1, last)), axis=1)
    return indices, xp.concatenate((1.0 - weight, weight), axis=1)


def matrix(taps: Taps) -> Float64Array:
    """W as a dense (O, I) array."""
    w = np.zeros((len(taps.indices), taps.length))
    for column, weight in zip(taps.indices.T, taps.weights.T, strict=True):
        w[np.arange(len(w)), column] += weight
    return w


def apply_transpose(taps: Taps, dy: Float64Array, axis: int) -> Float64Array:
    """dx = Wᵀ·dy along one axis: each source pixel sums, in a fixed order, the runs of dy that read it."""
    dx = np.zeros((*dy.shape[:axis], taps.length, *dy.shape[axis + 1 :]))
    shape = [1] * dy.ndim
    shape[axis] = -1
    for column, weight in zip(taps.indices.T, taps.weights.T, strict=True):
        order = np.argsort(column, kind="stable")
        pixels, starts = np.unique(column[order], return_index=True)
        runs = np.add.reduceat(dy.take(order, axis=axis) * weight[order].reshape(shape), starts, axis=axis)
        dx[(*[slice(None)] * axis, pixels)] += runs
    return dx
