"""Weights of a few bits: numbers packed in bytes along rows, scales and zero points for blocks of a row."""

from collections.abc import Mapping
from typing import Any

import numpy as np


def lengths_of(attributes: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """The shapes of the weight of a MatMulNBits, its scales, zero points that are packed, and such that are floats."""
    n, bits, size = attributes["N"], attributes["bits"], attributes["block_size"]
    blocks = -(-attributes["K"] // size)
    return [(n, blocks, size * bits // 8), (n, blocks), (n, -(-blocks * bits // 8)), (n, blocks)]


def unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """The numbers in bytes along the last axis, the lowest bits first, as uint8."""
    if bits == 8:
        return packed
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    numbers = packed[..., None] >> shifts & np.uint8((1 << bits) - 1)
    return numbers.reshape(*packed.shape[:-1], -1)


def dequantised(
    attributes: Mapping[str, Any], weight: np.ndarray, scales: np.ndarray, zero_points: np.ndarray | None
) -> np.ndarray:
    """Rows of W, (q - z) · scales, as float64, for the same rows of all; zero points that are uint8 are packed."""
    bits, blocks = attributes["bits"], scales.shape[1]
    z = np.array(1 << (bits - 1)) if zero_points is None else zero_points
    z = unpacked(z, bits)[:, :blocks] if z.dtype == np.uint8 else z
    w = (unpacked(weight, bits) - z.astype(np.float64)[..., None]) * scales[..., None]
    return w.reshape(len(w), -1)[:, : attributes["K"]]
