"""The native operator `MatrixProduct`: y = a·b in float32, in registers of whole matrices. Compiled.

a is (…, M, K), or (K, M) where `transA`, b (K, N), or (N, K) where `transB`; y is (…, M, N), all that comes before K
being rows. An item is some rows and some columns of y. A block of one operand is split into parts
(`vector.matrix_tiles`) and stays in the second-level cache; 32 lines of the other one after the other meet it, and are
split while those before them are multiplied. The smaller operand is kept. Lines that pass are never turned: where they
would be, the operands change places, and y is turned, 32 by 32. Sums of DEEPEST steps are added up, so that rounding
grows with the root of these. How y is cut into items, and what is kept, makes no difference to its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.core.errors import KernelError, ShapeError
from onnx_backprop.opset.core.op import Arg, Attribute, Attributes, Float64Array, Input, Op, Output
from onnx_backprop.opset.core.shapes import Dims
from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import F32, store_f32
from onnx_backprop.ort_ops.compiler.machine import PROCESSOR, matrix_tiles, processors
from onnx_backprop.ort_ops.compiler.records import Record
from onnx_backprop.ort_ops.runtime.bridge import NativeKernel, Request
from onnx_backprop.ort_ops.runtime.stages import Plan, stage
from onnx_backprop.ort_ops.runtime.workspace import workspace
from onnx_backprop.ort_ops.vector.matrix_tiles import (
    CONFIGURATION,
    DEPTH,
    GROUP,
    MIRRORED,
    SIDE,
    SPLIT_PAIRS,
    SPLIT_ROWS,
    SUMS,
    UNITS,
    add_sums,
    leave_tiles,
    multiply,
    split_pairs,
    split_rows,
    take_tiles,
)
from onnx_backprop.ort_ops.vector.registers import transpose_tile

NAME = "MatrixProduct"
DEEPEST = 576  # steps of k at a time
# in SIDEs of lines of an item: of what is kept, most, whose parts take two thirds of a second-level cache, and least,
# with which all of the next lines are split meanwhile; of what passes, beside which what is kept is split in no time
_KEPT, _LEAST, _PASSED = 12, 4, 128
_MANY = 4  # items of a thread, of which it does not matter whether the last ones end together
_TILE, _PARTS = 1024, 3
_AHEAD = 512  # bytes of a row that are fetched before they are split


@dataclass(frozen=True, kw_only=True)
class Offsets(Record):
    """Of a thread's scratch."""

    kept: int = 0
    passing: int = 0
    passing_next: int = 0
    sums: int = 0
    configuration: int = 0


@dataclass(frozen=True, kw_only=True)
class Product(Record):
    """The numbers of a plan; at_once, wide, deep: rows, columns and steps of k of an item."""

    rows: int
    columns: int
    k: int
    turned_a: int
    turned_b: int
    keeps_a: int
    mirrored: int  # the product is that of b turned and a turned, which is y turned
    at_once: int
    wide: int
    deep: int
    pieces: int  # that the columns are cut into
    thread: Offsets


@inner
def _split_group(p, operand, target, line, k, count, ahead):
    """SIDE rows of a, or columns of b, and DEPTH steps of k or fewer; `ahead` bytes further on is what comes next."""
    source, across, turned, lines = operand
    for half in range(2):
        tile, first = target + _TILE * half, line + 16 * half
        near = min(first, lines - 1)
        if across:
            split_pairs(tile, 64, 2 * _TILE, source + 4 * (k * lines + near), 4 * lines, count, lines - first, ahead)
        else:
            split_rows(tile, 64, 2 * _TILE, source + 4 * (near * p.k + k), 4 * p.k, lines - first, count, ahead)
        if turned:
            for part in range(_PARTS):
                transpose_tile(tile + 2 * _TILE * part, 64, tile + 2 * _TILE * part, 64)


@inner
def _split(p, operand, target, line, k, steps):
    """SIDE rows of a, or columns of b, from one of k on."""
    _, across, _, lines = operand
    ahead = 4 * DEPTH * lines if across else _AHEAD
    for n in range(0, steps, DEPTH):
        _split_group(p, operand, target + n // DEPTH * GROUP, line, k + n, min(DEPTH, steps - n), ahead)


@inner
def _split_all(p, operand, target, span, k, steps):
    """All lines that are kept, in the order in which they lie in memory."""
    _, across, _, lines = operand
    size = (steps + DEPTH - 1) // DEPTH * GROUP
    if across:
        for n in range(0, steps, DEPTH):
            for line in range(span[0], span[1], SIDE):
                to = target + (line - span[0]) // SIDE * size + n // DEPTH * GROUP
                _split_group(p, operand, to, line, k + n, min(DEPTH, steps - n), 4 * DEPTH * lines)
    else:
        for line in range(span[0], span[1], SIDE):
            _split(p, operand, target + (line - span[0]) // SIDE * size, line, k, steps)


@inner
def _strides(p, operand):
    """Bytes from unit to unit, from the first vector of a unit to the second one, from group to group."""
    _, across, _, lines = operand
    if across:
        return 8 * lines, 4 * lines, 4 * lines * DEPTH
    return 4 * p.k, 64, 4 * DEPTH


@inner
def _units(p, operand, line, k, share):
    """Where UNITS units of SIDE lines begin."""
    source, across, _, lines = operand
    if across:
        return source + 4 * ((k + share * UNITS) * lines + line)
    return source + 4 * ((line + share * UNITS) * p.k + k)


@inner
def _add(call, p, sums, row, column, add):
    """Sums of a row and a column on are added, which if mirrored are turned."""
    if p.mirrored:
        for n in range(4):
            tile, turned = 2048 * (n // 2) + 64 * (n % 2), SUMS + 2048 * (n % 2) + 64 * (n // 2)
            transpose_tile(sums + turned, 4 * SIDE, sums + tile, 4 * SIDE)
        sums += SUMS
    to = call.output + 4 * (row * p.columns + column)
    add_sums(to, 4 * p.columns, sums, min(SIDE, p.rows - row), min(SIDE, p.columns - column), add)


@inner
def _sweep(call, p, kept, kept_span, passing, span, scratch):
    """All steps of k: SIDE lines of one operand after the other meet a block of the other one, which is kept.

    While the registers multiply, the next lines are split.
    """
    blocks, sums = scratch + p.thread.kept, scratch + p.thread.sums
    block, block_next = scratch + p.thread.passing, scratch + p.thread.passing_next
    step, second, further = _strides(p, passing)
    shares, left_is_kept = SIDE // UNITS, p.keeps_a != p.mirrored
    for k in range(0, p.k, p.deep):
        steps = min(p.deep, p.k - k)
        groups = (steps + DEPTH - 1) // DEPTH
        _split_all(p, kept, blocks, kept_span, k, steps)
        _split(p, passing, block, span[0], k, steps)
        for line in range(span[0], span[1], SIDE):
            behind = line + SIDE
            whole = (
                steps % DEPTH == 0 and behind + SIDE <= span[1] and kept_span[0] + SIDE * (shares - 1) < kept_span[1]
            )
            for other in range(kept_span[0], kept_span[1], SIDE):
                n = (other - kept_span[0]) // SIDE
                kind, to, at, ahead = MIRRORED * p.mirrored, sums, sums, sums
                if whole and n < shares:
                    kind, to = kind + SPLIT_ROWS, block_next + n * UNITS // 16 * _TILE + n * UNITS % 16 * 64
                    if passing[1]:
                        kind, to = kind + SPLIT_PAIRS - SPLIT_ROWS, block_next + n * UNITS // 2 * 64
                    at, ahead = _units(p, passing, behind, k, n), _units(p, passing, behind, k, n + 1)
                    if n + 1 == shares:
                        ahead = _units(p, passing, behind + SIDE, k, 0)
                held = blocks + n * groups * GROUP
                left, right = (held, block) if left_is_kept else (block, held)
                multiply(kind, sums, 4 * SIDE, left, right, groups, to, at, step, second, further, ahead, 0)
                row, column = (other, line) if p.keeps_a else (line, other)
                _add(call, p, sums, row, column, k)
            if behind < span[1] and not whole:
                _split(p, passing, block_next, behind, k, steps)
            block, block_next = block_next, block


@inner
def _product(call, p, n, scratch):
    row, column = n // p.pieces * p.at_once, n % p.pieces * p.wide
    rows, columns = (row, min(row + p.at_once, p.rows)), (column, min(column + p.wide, p.columns))
    a = call.inputs[0], p.turned_a, p.turned_a != p.mirrored, p.rows
    b = call.inputs[1], 1 - p.turned_b, p.turned_b != p.mirrored, p.columns
    take_tiles(scratch + p.thread.configuration)
    if p.keeps_a:
        _sweep(call, p, a, rows, b, columns, scratch)
    else:
        _sweep(call, p, b, columns, a, rows, scratch)
    leave_tiles()


@inner
def _clear(call, p, row, _scratch):
    """A row of sums of nothing, as of the tokens of an expert that gets none."""
    for column in range(row * p.columns, (row + 1) * p.columns):
        store_f32(call.output, column, np.float32(0.0))


_PRODUCT, _CLEARED = stage("matrix_product", Product, _product), stage("matrix_product_clear", Product, _clear)


def _pieces(kept: int, passing: int) -> tuple[int, int]:
    """How many pieces SIDEs of lines that are kept, and of those that pass, are cut into.

    As few as threads have the same work with: every item splits what it keeps, which nothing hides.
    """
    threads = processors()
    kept_pieces = max(-(-kept // _KEPT), 1)
    passing_pieces = min(max(passing // _PASSED, 1), _MANY * threads)
    while kept_pieces * passing_pieces < _MANY * threads and kept_pieces * passing_pieces % threads:
        if kept // (kept_pieces + 1) >= _LEAST:
            kept_pieces += 1
        elif passing_pieces < passing:
            passing_pieces += 1
        else:
            break
    return kept_pieces, passing_pieces


def _lines(length: int, pieces: int) -> int:
    """How long so many pieces of about the same length are, in whole SIDEs."""
    return -(-length // (pieces * SIDE)) * SIDE


def _plan(request: Request) -> Plan:
    a, attributes = request.inputs[0], request.attributes
    assert a is not None
    if not matrix_tiles():  # LLVM would end the process
        text = f"expected a processor with registers of matrices (AMX), got {PROCESSOR!r}. Make the graph anew here"
        raise KernelError(text, op_type=NAME)
    turned_a, turned_b = int(attributes["transA"]), int(attributes["transB"])
    rows, columns, k = math.prod(request.output[:-1]), request.output[-1], a[-2] if turned_a else a[-1]
    if not k:
        alone = Product(
            rows=rows, columns=columns, k=0, turned_a=0, turned_b=0, keeps_a=0, mirrored=0, at_once=0, wide=0, deep=0,
            pieces=0, thread=Offsets(),
        )  # fmt: skip
        return Plan(alone, ((_CLEARED, rows),))
    keeps_a = rows * (1 if turned_b else 2) <= columns * (2 if turned_a else 1)
    mirrored = turned_b if keeps_a else turned_a
    kept, passing = (rows, columns) if keeps_a else (columns, rows)
    kept_pieces, passing_pieces = _pieces(-(-kept // SIDE), -(-passing // SIDE))
    kept_lines, passing_lines = _lines(kept, kept_pieces), _lines(passing, passing_pieces)
    at_once, wide = (kept_lines, passing_lines) if keeps_a else (passing_lines, kept_lines)
    pieces = -(-columns // wide)
    deep = _lines(k, -(-k // DEEPEST))
    block = deep // DEPTH * GROUP
    thread, scratch = workspace(
        Offsets,
        kept=block * kept_lines // SIDE,
        passing=block,
        passing_next=block,
        sums=2 * SUMS,
        configuration=CONFIGURATION,
    )
    parameters = Product(
        rows=rows, columns=columns, k=k, turned_a=turned_a, turned_b=turned_b, keeps_a=int(keeps_a), mirrored=mirrored,
        at_once=at_once, wide=wide, deep=deep, pieces=pieces, thread=thread,
    )  # fmt: skip
    return Plan(parameters, ((_PRODUCT, pieces * -(-rows // at_once)),), per_thread=scratch)


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
