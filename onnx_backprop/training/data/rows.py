"""Arrays of which the rows that are asked for are read, and no others."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np


class StoredRows(ABC):
    """An array whose rows lie in files. It has a length, and rows: `array[[5, 3]]`, `array[:8]`.

    dtype, shape, ndim: as of an array. starts: the first row of each block that is read as a whole, and behind the last
    the number of all; None where single rows are read.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    starts: np.ndarray | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, wanted: slice | Sequence[int] | np.ndarray) -> np.ndarray:
        """The rows, read from the disk; InvalidArgumentError where the files have become others."""
        rows = np.arange(*wanted.indices(len(self))) if isinstance(wanted, slice) else np.asarray(wanted, np.int64)
        if rows.size and not 0 <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"rows: expected 0 … {len(self) - 1}, got {rows.min()} … {rows.max()}")
        result = np.empty((len(rows), *self.shape[1:]), self.dtype)
        if result.size:
            self._read(rows, result)
        return result

    @abstractmethod
    def _read(self, rows: np.ndarray, into: np.ndarray) -> None:
        """into[n] ← row rows[n]."""
