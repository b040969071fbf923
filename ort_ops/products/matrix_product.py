"""The native operator `MatrixProduct`: y = a·b in float32, in registers of whole matrices. Compiled.

a is (…, M, K), or (K, M) where `transA`, b (K, N), or (N, K) where `transB`; y is (…, M, N), all that comes before K
being rows. An item is some rows and some columns of y. A block of b is split into parts (`vector.matrix_tiles`), stays
in the second-level cache, and meets 32 rows of a after the other. Where a is turned, which takes longer to split, or
has few rows, a block of a stays there and columns of b pass. What passes next is fetched meanwhile. Sums of DEEPEST
steps are added up, so that rounding grows with the root of these. How y is cut into items makes no difference to its
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.core.errors import ShapeError
from onnx_backprop.opset.core.op import Arg, Attribute, Attributes, Float64Array, Input, Op, Output
from onnx_backprop.opset.core.shapes import Dims
from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import F32, store_f32
from onnx_backprop.ort_ops.compiler.machine import processors
from onnx_backprop.ort_ops.compiler.records import Record
from onnx_backprop.ort_ops.runtime.bridge import NativeKernel, Request
from onnx_backprop.ort_ops.runtime.stages import Plan, stage
from onnx_backprop.ort_ops.runtime.workspace import workspace
from onnx_backprop.ort_ops.vector.matrix_tiles import (
    CONFIGURATION,
    DEPTH,
    FETCHED,
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
# lines of an item: of the operand that is kept, whose parts take two thirds of a second-level cache, and of the other
_KEPT, _PASSED = 384, 512
_PASSED_ONCE = 2048  # where all of the kept operand is one block, which is split once for each item
_LEAST = 128  # that items are cut into for threads
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
    turned_left: int
    turned_right: int
    keeps_left: bool
    at_once: int
    wide: int
    deep: int
    pieces: int  # that the columns are cut into
    own: Offsets


@inner
def _split(p, operand, target, line, k, steps):
    """SIDE rows of a, or columns of b, from one of k on."""
    source, across, turned, lines = operand
    for n in range(0, steps, DEPTH):
        count = min(DEPTH, steps - n)
        for half in range(2):
            tile, first = target + n // DEPTH * GROUP + _TILE * half, line + 16 * half
            near = min(first, lines - 1)
            if across:
                split_pairs(tile, source + 4 * ((k + n) * lines + near), 4 * lines, count, lines - first)
            else:
                split_rows(tile, source + 4 * (near * p.k + k + n), 4 * p.k, lines - first, count)
            if turned:
                for part in range(_PARTS):
                    transpose_tile(tile + 2 * _TILE * part, 64, tile + 2 * _TILE * part, 64)


@inner
def _ahead(p, operand, line, k, share, nothing):
    """A share of what `_split` reads next, for `multiply_groups` to fetch: (address, its step, that of groups)."""
    source, across, _, lines = operand
    if share >= SIDE or line >= lines:
        return nothing, 0, 0
    if across:
        return source + 4 * ((k + share) * lines + line), 4 * lines, 4 * lines * DEPTH
    return source + 4 * ((line + share) * p.k + k), 4 * p.k, 4 * DEPTH


@inner
def _sweep(call, p, kept, kept_span, passing, span, scratch):
    """All steps of k: SIDE lines of one operand after the other meet a block of the other one, which is kept."""
    blocks, block, sums = scratch + p.own.kept, scratch + p.own.passing, scratch + p.own.sums
    for k in range(0, p.k, p.deep):
        steps = min(p.deep, p.k - k)
        groups = (steps + DEPTH - 1) // DEPTH
        for other in range(kept_span[0], kept_span[1], SIDE):
            _split(p, kept, blocks + (other - kept_span[0]) // SIDE * groups * GROUP, other, k, steps)
        for line in range(span[0], span[1], SIDE):
            _split(p, passing, block, line, k, steps)
            for other in range(kept_span[0], kept_span[1], SIDE):
                number = (other - kept_span[0]) // SIDE
                held = blocks + number * groups * GROUP
                ahead = _ahead(p, passing, line + SIDE, k, number * FETCHED, sums)
                row, column, left, right = line, other, block, held
                if p.keeps_left:
                    row, column, left, right = other, line, held, block
                multiply_groups(sums, left, right, groups, ahead[0], ahead[1], ahead[2])
                to = call.output + 4 * (row * p.columns + column)
                add_sums(to, 4 * p.columns, sums, min(SIDE, p.rows - row), min(SIDE, p.columns - column), k)


@inner
def _product(call, p, n, scratch):
    row, column = n // p.pieces * p.at_once, n % p.pieces * p.wide
    rows, columns = (row, min(row + p.at_once, p.rows)), (column, min(column + p.wide, p.columns))
    left = call.inputs[0], p.turned_left, p.turned_left, p.rows
    right = call.inputs[1], 1 - p.turned_right, p.turned_right, p.columns
    take_tiles(scratch + p.own.configuration)
    if p.keeps_left:
        _sweep(call, p, left, rows, right, columns, scratch)
    else:
        _sweep(call, p, right, columns, left, rows, scratch)
    leave_tiles()


@inner
def _clear(call, p, row, _scratch):
    """A row of sums of nothing, as of the tokens of an expert that gets none."""
    for column in range(row * p.columns, (row + 1) * p.columns):
        store_f32(call.output, column, np.float32(0.0))


_PRODUCT, _CLEARED = stage("matrix_product", Product, _product), stage("matrix_product_clear", Product, _clear)


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
    turned, keeps_left = int(attributes["transA"]), bool(attributes["transA"]) or rows <= _KEPT
    if not k:
        alone = Product(
            rows=rows, columns=columns, k=0, turned_left=0, turned_right=0, keeps_left=True, at_once=0, wide=0, deep=0,
            pieces=0, own=Offsets(),
        )  # fmt: skip
        return Plan(alone, ((_CLEARED, rows),))
    most_rows, most_columns = (_KEPT, _PASSED) if keeps_left else (_PASSED, _KEPT)
    at_once, row_pieces = _cut(rows, most_rows, SIDE)
    wide, pieces = _cut(columns, _PASSED_ONCE if keeps_left and row_pieces == 1 else most_columns, SIDE)
    threads = processors()
    cut, count, other = (wide, pieces, row_pieces) if keeps_left else (at_once, row_pieces, pieces)
    while cut > _LEAST and count * other < _MANY * threads and count * other % threads:
        cut, count = _cut(columns if keeps_left else rows, cut - SIDE, SIDE)
    wide, at_once, pieces = (cut, at_once, count) if keeps_left else (wide, cut, pieces)
    deep, _ = _cut(k, DEEPEST, DEPTH)
    block = deep // DEPTH * GROUP
    own, scratch = workspace(
        Offsets,
        kept=block * (at_once if keeps_left else wide) // SIDE,
        passing=block,
        sums=SUMS,
        configuration=CONFIGURATION,
    )
    parameters = Product(
        rows=rows, columns=columns, k=k, turned_left=turned, turned_right=int(attributes["transB"]),
        keeps_left=keeps_left, at_once=at_once, wide=wide, deep=deep, pieces=pieces, own=own,
    )  # fmt: skip
    return Plan(parameters, ((_PRODUCT, count * other),), per_thread=scratch)


def _shape(attributes: Attributes, args: Sequence[Arg | None]) -> Dims | None:
    attributes.require_flags("transA", "transB")
    a, b = (arg and arg.dims for arg in args)
    if a is None or b is None:
        return None
    if len(b) != 2 or len(a) < 2 or (attributes["transA"] and len(a) != 2):
        raise ShapeError(f"expected a of rank 2 or more, 2 with transA, and b of rank 2, got {a} and {b}", op_type=NAME)
    rows, k = (a[1:], a[0]) if attributes["transA"] else (a[:-1], a[-1])
    depth, columns = b[::-1] if attributes["transB"] else b
    if k != depth:
        raise ShapeError(f"expected one length to sum over, got {k} and {depth}", op_type=NAME)
    return (*rows, columns)


def _reference(attributes: Attributes, _out: tuple[int, ...], a: Float64Array, b: Float64Array) -> Float64Array:
    return (a.T if attributes["transA"] else a) @ (b.T if attributes["transB"] else b)


def _body(b: Body, attributes: Attributes, left: Tensor, right: Tensor) -> str:
    turned = attributes["transA"], attributes["transB"]
    names = (b.Transpose(x, perm=[1, 0]) if turn else x for x, turn in zip((left, right), turned, strict=True))
    return b.MatMul(*names)


OP = Op(
    name=NAME,
    doc=__doc__ or "",
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
