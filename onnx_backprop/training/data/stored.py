"""Arrays in a folder of files, larger than memory: rows are read when they are asked for, and not kept.

FOLDER holds *.npz files, each with some rows of all arrays, as np.savez writes them; or NAME.npy, or several
NAME.PART.npy, for every array; or files of `columns`; or `tars`. Files come in the order of their names, part 2
before part 10.
"""

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from onnx_backprop.opset.core.archives import NpzArrays, Place, npy_place
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.training.data.columns import SUFFIXES, Columns
from onnx_backprop.training.data.datasets import fetched, is_remote
from onnx_backprop.training.data.rows import StoredRows
from onnx_backprop.training.data.tars import TAR, read_tars

Part = tuple[Path, Place]


class FileRows(StoredRows):
    """An array that lies in files as it is; single rows are read, and none is kept."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = list(parts)
        first = self._parts[0][1]
        self._firsts = np.cumsum([0, *(place.shape[0] for _, place in self._parts)])
        self.dtype, self.shape = first.dtype, (int(self._firsts[-1]), *first.shape[1:])

    def _read(self, rows: np.ndarray, into: np.ndarray) -> None:
        parts, raw = np.searchsorted(self._firsts, rows, side="right") - 1, into.reshape(len(rows), -1).view(np.uint8)
        length = raw.shape[1]
        for part in np.unique(parts):
            path, place = self._parts[part]
            with open(path, "rb", buffering=0) as file:
                for n in np.flatnonzero(parts == part):
                    file.seek(place.start + int(rows[n] - self._firsts[part]) * length)
                    if file.readinto(raw[n].data) != length:
                        raise InvalidArgumentError(f"{path} has become shorter while it was read")


def read_rows(path: str | os.PathLike[str], *, what: str = "data") -> Mapping[str, np.ndarray | StoredRows]:
    """The arrays of an .npz file, which are read as a whole, or of a Parquet or Arrow file or a folder, by rows.

    what: names them in errors. Errors: InvalidArgumentError for what cannot be read.
    """
    if is_remote(path):
        path = fetched(str(path), what)
    if os.path.isdir(path):
        return read_folder(path, what=what)
    if Path(path).suffix == TAR:
        return read_tars([Path(path)], what=what)
    return Columns([Path(path)], what=what) if Path(path).suffix in SUFFIXES else NpzArrays(path, what=what)


def _by_numbers(path: Path) -> list[tuple[int, str]]:
    """A key of names in which numbers go by their value: part 2 before part 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def read_folder(folder: str | os.PathLike[str], *, what: str) -> Mapping[str, StoredRows]:
    """The arrays of a folder by name, of which nothing but the headers is read.

    Errors: InvalidArgumentError for a folder with no such files, or of several kinds, files that cannot be read by
    rows, parts of one array of different types or shapes, .npz files that have not the same arrays, each with one
    number of rows, and what `Columns` refuses.
    """
    by_suffix = {
        suffix: sorted(Path(folder).glob(f"*{suffix}"), key=_by_numbers) for suffix in (".npz", ".npy", TAR, *SUFFIXES)
    }
    suffixes = [suffix for suffix, paths in by_suffix.items() if paths]
    if len(suffixes) != 1:
        raise InvalidArgumentError(
            f"{what}: {folder}: expected files *.npz, or NAME.npy, or *{', or *'.join((TAR, *SUFFIXES))}, "
            f"got {' and '.join(suffixes) or 'none of them'}"
        )
    if suffixes[0] == TAR:
        return read_tars(by_suffix[TAR], what=what)
    if suffixes[0] in SUFFIXES:
        return Columns(by_suffix[suffixes[0]], what=what)
    npz, npy = by_suffix[".npz"], by_suffix[".npy"]
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
    for name, pieces in parts.items():
        kinds = {(place.dtype, place.shape[1:]) for _, place in pieces}
        if len(kinds) > 1:
            listed = ", ".join(sorted(f"{dtype}{list(shape)}" for dtype, shape in kinds))
            raise InvalidArgumentError(f"{what}: {folder}: rows of {name!r} have several types or shapes: {listed}")
    return {name: FileRows(pieces) for name, pieces in parts.items()}
