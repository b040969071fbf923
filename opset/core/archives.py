"""Arrays in .npz files, read one by one and believed only as far as the file itself bears them out."""

import os
import reprlib
import textwrap
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import IO

import numpy as np

from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.hints import near_file
from onnx_backprop.opset.core.limits import current, how_to_raise

_ENCRYPTED = 1  # a bit of a member's flags
_NUMBERS = "biufc"  # kinds of element types
_CHUNK = 2**24  # bytes
_MESSAGE = 200  # characters of what somebody else says
_LOCAL_LENGTHS = 26  # where a member's own header has the lengths of its name and extra field
_HEADER = 10_000  # characters of an array's header that NumPy parses


@dataclass(frozen=True)
class Place:
    """An array in C order in a file, from byte `start` on."""

    start: int
    shape: tuple[int, ...]
    dtype: np.dtype


class NpzArrays(Mapping[str, np.ndarray]):
    """The arrays of an .npz file by name; each is read when it is asked for, and only then.

    What is read may take as many bytes as the file, or `limits.current().npz_bytes` where that is more, since what is
    compressed may be a thousand times as large. Nothing is unpickled.
    """

    def __init__(self, path: str | os.PathLike[str], *, what: str = "") -> None:
        """what: names the file in errors, as `--data`.

        Errors: InvalidArgumentError for a file that is not a readable archive, here or where an array is asked for.
        """
        self._path, self._label = path, f"{what}: {path}" if what else str(path)
        self._sizes: dict[str, int] = {}  # bytes of what was read
        with self._archive() as archive:
            members = archive.infolist()
        self._members = {info.filename.removesuffix(".npy"): info for info in members}
        stray = next((info.filename for info in members if not info.filename.endswith(".npy")), None)
        if stray is not None:
            raise self._wrong(f"it holds {reprlib.repr(stray)}, expected arrays alone, NAME.npy")
        if len(self._members) < len(members):
            raise self._wrong("it holds two arrays of one name")

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __contains__(self, name: object) -> bool:
        """Without reading it."""
        return name in self._members

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, name: str) -> np.ndarray:
        info = self._members[name]
        with self._archive(name) as archive:
            self._check_member(name, info)
            with archive.open(info) as file, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of headers that NumPy for Python 2 has written
                shape, in_order_of_columns, dtype = _header(file)
                size = self._checked_size(name, info, shape, dtype)
                array = np.empty(size // dtype.itemsize, dtype)
                self._fill(name, array, file)
            self._sizes[name] = size
            return array.reshape(shape, order="F" if in_order_of_columns else "C")

    def place(self, name: str) -> "Place":
        """Where the rows of an array lie in the file; InvalidArgumentError unless it is stored as it is, in C order."""
        info = self._members[name]
        with self._archive(name) as archive:
            self._check_member(name, info)
            with archive.open(info) as file:
                shape, in_order_of_columns, dtype = _header(file)
                size = self._checked_size(name, info, shape, dtype)
            if info.compress_type != zipfile.ZIP_STORED or in_order_of_columns or not shape:
                raise self._wrong(
                    f"array {reprlib.repr(name)}: expected rows as np.savez writes them, got a number, columns or "
                    "compressed ones. Write it with np.savez of np.ascontiguousarray"
                )
        with open(self._path, "rb") as file:
            file.seek(info.header_offset + _LOCAL_LENGTHS)
            lengths = int.from_bytes(file.read(2), "little") + int.from_bytes(file.read(2), "little")
            start = info.header_offset + _LOCAL_LENGTHS + 4 + lengths + info.file_size - size
            if start + size > os.path.getsize(self._path):
                raise self._wrong(f"array {reprlib.repr(name)} goes beyond the end of the file")
        return Place(start, shape, dtype)

    @contextmanager
    def _archive(self, name: str | None = None) -> Iterator[zipfile.ZipFile]:
        """The open file; whatever is wrong with it, or with one of its arrays, is an InvalidArgumentError."""
        if not os.path.isfile(self._path):  # a pipe cannot be read from its end
            raise self._wrong(f"there is no such file{near_file(self._path)}")
        try:
            with zipfile.ZipFile(self._path) as archive:
                yield archive
        except InvalidArgumentError:
            raise
        except (
            Exception
        ) as e:  # zlib.error, struct.error, NotImplementedError …: there is no list of what garbage raises
            where = "" if name is None else f"array {reprlib.repr(name)}: "
            raise self._wrong(where + (textwrap.shorten(str(e), _MESSAGE) or type(e).__name__)) from e

    def _wrong(self, what: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self._label} cannot be read as an .npz file: {what}")

    def _check_member(self, name: str, info: zipfile.ZipInfo) -> None:
        if info.flag_bits & _ENCRYPTED:
            raise self._wrong(f"array {reprlib.repr(name)} is encrypted")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            names = getattr(zipfile, "compressor_names", {})  # of CPython, in no documentation
            kind = names.get(info.compress_type, info.compress_type)
            raise self._wrong(
                f"array {reprlib.repr(name)}: expected it stored or deflated, as NumPy writes it, got {kind}"
            )

    def _checked_size(self, name: str, info: zipfile.ZipInfo, shape: tuple[int, ...], dtype: np.dtype) -> int:
        """The bytes of an array that is one of numbers, is as large as its member, and not too large."""
        if dtype.kind not in _NUMBERS:
            raise self._wrong(f"array {reprlib.repr(name)}: expected numbers, got {reprlib.repr(str(dtype))}")
        size = prod(shape) * dtype.itemsize
        total = sum(self._sizes.values()) - self._sizes.get(name, 0) + size
        if total > max(current().npz_bytes, os.path.getsize(self._path)):
            raise self._wrong(
                f"with array {reprlib.repr(name)} of {dtype}{reprlib.repr(shape)} there are {total:,} bytes to read, "
                f"more than the file has. {how_to_raise('npz_bytes')}, on the command line --limit npz_bytes=…"
            )
        if min(shape, default=0) < 0 or not 0 <= info.file_size - size <= 2 * _HEADER:
            raise self._wrong(
                f"array {reprlib.repr(name)} of {dtype}{reprlib.repr(shape)}: expected {size:,} bytes and a header, "
                f"got {info.file_size:,}"
            )
        return size

    def _fill(self, name: str, array: np.ndarray, file: IO[bytes]) -> None:
        view, done = array.view(np.uint8).data, 0
        while piece := file.read(_CHUNK):
            if done + len(piece) > len(view):
                break
            view[done : done + len(piece)] = piece
            done += len(piece)
        if done < len(view) or piece:
            raise self._wrong(
                f"array {reprlib.repr(name)}: expected {len(view):,} bytes, got {'more' if piece else f'{done:,}'}"
            )


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether columns come first, and element type, by NumPy's own parser."""
    version = np.lib.format.read_magic(file)
    if version != (1, 0):  # later ones are for long names of fields; their headers may claim 4 GiB
        raise ValueError(f"expected version 1.0 of the format, got {version[0]}.{version[1]}")
    return np.lib.format.read_array_header_1_0(file, max_header_size=_HEADER)


def npy_place(path: str | os.PathLike[str], *, what: str = "") -> Place:
    """Where the rows of an .npy file lie; InvalidArgumentError unless it holds numbers in C order, and all of them."""
    label = f"{what}: {path}" if what else str(path)
    try:
        with open(path, "rb") as file:
            shape, in_order_of_columns, dtype = _header(file)
            start = file.tell()
    except (OSError, ValueError, EOFError) as e:
        reason = textwrap.shorten(str(e), _MESSAGE) or type(e).__name__
        raise InvalidArgumentError(f"{label} cannot be read as an .npy file: {reason}") from e
    size = prod(shape) * dtype.itemsize
    if dtype.kind not in _NUMBERS or in_order_of_columns or not shape or min(shape) < 0:
        raise InvalidArgumentError(
            f"{label} cannot be read by rows: expected numbers in C order, of one axis or more, got "
            f"{reprlib.repr(str(dtype))} {reprlib.repr(shape)}{' in order of columns' * in_order_of_columns}"
        )
    if start + size != os.path.getsize(path):
        raise InvalidArgumentError(
            f"{label} cannot be read as an .npy file: expected {start + size:,} bytes, got {os.path.getsize(path):,}"
        )
    return Place(start, shape, dtype)
