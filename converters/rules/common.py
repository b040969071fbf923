"""Compositions of a few nodes that rules of several families emit."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder, dims, element_type
from onnx_backprop.converters.reverse.forward import constant_value

HALF_TYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
DOMAIN_TYPES = (ir.DataType.FLOAT, *HALF_TYPES)  # of the tensors of our domain's operators


def work_type(value: ir.Value) -> ir.DataType:
    """The type to sum and count in: float32 for the half types, which lose small terms, else the value's own."""
    own = element_type(value)
    return ir.DataType.FLOAT if own in HALF_TYPES else own


def cast(op: Builder, value: ir.Value, source: ir.DataType, target: ir.DataType) -> ir.Value:
    """The value, of element type `source`, as `target`; no node when that is its type already."""
    return value if source == target else op.Cast(value, to=target.value)


def widen(op: Builder, value: ir.Value, like: ir.Value) -> ir.Value:
    """The value, which has the type of `like`, in the type to sum in."""
    return cast(op, value, element_type(like), work_type(like))


def narrow(op: Builder, value: ir.Value, like: ir.Value) -> ir.Value:
    """Back from the type to sum in to the type of `like`."""
    return cast(op, value, work_type(like), element_type(like))


def length(op: Builder, value: ir.Value, axis: int) -> ir.Value:
    """The length of one axis (negative counts from the end), a 1-D int64 tensor of one entry."""
    known = dims(value)
    n = None if known is None else known[axis]
    if isinstance(n, int):
        return op.ints([n])
    return op.Shape(value, start=axis, end=None if axis == -1 else axis + 1)


def lengths_from(op: Builder, value: ir.Value, start: int) -> ir.Value:
    """The lengths of the axes from `start` on, a 1-D int64 tensor."""
    known = dims(value)
    if known is not None and all(isinstance(n, int) for n in known[start:]):
        return op.ints([n for n in known[start:] if isinstance(n, int)])
    return op.Shape(value, start=start)


def size(op: Builder, value: ir.Value) -> ir.Value:
    """The number of elements, a 1-D int64 tensor of one entry."""
    known = dims(value)
    if known is not None and all(isinstance(n, int) for n in known):
        return op.ints([prod(n for n in known if isinstance(n, int))])
    return op.Reshape(op.Size(value), op.ints([1]))


def size_ratio(op: Builder, part: ir.Value, whole: ir.Value) -> ir.Value:
    """The number of elements of `part` over that of `whole`, 0-D, in the type to sum in."""
    wide = work_type(whole)
    counts = [dims(part), dims(whole)]
    if all(shape is not None and all(isinstance(n, int) for n in shape) for shape in counts):
        few, many = (prod(n for n in shape or () if isinstance(n, int)) for shape in counts)
        return op.constant(np.array(few / max(many, 1)).astype(wide.numpy()))
    return op.Div(op.Cast(op.Size(part), to=wide.value), op.Cast(op.Size(whole), to=wide.value))


def positions(op: Builder, value: ir.Value) -> ir.Value:
    """An int64 tensor of the shape of `value` whose entries are their own row-major positions.

    An operator that only moves or copies elements, run on this, tells where each element of its output came from.
    """
    zero, one = op.constant(np.array(0)), op.constant(np.array(1))
    return op.Reshape(op.Range(zero, op.Size(value), one), op.shape(value), allowzero=1)


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
    return op.emit("Pad", [x, pads] if value is None else [x, pads, value], {"mode": mode})[0]


def _pads_of_all_axes(op: Builder, x: ir.Value, pads: ir.Value, axes: ir.Value) -> ir.Value:
    known = dims(x)
    numbers, along = constant_value(pads), constant_value(axes)
    if known is not None and numbers is not None and along is not None:
        rank = len(known)
        full = np.zeros((2, rank), np.int64)
        full[:, along] = numbers.reshape(2, -1)
        return op.ints(full.ravel().tolist())
    rank = op.Shape(op.Shape(x)) if known is None else op.ints([len(known)])
    axes = op.Mod(op.Cast(axes, to=ir.DataType.INT64.value), rank)  # counted from the front
    none = op.ConstantOfShape(op.Mul(rank, op.ints([2])), value=ir.tensor(np.zeros(1, np.int64)))
    return op.ScatterElements(none, op.Concat(axes, op.Add(axes, rank), axis=0), pads)


def scatter_add(
    op: Builder, shape: ir.Value, indices: ir.Value, g: ir.Value, *, like: ir.Value, axis: int = 0
) -> ir.Value:
    """Zeros of a given shape, with g (typed as `like`) added at `indices` along `axis`, as ScatterElements has it.

    Not ScatterND, which in onnxruntime adds to a repeated index from several threads at once and loses terms; and not
    in a half type, which onnxruntime's ScatterElements cannot add.
    """
    zeros = op.ConstantOfShape(shape, value=ir.tensor(np.zeros(1, work_type(like).numpy())))
    return narrow(op, op.ScatterElements(zeros, indices, widen(op, g, like), axis=axis, reduction="add"), like)


def put_back(op: Builder, x: ir.Value, origins: ir.Value, g: ir.Value) -> ir.Value:
    """The gradient of a copy out of x: each element of g added at its origin, a row-major position in x."""
    flat = op.ints([-1])
    summed = scatter_add(op, size(op, x), op.Reshape(origins, flat), op.Reshape(g, flat), like=x)
    return op.Reshape(summed, op.shape(x), allowzero=1)
