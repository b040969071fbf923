"""Gradients of operators that address elements by tensors of indices: scatter, gather by tuples, unpooling."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.known import dims, element_type
from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads, gradient
from onnx_backprop.converters.rules.common import as_shaped, cast, count_up, narrow, positions, scatter_add, size, widen
from onnx_backprop.converters.rules.factors import product_and_others
from onnx_backprop.converters.rules.merged_shapes import merged_length

TO_THE_END = 2**63 - 1


@gradient("ScatterElements", versions=(18,))
def scatter_elements(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = data, u put in at the indices along an axis  =>  ddata = dy where nothing was put, else 0; du = dy there.

    With a reduction: add, ddata = dy and du = dy at the indices; mul, each gets dy times the other factors; max and
    min, dy in equal shares for all that equal Y. Edge: of several u for one place the last counts, as in onnxruntime
    (the standard forbids them without a reduction); the others get 0.
    """
    data, indices, updates = node.input(0), node.input(1), node.input(2)
    axis, reduction = node.axis(0), _reduction(node)
    if reduction == "add":
        return dy, None, op.GatherElements(dy, indices, axis=axis)
    if reduction != "none":
        ddata, dupdates = _Scatter(op, data, indices, updates, axis).reduced(node.output(), dy, reduction)
        return narrow(op, ddata, data), None, narrow(op, dupdates, data)
    taken = op.GatherElements(dy, indices, axis=axis)
    if _distinct(node, axis):
        return op.ScatterElements(dy, indices, op.zeros(op.shape(indices), data), axis=axis), None, taken
    last, update_numbers = _last_writers(op, op.shape(data), indices, axis)
    wins = op.Equal(op.GatherElements(last, indices, axis=axis), update_numbers)
    return op.Where(op.Less(last, 0), dy, 0), None, op.Where(wins, taken, 0)


@gradient("ScatterND", versions=(18,))
def scatter_nd(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = data, the slices u put in at tuples of indices  =>  ddata = dy where nothing was put, else 0; du = dy there.

    Reductions and repeated tuples are as those of ScatterElements: data is seen as the matrix (tuples, elements of a
    slice). onnxruntime puts the slices in from several threads, so of repeated tuples any may be the last.
    """
    data, indices, updates = node.input(0), node.input(1), node.input(2)
    reduction = _reduction(node)
    if reduction == "add":
        return dy, None, op.GatherND(dy, indices)
    rows = _Rows.from_indices(op, data, indices)
    g = rows.matrix(op, dy)
    if reduction == "none":
        last, update_numbers = _last_writers(op, rows.count, rows.numbers, 0)
        wins, untouched = op.Equal(op.Gather(last, rows.numbers), update_numbers), op.Less(last, 0)
        ddata = op.Where(op.Unsqueeze(untouched, [1]), g, 0)
        dupdates = op.Where(op.Unsqueeze(wins, [1]), op.Gather(g, rows.numbers, axis=0), 0)
    else:
        scatter = _Scatter(op, rows.matrix(op, data), rows.expanded(op), rows.picked(op, updates), 0)
        y = rows.matrix(op, node.output())
        ddata, dupdates = (narrow(op, part, data) for part in scatter.reduced(y, g, reduction))
    return as_shaped(op, ddata, data), None, as_shaped(op, dupdates, updates)


@gradient("GatherND", versions=(13,))
def gather_nd(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = the slices of x at tuples of indices  =>  dx = zeros with dy added there; repeated ones add up.

    x is seen as the matrix (tuples, elements of a slice), the batch axes being part of a tuple.
    """
    x = node.input(0)
    rows = _Rows.from_indices(op, x, node.input(1), batch=node.int("batch_dims", 0))
    shape = op.Concat(rows.count, rows.width, axis=0)
    dx = scatter_add(op, shape, rows.expanded(op), rows.picked(op, dy), like=x)
    return as_shaped(op, dx, x)


@gradient("MaxUnpool", versions=(11, 22))
def max_unpool(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = zeros with x put in at the indices, row-major positions in Y  =>  dx = dy at the indices.

    Edge: of several x for one place the last counts, as in onnxruntime; the others get 0. With output_shape the
    positions are those in an output of that shape, as in onnxruntime.
    """
    x, indices = node.input(0), op.Reshape(node.input(1), [-1])
    last, update_numbers = _last_writers(op, size(op, node.output()), indices, 0)
    wins = op.Equal(op.Gather(last, indices), update_numbers)
    taken = op.Gather(op.Reshape(dy, [-1]), indices)
    return as_shaped(op, op.Where(wins, taken, 0), x)


def _reduction(node: Forward) -> str:
    return node.choice("reduction", "none", ("none", "add", "mul", "max", "min"))


def _distinct(node: Forward, axis: int) -> bool:
    """Whether no two indices name the same place, as far as that can be told at conversion."""
    indices, static_shape = node.constant(1), dims(node.input(0))
    if indices is None or indices.size == 0:
        return indices is not None
    n = None if static_shape is None else static_shape[axis]
    if isinstance(n, int):
        indices = np.where(indices < 0, indices + n, indices)
    elif (indices < 0).any() and (indices >= 0).any():
        return False
    return bool((np.diff(np.sort(indices, axis=axis), axis=axis) != 0).all())


def _last_writers(op: Builder, shape: ir.Value, indices: ir.Value, axis: int) -> tuple[ir.Value, ir.Value]:
    """For each place the number of the update that was put there last, -1 for none; and the updates' own numbers."""
    update_numbers = positions(op, indices)
    unwritten = op.filled(shape, -1)
    return op.ScatterElements(unwritten, indices, update_numbers, axis=axis), update_numbers


@dataclass(frozen=True)
class _Rows:
    """A value seen as a matrix of `count` rows and `width` columns, and the `numbers` of the rows that tuples name."""

    count: ir.Value
    width: ir.Value
    numbers: ir.Value

    @classmethod
    def from_indices(cls, op: Builder, value: ir.Value, indices: ir.Value, batch: int = 0) -> "_Rows":
        """The rows are the leading axes: `batch` of them, and as many as a tuple of indices, its last axis, has."""
        static_shape = dims(indices)
        depth = None if static_shape is None else static_shape[-1]
        if isinstance(depth, int):
            lengths, width = op.lengths(value, 0, batch + depth), merged_length(op, value, batch + depth)
        else:
            shape, end = op.shape(value), op.Add(op.length(indices, -1), [batch])
            lengths = op.Slice(shape, [0], end)
            width = op.ReduceProd(op.Slice(shape, end, [TO_THE_END]), keepdims=1)
        count = op.ReduceProd(lengths, keepdims=1)
        numbered = op.Reshape(count_up(op, count), lengths, allowzero=1)
        numbers = op.Reshape(op.GatherND(numbered, indices, batch_dims=batch or None), [-1])
        return cls(count, width, numbers)

    def matrix(self, op: Builder, value: ir.Value) -> ir.Value:
        """A value of the shape of the whole, as (rows, width)."""
        return op.Reshape(value, op.Concat(self.count, self.width, axis=0), allowzero=1)

    def picked(self, op: Builder, value: ir.Value) -> ir.Value:
        """A value of one slice per tuple, as (tuples, width)."""
        return op.Reshape(value, self._picked_shape(op), allowzero=1)

    def expanded(self, op: Builder) -> ir.Value:
        """The row numbers as indices for ScatterElements along axis 0: (tuples, width)."""
        return op.Expand(op.Unsqueeze(self.numbers, [1]), self._picked_shape(op))

    def _picked_shape(self, op: Builder) -> ir.Value:
        return op.Concat(op.Shape(self.numbers), self.width, axis=0)


class _Scatter:
    """Y = data, reduced with u at the indices along an axis, all in the type to sum in."""

    def __init__(self, op: Builder, data: ir.Value, indices: ir.Value, updates: ir.Value, axis: int) -> None:
        self._op, self._axis, self._indices = op, axis, indices
        self._data, self._updates = widen(op, data), widen(op, updates)
        self._one, self._zero = op.scalar(1, self._data), op.scalar(0, self._data)

    def reduced(self, y: ir.Value, dy: ir.Value, reduction: str) -> tuple[ir.Value, ir.Value]:
        """Ddata and du, in the type to sum in, for the reductions mul, max and min."""
        dy = widen(self._op, dy)
        return self._product(dy) if reduction == "mul" else self._extremum(widen(self._op, y), dy)

    def _product(self, dy: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Each factor gets dy times the others, in float64: data Π u, an update data times the other updates."""
        op, double = self._op, ir.DataType.DOUBLE
        start = {
            "mul": op.number(1, double),
            "add": op.number(0, double),
            "min": op.number(2**63 - 1, ir.DataType.INT64),
        }
        parts = product_and_others(
            op, cast(op, self._updates, double), lambda how, value: self._onto(start[how], value, how), self._at
        )
        product, others = (cast(op, part, element_type(self._data)) for part in parts)
        return op.Mul(dy, product), op.Mul(self._at(op.Mul(dy, self._data)), others)

    def _extremum(self, y: ir.Value, dy: ir.Value) -> tuple[ir.Value, ir.Value]:
        op = self._op
        hits = op.Equal(self._data, y), op.Equal(self._updates, self._at(y))
        ones, of_updates = (op.Where(hit, self._one, self._zero) for hit in hits)
        count = op.ScatterElements(ones, self._indices, of_updates, axis=self._axis, reduction="add")
        share = op.Div(dy, count)
        return op.Where(hits[0], share, 0), op.Where(hits[1], self._at(share), 0)

    def _at(self, value: ir.Value) -> ir.Value:
        return self._op.GatherElements(value, self._indices, axis=self._axis)

    def _onto(self, start: ir.Value, values: ir.Value, reduction: str) -> ir.Value:
        op = self._op
        filled = op.Expand(start, op.Shape(self._data))
        return op.ScatterElements(filled, self._indices, values, axis=self._axis, reduction=reduction)
