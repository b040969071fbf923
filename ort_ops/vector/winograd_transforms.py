"""The transforms of Winograd's F(2×2, 3×3), as vector code: 2×2 cells of a convolution by 3×3 from 16 products.

    Y = Aᵀ · [ (G g Gᵀ) ⊙ (Bᵀ d B) ] · A

d: 4×4 cells of the source, g: the kernel, Y: 2×2 cells. Bᵀ has the rows 1 0 -1 0, 0 1 1 0, 0 -1 1 0, 0 1 0 -1; G the
rows 1 0 0, ½ ½ ½, ½ -½ ½, 0 0 1; Aᵀ the rows 1 1 1 0, 0 1 -1 -1. Lanes of a register are neighbouring tiles, or
channels of the weights. Source: Lavin, Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016.
"""

from collections.abc import Callable

from llvmlite import ir

from onnx_backprop.ort_ops.compiler.decorators import VECTOR
from onnx_backprop.ort_ops.compiler.llvm import Make, routine
from onnx_backprop.ort_ops.vector.emit import BYTES, FLOAT, I32, I64, VEC, Block, Value, blocks

ELEMENTS = 16  # products per tile


def _behind(b: Block, start: Value, step: Value, n: int) -> Value:
    """The n-th of some addresses that are `step` apart."""
    return b.add(start, b.mul(step, I64(n)))


def _transformed(
    b: Block, by: Callable[..., list[Value]], lines: list[list[Value]], target: Value, steps: tuple[Value, int, int]
) -> None:
    """The other factor of a transform, by the first entries of all lines, the second ones …, as vectors in memory.

    steps: bytes from vector to vector, and how many vectors from one of these to the next, and from entry to entry.
    """
    step, outer, inner = steps
    for i in range(len(lines[0])):
        for j, value in enumerate(by(b, [line[i] for line in lines])):
            b.put(value, _behind(b, target, step, outer * i + inner * j))


def _pick(b: Block, first: Value, second: Value, lanes: list[int]) -> Value:
    return b.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, VECTOR), lanes))


_EVEN = [2 * i for i in range(VECTOR)]
_ODD = [2 * i + 1 for i in range(VECTOR)]
_LOW = [i // 2 + VECTOR * (i % 2) for i in range(VECTOR)]
_HIGH = [lane + VECTOR // 2 for lane in _LOW]


def _source_row(b: Block, d: list[Value]) -> list[Value]:
    """Bᵀ d."""
    return [b.fsub(d[0], d[2]), b.fadd(d[1], d[2]), b.fsub(d[2], d[1]), b.fsub(d[1], d[3])]


def _source(b: Block, source: Value, row: Value, target: Value, step: Value) -> None:
    rows = []
    for j in range(4):
        at = _behind(b, source, row, j)
        pairs = ([b.vector(b.add(at, I64(offset))) for offset in (first, BYTES + first)] for first in (0, 8))
        rows.append(_source_row(b, [_pick(b, *pair, lanes) for pair in pairs for lanes in (_EVEN, _ODD)]))
    _transformed(b, _source_row, rows, target, (step, 1, 4))


def _weights_row(b: Block, g: list[Value]) -> list[Value]:
    """G g."""
    half = ir.Constant(VEC, [0.5] * VECTOR)
    outer, inner = b.fmul(half, b.fadd(g[0], g[2])), b.fmul(half, g[1])
    return [g[0], b.fadd(outer, inner), b.fsub(outer, inner), g[2]]


def _weights(b: Block, source: Value, row: Value, target: Value, step: Value) -> None:
    g = [b.vector(_behind(b, source, row, n)) for n in range(9)]
    columns = [_weights_row(b, [g[3 * i + j] for i in range(3)]) for j in range(3)]
    _transformed(b, _weights_row, columns, target, (step, 4, 1))


def _result_row(b: Block, m: list[Value]) -> list[Value]:
    """Aᵀ m."""
    return [b.fadd(b.fadd(m[0], m[1]), m[2]), b.fsub(b.fsub(m[1], m[2]), m[3])]


def _result(b: Block, source: Value, step: Value, top: Value, bottom: Value, bias: Value) -> None:
    m = [b.vector(_behind(b, source, step, n)) for n in range(ELEMENTS)]
    columns = [_result_row(b, [m[4 * i + j] for i in range(4)]) for j in range(4)]
    added = b.splat(b.load(b.pointer(bias, FLOAT)))
    for i, target in enumerate((top, bottom)):
        left, right = (b.fadd(y, added) for y in _result_row(b, [columns[j][i] for j in range(4)]))
        b.put(_pick(b, left, right, _LOW), target)
        b.put(_pick(b, left, right, _HIGH), b.add(target, I64(BYTES)))


def _cells(b: Block, source: Value, row: Value, cell: Value, target: Value, step: Value) -> None:
    rows = []
    for i in range(4):
        at = _behind(b, source, row, i)
        rows.append(_source_row(b, [b.vector(_behind(b, at, cell, j)) for j in range(4)]))
    _transformed(b, _source_row, rows, target, (step, 1, 4))


def _gradient_row(b: Block, y: list[Value]) -> list[Value]:
    """A y."""
    return [y[0], b.fadd(y[0], y[1]), b.fsub(y[0], y[1]), b.fneg(y[1])]


def _gradient(b: Block, source: Value, row: Value, target: Value, step: Value) -> None:
    rows = []
    for i in range(2):
        at = _behind(b, source, row, i)
        pair = b.vector(at), b.vector(b.add(at, I64(BYTES)))
        rows.append(_gradient_row(b, [_pick(b, *pair, lanes) for lanes in (_EVEN, _ODD)]))
    _transformed(b, _gradient_row, rows, target, (step, 1, 4))


def _kernel_row(b: Block, u: list[Value]) -> list[Value]:
    """Gᵀ u."""
    half = ir.Constant(VEC, [0.5] * VECTOR)
    both, difference = b.fmul(half, b.fadd(u[1], u[2])), b.fmul(half, b.fsub(u[1], u[2]))
    return [b.fadd(u[0], both), difference, b.fadd(both, u[3])]


def _kernel(b: Block, source: Value, step: Value, target: Value, row: Value) -> None:
    u = [b.vector(_behind(b, source, step, n)) for n in range(ELEMENTS)]
    columns = [_kernel_row(b, [u[4 * i + j] for i in range(4)]) for j in range(4)]
    _transformed(b, _kernel_row, columns, target, (row, 3, 1))


def _whole(write: Callable[..., None]) -> Make:
    """A function with what is written."""

    def make(function: ir.Function) -> None:
        (b,) = blocks(function, "entry")
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
