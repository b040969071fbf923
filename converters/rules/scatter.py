"""Gradients of operators that address elements by tensors of indices: scatter, gather by tuples, unpooling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder, dims
from onnx_backprop.converters.reverse.forward import Forward
from onnx_backprop.converters.reverse.registry import Grads, gradient
from onnx_backprop.converters.rules.common import length, narrow, positions, scatter_add, size, widen, work_type
from onnx_backprop.converters.rules.merged_shapes import leading_lengths, merged_length

REDUCTIONS = ("none", "add", "mul", "max", "min")
TO_THE_END = 2**63 - 1


@gradient("ScatterElements", versions=(18,))
def scatter_elements(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = data, u put in at the indices along an axis  =>  ddata = dy where nothing was put, else 0; du = dy there.

    With a reduction: add, ddata = dy and du = dy at the indices; mul, each gets dy times the other factors; max and
    min, dy in equal shares for all that equal Y. Edge: of several u for one place the last counts, as in onnxruntime
    (the standard forbids them without a reduction); the others get 0.
    """
    data, indices, updates = node.input(0), node.input(1), node.input(2)
    axis, reduction = node.int("axis", 0), _reduction(node)
    if reduction == "add":
        return dy, None, op.GatherElements(dy, indices, axis=axis) if node.wants(2) else None
    if reduction != "none":
        ddata, dupdates = _Scatter(op, data, indices, updates, axis).reduced(node.output(), dy, reduction)
        return narrow(op, ddata, data), None, narrow(op, dupdates, data)
    taken, zero = op.GatherElements(dy, indices, axis=axis), op.scalar(0.0, data)
    if _distinct(node, axis):
        placed = (
            op.ScatterElements(dy, indices, op.zeros(op.shape(indices), data), axis=axis) if node.wants(0) else None
        )
        return placed, None, taken
    last, own = _last_writers(op, op.shape(data), indices, axis)
    wins = op.Equal(op.GatherElements(last, indices, axis=axis), own)
    untouched = op.Less(last, op.constant(np.array(0)))
    return op.Where(untouched, dy, zero), None, op.Where(wins, taken, zero)


@gradient("ScatterND", versions=(18,))
def scatter_nd(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = data, the slices u put in at tuples of indices  =>  ddata = dy where nothing was put, else 0; du = dy there.

    Reductions and repeated tuples are as those of ScatterElements: data is seen as the matrix (tuples, elements of a
    slice). onnxruntime puts the slices in from several threads, so of repeated tuples any may be the last.
    """
    data, indices, updates = node.input(0), node.input(1), node.input(2)
    reduction = _reduction(node)
    if reduction == "add":
        return dy, None, op.GatherND(dy, indices) if node.wants(2) else None
    rows = _Rows.of(op, data, indices)
    g = rows.matrix(op, dy)
    if reduction == "none":
        last, own = _last_writers(op, rows.count, rows.numbers, 0)
        wins = op.Equal(op.Gather(last, rows.numbers), own)
        untouched = op.Less(last, op.constant(np.array(0)))
        zero, column = op.scalar(0.0, data), op.ints([1])
        ddata = op.Where(op.Unsqueeze(untouched, column), g, zero)
        dupdates = op.Where(op.Unsqueeze(wins, column), op.Gather(g, rows.numbers, axis=0), zero)
    else:
        scatter = _Scatter(op, rows.matrix(op, data), rows.expanded(op), rows.picked(op, updates), 0, like=data)
        y = rows.matrix(op, node.output())
        ddata, dupdates = (narrow(op, part, data) for part in scatter.reduced(y, g, reduction))
    return op.Reshape(ddata, op.shape(data), allowzero=1), None, op.Reshape(dupdates, op.shape(updates), allowzero=1)


@gradient("GatherND", versions=(13,))
def gather_nd(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = the slices of x at tuples of indices  =>  dx = zeros with dy added there; repeated ones add up.

    x is seen as the matrix (tuples, elements of a slice), the batch axes being part of a tuple.
    """
    x = node.input(0)
    rows = _Rows.of(op, x, node.input(1), batch=node.int("batch_dims", 0))
    shape = op.Concat(rows.count, rows.width, axis=0)
    dx = scatter_add(op, shape, rows.expanded(op), rows.picked(op, dy), like=x)
    return op.Reshape(dx, op.shape(x), allowzero=1), None


@gradient("MaxUnpool", versions=(11, 22))
def max_unpool(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = zeros with x put in at the indices, row-major positions in Y  =>  dx = dy at the indices.

    Edge: of several x for one place the last counts, as in onnxruntime; the others get 0. With output_shape the
    positions are those in an output of that shape, as in onnxruntime.
    """
    x, indices = node.input(0), op.Reshape(node.input(1), op.ints([-1]))
    last, own = _last_writers(op, size(op, node.output()), indices, 0)
    wins = op.Equal(op.Gather(last, indices), own)
    taken = op.Gather(op.Reshape(dy, op.ints([-1])), indices)
    dx = op.Reshape(op.Where(wins, taken, op.scalar(0.0, x)), op.shape(x), allowzero=1)
    return (dx, None, None)[: len(node.inputs)]


def _reduction(node: Forward) -> str:
    reduction = node.string("reduction", "none")
    if reduction not in REDUCTIONS:
        raise node.refuse("reduction", reduction, ", ".join(REDUCTIONS))
    return reduction


def _distinct(node: Forward, axis: int) -> bool:
    """Whether no two indices name the same place, as far as that can be told at conversion."""
    indices, known = node.constant(1), dims(node.input(0))
    if indices is None or indices.size == 0:
        return indices is not None
    n = None if known is None else known[axis]
    if isinstance(n, int):
        indices = np.where(indices < 0, indices + n, indices)
    elif (indices < 0).any() and (indices >= 0).any():
        return False
    return bool((np.diff(np.sort(indices, axis=axis), axis=axis) != 0).all())


def _last_writers(op: Builder, shape: ir.Value, indices: ir.Value, axis: int) -> tuple[ir.Value, ir.Value]:
    """For each place the number of the update that was put there last, -1 for none; and the updates' own numbers."""
    own = positions(op, indices)
    nobody = op.ConstantOfShape(shape, value=ir.tensor(np.array([-1], np.int64)))
    return op.ScatterElements(nobody, indices, own, axis=axis), own


@dataclass(frozen=True)
class _Rows:
    """A value seen as a matrix of `count` rows and `width` columns, and the `numbers` of the rows that tuples name."""

    count: ir.Value
    width: ir.Value
    numbers: ir.Value

    @classmethod
    def of(cls, op: Builder, value: ir.Value, indices: ir.Value, batch: int = 0) -> _Rows:
        """The rows are the leading axes: `batch` of them, and as many as a tuple of indices, its last axis, has."""
        known = dims(indices)
        depth = None if known is None else known[-1]
        if isinstance(depth, int):
            lengths, width = leading_lengths(op, value, batch + depth), merged_length(op, value, batch + depth)
        else:
            shape, end = op.shape(value), op.Add(length(op, indices, -1), op.ints([batch]))
            lengths = op.Slice(shape, op.ints([0]), end)
            width = op.ReduceProd(op.Slice(shape, end, op.ints([TO_THE_END])), keepdims=1)
        count = op.ReduceProd(lengths, keepdims=1)
        zero, one = op.constant(np.array(0)), op.constant(np.array(1))
        numbered = op.Reshape(op.Range(zero, op.Squeeze(count, op.ints([0])), one), lengths, allowzero=1)
        numbers = op.Reshape(op.GatherND(numbered, indices, batch_dims=batch or None), op.ints([-1]))
        return cls(count, width, numbers)

    def matrix(self, op: Builder, value: ir.Value) -> ir.Value:
        """A value of the shape of the whole, as (rows, width)."""
        return op.Reshape(value, op.Concat(self.count, self.width, axis=0), allowzero=1)

    def picked(self, op: Builder, value: ir.Value) -> ir.Value:
        """A value of one slice per tuple, as (tuples, width)."""
        return op.Reshape(value, self._picked_shape(op), allowzero=1)

    def expanded(self, op: Builder) -> ir.Value:
        """The row numbers as indices for ScatterElements along axis 0: (tuples, width)."""
        return op.Expand(op.Unsqueeze(self.numbers, op.ints([1])), self._picked_shape(op))

    def _picked_shape(self, op: Builder) -> ir.Value:
        return op.Concat(op.Shape(self.numbers), self.width, axis=0)


class _Scatter:
    """Y = data, reduced with u at the indices along an axis, all in the type to sum in."""

    def __init__(
        self,
        op: Builder,
        data: ir.Value,
        indices: ir.Value,
        updates: ir.Value,
        axis: int,
        like: ir.Value | None = None,
    ) -> None:
        """`like`: a value of the element type of data and updates, where theirs is not noted."""
        self._op, self._axis, self._indices = op, axis, indices
        self._like = like or data
        self._data, self._updates = widen(op, data, self._like), widen(op, updates, self._like)
        wide = work_type(self._like)
        self._zero, self._one = (op.constant(np.array(number).astype(wide.numpy())) for number in (0, 1))

    def reduced(self, y: ir.Value, dy: ir.Value, reduction: str) -> tuple[ir.Value, ir.Value]:
        """(ddata, du) for the reductions mul, max and min."""
        op = self._op
        dy = widen(op, dy, self._like)
        return self._product(dy) if reduction == "mul" else self._extremum(widen(op, y, self._like), dy)

    def _product(self, dy: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The product of the others is that of all that are not 0, over the own one; 0 where another is 0."""
        op = self._op
        is_zero = op.Equal(self._updates, self._zero)
        zeros = op.Where(is_zero, self._one, self._zero)
        factors = op.Where(is_zero, self._one, self._updates)
        product = self._onto(self._one, factors, "mul")
        count = self._onto(self._zero, zeros, "add")
        ddata = op.Mul(dy, op.Where(op.Equal(count, self._zero), product, self._zero))
        other_zeros = op.Sub(self._at(count), zeros)
        others = op.Where(op.Equal(other_zeros, self._zero), op.Div(self._at(product), factors), self._zero)
        return ddata, op.Mul(self._at(op.Mul(dy, self._data)), others)

    def _extremum(self, y: ir.Value, dy: ir.Value) -> tuple[ir.Value, ir.Value]:
        op = self._op
        hit_data, hit_updates = op.Equal(self._data, y), op.Equal(self._updates, self._at(y))
        counts = op.Where(hit_data, self._one, self._zero)
        count = op.ScatterElements(
            counts, self._indices, op.Where(hit_updates, self._one, self._zero), axis=self._axis, reduction="add"
        )
        share = op.Div(dy, count)
        return op.Where(hit_data, share, self._zero), op.Where(hit_updates, self._at(share), self._zero)

    def _at(self, value: ir.Value) -> ir.Value:
        return self._op.GatherElements(value, self._indices, axis=self._axis)

    def _onto(self, start: ir.Value, values: ir.Value, reduction: str) -> ir.Value:
        op = self._op
        filled = op.Expand(start, op.Shape(self._data))
        return op.ScatterElements(filled, self._indices, values, axis=self._axis, reduction=reduction)
