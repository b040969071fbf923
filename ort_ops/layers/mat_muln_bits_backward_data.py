"""MatMulNBitsBackwardData, compiled: dx = dy · W in panels of W, of which a thread unpacks one after the other.

An item is some rows of dx and the columns of some tiles. It goes along n: DEPTH rows of W become, tile by tile, a panel
of floats that stays in the first-level cache, and every row of dy of the item is multiplied by it.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir

from onnx_backprop.opset.operators.mat_muln_bits_backward_data import OP
from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import F32, by_type, intrinsic, load_u8, store_i64
from onnx_backprop.ort_ops.compiler.records import Record
from onnx_backprop.ort_ops.compiler.values import FLOAT, INT
from onnx_backprop.ort_ops.runtime.bridge import NativeKernel, Request
from onnx_backprop.ort_ops.runtime.stages import Plan, stage
from onnx_backprop.ort_ops.runtime.workspace import FLOAT as FLOAT_BYTES
from onnx_backprop.ort_ops.runtime.workspace import LINE, WORD, workspace
from onnx_backprop.ort_ops.vector.emit import Block
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS, SPARE_ROWS, multiply, one_segment, rows_apart
from onnx_backprop.ort_ops.vector.rows import read_run, write_run

DEPTH = 128  # rows of a panel: with COLUMNS columns at most half of a first-level cache
MOST_ROWS = (
    240 // ROWS * ROWS
)  # of an item, for which a panel is unpacked once; their sums stay in the second-level cache
FEW_ROWS = 4 * ROWS  # for which reading W takes longer than the sums: items read whole lines of it
COPIED_TILES = 4  # for which dy of a half type is copied in floats
LEAST_ITEMS = 16  # so that threads end together
TOGETHER = min(16, COLUMNS)  # numbers that are unpacked at once: no more than the shortest block, or a tile has
AHEAD = 8  # rows of W that are fetched before they are unpacked
PITCH = DEPTH + LINE // 4  # of a copy of dy: an odd number of lines


@dataclass(frozen=True, kw_only=True)
class Offsets(Record):
    """What a thread's scratch holds."""

    copy: int = 0
    panel: int = 0
    sums: int = 0
    starts: int = 0
    last_starts: int = 0


@dataclass(frozen=True, kw_only=True)
class Packed(Record):
    """The numbers of a plan: dy (rows, n), of which an item copies what it multiplies where `copied`; W (n, k)."""

    kind: int
    rows: int
    n: int
    k: int
    copied: int
    bits: int
    size: int
    blocks: int
    at_once: int  # rows of an item
    pieces: int  # that the rows are cut into
    tiles: int  # of an item
    offsets: Offsets


def _unpack(bits: int) -> Any:
    count = TOGETHER * bits // 8
    lane, real = (ir.VectorType(kind, TOGETHER) for kind in (ir.IntType(32), ir.FloatType()))
    some = ir.VectorType(ir.IntType(8), count)

    @intrinsic(None, INT, INT, INT, FLOAT, FLOAT)
    def unpack(builder, target, packed, ahead, scale, zero):
        """target[i] = (q[i] - zero) · scale for the next TOGETHER numbers; what lies `ahead` bytes on is fetched."""
        b = Block(builder.block)
        b.prefetch(b.add(packed, ahead))
        nothing = ir.Constant(some, ir.Undefined)
        stored = b.load(b.inttoptr(packed, some.as_pointer()), align=1)
        which = ir.Constant(lane, [i * bits // 8 for i in range(TOGETHER)])
        numbers = b.zext(b.shuffle_vector(stored, nothing, which), lane)
        if bits < 8:
            numbers = b.lshr(numbers, ir.Constant(lane, [i * bits % 8 for i in range(TOGETHER)]))
            numbers = b.and_(numbers, ir.Constant(lane, [(1 << bits) - 1] * TOGETHER))

        def splat(value):
            one = b.insert_element(ir.Constant(real, ir.Undefined), value, ir.IntType(32)(0))
            return b.shuffle_vector(one, ir.Constant(real, ir.Undefined), ir.Constant(lane, [0] * TOGETHER))

        centred = b.fsub(b.sitofp(numbers, real), splat(zero))
        b.store(b.fmul(centred, splat(scale)), b.inttoptr(target, real.as_pointer()), align=4)
        builder.position_at_end(b.block)

    return unpack


_unpack_2, _unpack_4, _unpack_8 = (_unpack(bits) for bits in (2, 4, 8))


@inner
def _run(unpack, target, packed, ahead, step, count, scale, zero):
    for i in range(0, count, TOGETHER):
        unpack(target + 4 * i, packed + i * step // 8, ahead, scale, zero)


@inner
def _panel(load, _store, call, p, first, count, column, panel):
    """Rows [first, first + count) of W, its columns from `column` on, which begins a run of TOGETHER."""
    bits, size, blocks = p.bits, p.size, p.blocks
    weight, scales, points, floats = call.inputs[1], call.inputs[2], call.inputs[3], call.inputs[4]
    end, mask, middle = min(column + COLUMNS, blocks * size), (1 << bits) - 1, 1 << (bits - 1)
    stored, ahead = (blocks * bits + 7) // 8, AHEAD * blocks * size * bits // 8
    for row in range(first, first + count):
        at, to = column, panel + 4 * (row - first) * COLUMNS
        while at < end:
            block = at // size
            stop = min(end, (block + 1) * size)
            zero = np.float32(middle)
            if points:
                place = block * bits
                zero = np.float32(load_u8(points, row * stored + (place >> 3)) >> (place & 7) & mask)
            elif floats:
                zero = load(floats, row * blocks + block)
            scale, packed = load(scales, row * blocks + block), weight + (row * blocks * size + at) * bits // 8
            if bits == 4:
                _run(_unpack_4, to, packed, ahead, 4, stop - at, scale, zero)
            elif bits == 8:
                _run(_unpack_8, to, packed, ahead, 8, stop - at, scale, zero)
            else:
                _run(_unpack_2, to, packed, ahead, 2, stop - at, scale, zero)
            to += 4 * (stop - at)
            at = stop


@inner
def _product(call, p, item, scratch):
    kind, tiles, begin, first = p.kind, p.tiles, item // p.pieces * p.tiles * COLUMNS, item % p.pieces * p.at_once
    count, end = min(p.at_once, p.rows - first), min(p.k, begin + tiles * COLUMNS)
    copy, panel, sums = scratch + p.offsets.copy, scratch + p.offsets.panel, scratch + p.offsets.sums
    starts, last = scratch + p.offsets.starts, scratch + p.offsets.last_starts
    dy, step = call.inputs[0] + 4 * first * p.n, 4 * p.n
    if p.copied:
        dy, step = copy, 4 * PITCH
    rows_apart(starts, step)
    for i in range(ROWS):  # the last tile, whose spare rows repeat its last one
        store_i64(last, i, step * min(i, (count - 1) % ROWS))
    for n in range(0, p.n, DEPTH):
        depth, source = min(DEPTH, p.n - n), dy + 4 * n
        if p.copied:
            source = copy
            for row in range(count):
                read_run(kind, copy, row * PITCH, call.inputs[0], (first + row) * p.n + n, 1, depth)
        for column in range(begin, end, COLUMNS):
            by_type(kind, _panel, call, p, n, depth, column, panel)
            to = sums + 4 * (column - begin) * (p.at_once + SPARE_ROWS)
            for row in range(0, count, ROWS):
                a = source + step * row, starts if row + ROWS <= count else last, 4
                c, b = (to + 4 * row * COLUMNS, 4 * COLUMNS), (panel, 4 * COLUMNS)
                multiply(min(ROWS, count - row), end - column, c, a, b, one_segment(starts), depth, n != 0)
    for row in range(count):
        for column in range(begin, end, COLUMNS):
            place = (column - begin) * (p.at_once + SPARE_ROWS) + row * COLUMNS
            write_run(kind, call.output, (first + row) * p.k + column, 1, sums, place, min(COLUMNS, end - column))


_PRODUCT = stage("mat_mul_n_bits_product", Packed, _product)


def _plan(request: Request) -> Plan:
    attributes, rows = request.attributes, math.prod(request.output[:-1])
    n, k, size, bits = attributes["N"], attributes["K"], attributes["block_size"], attributes["bits"]
    pieces = -(-rows // MOST_ROWS)
    at_once = -(-rows // (pieces * ROWS)) * ROWS
    pieces, all_tiles = -(-rows // at_once), -(-k // COLUMNS)
    copied = request.element_type != F32
    wanted = COPIED_TILES if copied else 8 * LINE // (bits * COLUMNS) if rows <= FEW_ROWS else 1
    tiles = max(1, min(wanted, all_tiles * pieces // LEAST_ITEMS))
    offsets, scratch = workspace(
        Offsets,
        copy=FLOAT_BYTES * at_once * PITCH if copied else 0,
        panel=FLOAT_BYTES * DEPTH * COLUMNS,
        sums=FLOAT_BYTES * tiles * (at_once + SPARE_ROWS) * COLUMNS,
        starts=WORD * (ROWS + 2),
        last_starts=WORD * ROWS,
    )
    parameters = Packed(
        kind=request.element_type, rows=rows, n=n, k=k, copied=int(copied), bits=bits, size=size,
        blocks=-(-k // size), at_once=at_once, pieces=pieces, tiles=tiles, offsets=offsets,
    )  # fmt: skip
    return Plan(parameters, ((_PRODUCT, pieces * -(-all_tiles // tiles)),), per_thread=scratch)


KERNEL = NativeKernel(OP, _plan)
