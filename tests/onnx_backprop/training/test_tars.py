"""Tars of samples as webdataset writes them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import onnx_backprop as ob
from onnx_backprop.training.data.stored import read_rows

RNG = np.random.default_rng(2)
X = RNG.standard_normal((5, 3)).astype(np.float32)
PIXELS = RNG.integers(0, 256, (5, 4, 6, 3), np.uint8)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def write(path: Path, files: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # pyright: ignore[reportCallIssue]
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def samples(rows: range) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for n in rows:
        files |= {f"a/{n:03}.x.npy": npy(X[n]), f"a/{n:03}.cls": f"{n % 2}\n".encode(), f"a/{n:03}.png": png(PIXELS[n])}
        files[f"a/{n:03}.json"] = b"{}"
    return files


def test_samples_are_rows(tmp_path: Path) -> None:
    write(tmp_path / "0.tar", samples(range(3)))
    write(tmp_path / "1.tar", samples(range(3, 5)))
    data = read_rows(tmp_path)
    assert sorted(data) == ["image", "labels", "x"]
    np.testing.assert_array_equal(data["x"][:], X)
    np.testing.assert_array_equal(data["labels"][[4, 1]], [0, 1])
    np.testing.assert_array_equal(data["image"][:], PIXELS.transpose(0, 3, 1, 2))
    alone = read_rows(tmp_path / "1.tar")
    np.testing.assert_array_equal(alone["x"][:], X[3:])
    batches = list(ob.Batches(data, 2, shuffle=False, scale=1 / 255))
    assert [batch["image"].dtype for batch in batches] == [np.float32] * 3


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    cases = {
        "other fields": (
            samples(range(2)) | {"b.x.npy": npy(X[0])},
            "the sample 'b' has the fields x, those before it",
        ),
        "nothing": ({"a.json": b"{}"}, "expected samples of KEY.NAME.npy, KEY.cls, KEY.png, got none"),
        "no name": ({"a.npy": npy(X[0])}, "a.npy: expected one field of a name"),
        "no class": ({"a.cls": b"rose"}, "a.cls cannot be read: invalid literal"),
        "no array": ({"a.x.npy": b"rose"}, "a.x.npy cannot be read"),
        "objects": ({"a.x.npy": npy(np.array([{}], object))}, "a.x.npy cannot be read: Object arrays"),
    }
    for name, (files, sentence) in cases.items():
        with pytest.raises(ob.InvalidArgumentError, match=sentence):
            read_rows(write(tmp_path / f"{name}.tar", files))
    sizes = read_rows(write(tmp_path / "sizes.tar", {"a.x.npy": npy(X[0]), "b.x.npy": npy(X[0, :2])}))
    with pytest.raises(
        ob.InvalidArgumentError, match=r"b\.x\.npy: expected float32 of the shape \(3,\).*got float32 \(2,\)"
    ):
        sizes["x"][:]
    packed = write(tmp_path / "packed.tar", samples(range(1)), "w:gz")
    with pytest.raises(ob.InvalidArgumentError, match="cannot be read as a tar, which must not be compressed"):
        read_rows(packed)
