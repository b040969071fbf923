"""Compositions of a few nodes that rules of several families emit."""

from __future__ import annotations

import onnx_ir as ir

from .builder import Builder, dims, element_type

HALF_TYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def work_type(value: ir.Value) -> ir.DataType:
    """The type to sum in: float32 for a half type, which would lose small terms and counts, else the value's own."""
    own = element_type(value)
    return ir.DataType.FLOAT if own in HALF_TYPES else own


def cast(op: Builder, value: ir.Value, source: ir.DataType, target: ir.DataType) -> ir.Value:
    """The value, of element type `source`, as `target`; no node when that is its type already."""
    return value if source == target else op.Cast(value, to=target.value)


def widen(op: Builder, value: ir.Value, like: ir.Value) -> ir.Value:
    """The value, of the type of `like`, in the type to sum in."""
    return cast(op, value, element_type(like), work_type(like))


def narrow(op: Builder, value: ir.Value, like: ir.Value) -> ir.Value:
    """Back from the type to sum in to the type of `like`."""
    return cast(op, value, work_type(like), element_type(like))


def length(op: Builder, value: ir.Value, axis: int) -> ir.Value:
    """The length of one axis (negative counts from the end) as a 1-D int64 tensor of one entry."""
    known = dims(value)
    if known is not None:
        n = known[axis]
        if isinstance(n, int):
            return op.ints([n])
    return op.Shape(value, start=axis, end=axis + 1 if axis != -1 else None)


def lengths_from(op: Builder, value: ir.Value, start: int) -> ir.Value:
    """The lengths of the axes from `start` on, 1-D int64."""
    known = dims(value)
    if known is not None and all(isinstance(n, int) for n in known[start:]):
        return op.ints([n for n in known[start:] if isinstance(n, int)])
    return op.Shape(value, start=start)


def positions(op: Builder, value: ir.Value) -> ir.Value:
    """A tensor of the shape of `value` whose entries are their own positions in row-major order, int64.

    An operator that only moves or copies elements, run on this, says where each element of its output came from.
    """
    flat = op.Range(op.constant_int(0), op.Size(value), op.constant_int(1))
    return op.Reshape(flat, op.shape(value), allowzero=1)


def scatter_add(op: Builder, shape: ir.Value, indices: ir.Value, g: ir.Value, *, like: ir.Value, axis: int) -> ir.Value:
    """Zeros of the given shape with g added at `indices` along `axis` (as ScatterElements has it), typed as `like`.

    ScatterElements, not ScatterND: onnxruntime's ScatterND adds repeated indices in parallel and loses some.
    It adds no half types, hence the detour by float32, which sums better anyway.
    """
    zeros = op.ConstantOfShape(shape, value=ir.tensor(work_type(like).numpy().type(0).reshape(1)))
    summed = op.ScatterElements(zeros, indices, widen(op, g, like), axis=axis, reduction="add")
    return narrow(op, summed, like)


def put_back(op: Builder, x: ir.Value, origins: ir.Value, g: ir.Value) -> ir.Value:
    """The gradient of a copy: every element of g added in x's shape at its origin, a position in row-major order."""
    flat, all_of_it = op.Size(x), op.ints([-1])
    shape = op.Reshape(flat, op.ints([1]))
    summed = scatter_add(op, shape, op.Reshape(origins, all_of_it), op.Reshape(g, all_of_it), like=x, axis=0)
    return op.Reshape(summed, op.shape(x), allowzero=1)
