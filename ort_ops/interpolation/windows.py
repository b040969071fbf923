"""The tables of `gather_windows` for one axis: which elements of a row of dy make which element of dx. Plain Python."""

from dataclasses import dataclass

import numpy as np

from onnx_backprop.ort_ops.compiler.decorators import VECTOR
from onnx_backprop.ort_ops.vector.permute import PATTERN_BYTES, WINDOW


@dataclass(frozen=True)
class GatherWindows:
    """Blocks of VECTOR elements of dx, entries ends[k] to ends[k + 1] of block k; see `vector.permute`."""

    ends: np.ndarray
    bases: np.ndarray  # of an entry: an element of the row of dy
    numbers: np.ndarray  # of an entry: its pattern
    patterns: np.ndarray

    def entries(self, lows: np.ndarray) -> np.ndarray:
        """An entry as one word: base, counted from the `lows` element of its block, and number of the pattern."""
        words = np.empty((len(self.bases), 2), np.int32)
        words[:, 0] = self.bases - np.repeat(lows, np.diff(self.ends))
        words[:, 1] = self.numbers
        return words.view(np.int64).reshape(-1)


def windows(starts: np.ndarray, indices: np.ndarray, weights: np.ndarray, inner: int) -> GatherWindows:
    """From the taps starts[i] to starts[i + 1] of cell i, ascending; a cell has `inner` elements.

    The t-th taps of a block's lanes make an entry, or several where they lie further apart than a window is wide, so
    each lane's sum runs in the order of its taps.
    """
    blocks = -(-(len(starts) - 1) * inner // VECTOR)
    element = np.arange(blocks * VECTOR).reshape(blocks, VECTOR)
    cell = np.minimum(element // inner, len(starts) - 2)
    first = starts[cell]
    counts = np.where(element < (len(starts) - 1) * inner, starts[cell + 1] - first, 0)
    parts = []
    for t in range(int(counts.max(initial=0))):
        left = counts > t
        tap = np.where(left, first + t, 0)
        place = np.where(left, indices[tap] * inner + element % inner, np.iinfo(np.int64).max)
        while left.any():
            block = np.flatnonzero(left.any(axis=1))
            base = place[block].min(axis=1)
            offset = place[block] - base[:, None]
            inside = left[block] & (offset < WINDOW)
            parts.append(
                (block, base, np.where(inside, offset, 0), np.where(inside, weights[tap[block]], np.float32(0.0)))
            )
            left[block] &= ~inside
            place[block] = np.where(inside, np.iinfo(np.int64).max, place[block])
    return _numbered(blocks, parts)


def _numbered(blocks: int, parts: list[tuple[np.ndarray, ...]]) -> GatherWindows:
    """Entries in the order of their blocks, equal patterns kept once."""
    block, base, offsets, weights = (np.concatenate([f[n] for f in parts]) for n in range(4))
    order = np.argsort(block, kind="stable")
    table = np.empty((len(order), PATTERN_BYTES), np.uint8)
    table[:, :VECTOR] = offsets[order]
    table[:, VECTOR:] = np.ascontiguousarray(weights[order], np.float32).view(np.uint8)
    patterns, numbers = np.unique(table, axis=0, return_inverse=True)
    ends = np.concatenate([[0], np.cumsum(np.bincount(block, minlength=blocks))])
    return GatherWindows(ends, base[order], numbers.reshape(-1), patterns)
