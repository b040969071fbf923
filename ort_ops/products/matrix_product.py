"""The native operator `MatrixProduct`: y = a·b in float32, in registers of whole matrices. Compiled.

a is (…, M, K), or (K, M) where `transA`, b (K, N), or (N, K) where `transB`; y is (…, M, N), all that comes before K
being rows. An item is some rows and some columns of y: a block of b is split into parts (`vector.matrix_tiles`), stays
in the second-level cache, and meets 32 rows of a after the other; where a is turned, which takes longer to split, a
block of a stays there. Sums of DEEPEST steps are added up, so that rounding
grows with the root of these. How y is cut into items makes no difference to its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.core.errors import ShapeError
from onnx_backprop.opset.core.op import Arg, Attribute, Attributes, Float64Array, Input, Op, Output
from onnx_backprop.opset.core.shapes import Dims
from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import F32
from onnx_backprop.ort_ops.compiler.machine import processors
from onnx_backprop.ort_ops.compiler.records import Record
from onnx_backprop.ort_ops.runtime.bridge import NativeKernel, Request
from onnx_backprop.ort_ops.runtime.stages import Plan, stage
from onnx_backprop.ort_ops.runtime.workspace import workspace
from onnx_backprop.ort_ops.vector.matrix_tiles import (
    CONFIGURATION,
    DEPTH,
    GROUP,
    SIDE,
    SUMS,
    add_sums,
    leave_tiles,
    multiply_groups,
    split_pairs,
    split_rows,
    take_tiles,
)
from onnx_backprop.ort_ops.vector.registers import transpose_tile

NAME = "MatrixProduct"
DEEPEST = 576  # steps of k at a time
_KEPT, _PASSED = 384, 512  # columns of an item, whose parts take two thirds of a second-level cache, and rows
_MANY = 4  # items of a thread, of which it does not matter whether the last ones end together
_TILE, _PARTS = 1024, 3


@dataclass(frozen=True, kw_only=True)
class Offsets(Record):
    """Of a thread's scratch."""

    kept: int = 0
    passing: int = 0
    sums: int = 0
    configuration: int = 0


@dataclass(frozen=True, kw_only=True)
class Product(Record):
    """The numbers of a plan; at_once, wide, deep: rows, columns and steps of k of an item."""

    rows: int
    columns: int
    k: int
    turned_left: bool
    turned_right: bool
    at_once: int
    wide: int
    deep: int
    pieces: int  # that the columns are cut into
    own: Offsets


@inner
def _turn(target):
    for part in range(_PARTS):
        tile = target + 2 * _TILE * part
        transpose_tile(tile, 64, tile, 64)


@inner
def _split_left(call, p, target, row, k, steps):
    """SIDE rows of a, from one of k on."""
    for n in range(0, steps, DEPTH):
        count = min(DEPTH, steps - n)
        for half in range(2):
            tile, first = target + n // DEPTH * GROUP + _TILE * half, row + 16 * half
            near = min(first, p.rows - 1)
            if p.turned_left:
                split_pairs(tile, call.inputs[0] + 4 * ((k + n) * p.rows + near), 4 * p.rows, count, p.rows - first)
                _turn(tile)
            else:
                split_rows(tile, call.inputs[0] + 4 * (near * p.k + k + n), 4 * p.k, p.rows - first, count)


@inner
def _split_right(call, p, target, column, k, steps):
    """SIDE columns of b, from one of k on."""
    for n in range(0, steps, DEPTH):
        count = min(DEPTH, steps - n)
        for half in range(2):
            tile, first = target + n // DEPTH * GROUP + _TILE * half, column + 16 * half
            near, left = min(first, p.columns - 1), p.columns - first
            if p.turned_right:
                split_rows(tile, call.inputs[1] + 4 * (near * p.k + k + n), 4 * p.k, left, count)
                _turn(tile)
            else:
                split_pairs(tile, call.inputs[1] + 4 * ((k + n) * p.columns + near), 4 * p.columns, count, left)


@inner
def _multiply(call, p, row, column, k, left, right, scratch):
    """One block of y, of which sums of the steps before `k` are there."""
    sums, to = scratch + p.own.sums, call.output + 4 * (row * p.columns + column)
    multiply_groups(sums, left, right, (min(p.deep, p.k - k) + DEPTH - 1) // DEPTH)
    add_sums(to, 4 * p.columns, sums, min(SIDE, p.rows - row), min(SIDE, p.columns - column), k)


@inner
def _product(call, p, n, scratch):
    first, begin = n // p.pieces * p.at_once, n % p.pieces * p.wide
    last, end = min(first + p.at_once, p.rows), min(begin + p.wide, p.columns)
    kept, passing = scratch + p.own.kept, scratch + p.own.passing
    take_tiles(scratch + p.own.configuration)
    for k in range(0, p.k, p.deep):
        steps = min(p.deep, p.k - k)
        strip = (steps + DEPTH - 1) // DEPTH * GROUP // SIDE
        if p.turned_left:
            for row in range(first, last, SIDE):
                _split_left(call, p, kept + (row - first) * strip, row, k, steps)
            for column in range(begin, end, SIDE):
                _split_right(call, p, passing, column, k, steps)
                for row in range(first, last, SIDE):
                    _multiply(call, p, row, column, k, kept + (row - first) * strip, passing, scratch)
        else:
            for column in range(begin, end, SIDE):
                _split_right(call, p, kept + (column - begin) * strip, column, k, steps)
            for row in range(first, last, SIDE):
                _split_left(call, p, passing, row, k, steps)
                for column in range(begin, end, SIDE):
                    _multiply(call, p, row, column, k, passing, kept + (column - begin) * strip, scratch)
    leave_tiles()


_PRODUCT = stage("matrix_product", Product, _product)


def _cut(length: int, most: int, step: int) -> tuple[int, int]:
    """(How long pieces are, how many there are) of about the same length, whole steps."""
    pieces = -(-length // most)
    piece = -(-length // (pieces * step)) * step
    return piece, -(-length // piece)


def _plan(request: Request) -> Plan:
    a, attributes = request.inputs[0], request.attributes
    assert a is not None
    columns, k = request.output[-1], a[-2] if attributes["transA"] else a[-1]
    rows = math.prod(request.output[:-1])
    threads, turned = processors(), bool(attributes["transA"])
    wide, pieces = _cut(columns, _PASSED if turned else _KEPT, SIDE)
    at_once, row_pieces = _cut(rows, _KEPT if turned else _PASSED, SIDE)
    while at_once > SIDE and pieces * row_pieces < _MANY * threads and pieces * row_pieces % threads:
        at_once, row_pieces = _cut(rows, at_once - SIDE, SIDE)
    deep, _ = _cut(k, DEEPEST, DEPTH)
    strip = deep // DEPTH * GROUP
    own, scratch = workspace(
        Offsets,
        kept=strip * (at_once if turned else wide) // SIDE,
        passing=strip,
        sums=SUMS,
        configuration=CONFIGURATION,
    )
    parameters = Product(
        rows=rows, columns=columns, k=k, turned_left=turned,
        turned_right=bool(attributes["transB"]), at_once=at_once, wide=wide, deep=deep, pieces=pieces, own=own,
    )  # fmt: skip
    return Plan(parameters, ((_PRODUCT, pieces * row_pieces),), per_thread=scratch)


def _shape(attributes: Attributes, args: Sequence[Arg | None]) -> Dims | None:
    attributes.require_flags("transA", "transB")
    a, b = (arg and arg.dims for arg in args)
    if a is None or b is None:
        return None
    if len(b) != 2 or len(a) < 2 or (attributes["transA"] and len(a) != 2):
        raise ShapeError(f"expected a of rank 2 or more, 2 with transA, and b of rank 2, got {a} and {b}", op_type=NAME)
    rows, k = (a[1:], a[0]) if attributes["transA"] else (a[:-1], a[-1])
    depth, columns = b[::-1] if attributes["transB"] else b
    if k != depth or k == 0:
        raise ShapeError(f"expected one length of 1 or more to sum over, got {k} and {depth}", op_type=NAME)
    return (*rows, columns)


def _reference(attributes: Attributes, _out: tuple[int, ...], a: Float64Array, b: Float64Array) -> Float64Array:
    return (a.T if attributes["transA"] else a) @ (b.T if attributes["transB"] else b)


def _body(b: Body, attributes: Attributes, left: Tensor, right: Tensor) -> str:
    turned = attributes["transA"], attributes["transB"]
    names = (b.Transpose(x, perm=[1, 0]) if turn else x for x, turn in zip((left, right), turned, strict=True))
    return b.MatMul(*names)


OP = Op(
    name=NAME,
    doc=__doc__,
    source="MatMul and Gemm of ONNX",
    attributes=(
        Attribute("transA", "int", "1 if a is turned.", default=0),
        Attribute("transB", "int", "1 if b is turned.", default=0),
    ),
    inputs=(Input("a", "T1", "The left matrix."), Input("b", "T1", "The right matrix.")),
    outputs=(Output("y", "The product."),),
    shape=_shape,
    reference=_reference,
    body=_body,
)

KERNEL = NativeKernel(OP, _plan, (F32,))
