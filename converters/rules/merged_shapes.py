"""Lengths and shapes for seeing a tensor with some of its axes merged, whatever its rank."""

from math import prod

import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import dims, known_lengths


def merged_length(op: Builder, value: ir.Value, start: int) -> ir.Value:
    """The product of the lengths of the axes from `start` on, 1-D of one entry; 1 where there is no such axis."""
    numbers, known = known_lengths(value, start), dims(value)
    if numbers is not None:
        return op.ints([prod(numbers)])
    if known is not None and len(known) == start + 1:
        return op.length(value, start)
    return op.ReduceProd(op.lengths(value, start), keepdims=1)


def channel_view(op: Builder, value: ir.Value) -> ir.Value:
    """The shape (N, C, L) that merges the spatial axes of a value (N, C, …)."""
    return op.Concat(op.length(value, 0), op.length(value, 1), merged_length(op, value, 2), axis=0)


def group_view(op: Builder, value: ir.Value, groups: int | None) -> ir.Value:
    """The shape (N, G, C/G, L) that splits the channels of a value (N, C, …) into G groups; None: G = C."""
    channels, first, last = op.length(value, 1), op.length(value, 0), merged_length(op, value, 2)
    if groups is None:
        return op.Concat(first, channels, [1], last, axis=0)
    count = known_lengths(value, 1, 2)
    return op.Concat(first, [groups], op.Div(channels, groups) if count is None else [count[0] // groups], last, axis=0)
