"""Slow and obvious: operators once more, from the formulas of their specifications, one index at a time.

Coordinates are fractions, so no tie is ever missed. Nothing here is shared with the package. Convolutions are not here:
their loops are those of the route "numba".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import numpy as np

Matrix = list[list[Fraction]]

# ----- Interpolation ----------------------------------------------------------------------------------------------------


def round_half_up(x: Fraction) -> int:
    return math.floor(x + Fraction(1, 2))


def round_half_down(x: Fraction) -> int:
    return math.ceil(x - Fraction(1, 2))


def spec_coordinate(coordinates: str, o: int, length: int, out: int) -> Fraction:
    """The source coordinate of destination index o in oneDNN's Interpolate."""
    if coordinates == "half_pixel":
        return (o + Fraction(1, 2)) / Fraction(out, length) - Fraction(1, 2)
    return Fraction(0) if out == 1 else Fraction(o * (length - 1), out - 1)


def nearest_row(index: int, length: int) -> list[Fraction]:
    row = [Fraction(0)] * length
    row[min(max(index, 0), length - 1)] += 1
    return row


def linear_row(x: Fraction, length: int) -> list[Fraction]:
    """Both neighbours weigh 1 - their distance; a neighbour outside is the edge pixel."""
    row = [Fraction(0)] * length
    left = math.floor(x)
    for tap in (left, left + 1):
        row[min(max(tap, 0), length - 1)] += 1 - abs(x - tap)
    return row


def interpolation_matrix(mode: str, coordinates: str, length: int, out: int) -> Matrix:
    """W of oneDNN's Interpolate along one axis: (out, length)."""
    xs = [spec_coordinate(coordinates, o, length, out) for o in range(out)]
    if mode == "nearest":
        return [nearest_row(round_half_up(x), length) for x in xs]
    return [linear_row(x, length) for x in xs]


def resample_matrix(
    mode: str, length: int, out: int, scale: Fraction, input_offset: Fraction, output_offset: Fraction
) -> Matrix:
    """W of DirectML's RESAMPLE along one axis: (out, length)."""
    xs = [(o - output_offset) / scale - input_offset for o in range(out)]
    if mode == "NEAREST_NEIGHBOR":
        return [nearest_row(round_half_down(x), length) for x in xs]
    return [linear_row(x, length) for x in xs]


def as_array(matrix: Matrix, length: int) -> np.ndarray:
    return np.array([[float(w) for w in row] for row in matrix]).reshape(len(matrix), length)


def transpose_all_axes(matrices: Sequence[np.ndarray], dy: np.ndarray) -> np.ndarray:
    """Σ over destination indices of dy times the product of one weight per axis, as one big matrix."""
    big = np.ones((1, 1))
    for matrix in matrices:
        big = np.kron(big, matrix)
    return (big.T @ dy.reshape(-1)).reshape([m.shape[1] for m in matrices])


# ----- Convolution ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Correlation:
    """A geometry in the correlation's own terms; `source` and `out` are spatial lengths."""

    source: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads_begin: tuple[int, ...]
    pads_end: tuple[int, ...]
    groups: int

    @property
    def out(self) -> tuple[int, ...]:
        """How many windows fit, counted."""
        lengths = zip(
            self.source, self.kernel, self.strides, self.dilations, self.pads_begin, self.pads_end, strict=True
        )
        return tuple(count_windows(*axis) for axis in lengths)


def count_windows(source: int, kernel: int, stride: int, dilation: int, begin: int, end: int) -> int:
    cells = range(-begin, source + end)
    starts = range(-begin, source + end, stride)
    return sum(start + (kernel - 1) * dilation in cells for start in starts)


def relayout(array: np.ndarray, have: str, want: str) -> np.ndarray:
    """From one layout to another, both named as in the specifications: X stands for all spatial axes."""
    spatial = "xyz"[: array.ndim - 2]
    source, target = have.replace("X", spatial), want.replace("X", spatial)
    return array.transpose([source.index(letter) for letter in target])


# ----- Pools --------------------------------------------------------------------------------------------------------------


def max_pool_backward(c: Correlation, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """x (N, C, …), dy (N, C, …) -> dx; `c.kernel` are the windows, whose number is dy's."""
    dx = np.zeros(x.shape)
    for n, channel in product(range(len(x)), range(x.shape[1])):
        for o in product(*map(range, dy.shape[2:])):
            winner = None
            for k in product(*map(range, c.kernel)):
                i = tuple(
                    a * s + b * d - p for a, b, s, d, p in zip(o, k, c.strides, c.dilations, c.pads_begin, strict=True)
                )
                inside = all(0 <= cell < length for cell, length in zip(i, x.shape[2:], strict=True))
                if inside and (winner is None or x[(n, channel, *i)] > x[(n, channel, *winner)]):
                    winner = i
            if winner is not None:
                dx[(n, channel, *winner)] += dy[(n, channel, *o)]
    return dx


def avg_pool_backward(c: Correlation, dy: np.ndarray, *, exclude_pad: bool) -> np.ndarray:
    """dy (N, C, …) -> dx, window by window; `c.kernel` are the windows, whose number is dy's."""
    dx = np.zeros((*dy.shape[:2], *c.source))
    for o in product(*map(range, dy.shape[2:])):
        cells = []
        for k in product(*map(range, c.kernel)):
            i = tuple(a * s + b - p for a, b, s, p in zip(o, k, c.strides, c.pads_begin, strict=True))
            if all(0 <= cell < length for cell, length in zip(i, c.source, strict=True)):
                cells.append(i)
        for i in cells:
            dx[(slice(None), slice(None), *i)] += dy[(slice(None), slice(None), *o)] / (
                len(cells) if exclude_pad else math.prod(c.kernel)
            )
    return dx


def layer_norm(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, *, axis: int, epsilon: float) -> np.ndarray:
    """Layer normalisation of the axes from `axis` on, row by row, element by element."""
    y = np.zeros_like(x)
    axis %= x.ndim
    for row in np.ndindex(x.shape[:axis]):
        cells = [float(v) for v in x[row].ravel()]
        mean = sum(cells) / len(cells)
        variance = sum((v - mean) ** 2 for v in cells) / len(cells)
        for place in np.ndindex(x.shape[axis:]):
            z = (float(x[row + place]) - mean) / (variance + epsilon) ** 0.5
            y[row + place] = gamma[place] * z + beta[place]
    return y


def batch_norm(
    x: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray,
    beta: np.ndarray,
    *,
    epsilon: float,
    momentum: float,
) -> tuple[np.ndarray, ...]:
    """Batch normalisation of (N, C, …) in fractions, element by element: y, running mean, running variance, μ, σ²."""
    y, statistics = np.zeros_like(x), np.zeros((4, x.shape[1]))
    for c in range(x.shape[1]):
        cells = [Fraction(float(v)) for v in x[:, c].ravel()]
        centre = sum(cells, Fraction(0)) / max(1, len(cells))
        power = sum(((v - centre) ** 2 for v in cells), Fraction(0)) / max(1, len(cells))
        for n, (old, new) in enumerate(((mean[c], centre), (variance[c], power))):
            statistics[n, c] = momentum * float(old) + (1 - momentum) * float(new)
            statistics[n + 2, c] = float(new)
        rate = 1 / math.sqrt(float(power) + epsilon) if cells else 0.0
        for place in np.ndindex((x.shape[0], *x.shape[2:])):
            at = (place[0], c, *place[1:])
            y[at] = gamma[c] * float(Fraction(float(x[at])) - centre) * rate + beta[c]
    return y, *statistics
