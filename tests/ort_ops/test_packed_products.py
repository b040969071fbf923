"""MatMulNBitsBackwardData between unreadable pages: tiles with fewer rows and columns than they are made for."""

from __future__ import annotations

import numpy as np
import pytest

from tests.declarations.calls import Call
from tests.operators.mat_muln_bits_backward_data import OP
from tests.ort_ops import guarded


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize(("rows", "n", "k", "bits"), [(3, 130, 40, 4), (11, 5, 129, 8), (25, 131, 17, 2), (7, 1, 1, 4)])
def test_no_byte_beyond_the_ends(rows: int, n: int, k: int, bits: int, at_end: bool, dtype: str) -> None:
    rng, blocks = np.random.default_rng(rows), -(-k // 16)
    inputs: list[np.ndarray | None] = [
        rng.integers(-8, 9, (rows, n)).astype(np.float32) / 8,
        rng.integers(0, 256, (n, blocks, 2 * bits)).astype(np.uint8),
        rng.integers(-8, 9, (n, blocks)).astype(np.float32) / 8,
        rng.integers(0, 256, (n, -(-blocks * bits // 8))).astype(np.uint8),
    ]
    call = Call(OP, {"K": k, "N": n, "block_size": 16, "bits": bits}, inputs, rows)
    assert guarded.check(call, dtype, at_end=at_end) == "answered"
