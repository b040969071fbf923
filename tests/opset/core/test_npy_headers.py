"""Headers of .npy files that no writer writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import onnx_backprop as ob
from onnx_backprop.opset.core.archives import npy_place


def written(path: Path, header: str, count: int) -> Path:
    text = header.encode().ljust(117) + b"\n"
    path.write_bytes(
        b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + np.zeros(count, np.float32).tobytes()
    )
    return path


@pytest.mark.parametrize("shape", [(-2, 3, -1), (-2, -3), (3, -2, -1), ()])
def test_lengths_whose_product_fits_the_file(shape: tuple[int, ...], tmp_path: Path) -> None:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}"
    path = written(tmp_path / "rows.npy", header, 6 if shape else 1)
    with pytest.raises(ob.InvalidArgumentError, match="cannot be read"):
        npy_place(path)


def test_lengths_that_are_read(tmp_path: Path) -> None:
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)}"
    place = npy_place(written(tmp_path / "rows.npy", header, 6))
    assert (place.shape, place.dtype) == ((2, 3), np.float32)
