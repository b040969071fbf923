"""Folders of arrays that are larger than memory."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

import onnx_backprop as ob
from onnx_backprop.training.data.stored import read_folder


def arrays(rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
    return {"x": rng.standard_normal((rows, 3, 2)).astype(np.float32), "labels": rng.integers(0, 9, rows)}


def test_parts_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for n in range(12):
        np.save(tmp_path / f"x.{n}.npy", np.full((3, 2), n, np.float32))
    np.save(tmp_path / "labels.npy", np.repeat(np.arange(12), 3))
    read = read_folder(tmp_path, what="--data")
    np.testing.assert_array_equal(read["x"][:][:, 0], read["labels"][:])


@pytest.mark.parametrize("kind", ["npz", "npy", "parts"])
def test_rows_are_those_of_the_arrays(rng: np.random.Generator, tmp_path: Path, kind: str) -> None:
    """In parts of several lengths, one of them empty; batches in the same order as from memory, from any one on."""
    whole, bounds = arrays(rng, 23), [0, 4, 4, 15, 23]
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        part = {name: array[start:end] for name, array in whole.items()}
        if kind == "npz":
            np.savez(tmp_path / f"part{n}.npz", **part)
        for name, array in (part if kind == "parts" else {}).items():
            np.save(tmp_path / f"{name}.{n}.npy", array)
    for name, array in (whole if kind == "npy" else {}).items():
        np.save(tmp_path / f"{name}.npy", array)
    rows = read_folder(tmp_path, what="--data")
    for name, array in whole.items():
        assert (rows[name].shape, rows[name].dtype) == (array.shape, array.dtype)
        np.testing.assert_array_equal(rows[name][[22, 0, 4, 3, 22]], array[[22, 0, 4, 3, 22]])
        np.testing.assert_array_equal(rows[name][2:20:3], array[2:20:3])
        assert rows[name][[]].shape == (0, *array.shape[1:])
        with pytest.raises(IndexError, match=re.escape("expected 0 … 22")):
            rows[name][[23]]
    stored, held = ob.Batches(rows, 5, seed=7), ob.Batches(whole, 5, seed=7)
    for got, expected in zip(stored.since(2), list(held)[2:], strict=True):
        for name in whole:
            np.testing.assert_array_equal(got[name], expected[name])


def test_what_is_no_folder_of_rows_is_refused(rng: np.random.Generator, tmp_path: Path) -> None:
    def refused(words: str) -> None:
        with pytest.raises(ob.InvalidArgumentError, match=words):
            read_folder(tmp_path, what="--data")
        for path in tmp_path.iterdir():
            path.unlink()

    refused("got none of them")
    given = arrays(rng, 4)
    np.savez(tmp_path / "a.npz", **given)
    np.save(tmp_path / "x.npy", given["x"])
    refused(r"got \.npz and \.npy")
    np.savez_compressed(tmp_path / "a.npz", **given)
    refused("expected rows as np.savez writes them")
    np.savez(tmp_path / "a.npz", x=given["x"], labels=given["labels"][:3])
    refused("of one number of rows")
    np.savez(tmp_path / "a.npz", **given)
    np.savez(tmp_path / "b.npz", x=given["x"])
    refused("expected arrays x, labels")
    np.save(tmp_path / "x.0.npy", given["x"])
    np.save(tmp_path / "x.1.npy", given["x"][:, :2])
    refused("several types or shapes")
    np.save(tmp_path / "x.npy", np.asfortranarray(given["x"]))
    refused("in order of columns")
    np.save(tmp_path / "x.npy", np.array(["a"], object), allow_pickle=True)
    refused("numbers in C order")
    np.save(tmp_path / "x.npy", given["x"])
    content = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(content[:-1])
    refused(f"expected {len(content)} bytes, got {len(content) - 1}")


def test_files_that_shrink_meanwhile(rng: np.random.Generator, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", arrays(rng, 4)["x"])
    rows = read_folder(tmp_path, what="--data")["x"]
    (tmp_path / "x.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:-4])
    with pytest.raises(ob.InvalidArgumentError, match="has become shorter"):
        rows[[3]]
