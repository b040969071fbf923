"""The order in which an epoch goes through rows, be it all of them or blocks, few of which are read at a time."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from onnx_backprop.distributed.shards import bounds
from onnx_backprop.training.data.rows import StoredRows

_OPEN = 2**27  # bytes of the blocks that a batch takes rows from
_MOST_STREAMS = 64
_NUMBER = 8  # bytes of a row's place in the order
_LISTED = 2**25  # rows whose order is one array, of 4 bytes for each


def row_order(count: int, seed: int, epoch: int) -> "np.ndarray | Scattered":
    """A permutation of 0 … count - 1, a function of its arguments, of which slices are taken."""
    if count > _LISTED:
        return Scattered(count, seed, epoch)
    order = np.arange(count, dtype=np.uint32)
    np.random.default_rng([seed, epoch]).shuffle(order)
    return order


class Scattered:
    """A permutation of 0 … count - 1 of which any part is computed alone, in no memory but the part's.

    A Feistel network permutes the numbers of 2·b bits, of which there are count or more: eight times (l, r) becomes
    (r, l ^ F(r)), F being the mixing of MurmurHash3 with a key of the round; what is not below count is permuted again.
    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002.
    """

    def __init__(self, count: int, seed: int, epoch: int) -> None:
        self._count, self._half = count, np.uint64(-(-(count - 1).bit_length() // 2))
        self._keys = np.random.default_rng([seed, epoch]).integers(2**64, size=8, dtype=np.uint64)

    def __getitem__(self, part: slice) -> np.ndarray:
        result = self._permuted(np.arange(*part.indices(self._count), dtype=np.uint64))
        while (outside := result >= self._count).any():
            result[outside] = self._permuted(result[outside])
        return result.astype(np.int64)

    def _permuted(self, numbers: np.ndarray) -> np.ndarray:
        low = (np.uint64(1) << self._half) - np.uint64(1)
        left, right = numbers >> self._half, numbers & low
        for key in self._keys:
            left, right = right, left ^ (_mixed(right + key) & low)
        return left << self._half | right


def _mixed(x: np.ndarray) -> np.ndarray:
    """MurmurHash3's finalizer of 64 bits, modulo 2⁶⁴."""
    x = (x ^ x >> np.uint64(33)) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ x >> np.uint64(33)) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ x >> np.uint64(33)


class BlockOrder:
    """The rows of each batch, a function of (seed, epoch), the size and the blocks alone: not of who reads them.

    S are the rows of all blocks, these in a permutation and the rows of each in one of its own. Of F full batches of
    `size` rows lane l has w_l rows, Σ w_l = size: in batch n rows n·w_l … (n + 1)·w_l of its F·w_l in S. What is left
    of S is the last batch. So a batch mixes as many blocks as there are lanes, each of which is read once an epoch;
    a rank, which has some of the lanes, reads few of the others' blocks.
    """

    def __init__(self, starts: np.ndarray, size: int, streams: int, seed: int, epoch: int) -> None:
        self._starts, self._size = starts, size
        self._blocks = np.random.default_rng([seed, epoch]).permutation(len(starts) - 1)
        self._ends = np.cumsum(np.diff(starts)[self._blocks])
        self._full = int(starts[-1]) // size
        self._streams = [bounds(size, stream, streams) for stream in range(streams)]

        @lru_cache(2 * streams + 1)
        def shuffled(block: int) -> np.ndarray:
            first, end = int(starts[block]), int(starts[block + 1])
            return first + np.random.default_rng([seed, epoch, block + 1]).permutation(end - first)

        self._shuffled = shuffled

    def batch(self, n: int) -> np.ndarray:
        """The numbers of the rows of one batch."""
        if n >= self._full:
            return self._rows(self._full * self._size, int(self._ends[-1]))
        parts = [
            self._rows(self._full * start + n * (end - start), self._full * start + (n + 1) * (end - start))
            for start, end in self._streams
        ]
        return np.concatenate(parts)

    def _rows(self, start: int, end: int) -> np.ndarray:
        """S[start:end]."""
        parts = [np.empty(0, np.int64)]
        k = int(np.searchsorted(self._ends, start, side="right"))
        while start < end:
            block = self._shuffled(int(self._blocks[k]))
            left = int(self._ends[k]) - start  # of this block
            stop = len(block) - left + min(left, end - start)
            parts.append(block[len(block) - left : stop])
            start, k = start + min(left, end - start), k + 1
        return np.concatenate(parts)


def streams(arrays: Sequence[StoredRows], size: int) -> int:
    """How many blocks a batch of some arrays mixes: as many as memory has room for."""
    longest = max(int(np.diff(array.starts).max()) for array in arrays if array.starts is not None)
    row = sum(int(np.prod(array.shape[1:])) * array.dtype.itemsize for array in arrays if array.starts is not None)
    return max(1, min(_MOST_STREAMS, size, _OPEN // (longest * (row + _NUMBER))))
