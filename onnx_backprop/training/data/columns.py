"""Columns of Parquet and of Arrow (Feather) files, larger than memory, through pyarrow: a block is decoded as a whole.

A block is a row group of Parquet, a record batch of Arrow. Numbers and truth values become rows of the shape (), lists
of one length, nested or not, and fixed-shape tensors rows of theirs. Files come in the order of their names, part 2
before part 10.
"""

from __future__ import annotations

import reprlib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.limits import current, how_to_raise
from onnx_backprop.training.data.rows import StoredRows

SUFFIXES = (".parquet", ".arrow", ".feather")
_HELD = 2**28  # bytes of the decoded blocks that an array keeps for its next rows
_MESSAGE = 200  # characters of what somebody else says
_UNKNOWN_WIDTH = 2**31  # more than any column of numbers has


class Columns(Mapping[str, StoredRows]):
    """The columns of some files, by name, of which one is looked into when it is asked for."""

    def __init__(self, paths: Sequence[Path], *, what: str) -> None:
        """what: names the files in errors, as `--data`.

        Errors: InvalidArgumentError without pyarrow, and for files that it cannot read.
        """
        self._what = what
        self._files = [_File(path, what) for path in paths]
        self._names = list(dict.fromkeys(name for file in self._files for name in file.names))
        self._known: dict[str, BlockRows] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        """Without looking into it."""
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> BlockRows:
        """Errors: InvalidArgumentError for a column that is not one array of numbers, or not in every file once."""
        if name not in self._names:
            raise KeyError(name)
        if name not in self._known:
            self._known[name] = BlockRows(name, self._files, self._what)
        return self._known[name]


class BlockRows(StoredRows):
    """A column as an array. The blocks of the last rows are kept, so that the next ones may come from them."""

    def __init__(self, name: str, files: Sequence[_File], what: str) -> None:
        self._name, self._what = name, what
        self._blocks = [(file, n) for file in files for n, rows in enumerate(file.rows) if rows]
        self.starts = np.cumsum([0, *(file.rows[n] for file, n in self._blocks)])
        self._held: dict[int, np.ndarray] = {}
        for file in files:
            if file.names.count(name) != 1:
                raise file.wrong(f"expected a column {reprlib.repr(name)}, got {file.names.count(name)} of that name")
        if not self._blocks:
            raise InvalidArgumentError(f"{what}: column {reprlib.repr(name)} has no rows")
        file, n = self._blocks[0]
        first = file.column(name, n)
        self.dtype, self.shape = first.dtype, (int(self.starts[-1]), *first.shape[1:])
        self._held[0] = first
        size = int(np.diff(self.starts).max()) * first[:1].nbytes
        if size > current().npz_bytes:
            raise InvalidArgumentError(
                f"{what}: column {reprlib.repr(name)} has a block of {size:,} bytes, which is read as a whole. Write "
                f"smaller row groups. {how_to_raise('npz_bytes')}, on the command line --limit npz_bytes=…"
            )

    def _read(self, rows: np.ndarray, into: np.ndarray) -> None:
        assert self.starts is not None
        blocks = np.searchsorted(self.starts, rows, side="right") - 1
        wanted = np.unique(blocks).tolist()
        held = {block: self._held[block] for block in wanted if block in self._held}
        self._held = held  # the others go before any is read
        for block in wanted:
            array = held[block] if block in held else self._decoded(block)
            inside = blocks == block
            into[inside] = array[rows[inside] - self.starts[block]]
            if sum(a.nbytes for a in held.values()) + array.nbytes <= _HELD:
                held[block] = array

    def _decoded(self, block: int) -> np.ndarray:
        file, n = self._blocks[block]
        array = file.column(self._name, n)
        if array.dtype != self.dtype or array.shape[1:] != self.shape[1:]:
            raise file.wrong(
                f"column {reprlib.repr(self._name)}: expected rows of {self.dtype}{list(self.shape[1:])}, as in "
                f"{self._blocks[0][0].path}, got {array.dtype}{list(array.shape[1:])}"
            )
        return array


class _File:
    """A file of blocks. It is opened for each of them, so that no number of files is too many.

    names: of its columns. rows: of each block.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path, self._what = path, what
        self._of_parquet = path.suffix == ".parquet"
        with self._reading():
            if self._of_parquet:
                with self._parquet() as file:
                    self.names: list[str] = list(file.schema_arrow.names)
                    groups = [file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)]
                    self.rows: list[int] = [group.num_rows for group in groups]
                return
            pyarrow = _pyarrow(what, path)
            with pyarrow.memory_map(str(path)) as source:
                schema = pyarrow.ipc.open_file(source).schema
                self.names = list(schema.names)
                narrow = min(range(len(schema)), key=lambda n: _width(schema.field(n).type), default=None)
                file = self._arrow(source, narrow)
                self.rows = [file.get_batch(n).num_rows for n in range(file.num_record_batches)]

    def _parquet(self) -> Any:
        _pyarrow(self._what, self.path)
        return import_module("pyarrow.parquet").ParquetFile(str(self.path))

    def _arrow(self, source: Any, field: int | None) -> Any:
        """Its reader, of one column."""
        ipc = import_module("pyarrow.ipc")
        fields = [] if field is None else [field]
        return ipc.open_file(source, options=ipc.IpcReadOptions(included_fields=fields, use_threads=False))

    def column(self, name: str, block: int) -> np.ndarray:
        """A column of one block, (rows, …)."""
        with self._reading():
            if self._of_parquet:
                with self._parquet() as file:
                    column = file.read_row_group(block, columns=[name], use_threads=False).column(name)
                    chunks = column.chunks
            else:
                with _pyarrow(self._what, self.path).OSFile(str(self.path)) as source:
                    chunks = [self._arrow(source, self.names.index(name)).get_batch(block).column(0)]
            parts = [self._array(chunk, name) for chunk in chunks]
            shapes = {part.shape[1:] for part in parts}
            if len(shapes) > 1:
                raise self._unequal(name, sorted(map(str, shapes)))
            array = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if len(array) != self.rows[block]:
            raise self.wrong("it has become another while it was read")
        return array

    def _array(self, values: Any, name: str) -> np.ndarray:
        """An array of Arrow as one of NumPy, (length, …)."""
        of = import_module("pyarrow").types
        kind = values.type
        if hasattr(values, "storage"):  # an extension, such as a tensor of fixed shape
            stored = self._array(values.storage, name)
            if not hasattr(kind, "permutation"):
                return stored
            if kind.permutation and list(kind.permutation) != sorted(kind.permutation):
                raise self.wrong(f"column {reprlib.repr(name)}: expected tensors in row-major order, got others")
            return stored.reshape(len(stored), *kind.shape)
        if values.null_count:
            raise self.wrong(f"column {reprlib.repr(name)} has rows without a value. Fill them, or leave them out")
        if of.is_dictionary(kind):
            return self._array(values.dictionary_decode(), name)
        if of.is_fixed_size_list(kind) or of.is_list(kind) or of.is_large_list(kind):
            if of.is_fixed_size_list(kind):
                lengths = {kind.list_size}
            else:
                lengths = set(np.unique(values.value_lengths().to_numpy()).tolist())
            if len(lengths) > 1:
                raise self._unequal(name, [str(min(lengths)), str(max(lengths))])
            inner = self._array(values.flatten(), name)
            return inner.reshape(len(values), *lengths, *inner.shape[1:])
        if of.is_integer(kind) or of.is_floating(kind) or of.is_boolean(kind):
            return values.to_numpy(zero_copy_only=False)
        raise self.wrong(f"column {reprlib.repr(name)}: expected numbers or lists of them, got {str(kind)[:_MESSAGE]}")

    def _unequal(self, name: str, lengths: list[str]) -> InvalidArgumentError:
        return self.wrong(
            f"column {reprlib.repr(name)}: expected lists of one length, got {lengths[0]} and {lengths[-1]}. Pad them"
        )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """A block whose errors are InvalidArgumentError."""
        try:
            yield
        except InvalidArgumentError:
            raise
        except Exception as e:  # pyarrow's errors are of many classes
            raise self.wrong(f"it cannot be read: {textwrap.shorten(str(e), _MESSAGE) or type(e).__name__}") from e

    def wrong(self, what: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self._what}: {self.path}: {what}")


def _pyarrow(what: str, path: Path) -> Any:
    try:
        return import_module("pyarrow")
    except ImportError as e:
        raise InvalidArgumentError(
            f"{what}: {path}: Parquet and Arrow files are read by pyarrow, which does not load: {e}. "
            "pip install 'onnx-backprop[parquet]' brings it"
        ) from e


def _width(kind: Any) -> int:
    """Bits of a value, many where that differs."""
    try:
        return int(kind.bit_width)
    except ValueError:
        return _UNKNOWN_WIDTH
