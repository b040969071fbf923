"""Files of arrays that are hostile or damaged: one sentence each; what is read is what was asked for."""

from __future__ import annotations

import io
import os
import random
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_backprop.opset.core.archives import NpzArrays
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.limits import limits

X = np.arange(12, dtype=np.float32).reshape(3, 4)
CASES = int(os.environ.get("NPZ", "1000"))


def npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def declared(text: str, data: bytes = b"", version: int = 1) -> bytes:
    """An array whose header says what it likes."""
    size = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + text.encode("latin-1") + data


def header(shape: str, descr: str = "'<f4'") -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n"


def zipped(path: Path, members: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_as_numpy_writes_them(tmp_path: Path, save: Any) -> None:
    arrays = {
        "x": X, "columns": np.asfortranarray(X), "scalar": np.float64(3), "empty": np.zeros((0, 4), np.int8),
        "labels": np.arange(5), "yes": np.array([True, False]), "big": X.astype(">f8"), "half": X.astype(np.float16),
        "complex": X * 1j, "many dimensions": np.zeros((1,) * 20, np.uint8),
    }  # fmt: skip
    save(tmp_path / "a.npz", **arrays)
    got = NpzArrays(tmp_path / "a.npz")
    assert list(got) == list(arrays)
    assert len(got) == len(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(got[name], array, strict=True)
        assert got[name].flags.writeable


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    large = np.zeros(10_000_000, np.float32)
    np.savez_compressed(tmp_path / "a.npz", x=X, large=large, text=np.array(["a"]))
    tracemalloc.start()
    arrays = NpzArrays(tmp_path / "a.npz")
    assert "large" in arrays
    np.testing.assert_array_equal(arrays["x"], X)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < large.nbytes / 20


def test_what_grows_is_limited_and_what_does_not_is_not(tmp_path: Path) -> None:
    zeros = np.zeros(100_000, np.float32)
    np.savez(tmp_path / "stored.npz", a=zeros, b=zeros)
    np.savez_compressed(tmp_path / "grows.npz", a=zeros, b=zeros)
    with limits(npz_bytes=700_000):
        assert len({name: array.nbytes for name, array in NpzArrays(tmp_path / "stored.npz").items()}) == 2
        arrays = NpzArrays(tmp_path / "grows.npz", what="--data")
        assert arrays["a"].nbytes == arrays["a"].nbytes == 400_000
        with pytest.raises(
            InvalidArgumentError,
            match=r"--data: .*with array 'b' of float32\(100000,\) there are 800,000 bytes to read",
        ):
            arrays["b"]
    with limits(npz_bytes=800_000):
        assert arrays["b"].nbytes == 400_000


FLOATS = X.tobytes()
MEMBERS: dict[str, tuple[dict[str, bytes], str]] = {
    "no array": ({"a": b"text"}, "it holds 'a', expected arrays alone"),
    "an office document": ({"[Content_Types].xml": b"<xml/>"}, "expected arrays alone, NAME.npy"),
    "a folder": ({"x/": b""}, "expected arrays alone"),
    "empty": ({"x.npy": b""}, "array 'x': .*magic string"),
    "a part": ({"x.npy": npy(X)[:-5]}, "array 'x': expected 48 bytes, got 43"),
    "objects": ({"x.npy": npy(np.array([{}], object))}, "array 'x': expected numbers, got 'object'"),
    "text": ({"x.npy": npy(np.array(["a", "bc"]))}, "array 'x': expected numbers, got '<U2'"),
    "bytes": ({"x.npy": npy(np.array([b"a"]))}, r"array 'x': expected numbers, got '\|S1'"),
    "dates": ({"x.npy": npy(np.array(["2020-01-01"], "M8[D]"))}, "array 'x': expected numbers, got 'datetime64"),
    "records": ({"x.npy": npy(np.zeros(2, "f4,i4"))}, r"array 'x': expected numbers, got \"\["),
    "terabytes": ({"x.npy": declared(header("(3298534883328,)"), FLOATS)}, "there are 13,194,139,533,312 bytes to read"),
    "a number of 200 digits": ({"x.npy": declared(header(f"({10**200},)"), FLOATS)}, "bytes to read"),
    "a number of 9000 digits": ({"x.npy": declared(header(f"({'9' * 9000},)"), FLOATS)}, "array 'x': "),
    "below 0": ({"x.npy": declared(header("(-1,)"), FLOATS)}, "array 'x'.* expected -4 bytes and a header"),
    "twice below 0": ({"x.npy": declared(header("(-3, -4)"), FLOATS)}, "array 'x'.* expected 48 bytes and a header"),
    "100 dimensions": ({"x.npy": declared(header(f"({'1,' * 100})"), bytes(4))}, "array 'x': .*dimension"),
    "shape that is none": ({"x.npy": declared(header("3"), FLOATS)}, "array 'x': shape is not valid: 3"),
    "type that is none": ({"x.npy": declared(header("(3,)", "()"), FLOATS)}, "array 'x': "),
    "code": ({"x.npy": declared(header("(__import__('os').getpid(),)"), FLOATS)}, "array 'x': malformed node"),
    "deep": ({"x.npy": declared("(" * 9000, FLOATS)}, "array 'x': "),
    "a long header": ({"x.npy": declared(header("(3, 4)") + " " * 20_000, FLOATS)}, "array 'x': Header info length"),
    "a header of gigabytes": ({"x.npy": declared(header("(3, 4)"), FLOATS, version=2)}, "expected version 1.0 of the format"),
    "more than declared": ({"x.npy": declared(header("(3,)"), bytes(100_000))}, "expected 12 bytes and a header, got 100"),
    "a little more": ({"x.npy": declared(header("(3,)"), bytes(100))}, "array 'x': expected 12 bytes, got more"),
}  # fmt: skip


@pytest.mark.parametrize("case", MEMBERS)
@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_members(tmp_path: Path, case: str, kind: int) -> None:
    members, message = MEMBERS[case]
    zipped(tmp_path / "a.npz", members, kind)
    with pytest.raises(InvalidArgumentError, match=f"a.npz cannot be read as an .npz file: .*{message}") as raised:
        dict(NpzArrays(tmp_path / "a.npz"))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions(tmp_path: Path, kind: int) -> None:
    zipped(tmp_path / "a.npz", {"x.npy": npy(X)}, kind)
    with pytest.raises(
        InvalidArgumentError, match="array 'x': expected it stored or deflated, as NumPy writes it, got"
    ):
        NpzArrays(tmp_path / "a.npz")["x"]


def patched(content: bytes, *changes: tuple[int, int]) -> bytes:
    """With bytes of the entry in the central directory changed, by their place in it."""
    start, result = content.index(b"PK\x01\x02"), bytearray(content)
    for place, value in changes:
        result[start + place] = value
    return bytes(result)


def test_archives(tmp_path: Path) -> None:
    whole = zipped(tmp_path / "whole", {"x.npy": npy(X)}).read_bytes()
    packed = zipped(tmp_path / "packed", {"x.npy": npy(np.zeros(1000))}, zipfile.ZIP_DEFLATED).read_bytes()
    with zipfile.ZipFile(tmp_path / "twice", "w") as archive:
        archive.writestr("x.npy", npy(X))
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("x.npy", npy(X))
    cases = {
        "nothing": (b"", "File is not a zip file"),
        "one array": (npy(X), "File is not a zip file"),
        "cut": (whole[:-30], "File is not a zip file"),
        "encrypted": (patched(whole, (8, 1)), "array 'x' is encrypted"),
        "unknown compression": (patched(whole, (10, 77)), "array 'x': expected it stored or deflated, .* got 77"),
        "another size": (patched(whole, (24, 0)), "array 'x': Bad CRC-32"),
        "gigabytes": (patched(packed, (27, 255)), r"expected 8,000 bytes and a header, got 4,278"),
        "broken zlib": (packed.replace(packed[60:70], bytes(10)), "array 'x': Error -3 while decompressing"),
        "other bytes": (whole.replace(FLOATS, FLOATS[::-1]), "array 'x': Bad CRC-32"),
        "twice": ((tmp_path / "twice").read_bytes(), "two arrays of one name"),
    }
    for name, (content, message) in cases.items():
        (tmp_path / "a.npz").write_bytes(content)
        with pytest.raises(InvalidArgumentError, match=message) as raised:
            dict(NpzArrays(tmp_path / "a.npz"))
        assert "\n" not in str(raised.value), name


def test_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", "pipe", ".", "nul\0", 300 * "x"):
        with pytest.raises(InvalidArgumentError, match="there is no such file"):
            NpzArrays(tmp_path / name)


def test_damaged_at_random(tmp_path: Path) -> None:
    """An InvalidArgumentError, or arrays of numbers no larger than the limit."""
    seed, path = int(os.environ.get("SEED", "18")), tmp_path / "a.npz"
    rng, contents = random.Random(seed), []
    for save in (np.savez, np.savez_compressed):
        save(path, x=X, labels=np.arange(5), columns=np.asfortranarray(X))
        contents.append(path.read_bytes())
    read = 0
    with limits(npz_bytes=1_000_000):
        for case in range(CASES):
            content = bytearray(rng.choice(contents))
            for _ in range(rng.choice([1, 1, 2, 8])):
                place = rng.randrange(len(content))
                content[place : place + rng.choice([0, 1, 1, 4])] = rng.randbytes(rng.choice([0, 1, 1, 4]))
            path.write_bytes(content)
            try:
                arrays = dict(NpzArrays(path))
            except InvalidArgumentError:
                continue
            except Exception as e:
                raise AssertionError(f"seed {seed}, case {case}") from e
            read += 1
            assert all(a.dtype.kind in "biufc" and a.nbytes < 10**6 for a in arrays.values()), (
                f"seed {seed}, case {case}"
            )
    assert 0 < read < CASES / 2
