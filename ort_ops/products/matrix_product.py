"""The native operator `MatrixProduct`: y = a·b in float32, in registers of whole matrices. Compiled.

a is (…, M, K), or (K, M) where `transA`, b (K, N), or (N, K) where `transB`; y is (…, M, N), all that comes before K
being rows. An item is some rows and some columns of y. A block of one operand is split into parts
(`vector.matrix_tiles`) and stays in the second-level cache; 32 lines of the other one after the other meet it, and are
split while those before them are multiplied. What costs less is kept. Lines that pass are never turned: where they
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
from onnx_backprop.ort_ops.compiler.decorators import VECTOR, inner
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
    STREAMED,
    SUMS,
    TURNED,
    UNITS,
    add_sums,
    leave_tiles,
    multiply,
    put_sums,
    split_pairs,
    split_rows,
    take_tiles,
)
from onnx_backprop.ort_ops.vector.registers import fence, transpose_tile

NAME = "MatrixProduct"
DEEPEST = 576  # steps of k at a time
_LEAST = SIDE // UNITS  # SIDEs of lines that are kept, with which all of the next lines are split meanwhile
_KEPT = 600 << 10  # bytes of parts that are kept, beside which a second-level cache has room for all that passes
_WHOLE = 24  # groups of steps of k: of more, y is added to in memory
# reading a block and splitting it, meanwhile or not, takes as long as so many products of two blocks
_HIDDEN, _SEEN = 1, 3
_MANY = 4  # items of a thread at most, so that threads end together
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
    span: int  # steps of k at a time, whose sums are added up before they are written
    streams: int  # whether y is written past the caches where its address allows it
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
def _put(call, p, sums, row, column, skipped, add):
    """Sums of a row and a column on are written, or added; those of `skipped` lines before them are not."""
    rows, columns = min(SIDE, p.rows - row), min(SIDE, p.columns - column)
    to = call.output + 4 * (row * p.columns + column)
    if p.streams and rows == SIDE and columns == SIDE and call.output % (4 * VECTOR) == 0:
        put_sums(STREAMED + p.mirrored, to, 4 * p.columns, sums)
    else:
        if p.mirrored:
            put_sums(TURNED, sums + SUMS, 4 * SIDE, sums)
            sums += SUMS
        sums += 4 * skipped * (1 if p.keeps_a else SIDE)
        add_sums(to, 4 * p.columns, sums, rows, columns, add)


@inner
def _sweep(call, p, kept, kept_span, passing, span, scratch):
    """All steps of k: SIDE lines of one operand after the other meet a block of the other one, which is kept.

    While the registers multiply, the next lines are split. The last ones begin among those before, to be as many.
    """
    blocks, sums = scratch + p.thread.kept, scratch + p.thread.sums
    block, block_next = scratch + p.thread.passing, scratch + p.thread.passing_next
    step, second, further = _strides(p, passing)
    shares, left_is_kept = SIDE // UNITS, p.keeps_a != p.mirrored
    kind = MIRRORED * p.mirrored
    splits = kind + (SPLIT_PAIRS if passing[1] else SPLIT_ROWS)
    for k in range(0, p.k, p.span):
        steps = min(p.span, p.k - k)
        groups = (steps + DEPTH - 1) // DEPTH
        _split_all(p, kept, blocks, kept_span, k, steps)
        _split(p, passing, block, span[0], k, steps)
        for line in range(span[0], span[1], SIDE):
            first, behind = max(min(line, span[1] - SIDE), span[0]), min(line + SIDE, span[1] - SIDE)
            more = line + SIDE < span[1]
            hidden = more and kept_span[0] + SIDE * (shares - 1) < kept_span[1]
            for other in range(kept_span[0], kept_span[1], SIDE):
                n = (other - kept_span[0]) // SIDE
                for part in range(0, steps, p.deep):
                    many, group = min(p.deep, steps - part), part // DEPTH * GROUP
                    held, passes = blocks + n * groups * GROUP + group, block + group
                    left, right = (held, passes) if left_is_kept else (passes, held)
                    total, again, left_over = sums + part // p.deep * SUMS, 0, (many + DEPTH - 1) // DEPTH
                    if hidden and n < shares and many >= DEPTH:
                        again = many // DEPTH
                        left_over -= again
                        to = block_next + group + n * UNITS // 16 * _TILE + n * UNITS % 16 * 64
                        if passing[1]:
                            to = block_next + group + n * UNITS // 2 * 64
                        at, ahead = _units(p, passing, behind, k + part, n), _units(p, passing, behind, k + part, n + 1)
                        if n + 1 == shares:
                            ahead = _units(p, passing, behind + SIDE, k + part, 0)
                        sums_or_none = 0 if left_over else total
                        multiply(
                            splits, sums_or_none, 4 * SIDE, left, right, again, to, at, step, second, further, ahead, 0
                        )
                    if left_over:
                        left, right = left + again * GROUP, right + again * GROUP
                        multiply(kind, total, 4 * SIDE, left, right, left_over, sums, sums, 0, 0, 0, sums, again)
                    if part:
                        add_sums(sums, 4 * SIDE, total, SIDE, SIDE, 1)
                row, column = (other, line) if p.keeps_a else (line, other)
                _put(call, p, sums, row, column, line - first, k)
            if hidden and steps % DEPTH:
                done = steps // DEPTH
                _split_group(p, passing, block_next + done * GROUP, behind, k + done * DEPTH, steps % DEPTH, 0)
            elif more and not hidden:
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
    if p.streams:
        fence()


@inner
def _clear(call, p, row, _scratch):
    """A row of sums of nothing, as of the tokens of an expert that gets none."""
    for column in range(row * p.columns, (row + 1) * p.columns):
        store_f32(call.output, column, np.float32(0.0))


_PRODUCT, _CLEARED = stage("matrix_product", Product, _product), stage("matrix_product_clear", Product, _clear)


def _cut(kept: int, passing: int, groups: int) -> tuple[int, int, int]:
    """(time, of what is kept, of what passes): how many SIDEs of lines an item has with which threads end soonest.

    The time is in products of two blocks. Every item splits what it keeps, which nothing hides.
    """
    threads, candidates = processors(), list[tuple[int, int, int]]()
    for held in range(min(max(_KEPT // (groups * GROUP), _LEAST), kept), 0, -1):
        pieces = -(-kept // held)
        for cuts in {1, *(threads * n // pieces + m for n in range(1, _MANY + 1) for m in (0, 1))} - {0}:
            lines = -(-passing // cuts)
            rounds = -(-pieces * -(-passing // lines) // threads)
            split = (_HIDDEN if held >= _LEAST else _SEEN) * lines + _SEEN * held
            candidates.append((rounds * (held * lines + split), -held, -lines))
    time, held, lines = min(candidates)
    return time, -held, -lines


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
            span=0, streams=0, pieces=0, thread=Offsets(),
        )  # fmt: skip
        return Plan(alone, ((_CLEARED, rows),))
    deep = -(-k // (-(-k // DEEPEST) * DEPTH)) * DEPTH
    groups = -(-k // DEPTH)
    if groups > _WHOLE:
        groups = deep // DEPTH
    down, across = max(-(-rows // SIDE), 1), max(-(-columns // SIDE), 1)
    (time_a, *cut_a), (time_b, *cut_b) = _cut(down, across, groups), _cut(across, down, groups)
    keeps_a = time_a <= time_b
    mirrored = turned_b if keeps_a else turned_a
    (at_once, wide), kept_lines = (cut_a, cut_a[0]) if keeps_a else (cut_b[::-1], cut_b[0])
    pieces = -(-columns // (wide * SIDE))
    block = groups * GROUP
    # the gradient of a weight is read by its update alone, long after
    streams = int(turned_a and columns % VECTOR == 0 and groups * DEPTH >= k)
    thread, scratch = workspace(
        Offsets,
        sums=max(-(-groups * DEPTH // deep), 2)
        * SUMS,  # in front: where some are skipped, rows are read to behind them
        kept=block * kept_lines,
        passing=block,
        passing_next=block,
        configuration=CONFIGURATION,
    )
    parameters = Product(
        rows=rows, columns=columns, k=k, turned_a=turned_a, turned_b=turned_b, keeps_a=int(keeps_a), mirrored=mirrored,
        at_once=at_once * SIDE, wide=wide * SIDE, deep=deep, span=groups * DEPTH, streams=streams, pieces=pieces,
        thread=thread,
    )  # fmt: skip
    return Plan(parameters, ((_PRODUCT, pieces * -(-down // at_once)),), per_thread=scratch)


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
