"""Lengths and shapes for seeing a tensor with some of its axes merged, whatever its rank."""

from __future__ import annotations

from math import prod

import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder, dims
from onnx_backprop.converters.rules.common import length, lengths_from


def merged_length(op: Builder, value: ir.Value, start: int) -> ir.Value:
    """The product of the lengths of the axes from `start` on, 1-D of one entry; 1 where there is no such axis."""
    known = dims(value)
    if known is not None and all(isinstance(n, int) for n in known[start:]):
        return op.ints([prod(n for n in known[start:] if isinstance(n, int))])
    if known is not None and len(known) == start + 1:
        return length(op, value, start)
    return op.ReduceProd(lengths_from(op, value, start), keepdims=1)


def channel_view(op: Builder, value: ir.Value) -> ir.Value:
    """The shape (N, C, L) that merges the spatial axes of a value (N, C, …)."""
    return op.Concat(length(op, value, 0), length(op, value, 1), merged_length(op, value, 2), axis=0)


def group_view(op: Builder, value: ir.Value, groups: int | None) -> ir.Value:
    """The shape (N, G, C/G, L) that splits the channels of a value (N, C, …) into G groups; None: G = C."""
    channels, first, last = length(op, value, 1), length(op, value, 0), merged_length(op, value, 2)
    if groups is None:
        return op.Concat(first, channels, op.ints([1]), last, axis=0)
    known = dims(value)
    count = None if known is None else known[1]
    each = op.ints([count // groups]) if isinstance(count, int) else op.Div(channels, op.ints([groups]))
    return op.Concat(first, op.ints([groups]), each, last, axis=0)


def leading_lengths(op: Builder, value: ir.Value, count: int) -> ir.Value:
    """The lengths of the first axes, a 1-D int64 tensor."""
    known = dims(value)
    if known is not None and all(isinstance(n, int) for n in known[:count]):
        return op.ints([n for n in known[:count] if isinstance(n, int)])
    return op.Shape(value, start=0, end=count)
