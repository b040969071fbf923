"""Weights of a few bits in standard operators, for the body of an operator and for gradient rules."""

from collections.abc import Mapping
from typing import Any

import numpy as np


def centred(
    b: Any,
    attributes: Mapping[str, Any],
    weight: Any,
    zero_points: Any | None,
    float_zero_points: Any | None,
    *,
    to: int,
    nothing: Any | None = None,
) -> Any:
    """q - z (N, blocks, block_size) of a MatMulNBits, in the float type `to`; `b` emits operators.

    nothing: a 0, int64 (1,), that only a run knows. onnxruntime then does not compute this once and keep it.
    """
    n, bits, size = attributes["N"], attributes["bits"], attributes["block_size"]
    blocks = -(-attributes["K"] // size)

    def unpacked(packed: Any, stored: list[int], row: list[int]) -> Any:
        """Numbers in floats, of the shape (N, *row), of bytes (N, *stored)."""
        if bits < 8:
            packed = b.Reshape(packed, _waiting(b, [n, *stored, 1], nothing))
            packed = b.BitShift(packed, b.constant(np.arange(0, 8, bits, dtype=np.uint8)), direction="RIGHT")
            packed = b.BitwiseAnd(packed, b.constant(np.array((1 << bits) - 1, np.uint8)))
        return b.Cast(b.Reshape(packed, _waiting(b, [n, *row], nothing)), to=to)

    q = unpacked(weight, [blocks, size * bits // 8], [blocks, size])
    if zero_points is not None:
        stored = -(-blocks * bits // 8)
        z = unpacked(zero_points, [stored], [stored * 8 // bits, 1])
        if stored * 8 != blocks * bits:
            z = b.Slice(z, b.ints([0]), b.ints([blocks]), b.ints([1]))
    elif float_zero_points is not None:
        z = b.Reshape(float_zero_points, b.ints([n, blocks, 1]))
    else:
        z = b.Cast(b.constant(np.array(1 << (bits - 1), np.float32)), to=to)
    return b.Sub(q, z)


def _waiting(b: Any, lengths: list[int], nothing: Any | None) -> Any:
    return b.ints(lengths) if nothing is None else b.Add(b.ints(lengths), nothing)
