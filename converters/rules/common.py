"""Compositions of a few nodes that rules of several families emit."""

from math import prod

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import constant_value, dims, element_type, known_lengths

HALF_TYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
FLOAT_TYPES = (*HALF_TYPES, ir.DataType.FLOAT, ir.DataType.DOUBLE)
DOMAIN_TYPES = (ir.DataType.FLOAT, *HALF_TYPES)  # of the tensors of our domain's operators


def work_type(value: ir.Value) -> ir.DataType:
    """The type to sum and count in: float32 for the half types, which lose small terms, else the value's own."""
    dtype = element_type(value)
    return ir.DataType.FLOAT if dtype in HALF_TYPES else dtype


def cast(op: Builder, value: ir.Value, target: ir.DataType) -> ir.Value:
    """The value as `target`; no node when that is its type already."""
    return value if value.dtype == target else op.Cast(value, to=target)


def widen(op: Builder, value: ir.Value, like: ir.Value | None = None) -> ir.Value:
    """The value in the type to sum in, that of `like` where one is given."""
    return cast(op, value, work_type(value if like is None else like))


def narrow(op: Builder, value: ir.Value, like: ir.Value) -> ir.Value:
    """Back from the type to sum in to the type of `like`."""
    return cast(op, value, element_type(like))


def divided(op: Builder, a: ir.Value, b: ir.Value) -> ir.Value:
    """a / b; 0 where b = 0, and so are all its derivatives there: those of a division behind a Where are NaN."""
    flat = op.Equal(b, 0)
    return op.Where(flat, 0, op.Div(a, op.Where(flat, 1, b)))


def as_shaped(op: Builder, value: ir.Value, like: ir.Value) -> ir.Value:
    """The value in the shape of another."""
    return op.Reshape(value, op.shape(like), allowzero=1)


def size(op: Builder, value: ir.Value) -> ir.Value:
    """The number of elements, a 1-D int64 tensor of one entry."""
    known = known_lengths(value)
    return op.Reshape(op.Size(value), [1]) if known is None else op.ints([prod(known)])


def size_ratio(op: Builder, part: ir.Value, whole: ir.Value) -> ir.Value:
    """The number of elements of `part` over that of `whole`, or over 1 if that is empty: 0-D, in the type to sum in."""
    wide, few, many = work_type(whole), known_lengths(part), known_lengths(whole)
    if few is not None and many is not None:
        return op.number(prod(few) / max(prod(many), 1), wide)
    above = op.Cast(op.Size(part), to=wide) if few is None else op.number(prod(few), wide)
    return op.Div(above, op.Cast(op.Max(op.Size(whole), 1), to=wide))


def count_up(op: Builder, end: ir.Value) -> ir.Value:
    """0, 1, … end - 1, for a 1-D `end` of one entry."""
    return op.Range(0, op.Squeeze(end, [0]), 1)


def positions(op: Builder, value: ir.Value) -> ir.Value:
    """An int64 tensor of the shape of `value` whose entries are their own row-major positions.

    An operator that only moves or copies elements, run on this, tells where each element of its output came from.
    """
    return as_shaped(op, op.Range(0, op.Size(value), 1), value)


def padded(
    op: Builder,
    x: ir.Value,
    pads: ir.Value,
    axes: ir.Value | None = None,
    value: ir.Value | None = None,
    mode: str | None = None,
) -> ir.Value:
    """Cells added before and behind along some axes (None: all); negative numbers cut.

    Always with pads for all axes: onnxruntime's optimizer forgets the axes when it moves a Transpose past a Pad.
    """
    if axes is not None:
        pads = _pads_of_all_axes(op, x, pads, axes)
    return op.Pad(x, pads, value, mode=mode)


def _pads_of_all_axes(op: Builder, x: ir.Value, pads: ir.Value, axes: ir.Value) -> ir.Value:
    known = dims(x)
    numbers, along = constant_value(pads), constant_value(axes)
    if known is not None and numbers is not None and along is not None:
        full = np.zeros((2, len(known)), np.int64)
        full[:, along] = numbers.reshape(2, -1)
        return op.ints(full.ravel().tolist())
    rank = op.Shape(op.Shape(x)) if known is None else op.ints([len(known)])
    axes = op.Mod(op.Cast(axes, to=ir.DataType.INT64), rank)  # counted from the front
    return op.ScatterElements(op.filled(op.Mul(rank, 2), 0), op.Concat(axes, op.Add(axes, rank), axis=0), pads)


def scatter_add(
    op: Builder, shape: ir.Value, indices: ir.Value, g: ir.Value, *, like: ir.Value, axis: int = 0
) -> ir.Value:
    """Zeros of a given shape, with g (typed as `like`) added at `indices` along `axis`, as ScatterElements has it.

    Not ScatterND, which in onnxruntime adds to a repeated index from several threads at once and loses terms; and not
    in a half type, which onnxruntime's ScatterElements cannot add.
    """
    zeros = op.filled(shape, 0, work_type(like))
    return narrow(op, op.ScatterElements(zeros, indices, widen(op, g, like), axis=axis, reduction="add"), like)


def put_back(op: Builder, x: ir.Value, origins: ir.Value, g: ir.Value) -> ir.Value:
    """The gradient of a copy out of x: each element of g added at its origin, a row-major position in x."""
    return as_shaped(op, scatter_add(op, size(op, x), op.Reshape(origins, [-1]), op.Reshape(g, [-1]), like=x), x)
