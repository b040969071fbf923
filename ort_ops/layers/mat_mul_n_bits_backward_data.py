"""MatMulNBitsBackwardData, compiled: dx = dy · W in panels of W, of which a thread unpacks one after the other.

An item is some rows of dx and so many columns as a tile has. It goes along n: DEPTH rows of W become a panel of floats
that stays in the first-level cache, and every row of dy of the item is multiplied by it. Half types, and rows of dy
that lie a multiple of a page apart, which would meet in a cache, are copied first.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir

from onnx_backprop.opset.operators.mat_mul_n_bits_backward_data import OP
from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import F32, by_type, intrinsic, load_u8, store_i64
from onnx_backprop.ort_ops.compiler.records import Record
from onnx_backprop.ort_ops.compiler.values import FLOAT, INT
from onnx_backprop.ort_ops.runtime.bridge import NativeKernel, Request
from onnx_backprop.ort_ops.runtime.stages import Plan, stage
from onnx_backprop.ort_ops.runtime.workspace import FLOAT as FLOAT_BYTES
from onnx_backprop.ort_ops.runtime.workspace import WORD, workspace
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS, SPARE_ROWS, multiply, one_segment, rows_apart
from onnx_backprop.ort_ops.vector.rows import read_run, write_run

DEPTH = 128  # rows of a panel: with COLUMNS columns at most half of a first-level cache
MOST_ROWS = 40 * ROWS  # of an item: the panel is unpacked once for them, and their sums stay in the second-level cache
TOGETHER = 16  # numbers that are unpacked at once, the shortest block
_PAGE, _LINE = 4096, 16  # bytes; floats


@dataclass(frozen=True, kw_only=True)
class Offsets(Record):
    """What a thread's scratch holds."""

    panel: int = 0
    sums: int = 0
    starts: int = 0
    last_starts: int = 0


@dataclass(frozen=True, kw_only=True)
class Packed(Record):
    """The numbers of a plan: dy (rows, n), pitch floats from row to row, a copy where `copied`; W (n, k)."""

    kind: int
    rows: int
    n: int
    k: int
    pitch: int
    copied: int
    bits: int
    size: int
    blocks: int
    at_once: int  # rows of an item
    pieces: int  # that the rows are cut into
    offsets: Offsets


def _unpack(bits: int) -> Any:
    count = TOGETHER * bits // 8
    lane, real = (ir.VectorType(kind, TOGETHER) for kind in (ir.IntType(32), ir.FloatType()))
    some = ir.VectorType(ir.IntType(8), count)

    @intrinsic(None, INT, INT, FLOAT, FLOAT)
    def unpack(b, target, packed, scale, zero):
        """target[i] = (q[i] - zero) · scale for the next TOGETHER numbers."""
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

    return unpack


_unpack_2, _unpack_4, _unpack_8 = (_unpack(bits) for bits in (2, 4, 8))


@inner
def _run(unpack, target, packed, step, count, scale, zero):
    for i in range(0, count, TOGETHER):
        unpack(target + 4 * i, packed + i * step // 8, scale, zero)


@inner
def _panel(load, _store, call, p, first, count, column, panel):
    """Rows [first, first + count) of W, its columns from `column` on, which begins a run of TOGETHER."""
    bits, size, blocks = p.bits, p.size, p.blocks
    weight, scales, points, floats = call.inputs[1], call.inputs[2], call.inputs[3], call.inputs[4]
    end, mask, middle = min(column + COLUMNS, blocks * size), (1 << bits) - 1, 1 << (bits - 1)
    stored = (blocks * bits + 7) // 8
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
                _run(_unpack_4, to, packed, 4, stop - at, scale, zero)
            elif bits == 8:
                _run(_unpack_8, to, packed, 8, stop - at, scale, zero)
            else:
                _run(_unpack_2, to, packed, 2, stop - at, scale, zero)
            to += 4 * (stop - at)
            at = stop


@inner
def _copy(call, p, row, _scratch):
    read_run(p.kind, call.shared, row * p.pitch, call.inputs[0], row * p.n, 1, p.n)


@inner
def _product(call, p, item, scratch):
    piece, column = item % p.pieces, item // p.pieces * COLUMNS
    first, columns = piece * p.at_once, min(COLUMNS, p.k - column)
    count = min(p.at_once, p.rows - first)
    panel, sums = scratch + p.offsets.panel, scratch + p.offsets.sums
    starts, last = scratch + p.offsets.starts, scratch + p.offsets.last_starts
    dy = call.shared if p.copied else call.inputs[0]
    rows_apart(starts, 4 * p.pitch)
    for i in range(ROWS):  # the last tile, whose spare rows repeat its last one
        store_i64(last, i, 4 * p.pitch * min(i, (count - 1) % ROWS))
    for n in range(0, p.n, DEPTH):
        depth = min(DEPTH, p.n - n)
        by_type(p.kind, _panel, call, p, n, depth, column, panel)
        for row in range(0, count, ROWS):
            height, c = min(ROWS, count - row), (sums + 4 * row * COLUMNS, 4 * COLUMNS)
            a = dy + 4 * ((first + row) * p.pitch + n), starts if row + ROWS <= count else last, 4
            multiply(height, columns, c, a, (panel, 4 * COLUMNS), one_segment(starts), depth, n != 0)
    for row in range(count):
        write_run(p.kind, call.output, (first + row) * p.k + column, 1, sums, row * COLUMNS, columns)


_COPY = stage("mat_mul_n_bits_copy", Packed, _copy)
_PRODUCT = stage("mat_mul_n_bits_product", Packed, _product)


def _plan(request: Request) -> Plan:
    attributes, rows = request.attributes, math.prod(request.output[:-1])
    n, k, size = attributes["N"], attributes["K"], attributes["block_size"]
    pieces = -(-rows // MOST_ROWS)
    at_once = -(-rows // (pieces * ROWS)) * ROWS
    pieces = -(-rows // at_once)
    copied = request.element_type != F32 or (rows >= ROWS and FLOAT_BYTES * n % _PAGE == 0)
    pitch = -(-n // _LINE) * _LINE + _LINE if copied else n
    offsets, scratch = workspace(
        Offsets,
        panel=FLOAT_BYTES * DEPTH * COLUMNS,
        sums=FLOAT_BYTES * (at_once + SPARE_ROWS) * COLUMNS,
        starts=WORD * (ROWS + 2),
        last_starts=WORD * ROWS,
    )
    parameters = Packed(
        kind=request.element_type, rows=rows, n=n, k=k, pitch=pitch, copied=int(copied), bits=attributes["bits"],
        size=size, blocks=-(-k // size), at_once=at_once, pieces=pieces, offsets=offsets,
    )  # fmt: skip
    copy = ((_COPY, rows),) if copied else ()
    product = _PRODUCT, pieces * -(-k // COLUMNS)
    return Plan(parameters, (*copy, product), FLOAT_BYTES * rows * pitch if copied else 0, scratch)


KERNEL = NativeKernel(OP, _plan)
