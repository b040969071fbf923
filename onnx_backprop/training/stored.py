"""Arrays in a folder of files, larger than memory: rows are read when they are asked for, and not kept.

FOLDER holds *.npz files, each with some rows of all arrays, as np.savez writes them; or NAME.npy, or several
NAME.PART.npy, for every array. Files come in the order of their names.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from onnx_backprop.opset.core.archives import NpzArrays, Place, npy_place
from onnx_backprop.opset.core.errors import InvalidArgumentError

Part = tuple[Path, Place]


class StoredRows:
    """An array whose rows lie in files. It has a length, and rows: `array[[5, 3]]`, `array[:8]`."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = list(parts)
        first = self._parts[0][1]
        self._starts = np.cumsum([0, *(place.shape[0] for _, place in self._parts)])
        self.dtype, self.shape = first.dtype, (int(self._starts[-1]), *first.shape[1:])
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, wanted: slice | Sequence[int] | np.ndarray) -> np.ndarray:
        """The rows, read from the disk; InvalidArgumentError where the files have become shorter."""
        rows = np.arange(*wanted.indices(len(self))) if isinstance(wanted, slice) else np.asarray(wanted, np.int64)
        if rows.size and not 0 <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"rows: expected 0 … {len(self) - 1}, got {rows.min()} … {rows.max()}")
        result = np.empty((len(rows), *self.shape[1:]), self.dtype)
        if result.size:
            self._read(rows, result.reshape(len(rows), -1).view(np.uint8))
        return result

    def _read(self, rows: np.ndarray, into: np.ndarray) -> None:
        parts, length = np.searchsorted(self._starts, rows, side="right") - 1, into.shape[1]
        for part in np.unique(parts):
            path, place = self._parts[part]
            with open(path, "rb", buffering=0) as file:
                for n in np.flatnonzero(parts == part):
                    file.seek(place.start + int(rows[n] - self._starts[part]) * length)
                    if file.readinto(into[n].data) != length:
                        raise InvalidArgumentError(f"{path} has become shorter while it was read")


def read_folder(folder: str | os.PathLike[str], *, what: str) -> dict[str, StoredRows]:
    """The arrays of a folder by name, of which nothing but the headers is read.

    Errors: InvalidArgumentError for a folder with no such files, or of both kinds, files that cannot be read by rows,
    parts of one array of different types or shapes, and .npz files that have not the same arrays, each with one number
    of rows.
    """
    npz, npy = (sorted(Path(folder).glob(f"*.{suffix}")) for suffix in ("npz", "npy"))
    if bool(npz) == bool(npy):
        found = "both" if npz else "neither"
        raise InvalidArgumentError(f"{what}: {folder}: expected files *.npz, or NAME.npy, got {found}")
    parts: defaultdict[str, list[Part]] = defaultdict(list)
    for path in npz:
        arrays = NpzArrays(path, what=what)
        places = {name: arrays.place(name) for name in arrays}
        if len({place.shape[0] for place in places.values()}) != 1 or (parts and parts.keys() != places.keys()):
            raise InvalidArgumentError(
                f"{what}: {path}: expected arrays {', '.join(parts or places)} of one number of rows, got "
                + ", ".join(f"{name!r} {list(place.shape)}" for name, place in places.items())
            )
        for name, place in places.items():
            parts[name].append((path, place))
    for path in npy:
        parts[path.name.partition(".")[0]].append((path, npy_place(path, what=what)))
    for name, own in parts.items():
        kinds = {(place.dtype, place.shape[1:]) for _, place in own}
        if len(kinds) > 1:
            said = ", ".join(sorted(f"{dtype}{list(shape)}" for dtype, shape in kinds))
            raise InvalidArgumentError(f"{what}: {folder}: rows of {name!r} have several types or shapes: {said}")
    return {name: StoredRows(own) for name, own in parts.items()}
