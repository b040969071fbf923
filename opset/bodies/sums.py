"""Sums over all axes but the channels' inside a body, in stages: short float32 sums, added up in float64.

onnxruntime adds float32 numbers up one after the other; over a million rows that is 3e-5 off, of equal numbers 3e-3.
"""

from collections.abc import Sequence
from math import prod

import numpy as np

from onnx_backprop.opset.bodies.builder import DOUBLE, FLOAT, Body, known
from onnx_backprop.opset.core.shapes import Dim, Dims

_ROWS = 64  # numbers at most that are added one after the other
_RUN = 256  # that lie one behind the other, of which several are added at a time
_ENOUGH = 16  # of a stage whose length is known at conversion


def sum_channels(b: Body, x: str, dims: Dims | None, *, last: bool) -> str:
    """Σ over all axes but the channels', which are axis 1, or the last one: 1-D.

    dims: what is known of x, of rank 2 and more; None for an unknown rank.
    """
    if dims is None:
        second = b.Gather(b.Shape(x), b.ints([1]), name=f"{b.op}: expected rank 2 or more")
        before, behind = b.Shape(x, start=0, end=-1 if last else 1), b.Shape(x, start=-1 if last else 2)
        parts = [b.ReduceProd(before, keepdims=1), b.Add(behind, b.Sub(second, second))]
        parts = parts if last else [before, second, b.ReduceProd(behind, keepdims=1)]
        x, dims = b.Reshape(x, b.Concat(*parts, axis=0), allowzero=1), (None,) * len(parts)
    if len(dims) > 2 and not last and set(dims[2:]) == {1}:
        x, dims = b.Reshape(x, b.ints([0, 0])), dims[:2]
    if len(dims) > 2 and not last:
        return _sum_runs(b, x, dims)
    return sum_rows(b, x, dims)


def sum_rows(b: Body, x: str, dims: Dims) -> str:
    """Σ over all axes but the last one: (c, k, F) to (k, F) in float32, c <= 64, and to (F) in float64."""
    *rows, width = dims
    if (entries := known(rows)) is not None and prod(entries) <= _ROWS:
        return b.ReduceSum(x, b.ints(range(len(rows))), keepdims=0)
    factor = _known_factor(rows, _ROWS) if isinstance(width, int) and width > 0 else None
    if factor:
        shape = b.ints([factor, -1, width])
    else:
        count = b.Shape(x, start=0, end=-1)
        count = count if len(rows) == 1 else b.ReduceProd(count, keepdims=1)
        divisor = _divisor(b, count, _ROWS)
        shape = b.Concat(divisor, b.Div(count, divisor), b.Shape(x, start=-1), axis=0)
    first = b.ReduceSum(b.Reshape(x, shape, allowzero=None if factor else 1), b.ints([0]), keepdims=0)
    return _exactly(b, first, [0])


def _sum_runs(b: Body, x: str, dims: Dims) -> str:
    """(N, C, k, c) to (N, C, k) in float32, c <= 256, and to (C) in float64."""
    factor = _known_factor(dims[2:], _RUN)
    if factor:
        shape = b.ints([0, 0, -1, factor])
    else:
        count = b.Shape(x, start=2)
        count = count if len(dims) == 3 else b.ReduceProd(count, keepdims=1)
        divisor = _divisor(b, count, _RUN)
        shape = b.Concat(b.Shape(x, start=0, end=2), b.Div(count, divisor), divisor, axis=0)
    first = b.ReduceSum(b.Reshape(x, shape, allowzero=None if factor else 1), b.ints([3]), keepdims=0)
    return _exactly(b, first, [0, 2])


def _exactly(b: Body, x: str, axes: list[int]) -> str:
    return b.Cast(b.ReduceSum(b.Cast(x, to=DOUBLE), b.ints(axes), keepdims=0), to=FLOAT)


def _known_factor(lengths: Sequence[Dim], most: int) -> int | None:
    """The largest factor up to `most` of the product of some lengths, where it is known and worth it."""
    whole, product = known(lengths) is not None, prod(d for d in lengths if isinstance(d, int))
    factor = next(n for n in range(most, 0, -1) if product % n == 0)
    return factor if product and (whole or factor >= _ENOUGH) else None


def _divisor(b: Body, count: str, most: int) -> str:
    """The same at run time, 1-D: of the remainders of a count by 1, 2, … the last one that is 0."""
    numbers = b.constant(np.array([np.iinfo(np.int64).max, *range(1, most + 1)], np.int64))
    return b.ArgMin(b.Mod(count, numbers), axis=0, select_last_index=1)
