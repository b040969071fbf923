"""Interpolation along one axis as a sparse matrix, and its transpose.

Every interpolation operator is separable: along each axis it is y = W·x with an (O, I) matrix W that has a few
taps (source index, weight) per row, and its gradient is dx = Wᵀ·dy, axis by axis in any order. Operators differ
only in how they place the taps. Rows sum to 1, hence Σ dx = Σ dy.

Here I is the source length, O the destination length, o a destination index and x the source coordinate of o,
in source pixels; pixel centres lie on integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnx_backprop.opset.core.op import Float64Array

IntArray = NDArray[np.intp]


@dataclass(frozen=True)
class Taps:
    """Row o of W: weights[o, t] at column indices[o, t]; a column may occur twice. `length` is I."""

    indices: IntArray
    weights: Float64Array
    length: int


def spec_taps(mode: str, coordinates: str, length: int, out: int) -> Taps:
    """Taps of oneDNN's Interpolate, in integer arithmetic so that ties and borders are exact.

    nearest: x rounded, ties up. linear: taps floor(x) and floor(x)+1 of x clamped to [0, I-1].
    half_pixel: x = (o + 1/2)·I/O - 1/2. align_corners: x = o·(I-1)/(O-1), 0 when O = 1.
    """
    o = np.arange(out, dtype=np.int64)
    if coordinates == "half_pixel":
        numerator, denominator = (2 * o + 1) * length - out, 2 * out
    else:
        numerator, denominator = o * (length - 1), max(out - 1, 1)
    if mode == "nearest":
        # floor(x + 1/2) with x = numerator / denominator; the clamp guards nothing but rounding it cannot do
        index = (2 * numerator + denominator) // (2 * denominator)
        return _one_tap(np.clip(index, 0, length - 1), length)
    numerator = np.clip(numerator, 0, (length - 1) * denominator)
    left, rest = np.divmod(numerator, denominator)
    return _two_taps(left, rest / denominator, length)


def resample_taps(
    mode: str, length: int, out: int, scale: float | None, input_offset: float, output_offset: float
) -> Taps:
    """Taps of DirectML's RESAMPLE: x = (o - output_offset) / scale - input_offset, the given scale as it is.

    NEAREST_NEIGHBOR: x rounded, ties down. LINEAR: as above. Beyond the borders the edge pixel repeats.
    No scale means O/I, as a fraction: rounding the quotient first would move ties (I = 14, O = 17).
    """
    o = np.arange(out) - output_offset
    x = (o * length / out if scale is None else o / scale) - input_offset
    if mode == "NEAREST_NEIGHBOR":
        return _one_tap(np.clip(np.ceil(x - 0.5), 0, length - 1), length)
    x = np.clip(x, 0, length - 1)
    left = np.floor(x)
    return _two_taps(left, x - left, length)


def _one_tap(index: NDArray[np.number], length: int) -> Taps:
    column = index.astype(np.intp)[:, None]
    return Taps(column, np.ones(column.shape), length)


def _two_taps(left: NDArray[np.number], weight: NDArray[np.floating], length: int) -> Taps:
    weight = weight.astype(np.float64, copy=False)
    first = left.astype(np.intp)
    second = np.minimum(first + 1, length - 1)
    return Taps(np.stack((first, second), axis=1), np.stack((1 - weight, weight), axis=1), length)


def matrix(taps: Taps) -> Float64Array:
    """W as a dense (O, I) array."""
    w = np.zeros((len(taps.indices), taps.length))
    for column, weight in zip(taps.indices.T, taps.weights.T, strict=True):
        w[np.arange(len(w)), column] += weight
    return w


def apply(taps: Taps, x: Float64Array, axis: int) -> Float64Array:
    """y = W·x along one axis."""
    shape = [1] * x.ndim
    shape[axis] = -1
    y = np.zeros((*x.shape[:axis], len(taps.indices), *x.shape[axis + 1 :]))
    for column, weight in zip(taps.indices.T, taps.weights.T, strict=True):
        y += x.take(column, axis=axis) * weight.reshape(shape)
    return y


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
