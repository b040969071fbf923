"""The transforms of Winograd's F(2×2, 3×3), as vector code: 2×2 cells of a convolution by 3×3 from 16 products.

    Y = Aᵀ · [ (G g Gᵀ) ⊙ (Bᵀ d B) ] · A

d: 4×4 cells of the source, g: the kernel, Y: 2×2 cells. Bᵀ has the rows 1 0 -1 0, 0 1 1 0, 0 -1 1 0, 0 1 0 -1; G the
rows 1 0 0, ½ ½ ½, ½ -½ ½, 0 0 1; Aᵀ the rows 1 1 1 0, 0 1 -1 -1. Lanes of a register are neighbouring tiles, or
channels of the weights. Source: Lavin, Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from onnx_backprop.ort_ops.compiler.decorators import VECTOR
from onnx_backprop.ort_ops.compiler.llvm import Make, routine
from onnx_backprop.ort_ops.vector.registers import BYTES, FLOAT, I32, I64, VEC, Value

ELEMENTS = 16  # products per tile


def _load(b: ir.IRBuilder, address: Value, offset: int = 0) -> Value:
    return b.load(b.inttoptr(b.add(address, I64(offset)), VEC.as_pointer()), align=4)


def _store(b: ir.IRBuilder, value: Value, address: Value, offset: int = 0) -> None:
    b.store(value, b.inttoptr(b.add(address, I64(offset)), VEC.as_pointer()), align=4)


def _pick(b: ir.IRBuilder, first: Value, second: Value, lanes: list[int]) -> Value:
    return b.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, VECTOR), lanes))


_EVEN = [2 * i for i in range(VECTOR)]
_ODD = [2 * i + 1 for i in range(VECTOR)]
_LOW = [i // 2 + VECTOR * (i % 2) for i in range(VECTOR)]
_HIGH = [lane + VECTOR // 2 for lane in _LOW]


def _source_row(b: ir.IRBuilder, d: list[Value]) -> list[Value]:
    """Bᵀ d."""
    return [b.fsub(d[0], d[2]), b.fadd(d[1], d[2]), b.fsub(d[2], d[1]), b.fsub(d[1], d[3])]


def _source(b: ir.IRBuilder, source: Value, row: Value, target: Value, step: Value) -> None:
    rows = []
    for j in range(4):
        at = b.add(source, b.mul(row, I64(j)))
        now, later = (_load(b, at), _load(b, at, BYTES)), (_load(b, at, 8), _load(b, at, BYTES + 8))
        rows.append(_source_row(b, [_pick(b, *pair, lanes) for pair in (now, later) for lanes in (_EVEN, _ODD)]))
    for j in range(4):
        for i, value in enumerate(_source_row(b, [rows[k][j] for k in range(4)])):
            _store(b, value, b.add(target, b.mul(step, I64(4 * i + j))))


def _weights_row(b: ir.IRBuilder, g: list[Value]) -> list[Value]:
    """G g."""
    half = ir.Constant(VEC, [0.5] * VECTOR)
    outer, inner = b.fmul(half, b.fadd(g[0], g[2])), b.fmul(half, g[1])
    return [g[0], b.fadd(outer, inner), b.fsub(outer, inner), g[2]]


def _weights(b: ir.IRBuilder, source: Value, row: Value, target: Value, step: Value) -> None:
    g = [_load(b, b.add(source, b.mul(row, I64(n)))) for n in range(9)]
    columns = [_weights_row(b, [g[3 * i + j] for i in range(3)]) for j in range(3)]
    for i in range(4):
        for j, value in enumerate(_weights_row(b, [columns[k][i] for k in range(3)])):
            _store(b, value, b.add(target, b.mul(step, I64(4 * i + j))))


def _result_row(b: ir.IRBuilder, m: list[Value]) -> list[Value]:
    """Aᵀ m."""
    return [b.fadd(b.fadd(m[0], m[1]), m[2]), b.fsub(b.fsub(m[1], m[2]), m[3])]


def _result(b: ir.IRBuilder, source: Value, step: Value, top: Value, bottom: Value, bias: Value) -> None:
    m = [_load(b, b.add(source, b.mul(step, I64(n)))) for n in range(ELEMENTS)]
    columns = [_result_row(b, [m[4 * i + j] for i in range(4)]) for j in range(4)]
    nothing = ir.Constant(VEC, ir.Undefined)
    scalar = b.load(b.inttoptr(bias, FLOAT.as_pointer()))
    added = _pick(b, b.insert_element(nothing, scalar, I32(0)), nothing, [0] * VECTOR)
    for i, target in enumerate((top, bottom)):
        left, right = (b.fadd(y, added) for y in _result_row(b, [columns[j][i] for j in range(4)]))
        _store(b, _pick(b, left, right, _LOW), target)
        _store(b, _pick(b, left, right, _HIGH), target, BYTES)


def _cells(b: ir.IRBuilder, source: Value, row: Value, cell: Value, target: Value, step: Value) -> None:
    rows = []
    for i in range(4):
        at = b.add(source, b.mul(row, I64(i)))
        rows.append(_source_row(b, [_load(b, b.add(at, b.mul(cell, I64(j)))) for j in range(4)]))
    for j in range(4):
        for i, value in enumerate(_source_row(b, [rows[k][j] for k in range(4)])):
            _store(b, value, b.add(target, b.mul(step, I64(4 * i + j))))


def _gradient_row(b: ir.IRBuilder, y: list[Value]) -> list[Value]:
    """A y."""
    return [y[0], b.fadd(y[0], y[1]), b.fsub(y[0], y[1]), b.fneg(y[1])]


def _gradient(b: ir.IRBuilder, source: Value, row: Value, target: Value, step: Value) -> None:
    rows = []
    for i in range(2):
        at = b.add(source, b.mul(row, I64(i)))
        pair = _load(b, at), _load(b, at, BYTES)
        rows.append(_gradient_row(b, [_pick(b, *pair, lanes) for lanes in (_EVEN, _ODD)]))
    for j in range(4):
        for i, value in enumerate(_gradient_row(b, [rows[k][j] for k in range(2)])):
            _store(b, value, b.add(target, b.mul(step, I64(4 * i + j))))


def _kernel_row(b: ir.IRBuilder, u: list[Value]) -> list[Value]:
    """Gᵀ u."""
    half = ir.Constant(VEC, [0.5] * VECTOR)
    both, difference = b.fmul(half, b.fadd(u[1], u[2])), b.fmul(half, b.fsub(u[1], u[2]))
    return [b.fadd(u[0], both), difference, b.fadd(both, u[3])]


def _kernel(b: ir.IRBuilder, source: Value, step: Value, target: Value, row: Value) -> None:
    u = [_load(b, b.add(source, b.mul(step, I64(n)))) for n in range(ELEMENTS)]
    columns = [_kernel_row(b, [u[4 * i + j] for i in range(4)]) for j in range(4)]
    for i in range(3):
        for j, value in enumerate(_kernel_row(b, [columns[k][i] for k in range(4)])):
            _store(b, value, b.add(target, b.mul(row, I64(3 * i + j))))


def _whole(write: Callable[..., None]) -> Make:
    """A function with what is written."""

    def make(function: ir.Function) -> None:
        b = ir.IRBuilder(function.append_basic_block("entry"))
        write(b, *function.args)
        b.ret_void()

    return make


@routine(_whole(_source))
def transform_source(source, row, target, step):
    """Bᵀ d B of a register full of tiles, each two cells after the one before.

    source: the first of four rows of float32, `row` bytes apart, of which two registers and two cells are read.
    target: the first of 16 vectors, `step` bytes apart. All arguments are int64.
    """


@routine(_whole(_weights))
def transform_weights(source, row, target, step):
    """G g Gᵀ of a register full of kernels: 9 vectors, `row` bytes apart, to 16 vectors, `step` bytes apart."""


@routine(_whole(_result))
def transform_result(source, step, top, bottom, bias):
    """Aᵀ m A of a register full of tiles, plus a number: two rows of two registers each.

    source: the first of 16 vectors, `step` bytes apart. bias: address of the number.
    """


# The weight gradient is the adjoint: dg = Gᵀ · [ Σ_tiles (A dY Aᵀ) ⊙ (Bᵀ d B) ] · G


@routine(_whole(_cells))
def transform_cells(source, row, cell, target, step):
    """Bᵀ d B of one tile of a register full of channels: 4×4 vectors, `row` and `cell` bytes apart."""


@routine(_whole(_gradient))
def transform_gradient(source, row, target, step):
    """A dY Aᵀ of a register full of tiles: two rows, `row` bytes apart, of which two registers are read."""


@routine(_whole(_kernel))
def transform_kernel(source, step, target, row):
    """Gᵀ u G of a register full of kernels: 16 vectors, `step` bytes apart, to 9 vectors, `row` bytes apart."""
