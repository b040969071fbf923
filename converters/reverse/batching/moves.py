"""Shapes, and operators that put elements elsewhere."""

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.batching.elementwise import aligned
from onnx_backprop.converters.reverse.batching.folding import fold, is_quantised, moved, unfold
from onnx_backprop.converters.reverse.batching.registry import (
    Answer,
    Rows,
    Shared,
    batching,
    in_shape,
    product,
    shift,
    shifted,
)
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import known_lengths


@batching("Shape")
def shape(op: Builder, node: Rows) -> Answer:
    """All rows have one shape, which is that of the whole behind its axis 0."""
    start, end = node.int("start", 0), node.int("end", 2**31) if node.given("end") else None
    rank = node.static_rank(0)
    if start < 0 or (end is not None and end < 0):
        if rank is None:
            return None
        start = max(start + rank, 0) if start < 0 else start
        end = max(end + rank, 0) if end is not None and end < 0 else end
    return Shared(op.Shape(node.value(0), start=start + 1, end=None if end is None else end + 1))


@batching("Size")
def size(op: Builder, node: Rows) -> Answer:
    return Shared(op.ReduceProd(op.Shape(node.value(0), start=1), keepdims=0))


@batching("Transpose")
def transpose(op: Builder, node: Rows) -> Answer:
    rank = node.static_rank(0)
    if not node.given("perm") and rank is None:
        return None
    perm = node.ints("perm", range(rank or 0)[::-1])
    return node.again(node.values(), perm=[0, *(1 + axis for axis in perm)])


@batching("Reshape")
def reshape(op: Builder, node: Rows) -> Answer:
    """The length 0 in front keeps the rows, and others keep the axis at their place, as they did."""
    if not node.only(0):
        return None
    shape, known = node.input(1), known_lengths(node.output())
    constant = node.constant(1)
    if known is not None and 0 not in known:
        return op.Reshape(node.value(0), op.ints([0, *known]))
    if constant is None and node.int("allowzero", 0):
        return op.Reshape(node.value(0), op.joined(node.length, shape), allowzero=1)
    if node.int("allowzero", 0) and constant is not None and 0 in constant:
        return op.Reshape(node.value(0), op.joined(node.length, shape), allowzero=1)
    return op.Reshape(node.value(0), op.joined(op.ints([0]), shape))


@batching("Flatten")
def flatten(op: Builder, node: Rows) -> Answer:
    axis, rank = node.int("axis", 1), node.static_rank(0)
    if axis < 0:
        if rank is None:
            return None
        axis += rank
    value = node.rows(0)
    if axis == 1 and (value in node.folded or is_quantised(value)):
        return unfold(op, node, op.Flatten(fold(op, node, 0)), node.output(), node.lengths(0, 0, 1))
    sizes = (product(op, node.lengths(0, *part)) for part in ((0, axis), (axis, None)))
    return in_shape(op, value, node.length, *sizes)


@batching("Squeeze")
def squeeze(op: Builder, node: Rows) -> Answer:
    """Without axes, and in onnxruntime with none in the list, every axis of length 1 goes."""
    if not node.only(0):
        return None
    count = known_lengths(node.input(1)) if node.has(1) else [0]
    if count is not None and count != [0]:
        return node.again([node.value(0), shifted(op, node.input(1))])
    lengths = known_lengths(node.input(0))
    if lengths is None or count is None:
        return None
    axes = [n + 1 for n, length in enumerate(lengths) if length == 1]
    return op.Squeeze(node.value(0), op.ints(axes)) if axes else node.value(0)


@batching("Unsqueeze")
def unsqueeze(op: Builder, node: Rows) -> Answer:
    """Axes count in the result, of which a row's are those behind axis 0."""
    return node.again([node.value(0), shifted(op, node.input(1))]) if node.only(0) else None


@batching("Expand")
def expand(op: Builder, node: Rows) -> Answer:
    """Both shapes are aligned at the end, so the rows keep their axis once a row has the rank of the result."""
    rank, count = node.static_rank(0), known_lengths(node.input(1))
    if not node.only(0) or rank is None or count is None:
        return None
    return node.again([aligned(op, node, 0, max(rank, *count)), node.value(1)])


@batching("Tile")
def tile(op: Builder, node: Rows) -> Answer:
    return node.again([node.value(0), op.joined(op.ints([1]), node.input(1))]) if node.only(0) else None


@batching("Pad")
def pad(op: Builder, node: Rows) -> Answer:
    """No pads for the rows.

    All axes are written out: onnxruntime moves a Transpose past a Pad that names some, and takes its pads for others'.
    """
    rank, pads, axes = node.static_rank(0), node.input(1), node.constant(3)
    if not node.only(0) or rank is None:
        return None
    given = node.constant(1)
    if node.has(3) and (axes is None or given is None):
        places = op.Cast(node.input(3), to=ir.DataType.INT64)
        places = op.Add(op.Where(op.Less(places, 0), op.Add(places, rank), places), 1)
        pairs = op.Reshape(pads, [2, -1])
        zeros = op.constant(np.zeros((2, rank + 1), np.int64))
        pairs = op.ScatterElements(zeros, op.Expand(places, op.Shape(pairs)), pairs, axis=1)
        return node.again([node.value(0), op.Reshape(pairs, [-1]), node.value(2)])
    if given is None:
        none, parts = op.ints([0]), [op.Slice(pads, [n], [n + rank]) for n in (0, rank)]
        return node.again([node.value(0), op.joined(none, parts[0], none, parts[1]), node.value(2)])
    axes = np.arange(rank) if axes is None else axes
    whole = np.zeros((2, rank + 1), np.int64)
    whole[:, axes % rank + 1] = given.reshape(2, -1)
    return node.again([node.value(0), op.ints(whole.ravel().tolist()), node.value(2)])


@batching("Slice")
def slice_(op: Builder, node: Rows) -> Answer:
    if not node.only(0):
        return None
    starts = node.input(1)
    if node.has(3):
        axes = shifted(op, node.input(3))
    else:
        count = known_lengths(starts)
        if count is None:
            return None
        dtype = np.int64 if starts.dtype is None else starts.dtype.numpy()
        axes = op.constant(np.arange(1, 1 + count[0], dtype=dtype))
    return node.again([node.value(0), starts, node.input(2), axes, *node.values()[4:]])


@batching("Gather")
def gather(op: Builder, node: Rows) -> Answer:
    """y_n = x_n[…, i_n, …]."""
    rank, width = node.static_rank(0), node.static_rank(1)
    axis = node.int("axis", 0)
    if node.only(0):
        return node.again(node.values(), axis=shift(axis)) if axis >= 0 or rank is not None else None
    if rank is None or width is None:
        return None
    axis = axis + rank if axis < 0 else axis
    if node.only(1):
        return moved(op, node.again(node.values())[0], rank + width, axis, 0)
    data = moved(op, node.rows(0), rank + 1, axis + 1, 1)
    indices = op.Unsqueeze(node.value(1), [width + 1])
    gathered = op.GatherND(data, _int64(op, indices, node), batch_dims=1)  # (n, *indices, other axes)
    total = 1 + width + rank - 1
    perm = [0, *range(1 + width, 1 + width + axis), *range(1, 1 + width), *range(1 + width + axis, total)]
    return gathered if perm == list(range(total)) else op.Transpose(gathered, perm=perm)


def _int64(op: Builder, indices: ir.Value, node: Rows) -> ir.Value:
    return indices if node.input(1).dtype == ir.DataType.INT64 else op.Cast(indices, to=ir.DataType.INT64)


@batching("GatherElements")
def gather_elements(op: Builder, node: Rows) -> Answer:
    return node.again([node.rows(0), node.rows(1)], axis=shift(node.int("axis", 0)))


@batching("ScatterElements")
def scatter_elements(op: Builder, node: Rows) -> Answer:
    return node.again([node.rows(n) for n in range(3)], axis=shift(node.int("axis", 0)))


@batching("GatherND")
def gather_nd(op: Builder, node: Rows) -> Answer:
    before = node.int("batch_dims", 0)
    if not node.is_batched(0) and not before:
        return node.again(node.values())
    return node.again([node.rows(0), node.rows(1)], batch_dims=before + 1)


@batching("ScatterND")
def scatter_nd(op: Builder, node: Rows) -> Answer:
    """Indices begin with the number of their row."""
    rank = node.static_rank(1)
    if rank is None:
        return None
    numbers = op.Range(0, op.Squeeze(node.length, [0]), 1)
    indices = node.rows(1)
    front = op.joined(op.Shape(indices, end=rank), op.ints([1]))
    numbers = op.Expand(op.Reshape(numbers, op.ints([-1, *[1] * rank])), front)
    return node.again([node.rows(0), op.Concat(numbers, indices, axis=-1), node.rows(2)])
