"""What the numbers of a tensor say: a mask, a table of positions, sines and cosines, a bank of filters."""

from __future__ import annotations

import numpy as np

MASK, POSITIONS, ANGLES, BANK = "mask or limit", "table of positions", "table of sines and cosines", "bank of filters"
REPEATED, SLOPES = "one filter for all channels", "slopes of positions"
SYMMETRIC, AVERAGES = "symmetric matrix", "matrix of averages"  # of a graph, or of what resizes
_HUGE = {2: 6e4, 4: 1e30, 8: 1e30}  # size of the element type -> from here on a number is a limit
_MASKED = -100.0  # what a mask adds is this or less
_HEAD, _ROWS = 256, 64  # numbers of a tensor, rows of a table, that are looked at
_LARGE = 2**20  # numbers of a matrix of which some rows are looked at first
_RAMP = 4  # numbers in a row that are no chance any more
_VARIED = 0.5  # how far apart the numbers of a table of angles are
_LEAST_MASKED = 0.01  # the share of exact zeros that numbers drawn at random, or rounded to float16, do not have
_DISTINCT = 0.9  # the share of different numbers among floats, and not among 8-bit integers
_SHARP, _NEIGHBOURS = 0.98, 5  # the share of a wave's energy that lies in so many frequencies side by side


def is_uniform(array: np.ndarray, number: float | None = None) -> bool:
    """Whether all numbers are equal, or equal to one."""
    flat = array.ravel()
    return bool(flat.size and flat[0] == flat[-1] and (flat == (flat[0] if number is None else number)).all())


def is_ramp(array: np.ndarray) -> bool:
    """Whether it is 0, 1, 2, … along one axis, as what turns a distribution over places into a place."""
    return (
        array.size >= _RAMP and max(array.shape) == array.size and np.array_equal(array.ravel(), np.arange(array.size))
    )


def in_arithmetic(array: np.ndarray) -> str | None:
    """What a tensor is that plain arithmetic reads: a mask, a limit, positions (whole numbers and halves), slopes."""
    values = array.ravel().astype(np.float64, copy=False)
    largest = float(np.max(np.abs(values), initial=0.0))
    if not np.isfinite(largest) or largest >= _HUGE.get(array.dtype.itemsize, 1e30):
        return MASK
    if _are_slopes(values):
        return SLOPES
    if any(np.any(part != np.rint(2 * part) / 2) for part in (values[:_HEAD], values)):
        return None
    different = np.unique(values)
    if len(different) > 2:
        return POSITIONS
    if len(different) < 2 or 0 not in different:
        return None
    return MASK if different[0] <= _MASKED or (array.ndim > 1 and different[1] == 1) else None


def in_product(array: np.ndarray) -> str | None:
    """What a matrix or a kernel is that is no weight: a Fourier transform, a mel scale, one filter, a graph."""
    if array.ndim < 2 or array.size < 8 or is_uniform(array):
        return None
    if array.ndim > 2 and len(array) > 1 and np.array_equal(array, np.broadcast_to(array[:1, :1], array.shape)):
        return REPEATED if array[0, 0].size > 1 else None
    lengths = [n for n in array.shape if n > 1]
    if len(lengths) != 2:
        return None
    matrix = array.reshape(lengths)
    if _is_symmetric(matrix):
        return SYMMETRIC
    if any(map(_are_averages, (matrix, matrix.T))):
        return AVERAGES
    if array.size > _LARGE and not any(map(_may_be_none, (matrix, matrix.T))):
        return None
    matrix = matrix.astype(np.float64)
    if not np.isfinite(matrix).all():
        return None
    if _turns(matrix) or _turns(matrix.T):
        return ANGLES
    return BANK if any(_are_waves(m) or _are_bands(m) for m in (matrix, matrix.T)) else None


def _is_symmetric(matrix: np.ndarray) -> bool:
    """Whether a matrix is its transpose, and has numbers beside the diagonal, unlike what begins as the identity."""
    if matrix.shape[0] != matrix.shape[1] or not np.array_equal(matrix[0], matrix[:, 0]):
        return False
    return np.array_equal(matrix, matrix.T) and bool(np.count_nonzero(matrix) > np.count_nonzero(matrix.diagonal()))


def _are_averages(rows: np.ndarray) -> bool:
    """Whether each row has shares of 1, of several columns in some row and not of all in any."""
    for part in (rows[:1], rows):
        if part.min() < 0 or np.abs(part.sum(axis=1, dtype=np.float64) - 1).max() > 1e-4:
            return False
    places = np.count_nonzero(rows, axis=1)
    return bool(places.max() > 1 and places.max() < rows.shape[1])


def _may_be_none(rows: np.ndarray) -> bool:
    """Whether some rows of a large matrix leave open that it is no weight; they take less time than all."""
    first, middle = (part[:_ROWS].astype(np.float64) for part in (rows, rows[len(rows) // 2 :]))
    if not (np.isfinite(first).all() and np.isfinite(middle).all()):
        return False
    return _turns(first) or bool(middle.min() >= 0 or _sharp_share(middle)[0] >= 0.5)


def holds_angles(array: np.ndarray) -> bool:
    """Whether it is a table of sin(pω + φ) for positions p = 0, 1, … along one axis, or along both axes of a grid."""
    lengths = [n for n in array.shape if n > 1]
    if len(lengths) != 2 or array.ndim > 4 or not array.size:
        return False
    rows = array.reshape(lengths)
    if len(rows) <= 4 or np.abs(rows[:_ROWS]).max() > 1.0 + 1e-6:
        return False
    return any(_turns(part[:_ROWS].astype(np.float64)) or _turns_in_grid(part) for part in (rows, rows[1:]))


def are_sine_and_cosine(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether the squares of two tables have one sum, whose numbers vary."""
    first, second = (np.ravel(v)[:_HEAD].astype(np.float64) for v in (a, b))
    sums = first**2 + second**2
    if not first.size:
        return False
    return bool(min(np.ptp(first), np.ptp(second)) > _VARIED and np.ptp(sums) <= 1e-2 * sums.mean())


def _turns(table: np.ndarray, least: int = 5) -> bool:
    """Whether x[p + 1] + x[p - 1] = 2 cos ω · x[p] in every column, with a frequency that is clearly not 0 in some."""
    table = table[:_ROWS]
    if len(table) < least:
        return False
    inner, sums = table[1:-1], table[2:] + table[:-2]
    squares = (inner**2).sum(axis=0)
    factor = np.divide((inner * sums).sum(axis=0), squares, out=np.full(len(squares), 2.0), where=squares > 0)
    error = np.abs(sums - factor * inner).max(axis=0)
    size = np.abs(table).max(axis=0)
    still = size <= 1e-6 * size.max(initial=0.0)  # as sin(πp), but for rounding
    fits = still | ((error <= 2e-3 * size) & (np.abs(factor) <= 2 + 2e-3))
    moving = (np.abs(factor) < 1.99) & (np.ptp(table, axis=0) > 0)
    return bool(fits.all() and moving.sum() >= max(2, len(moving) // 8) and np.ptp(table) > _VARIED)


def _turns_in_grid(table: np.ndarray) -> bool:
    """Whether the rows are places of a grid, and every column depends on one of its axes alone and turns along it."""
    for height in range(4, len(table) // 4 + 1):
        if len(table) % height:
            continue
        grid = table.reshape(height, -1, table.shape[1])
        if not (
            _stays(corner := grid[:2, :2].astype(np.float64), 0) | _stays(corner, 1)
        ).all():  # nor does the whole, which may be large
            continue
        grid = grid.astype(np.float64)
        along_height, along_width = _stays(grid, 1), _stays(grid, 0)
        if (along_height | along_width).all() and along_height.any() and along_width.any():
            return _turns(grid[:, 0, along_height], 4) and _turns(grid[0][:, ~along_height], 4)
    return False


def _stays(grid: np.ndarray, axis: int) -> np.ndarray:
    """Whether a column is the same all along an axis of a grid, of each column."""
    return np.ptp(grid, axis=axis).max(axis=0) <= 1e-5


def _are_waves(rows: np.ndarray) -> bool:
    """Whether the rows are waves under a window, of many frequencies, as the kernels of a Fourier transform."""
    count, length = rows.shape
    if length < 16 or count < 8:
        return False
    share, peaks, kept = _sharp_share(rows)
    return share >= 0.9 and peaks >= max(4, kept // 3)


def _sharp_share(rows: np.ndarray) -> tuple[float, int, int]:
    """The share of the rows that are waves of few frequencies, how many frequencies there are, and how many rows."""
    energy = np.abs(np.fft.rfft(rows)) ** 2
    total = energy.sum(axis=1)
    kept = total > 1e-12 * max(float(total.max()), 1e-300)
    if energy.shape[1] < _NEIGHBOURS:
        return 0.0, 0, 0
    sharp = np.lib.stride_tricks.sliding_window_view(energy, _NEIGHBOURS, axis=1).sum(axis=2).max(axis=1)
    peaks = np.unique(energy[kept].argmax(axis=1))
    return float((sharp[kept] >= _SHARP * total[kept]).mean()) if kept.any() else 0.0, len(peaks), int(kept.sum())


def _are_bands(rows: np.ndarray) -> bool:
    """Whether the rows are triangles side by side, nearly all zero elsewhere, as those of a mel scale."""
    count, length = rows.shape
    if count < 4 or length < 16 or rows.min() < 0 or np.mean(rows == 0) < 0.5:
        return False
    for row in rows:
        places = np.flatnonzero(row)
        if not len(places):
            continue
        peak = int(row.argmax())
        rises, falls = np.diff(row[places[0] : peak + 1]), np.diff(row[peak : places[-1] + 1])
        if places[-1] - places[0] + 1 != len(places) or (rises < 0).any() or (falls > 0).any():
            return False
    starts = [int(row.argmax()) for row in rows if row.any()]
    wide = sum(int(np.count_nonzero(row)) > 1 for row in rows)
    return len(starts) >= 4 and starts == sorted(starts) and wide >= len(starts) / 2


def _are_slopes(values: np.ndarray) -> bool:
    """Whether they are powers of one root of 2 that differ, as the slopes of ALiBi."""
    if len(values) < 3 or values.min() <= 0:
        return False
    exponents = np.log2(values) * 16
    whole = np.rint(exponents)
    return bool(np.abs(exponents - whole).max() <= 1e-4 and len(np.unique(whole)) == len(whole) and whole.max() <= 0)


def is_masked(matrix: np.ndarray) -> bool:
    """Whether a mask has multiplied a matrix: some numbers are exact zeros, and hardly any others are equal.

    Rounded to integers, as by a quantiser, many are equal.
    """
    matrix = matrix[:_ROWS] if matrix.size > _LARGE else matrix
    kept = matrix != 0
    if not 0 < np.count_nonzero(kept) <= (1 - _LEAST_MASKED) * matrix.size:
        return False
    parts = (matrix[kept][:_HEAD], matrix.T[kept.T][:_HEAD])
    return all(len(np.unique(part)) > _DISTINCT * len(part) for part in parts)
