"""Sums of float32 over some axes that may be long, in stages.

onnxruntime adds the numbers up one after the other: over 2¹⁸ rows uniform ones are 2e-5 off, equal ones 2.5e-3. In
stages the relative error of a sum of positive numbers stays below 1e-6. They are BiasAddBackward's, of a view in which
the axes that are kept are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import onnx_ir as ir

from onnx_backprop.converters.reverse.known import element_type
from onnx_backprop.opset.core.shapes import Dims

if TYPE_CHECKING:
    from onnx_backprop.converters.reverse.builder import Builder

_ROWS = 64  # numbers that are added one after the other without harm
_RUN = 1024  # that lie one behind the other, of which onnxruntime adds several at a time


def sum_over(op: Builder, x: ir.Value, axes: Sequence[int], lengths: Dims, *, keepdims: int) -> ir.Value:
    """Σ of x, whose lengths are given, over some axes (>= 0): one ReduceSum where few elements meet, else in stages."""
    kept = [axis for axis in range(len(lengths)) if axis not in axes]
    first, end = (kept[0], kept[-1] + 1) if kept else (0, 0)
    if x.dtype != ir.DataType.FLOAT or not _is_long(lengths, axes, end):
        return op.ReduceSum(x, axes, keepdims=keepdims)
    if end - first > len(kept):
        wide = op.ReduceSum(op.Cast(x, to=ir.DataType.DOUBLE), axes, keepdims=keepdims)
        return op.Cast(wide, to=ir.DataType.FLOAT)
    if end and end == len(lengths):
        view = x if len(kept) == 1 else op.Flatten(x, axis=first)
        result = op.domain.BiasAddBackward(view, data_format="NXC")
    else:
        view = x
        if first != 1 or len(kept) > 1:
            parts = ((0, first), (first, end), (end, len(lengths)))
            view = op.Reshape(x, op.joined(*(_length(op, x, lengths, *part) for part in parts)), allowzero=1)
        result = op.domain.BiasAddBackward(view, data_format="NCX")
    if keepdims or len(kept) != 1:
        shape = _part(op, x, lengths, first, end)
        if keepdims:
            shape = op.joined(op.ints([1] * first), shape, op.ints([1] * (len(lengths) - end)))
        result = op.Reshape(result, shape, allowzero=1)
    result.shape = ir.Shape([d if n in kept else 1 for n, d in enumerate(lengths) if keepdims or n in kept])
    return result


def mean_over(op: Builder, x: ir.Value, axes: Sequence[int], lengths: Dims | None) -> ir.Value:
    """The mean of x over some axes (>= 0), which keep length 1, in stages as `sum_over`; None: of unknown rank."""
    end = 0 if lengths is None else max((n + 1 for n in range(len(lengths)) if n not in axes), default=0)
    if lengths is None or x.dtype != ir.DataType.FLOAT or not _is_long(lengths, axes, end):
        return op.ReduceMean(x, axes, keepdims=1)
    counts = [_part(op, x, lengths, axis, axis + 1) for axis in axes]
    count = op.ReduceProd(op.joined(*counts), keepdims=0) if len(counts) > 1 else op.Squeeze(counts[0])
    return op.Div(sum_over(op, x, axes, lengths, keepdims=1), op.Cast(count, to=element_type(x)))


def _is_long(lengths: Dims, axes: Sequence[int], end: int) -> bool:
    """Whether many elements may meet; end: behind the last axis that is kept."""
    behind, before = ([lengths[n] for n in axes if (n >= end) == last] for last in (True, False))
    return _may_exceed(behind, _RUN) or _may_exceed(before, _ROWS)


def _may_exceed(lengths: Sequence[object], most: int) -> bool:
    numbers = [length for length in lengths if isinstance(length, int)]
    return len(numbers) < len(lengths) or prod(numbers) > most


def _part(op: Builder, x: ir.Value, lengths: Dims, start: int, end: int) -> ir.Value:
    """The lengths of some axes, 1-D int64."""
    numbers = [length for length in lengths[start:end] if isinstance(length, int)]
    return op.ints(numbers) if len(numbers) == end - start else op.Shape(x, start=start or None, end=end)


def _length(op: Builder, x: ir.Value, lengths: Dims, start: int, end: int) -> ir.Value:
    """Their product, 1-D int64 of one entry."""
    numbers = [length for length in lengths[start:end] if isinstance(length, int)]
    if len(numbers) == end - start:
        return op.ints([prod(numbers)])
    part = _part(op, x, lengths, start, end)
    return part if end - start == 1 else op.ReduceProd(part, keepdims=1)
