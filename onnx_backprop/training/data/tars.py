"""Tars of samples, as webdataset writes them: a file KEY.FIELD for each field, those of a sample together."""

import io
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.training.data.images import SUFFIXES, decoded
from onnx_backprop.training.data.rows import StoredRows

TAR = ".tar"


class Member(NamedTuple):
    """A file in a tar: where its bytes lie."""

    path: Path
    name: str
    start: int
    size: int

    def read(self) -> bytes:
        """The bytes; InvalidArgumentError where the tar has become shorter."""
        with open(self.path, "rb") as file:
            file.seek(self.start)
            content = file.read(self.size)
        if len(content) != self.size:
            raise InvalidArgumentError(f"{self.path} has become shorter while it was read")
        return content


class TarRows(StoredRows):
    """A field of all samples, decoded when their rows are read."""

    def __init__(self, field: str, members: Sequence[Member], decode: Callable[[bytes], np.ndarray]) -> None:
        self._field, self._members, self._decode = field, list(members), decode
        first = self._row(0)
        self.dtype, self.shape = first.dtype, (len(members), *first.shape)

    def _row(self, row: int) -> np.ndarray:
        member = self._members[row]
        try:
            return self._decode(member.read())
        except (ValueError, OSError, EOFError, SyntaxError) as e:  # each of Pillow's formats raises its own
            raise InvalidArgumentError(f"{member.path}: {member.name} cannot be read: {e}") from e

    def _read(self, rows: np.ndarray, into: np.ndarray) -> None:
        for n, row in enumerate(rows):
            array = self._row(row)
            if (array.dtype, array.shape) != (self.dtype, self.shape[1:]):
                member = self._members[row]
                raise InvalidArgumentError(
                    f"{member.path}: {member.name}: expected {self.dtype} of the shape {self.shape[1:]}, as the first "
                    f"{self._field!r} is, got {array.dtype} {array.shape}. Bring them to one size"
                )
            into[n] = array


def read_tars(paths: Sequence[Path], *, what: str) -> Mapping[str, TarRows]:
    """Fields of all samples: KEY.NAME.npy is an array `NAME`, KEY.cls `labels`, an image `image` (3, height, width).

    Other fields are left out. Errors: InvalidArgumentError for a file that is no plain tar, samples that have not the
    same fields, and none that is known.
    """
    fields: dict[str, list[Member]] = {}
    samples = 0
    for path in paths:
        for key, sample in _samples(path, what):
            if samples and sample.keys() != fields.keys():
                raise InvalidArgumentError(
                    f"{what}: {path}: the sample {key!r} has the fields {', '.join(sample) or 'none'}, those before it "
                    f"have {', '.join(fields) or 'none'}"
                )
            for field, member in sample.items():
                fields.setdefault(field, []).append(member)
            samples += 1
    if not fields:
        raise InvalidArgumentError(f"{what}: {paths[0]}: expected samples of KEY.NAME.npy, KEY.cls, KEY.png, got none")
    return {field: TarRows(field, members, _DECODERS[_kind(members[0].name)]) for field, members in fields.items()}


def _samples(path: Path, what: str) -> list[tuple[str, dict[str, Member]]]:
    samples: dict[str, dict[str, Member]] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            for entry in archive:
                folder, slash, name = entry.name.rpartition("/")
                key, _, suffix = name.partition(".")
                if not entry.isfile() or not key or not _kind(name):
                    continue
                field = {"npy": suffix[: -len(".npy")], "cls": "labels", "image": "image"}[_kind(name)]
                sample = samples.setdefault(f"{folder}{slash}{key}", {})
                if not field or field in sample:
                    raise InvalidArgumentError(
                        f"{what}: {path}: {entry.name}: expected one field of a name, as KEY.x.npy"
                    )
                sample[field] = Member(path, entry.name, entry.offset_data, entry.size)
    except (tarfile.TarError, OSError, EOFError) as e:
        raise InvalidArgumentError(f"{what}: {path} cannot be read as a tar, which must not be compressed: {e}") from e
    return list(samples.items())


def _kind(name: str) -> str:
    """What a field is: "npy", "cls", "image", or "" for another."""
    suffix = f".{name.rpartition('.')[2].lower()}"
    return "image" if suffix in SUFFIXES else {".npy": "npy", ".cls": "cls"}.get(suffix, "")


_DECODERS: dict[str, Callable[[bytes], np.ndarray]] = {
    "npy": lambda content: np.load(io.BytesIO(content), allow_pickle=False),
    "cls": lambda content: np.array(int(content), np.int64),
    "image": lambda content: decoded(io.BytesIO(content)),
}
