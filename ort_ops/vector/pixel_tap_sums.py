"""Sums over the taps of a kernel with one channel per group, of cells whose channels lie beside each other.

    target[j, c] = start[c] + Σ_t weights[c, t] · source[j, c + shift(t)]

Several cells j share every weight that is loaded, and vectors go along the channels, as memory does: what is read and
written next lies behind what was, however many channels a cell has. Taps are added up in their order.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from onnx_backprop.ort_ops.compiler.decorators import VECTOR, inner
from onnx_backprop.ort_ops.compiler.llvm import routine
from onnx_backprop.ort_ops.vector.emit import I64, VEC, ZERO, Value, blocks, carry

TAP_BYTES = 16  # of an entry: int64 bytes to what a tap reads and to its weights
_CELLS = 4  # that share a weight
_BYTES = 4 * VECTOR


def _weigh(cells: int, *, whole: bool, streaming: bool) -> Callable[[ir.Function], None]:
    """`count` times some cells, all lanes of a vector or those that there are; the steps lead to the next ones."""

    def make(function: ir.Function) -> None:
        to, to_cell, to_step, at, at_cell, at_step, entries, taps, weights, step, count, start, start_step = (
            function.args[:13]
        )
        lanes, to_ahead, ahead = function.args[13:]
        entry, vector, tap, done, leave = blocks(function, "entry vector tap done leave")
        from_cells = [entry.mul(at_cell, I64(j)) for j in range(cells)]
        to_cells = [entry.mul(to_cell, I64(j)) for j in range(cells)]
        some, biased = None if whole else lanes, entry.icmp_signed("!=", start, I64(0))
        entry.cbranch(entry.icmp_signed(">", count, I64(0)), vector.block, leave.block)

        left, target, source, factors, bias = (vector.phi(I64) for _ in range(5))
        for from_cell, offset in zip(from_cells, to_cells, strict=True):
            vector.prefetch(vector.add(vector.add(source, ahead), from_cell), level=2)
            if not streaming:
                vector.prefetch(vector.add(vector.add(target, to_ahead), offset), writing=True, level=2)
        initial = vector.select(biased, vector.vector(vector.select(biased, bias, factors)), ZERO)
        vector.cbranch(vector.icmp_signed(">", taps, I64(0)), tap.block, done.block)

        t = tap.phi(I64)
        totals = [tap.phi(VEC) for _ in range(cells)]
        place = tap.add(entries, tap.mul(t, I64(TAP_BYTES)))
        behind = tap.add(source, tap.word(place))
        factor = tap.vector(tap.add(factors, tap.word(tap.add(place, I64(8)))))
        sums: list[Value] = []
        for from_cell, total in zip(from_cells, totals, strict=True):
            sums.append(tap.fma(factor, tap.vector(tap.add(behind, from_cell), some), total))
        further = tap.add(t, I64(1))
        steps = [(t, I64(0), further), *((total, initial, sum_) for total, sum_ in zip(totals, sums, strict=True))]
        carry(steps, vector, tap)
        tap.cbranch(tap.icmp_signed("<", further, taps), tap.block, done.block)

        results = [done.phi(VEC) for _ in range(cells)]
        carry([(result, initial, total) for result, total in zip(results, sums, strict=True)], vector, tap)
        for result, offset in zip(results, to_cells, strict=True):
            address = done.add(target, offset)
            if streaming:
                done.stream(result, address)
            else:
                done.put(result, address, some)
        phis = (left, count, I64(-1)), (target, to, to_step), (source, at, at_step), (factors, weights, step)
        steps = [(phi, first, done.add(phi, more)) for phi, first, more in (*phis, (bias, start, start_step))]
        carry(steps, entry, done)
        done.cbranch(done.icmp_signed(">", left, I64(1)), vector.block, leave.block)
        leave.ret_void()

    return make


def _function(cells: int, *, whole: bool = True, streaming: bool = False) -> Any:
    make = _weigh(cells, whole=whole, streaming=streaming)

    @routine(make, f"_{cells}_{whole}_{streaming}")
    def weigh(
        to, to_cell, to_step, at, at_cell, at_step, entries, taps, weights, step, count, start, start_step, lanes,
        to_ahead, ahead,
    ): ...  # fmt: skip

    return weigh


_several, _one, _part = _function(_CELLS), _function(1), _function(1, whole=False)
_several_past, _one_past = _function(_CELLS, streaming=True), _function(1, streaming=True)


@inner
def weigh_cells(cells, channels, to, to_cell, at, at_cell, taps, entries, weights, step, start, aheads, streaming):
    """Channels of cells at `to` from the cells at `at`: addresses, and bytes from one cell to the next.

    entries: of every tap, as words, bytes to what it reads and to its weights. weights: vectors of zeros and the
    channels' weights, `step` bytes from vector to vector. start: the address of as many vectors, 0 for none. What lies
    `aheads` bytes behind `to` and `at` is fetched for later. streaming: whether whole vectors, which then lie on
    multiples of their bytes, are stored past the caches.
    """
    vectors, lanes, a, b = channels // VECTOR, channels % VECTOR, aheads[0], aheads[1]
    many, done = _CELLS if cells >= _CELLS else 1, 0
    while vectors and done < cells:
        done = min(done, cells - many)  # the last ones twice rather than one by one
        t, s, count = to + done * to_cell, at + done * at_cell, vectors
        steps = (_BYTES, _BYTES, step, _BYTES * (start != 0))
        if vectors == 1:  # from cells to cells instead of from channels to channels
            count, steps = (cells - done) // many, (many * to_cell, many * at_cell, 0, 0)
        u, v, w, x = steps
        if many == 1 and streaming:
            _one_past(t, to_cell, u, s, at_cell, v, entries, taps, weights, w, count, start, x, VECTOR, a, b)
        elif many == 1:
            _one(t, to_cell, u, s, at_cell, v, entries, taps, weights, w, count, start, x, VECTOR, a, b)
        elif streaming:
            _several_past(t, to_cell, u, s, at_cell, v, entries, taps, weights, w, count, start, x, VECTOR, a, b)
        else:
            _several(t, to_cell, u, s, at_cell, v, entries, taps, weights, w, count, start, x, VECTOR, a, b)
        done += many * count if vectors == 1 else many
    if lanes:
        behind, factors = vectors * _BYTES, weights + vectors * step
        initial = start + behind if start else 0
        t, s = to + behind, at + behind
        _part(t, 0, to_cell, s, 0, at_cell, entries, taps, factors, 0, cells, initial, 0, lanes, a, b)
