"""Rows of Hugging Face's `datasets`, and files that lie elsewhere, through fsspec."""

import atexit
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from onnx_backprop.converters.tables import format_bytes
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.progress import note
from onnx_backprop.training.data.rows import StoredRows


class DatasetRows(StoredRows):
    """A column of a `datasets.Dataset`, of which rows are read when they are asked for."""

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset, self._name = dataset.select_columns([name]).with_format("numpy"), name
        first = self._rows([0])
        self.dtype, self.shape = first.dtype, (len(dataset), *first.shape[1:])

    def _rows(self, rows: list[int]) -> np.ndarray:
        array = np.asarray(self._dataset[rows][self._name])
        if array.dtype.kind not in "biuf":
            raise InvalidArgumentError(
                f"column {self._name!r}: expected numbers of one shape in every row, got {array.dtype}. Map it"
            )
        return array

    def _read(self, rows: np.ndarray, into: np.ndarray) -> None:
        array = self._rows(rows.tolist())
        if array.shape[1:] != into.shape[1:]:
            raise InvalidArgumentError(
                f"column {self._name!r}: expected rows of the shape {into.shape[1:]}, got {array.shape[1:]}"
            )
        into[...] = array


def columns_of(arrays: Any) -> Any:
    """The columns of a dataset by name; what is none stays."""
    if not isinstance(arrays, Mapping) and hasattr(arrays, "column_names") and hasattr(arrays, "with_format"):
        if not len(arrays):
            raise InvalidArgumentError("arrays: the dataset has no rows")
        return {name: DatasetRows(arrays, name) for name in arrays.column_names}
    return arrays


def is_remote(path: object) -> bool:
    """Whether it is a URL, as s3://bucket/data.npz."""
    return isinstance(path, str) and "://" in path


@cache
def fetched(url: str, what: str) -> Path:
    """A copy of a file or a folder that lies elsewhere, for as long as this process lives; said in the log.

    Errors: InvalidArgumentError without fsspec or what it needs for the URL, and for what it does not find.
    """
    try:
        fsspec = import_module("fsspec")
    except ImportError as e:
        raise InvalidArgumentError(f"{what}: {url} is read through fsspec: {e}. Run pip install fsspec") from e
    folder = Path(tempfile.mkdtemp(prefix="onnx_backprop-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target = folder / (url.rstrip("/").rpartition("/")[2] or "data")
    note(f"copying {url}")
    try:
        files, place = fsspec.url_to_fs(url)
        if there := files.exists(place):
            files.get(place.rstrip("/"), str(target), recursive=files.isdir(place))
    except Exception as e:  # each of fsspec's file systems raises its own
        raise InvalidArgumentError(f"{what}: {url} cannot be read: {type(e).__name__}: {e}") from e
    if not there:
        raise InvalidArgumentError(f"{what}: there is no {url}")
    size = sum(path.stat().st_size for path in ([target] if target.is_file() else target.rglob("*")) if path.is_file())
    note(f"copied {url}, {format_bytes(size)}, to {target} for this run")
    return target
