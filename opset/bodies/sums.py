"""Sums over all axes but the channels' inside a body, in stages: short float32 sums, added up in float64.

onnxruntime adds float32 numbers up one after the other; over a million rows that is 3e-5 off, of equal numbers 3e-3.
"""

from collections.abc import Sequence
from math import prod

import numpy as np

from onnx_backprop.opset.bodies.builder import DOUBLE, FLOAT, Body, known
from onnx_backprop.opset.core.shapes import Dims

_ROWS = 64  # numbers at most that are added one after the other
_RUN = 256  # that lie one behind the other, of which several are added at a time


def sum_channels(b: Body, x: str, dims: Dims | None, *, last: bool) -> str:
    """Σ over all axes but the channels', which are axis 1, or the last one: 1-D.

    dims: what is known of x, of rank 2 and more; None for an unknown rank.
    """
    if dims is None:
        second = b.Gather(b.Shape(x), b.ints([1]), name=f"{b.op}: expected rank 2 or more")
        before, behind = b.Shape(x, start=0, end=-1 if last else 1), b.Shape(x, start=-1 if last else 2)
        parts = [b.ReduceProd(before, keepdims=1), b.Add(behind, b.Sub(second, second))]
        parts = parts if last else [before, second, b.ReduceProd(behind, keepdims=1)]
        x = b.Reshape(x, b.Concat(*parts, axis=0), allowzero=1)
        dims = (None,) * len(parts)
    if len(dims) > 2 and not last and set(dims[2:]) == {1}:
        x, dims = b.Reshape(x, b.ints([0, 0])), dims[:2]
    if len(dims) > 2 and not last:
        return _sum_runs(b, x, dims)
    *leading, width = list(dims)
    entries = known(leading)
    if entries is not None and prod(entries) <= _ROWS:
        return b.ReduceSum(x, b.ints(range(len(dims) - 1)), keepdims=0)
    rows = None if entries is None else prod(entries)
    return sum_rows(b, (rows, width), x if rows and isinstance(width, int) and width else b.Flatten(x, axis=-1))[0]


def sum_rows(b: Body, dims: Dims, *tensors: str) -> list[str]:
    """Σ over the rows of tensors of one shape: 64 rows at most in float32, their sums in float64.

    Of rank 2, or with a number of rows that is known. Nodes of any width share one function where the number of rows is
    the same, or not known.
    """
    rows, width = dims
    if isinstance(rows, int) and rows <= _ROWS:
        return [b.ReduceSum(x, b.ints([0]), keepdims=0) for x in tensors]
    if isinstance(rows, int) and isinstance(width, int) and width:  # a width of 0 divides nothing
        factor = _factor(rows, _ROWS)
        shape = b.ints([factor, rows // factor, -1])
    else:
        count = b.Shape(tensors[0], end=1)
        divisor = _divisor(b, count, _ROWS)
        shape = b.Concat(divisor, b.Div(count, divisor), b.Shape(tensors[0], start=1), axis=0)
    return [_in_two(b, b.Reshape(x, shape, allowzero=1), [0], [0]) for x in tensors]


def _sum_runs(b: Body, x: str, dims: Dims) -> str:
    """(N, C, …): 256 numbers at most of a run in float32, their sums in float64."""
    entries = known(dims[2:])
    if entries is not None and prod(entries) <= _RUN:
        if dims[0] == 1:
            return b.ReduceSum(x, b.ints([0, *range(2, len(dims))]), keepdims=0)
        return _in_two(b, x, range(2, len(dims)), [0])
    if entries is not None:
        factor = _factor(prod(entries), _RUN)
        return _in_two(b, b.Reshape(x, b.ints([0, 0, prod(entries) // factor, factor])), [3], [0, 2])
    count = b.Shape(x, start=2)
    count = count if len(dims) == 3 else b.ReduceProd(count, keepdims=1)
    divisor = _divisor(b, count, _RUN)
    shape = b.Concat(b.Shape(x, start=0, end=2), b.Div(count, divisor), divisor, axis=0)
    return _in_two(b, b.Reshape(x, shape, allowzero=1), [3], [0, 2])


def _in_two(b: Body, x: str, first: Sequence[int], second: Sequence[int]) -> str:
    """Σ over some axes in float32 and over some of those that are left in float64."""
    x = b.ReduceSum(x, b.ints(first), keepdims=0)
    return b.Cast(b.ReduceSum(b.Cast(x, to=DOUBLE), b.ints(second), keepdims=0), to=FLOAT)


def _factor(count: int, most: int) -> int:
    """The largest divisor of a count that is not above `most`."""
    return next(n for n in range(most, 0, -1) if count % n == 0)


def _divisor(b: Body, count: str, most: int) -> str:
    """The same at run time, 1-D: of the remainders by 1, 2, … the last one that is 0.

    As float32, which holds remainders exactly: onnxruntime 1.18 has no ArgMin of int64.
    """
    numbers = b.constant(np.array([np.iinfo(np.int64).max, *range(1, most + 1)], np.int64))
    return b.ArgMin(b.Cast(b.Mod(count, numbers), to=FLOAT), axis=0, select_last_index=1)
