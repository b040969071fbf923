"""The transforms of Winograd's F(m×m, 3×3), as vector code: m×m cells of a convolution by 3×3; m is 2 or 4.

    Y = Aᵀ · [ (G g Gᵀ) ⊙ (Bᵀ d B) ] · A

d: (m+2)×(m+2) cells of the source, g: the kernel, Y: m×m cells. Two polynomials are multiplied by their values at
m + 1 points pᵢ and at infinity: with fᵢ = Π_{j≠i} (pᵢ - pⱼ), the row i of Bᵀ holds the coefficients of
Π_{j≠i} (x - pⱼ), its last one those of Π_j (x - pⱼ); that of G is pᵢ^j / fᵢ, that of A is pᵢ^j, their last ones are
0 … 0 1. Lanes of a register are neighbouring tiles, or channels of the weights. Source: Lavin, Gray, "Fast
Algorithms for Convolutional Neural Networks", CVPR 2016.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import combinations
from math import inf, prod
from typing import NamedTuple

from llvmlite import ir

from onnx_backprop.ort_ops.compiler.decorators import VECTOR
from onnx_backprop.ort_ops.compiler.llvm import Make, routine
from onnx_backprop.ort_ops.vector.emit import BYTES, FLOAT, I32, I64, VEC, ZERO, Block, Value, blocks, woven_lanes

Row = Sequence[float]


class _Transform(NamedTuple):
    """The matrices for tiles of m×m cells; two rows each belong to points p and -p, behind a first one that is 0's."""

    size: int  # m
    edge: int  # m + 2 cells of a row of the source, and values
    source: list[Row]  # Bᵀ
    weights: list[Row]  # G
    gradient: list[Row]  # A


def _transform(*points: Fraction) -> _Transform:
    """For 0 and these points, each with both signs."""
    finite = [Fraction(0), *(sign * p for p in points for sign in (1, -1))]
    edge = len(finite) + 1
    size = edge - 2

    def polynomial(roots: list[Fraction]) -> Row:
        """The coefficients of Π (x - root), and zeros to as many as a tile has cells."""
        terms = [float((-1) ** k * sum(prod(some) for some in combinations(roots, k))) for k in range(len(roots) + 1)]
        return [*reversed(terms), *[0.0] * (edge - 1 - len(roots))]

    others = [[q for q in finite if q != p] for p in finite]
    factors = [prod(p - q for q in rest) for p, rest in zip(finite, others, strict=True)]
    return _Transform(
        size,
        edge,
        source=[*map(polynomial, others), polynomial(finite)],
        weights=[*([float(p**k / f) for k in range(3)] for p, f in zip(finite, factors, strict=True)), _unit(3)],
        gradient=[*([float(p**k) for k in range(size)] for p in finite), _unit(size)],
    )


def _unit(length: int) -> Row:
    return [*[0.0] * (length - 1), 1.0]


# ¾ and 3/2: of points whose powers are exact in float32 those with the smallest rounding errors that were found, 2.4e-6
# of the largest entry on 256 channels; with 1 and 2, as it is often written, 9e-6; of 2×2 cells 0.7e-6.
_ALL = _transform(Fraction(1)), _transform(Fraction(3, 4), Fraction(3, 2))
_TRANSFORMS = {t.edge**2: t for t in _ALL}  # by the products per tile
MOST_ELEMENTS = max(_TRANSFORMS)
# Times the largest sum that a weight's gradient is made of. Gradients that are exactly zero, as of two channels that
# never meet, came out at up to 3.6·2⁻²⁴ of it; of others, next to none are below.
ROUNDING = 2.0**-21


def _times(b: Block, coefficient: float, value: Value) -> Value:
    if coefficient == 1:
        return value
    return b.fneg(value) if coefficient == -1 else b.fmul(ir.Constant(VEC, [coefficient] * VECTOR), value)


def _plus(b: Block, total: Value | None, coefficient: float, value: Value) -> Value | None:
    """total + coefficient · value; None is zero."""
    if not coefficient:
        return total
    if total is None:
        return _times(b, coefficient, value)
    if abs(coefficient) == 1:
        return (b.fadd if coefficient > 0 else b.fsub)(total, value)
    return b.fma(ir.Constant(VEC, [coefficient] * VECTOR), value, total)


def _sum(b: Block, row: Row, values: Sequence[Value]) -> Value | None:
    total = None
    for coefficient, value in sorted(zip(row, values, strict=True), key=lambda term: abs(term[0]) != 1):
        total = _plus(b, total, coefficient, value)
    return total


def _product(b: Block, matrix: list[Row], values: Sequence[Value]) -> list[Value]:
    """matrix · values; of the rows of two points p and -p, even and odd powers are summed once."""
    result = [_sum(b, matrix[0], values)]
    for row, mirrored in zip(matrix[1:-1:2], matrix[2:-1:2], strict=True):
        halves = [[(x + sign * y) / 2 for x, y in zip(row, mirrored, strict=True)] for sign in (1, -1)]
        even, odd = (_sum(b, half, values) for half in halves)
        result += [_plus(b, even, sign, odd) for sign in (1, -1)]
    return [*result, _sum(b, matrix[-1], values)]


def _adjoint_product(b: Block, matrix: list[Row], values: Sequence[Value]) -> list[Value]:
    """matrixᵀ · values; the values at two points p and -p are added and subtracted once."""
    terms = [(matrix[0], values[0])]
    for i in range(1, len(matrix) - 1, 2):
        for sign, join in ((1, b.fadd), (-1, b.fsub)):
            half = [(x + sign * y) / 2 for x, y in zip(matrix[i], matrix[i + 1], strict=True)]
            terms.append((half, join(values[i], values[i + 1])))
    terms.append((matrix[-1], values[-1]))
    rows, joined = zip(*terms, strict=True)
    return [_sum(b, column, joined) for column in zip(*rows, strict=True)]


def _behind(b: Block, start: Value, step: Value, n: int) -> Value:
    """The n-th of some addresses that are `step` apart."""
    return b.add(start, b.mul(step, I64(n)))


def _store(b: Block, lines: list[list[Value]], target: Value, steps: tuple[Value, int, int]) -> None:
    """lines[i][j] as vectors in memory; steps: bytes between vectors, vectors from i to i + 1 and j to j + 1."""
    step, outer, inner = steps
    for i, line in enumerate(lines):
        for j, value in enumerate(line):
            b.put(value, _behind(b, target, step, outer * i + inner * j))


def _turned(lines: list[list[Value]]) -> list[list[Value]]:
    return [list(line) for line in zip(*lines, strict=True)]


def _pick(b: Block, first: Value, second: Value, lanes: list[int]) -> Value:
    return b.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, VECTOR), lanes))


_EVEN = [2 * i for i in range(VECTOR)]
_ODD = [2 * i + 1 for i in range(VECTOR)]


def _every(b: Block, vectors: list[Value]) -> list[Value]:
    """As many vectors of every so many-th number, the first from number 0 on, the second from number 1 on …"""
    if len(vectors) == 1:
        return vectors
    even, odd = (
        _every(b, [_pick(b, *pair, lanes) for pair in zip(vectors[::2], vectors[1::2], strict=True)])
        for lanes in (_EVEN, _ODD)
    )
    return [value for pair in zip(even, odd, strict=True) for value in pair]


def _woven(b: Block, vectors: list[Value]) -> list[Value]:
    """The inverse of `_every`."""
    if len(vectors) == 1:
        return vectors
    pairs = zip(_woven(b, vectors[::2]), _woven(b, vectors[1::2]), strict=True)
    return [_pick(b, *pair, lanes) for pair in pairs for lanes in map(woven_lanes, range(2))]


def _of_tiles(b: Block, row: Value, size: int) -> list[Value]:
    """The `size` cells of a register full of tiles that follow one another in a row."""
    return _every(b, [b.vector(b.add(row, I64(BYTES * i))) for i in range(size)])


def _source(
    b: Block, t: _Transform, source: Value, row: Value, further: Value, edge: Value, target: Value, step: Value
) -> None:
    lines = []
    for i in range(t.edge):
        at = _behind(b, _behind(b, source, row, i % t.size), further, i // t.size)
        lines.append((_of_tiles(b, at, t.size) + _of_tiles(b, b.add(at, edge), t.size))[: t.edge])
    _values(b, t, lines, target, step)


def _values(b: Block, t: _Transform, lines: list[list[Value]], target: Value, step: Value) -> None:
    across = [_product(b, t.source, line) for line in lines]
    _store(b, [_product(b, t.source, line) for line in _turned(across)], target, (step, 1, t.edge))


def _weights(b: Block, t: _Transform, source: Value, row: Value, cell: Value, target: Value, step: Value) -> None:
    at = [[_behind(b, _behind(b, source, row, i), cell, j) for i in range(3)] for j in range(3)]
    g = [[b.vector(place) for place in column] for column in at]
    down = [_product(b, t.weights, column) for column in g]
    _store(b, [_product(b, t.weights, line) for line in _turned(down)], target, (step, t.edge, 1))


def _sums(b: Block, t: _Transform, source: Value, step: Value) -> list[list[Value]]:
    """The columns of the products of a tile."""
    return [[b.vector(_behind(b, source, step, t.edge * i + j)) for i in range(t.edge)] for j in range(t.edge)]


def _result(b: Block, t: _Transform, source: Value, step: Value, target: Value, row: Value, bias: Value) -> None:
    down = [_adjoint_product(b, t.gradient, column) for column in _sums(b, t, source, step)]
    added = b.splat(b.load(b.pointer(bias, FLOAT)))
    for i, line in enumerate(_turned(down)):
        cells = _woven(b, [b.fadd(y, added) for y in _adjoint_product(b, t.gradient, line)])
        _store(b, [cells], _behind(b, target, row, i), (I64(BYTES), 0, 1))


def _cells(b: Block, t: _Transform, source: Value, row: Value, cell: Value, target: Value, step: Value) -> None:
    at = [_behind(b, source, row, i) for i in range(t.edge)]
    _values(b, t, [[b.vector(_behind(b, start, cell, j)) for j in range(t.edge)] for start in at], target, step)


def _gradient(b: Block, t: _Transform, source: Value, row: Value, target: Value, step: Value) -> None:
    lines = [_of_tiles(b, _behind(b, source, row, i), t.size) for i in range(t.size)]
    across = [_product(b, t.gradient, line) for line in lines]
    _store(b, [_product(b, t.gradient, line) for line in _turned(across)], target, (step, 1, t.edge))


def _kernel(b: Block, t: _Transform, source: Value, step: Value, target: Value, row: Value) -> None:
    sums = _sums(b, t, source, step)
    down = [_adjoint_product(b, t.weights, column) for column in sums]
    lines = [_adjoint_product(b, t.weights, line) for line in _turned(down)]
    least = _rounding(b, [value for column in sums for value in column])
    kept = [[b.select(b.fcmp_ordered("<", b.absolute(g), least), ZERO, g) for g in line] for line in lines]
    _store(b, kept, target, (row, 3, 1))


def _rounding(b: Block, sums: list[Value]) -> Value:
    """Below it a weight's gradient is nothing but rounding errors; 0 for sums that are not finite."""
    largest = b.absolute(sums[0])
    for value in map(b.absolute, sums[1:]):
        largest = b.select(b.fcmp_ordered(">", value, largest), value, largest)
    finite = b.fcmp_ordered("<", largest, ir.Constant(VEC, [inf] * VECTOR))
    return b.select(finite, b.fmul(largest, ir.Constant(VEC, [ROUNDING] * VECTOR)), ZERO)


def _whole(write: Callable[..., None]) -> Make:
    """A function with what is written for tiles of so many products, its last argument."""

    def make(function: ir.Function) -> None:
        entry, other = blocks(function, "entry other")
        *arguments, elements = function.args
        switch = entry.switch(elements, other.block)
        other.ret_void()
        for n, transform in _TRANSFORMS.items():
            (b,) = blocks(function, f"elements_{n}")
            write(b, transform, *arguments)
            b.ret_void()
            switch.add_case(I64(n), b.block)

    return make


@routine(_whole(_source))
def transform_source(source, row, further, edge, target, step, elements):
    """Bᵀ d B of a register full of tiles, each m cells after the one before.

    source: the first of m rows of float32, `row` bytes apart; the next ones lie `further` bytes behind these, and the
    cells that follow the first m of each tile `edge` bytes. Of each so many registers are read.
    target: the first of `elements` vectors, `step` bytes apart. All arguments are int64.
    """


@routine(_whole(_weights))
def transform_weights(source, row, cell, target, step, elements):
    """G g Gᵀ of a register full of kernels: 3×3 vectors, `row` and `cell` bytes apart, to `elements`, `step` apart."""


@routine(_whole(_result))
def transform_result(source, step, target, row, bias, elements):
    """Aᵀ u A of a register full of tiles, plus a number: m rows, `row` bytes apart, of so many registers each.

    source: the first of `elements` vectors, `step` bytes apart. bias: address of the number.
    """


# The weight gradient is the adjoint: dg = Gᵀ · [ Σ_tiles (A dY Aᵀ) ⊙ (Bᵀ d B) ] · G


@routine(_whole(_cells))
def transform_cells(source, row, cell, target, step, elements):
    """Bᵀ d B of one tile of a register full of channels: as many vectors, `row` and `cell` bytes apart."""


@routine(_whole(_gradient))
def transform_gradient(source, row, target, step, elements):
    """A dY Aᵀ of a register full of tiles: m rows, `row` bytes apart, of which so many registers are read."""


@routine(_whole(_kernel))
def transform_kernel(source, step, target, row, elements):
    """Gᵀ u G of a register full of kernels: `elements` vectors, `step` bytes apart, to 3×3, `row` bytes apart.

    0 for what is less than rounding errors: an optimizer that divides by a gradient's size makes whole steps of them.
    """
