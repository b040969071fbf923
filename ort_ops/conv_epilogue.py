"""What happens to a tile of a convolution between the product and the tensor: the bias. Compiled."""

from __future__ import annotations

from numba import njit

from .native_llvm import load_f32, store_f32
from .native_rows import read_run


@njit
def bias_of(kind, bias, first, count, target):
    """float32 target = bias[first + i], i < count; zeros where there is no bias, whose address is 0 then."""
    if bias == 0:
        for i in range(count):
            store_f32(target, i, 0.0)
    else:
        read_run(kind, target, 0, bias, first, 1, count)


@njit
def add_to_rows(tile, row, values, rows, columns):
    """tile[i, j] += values[i]; `row` bytes from row to row, float32."""
    for i in range(rows):
        value, at = load_f32(values, i), tile + i * row
        for j in range(columns):
            store_f32(at, j, load_f32(at, j) + value)


@njit
def add_to_columns(tile, row, values, rows, columns):
    """tile[i, j] += values[j]."""
    for i in range(rows):
        at = tile + i * row
        for j in range(columns):
            store_f32(at, j, load_f32(at, j) + load_f32(values, j))
