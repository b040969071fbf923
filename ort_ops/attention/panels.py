"""What is done to a panel of scores while it is in a cache, as vector code: powers, their sums, their gradient.

A panel has a row for every key and COLUMNS queries side by side, so that maxima and sums over keys are taken lane by
lane. Written as LLVM IR for the exponential; the arguments of routines are addresses and numbers, int64.
"""

import math
from collections.abc import Callable, Sequence

from llvmlite import ir

from onnx_backprop.ort_ops.compiler.decorators import VECTOR
from onnx_backprop.ort_ops.compiler.llvm import intrinsic, routine
from onnx_backprop.ort_ops.compiler.values import FLOAT as FLOAT32
from onnx_backprop.ort_ops.elementwise.program import exp, polynomial
from onnx_backprop.ort_ops.vector.emit import (
    BYTES,
    FLOAT,
    I32,
    I64,
    ITEM,
    LANES,
    VEC,
    ZERO,
    Block,
    Value,
    blocks,
    carry,
)
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, VECTORS

_ROW = ITEM * COLUMNS
_LOG = (  # log(1 + x) = x - x²/2 + x³·P(x), from x = √½ - 1 to √2 - 1; Cephes
    *(3.3333331174e-1, -2.4999993993e-1, 2.0000714765e-1, -1.6668057665e-1, 1.4249322787e-1),
    *(-1.2420140846e-1, 1.1676998740e-1, -1.1514610310e-1, 7.0376836292e-2),
)


def _all(number: float) -> Value:
    return ir.Constant(VEC, [number] * VECTOR)


def _at(b: Block, address: Value, j: int) -> Value:
    return b.add(address, I64(BYTES * j))


def _rows(
    function: ir.Function,
    head: Block,
    rows: Value,
    first: Sequence[Value],
    body: Callable[[Block, Value, Sequence[Value]], Sequence[Value]],
) -> tuple[Block, list[Value]]:
    """Call `body(block, bytes before the row, values)` for each row, with the values that it answered for the one
    before.

    The block behind the loop and the values there; those of `first` where there are no rows.
    """
    again, behind = (Block(function.append_basic_block(name)) for name in ("again", "behind"))
    head.cbranch(head.icmp_signed(">", rows, I64(0)), again.block, behind.block)
    row = again.phi(I64)
    values = [again.phi(VEC) for _ in first]
    updated = body(again, again.mul(row, I64(_ROW)), values)
    following = again.add(row, I64(1))
    carry([(row, I64(0), following), *zip(values, first, updated, strict=True)], head, again)
    again.cbranch(again.icmp_signed("<", following, rows), again.block, behind.block)
    results = [behind.phi(VEC) for _ in first]
    carry(zip(results, first, updated, strict=True), head, again)
    return behind, results


def _soften(function: ir.Function) -> None:
    scores, rows, most, total, factor = function.args
    (head,) = blocks(function, "head")
    before = [head.vector(_at(head, most, j)) for j in range(VECTORS)]

    def larger(b: Block, at: Value, largest: Sequence[Value]) -> Sequence[Value]:
        read = [b.vector(_at(b, b.add(scores, at), j)) for j in range(VECTORS)]
        return [b.select(b.fcmp_ordered(">", x, y), x, y) for x, y in zip(read, largest, strict=True)]

    middle, largest = _rows(function, head, rows, before, larger)
    never = _all(-math.inf)
    centres = [middle.select(middle.fcmp_ordered("==", x, never), ZERO, x) for x in largest]

    def powers(b: Block, at: Value, sums: Sequence[Value]) -> Sequence[Value]:
        places = [_at(b, b.add(scores, at), j) for j in range(VECTORS)]
        results = [exp(b, b.fsub(b.vector(place), c)) for place, c in zip(places, centres, strict=True)]
        for place, result in zip(places, results, strict=True):
            b.put(result, place)
        return [b.fadd(x, y) for x, y in zip(sums, results, strict=True)]

    b, sums = _rows(function, middle, rows, [ZERO] * VECTORS, powers)
    for j in range(VECTORS):
        shrunk = exp(b, b.fsub(before[j], centres[j]))
        b.put(shrunk, _at(b, factor, j))
        b.put(largest[j], _at(b, most, j))
        place = _at(b, total, j)
        b.put(b.fma(b.vector(place), shrunk, sums[j]), place)
    b.ret_void()


@routine(_soften)
def soften(scores, rows, most, total, factor):
    """Scores become e^(s - m), m the largest of them and of `most`, which becomes m; total = total·factor + Σ e^(s -
    m).

    factor = e^(most - m) is what sums of before are to be multiplied by. m = 0 where every score is -inf, in powers.
    """


@intrinsic(FLOAT32, FLOAT32)
def exponential(builder, x):
    """e^x of one number."""
    b = Block(builder.block)
    result = b.extract_element(exp(b, b.splat(x)), I32(0))
    builder.position_at_end(b.block)
    return result


def _rescale(function: ir.Function) -> None:
    panel, rows, factor = function.args
    (head,) = blocks(function, "head")
    factors = [head.vector(_at(head, factor, j)) for j in range(VECTORS)]

    def body(b: Block, at: Value, _: Sequence[Value]) -> Sequence[Value]:
        for j in range(VECTORS):
            place = _at(b, b.add(panel, at), j)
            b.put(b.fmul(b.vector(place), factors[j]), place)
        return []

    _rows(function, head, rows, [], body)[0].ret_void()


@routine(_rescale)
def rescale(panel, rows, factor):
    """Multiply each row by a row of factors."""


def _logarithm(b: Block, x: Value) -> Value:
    """Of positive normal numbers, in 2 ulp; NaN of NaN."""
    bits = b.bitcast(x, LANES)

    def whole(number: int) -> Value:
        return ir.Constant(LANES, [number] * VECTOR)

    exponent = b.sub(b.lshr(bits, whole(23)), whole(126))
    part = b.bitcast(b.or_(b.and_(bits, whole(0x7FFFFF)), whole(0x3F000000)), VEC)  # ½ to 1
    small = b.fcmp_ordered("<", part, _all(math.sqrt(0.5)))
    exponent = b.select(small, b.sub(exponent, whole(1)), exponent)
    part = b.fsub(b.select(small, b.fadd(part, part), part), _all(1.0))
    n, square = b.sitofp(exponent, VEC), b.fmul(part, part)
    rest = b.fmul(polynomial(b, part, _LOG), b.fmul(part, square))
    rest = b.fma(square, _all(-0.5), b.fma(n, _all(-2.12194440e-4), rest))
    result = b.fma(n, _all(0.693359375), b.fadd(part, rest))
    return b.select(b.fcmp_unordered("uno", x, x), x, result)


def _finish(function: ir.Function) -> None:
    most, total = function.args
    (b,) = blocks(function, "head")
    for j in range(VECTORS):
        place, level = _at(b, total, j), _at(b, most, j)
        sums = b.vector(place)
        nothing = b.fcmp_ordered("==", sums, ZERO)
        divisor = b.select(nothing, _all(1.0), sums)
        b.put(b.select(nothing, _all(-math.inf), b.fadd(b.vector(level), _logarithm(b, divisor))), level)
        b.put(b.fdiv(_all(1.0), divisor), place)
    b.ret_void()


@routine(_finish)
def finish(most, total):
    """most = most + log(total), total = 1 / total: -inf and 1 where the total is 0."""


def _bend(function: ir.Function) -> None:
    scores, rows, cap, slopes = function.args
    entry, keep, drop = blocks(function, "entry keep drop")
    bound = entry.splat(entry.load(entry.pointer(cap, FLOAT)))
    twice = entry.fdiv(_all(-2.0), bound)
    entry.cbranch(entry.icmp_signed("!=", slopes, I64(0)), keep.block, drop.block)

    def of(block: Block, *, keeping: bool) -> None:
        def body(b: Block, at: Value, _: Sequence[Value]) -> Sequence[Value]:
            for j in range(VECTORS):
                place = _at(b, b.add(scores, at), j)
                x = b.vector(place)
                power = exp(b, b.fmul(b.absolute(x), twice))
                size = b.fdiv(b.fsub(_all(1.0), power), b.fadd(_all(1.0), power))
                bent = b.select(b.fcmp_ordered("<", x, ZERO), b.fneg(size), size)
                b.put(b.fmul(bent, bound), place)
                if keeping:
                    b.put(b.fma(b.fneg(bent), bent, _all(1.0)), _at(b, b.add(slopes, at), j))
            return []

        _rows(function, block, rows, [], body)[0].ret_void()

    of(keep, keeping=True)
    of(drop, keeping=False)


@routine(_bend)
def bend(scores, rows, cap, slopes):
    """s = cap·tanh(s / cap), and at `slopes`, unless that is 0, 1 - tanh²; cap: the address of a float32."""


def _differentiate(function: ir.Function) -> None:
    scores, products, rows, level, delta = function.args
    (head,) = blocks(function, "head")
    levels, deltas = ([head.vector(_at(head, x, j)) for j in range(VECTORS)] for x in (level, delta))

    def body(b: Block, at: Value, _: Sequence[Value]) -> Sequence[Value]:
        for j in range(VECTORS):
            place, other = (_at(b, b.add(x, at), j) for x in (scores, products))
            p = exp(b, b.fsub(b.vector(place), levels[j]))
            b.put(p, place)
            b.put(b.fmul(p, b.fsub(b.vector(other), deltas[j])), other)
        return []

    _rows(function, head, rows, [], body)[0].ret_void()


@routine(_differentiate)
def differentiate(scores, products, rows, level, delta):
    """Scores become p = e^(s - level), and products of dy and values p·(products - delta)."""
