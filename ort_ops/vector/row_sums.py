"""Weighted sums of rows, as vector code: target[i] = Σ_t weight(t) · row(t)[i]."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from onnx_backprop.ort_ops.compiler.decorators import VECTOR, inner
from onnx_backprop.ort_ops.compiler.llvm import routine
from onnx_backprop.ort_ops.vector.emit import FLOAT, I64, ITEM, MASK, Block, Value, blocks, vectors

_AHEAD = 4096  # bytes
# Short rows lie one behind the other: read one after the other they are one stream, which the processor itself fetches
# ahead; several at a time they would be several short ones. Who sums them fetches them for longer sums.
SHORT, _FEW = 512, 7  # elements, taps


def _combine(taps: int, fetching: bool) -> Callable[[ir.Function], None]:
    def make(function: ir.Function) -> None:
        target, source, table, count, add = function.args
        (head,) = blocks(function, "head")
        rows, weights = [], []
        for t in range(taps):
            index = head.word(head.add(table, I64(16 * t)))
            rows.append(head.add(source, head.mul(index, I64(ITEM))))
            weights.append(head.splat(head.load(head.pointer(head.add(table, I64(16 * t + 8)), FLOAT))))
        whole, nothing = (ir.Constant(MASK, [bit] * VECTOR) for bit in (1, 0))
        before = head.select(head.icmp_signed("!=", add, I64(0)), whole, nothing)

        def body(b: Block, done: Value, left: Value | None) -> None:
            offset = b.mul(done, I64(ITEM))
            to, mask = b.add(target, offset), before if left is None else b.and_(before, b.below(left))
            total = b.masked(to, mask)
            for row, weight in zip(rows, weights, strict=True):
                total = b.fma(weight, b.vector(b.add(row, offset), left), total)
            for row in rows[-2:] if fetching else ():
                b.prefetch(b.add(b.add(row, offset), I64(_AHEAD)), level=2)
            b.put(total, to, left)

        head.branch(vectors(function, count, body))

    return make


def _combine_function(taps: int, fetching: bool) -> Any:
    @routine(_combine(taps, fetching), f"_{taps}_{fetching}")
    def combine(target, source, table, count, add): ...

    return combine


_combine_4_long = _combine_function(4, fetching=True)
_combine_4, _combine_2, _combine_1 = (_combine_function(taps, fetching=False) for taps in (4, 2, 1))


@inner
def combine_rows(target, source, table, taps, count):
    """A row of `count` float32. table: two words per tap, the index in source of its row and its weight."""
    t = 0
    if taps <= _FEW and count <= SHORT:
        while t < taps:
            _combine_1(target, source, table + 16 * t, count, t)
            t += 1
    while taps - t >= 4:
        if count > SHORT:
            _combine_4_long(target, source, table + 16 * t, count, t)
        else:
            _combine_4(target, source, table + 16 * t, count, t)
        t += 4
    if taps - t >= 2:
        _combine_2(target, source, table + 16 * t, count, t)
        t += 2
    if t < taps:
        _combine_1(target, source, table + 16 * t, count, t)
