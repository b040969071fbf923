"""Sums over the cells of an image with one channel, for the taps of a kernel, as vector code: its weights' gradient.

    sums[t] += Σ_{l, i} a[l, i] · b[l, i + shift(t)]

Every element is a vector: cells of a row or channels of a cell, of which the last few may be fewer than a vector holds.
As many taps as registers hold are done at once.
"""

from collections.abc import Callable

from llvmlite import ir

from onnx_backprop.ort_ops.compiler.decorators import VECTOR, inner
from onnx_backprop.ort_ops.compiler.llvm import choice, routine
from onnx_backprop.ort_ops.vector.emit import BYTES, I64, VEC, ZERO, Block, Value, blocks, carry

Make = Callable[[ir.Function], None]
_AT_ONCE = 9, 3, 1  # taps
_PART, _FETCHING = 16, 32  # added to these: elements of fewer lanes than a vector's, what comes next is fetched


def _places(b: Block, shifts: Value, taps: int) -> list[Value]:
    return [b.word(b.add(shifts, I64(8 * t))) for t in range(taps)]


def _dot(taps: int, *, whole: bool, fetching: bool) -> Make:
    """All lines of some taps."""

    def make(function: ir.Function) -> None:
        sums, a, b, shifts, lines, a_line, b_line, count, a_step, b_step, lanes, a_ahead, b_ahead = function.args
        entry, outer, inner, after, leave = blocks(function, "entry outer inner after leave")
        places, left = _places(entry, shifts, taps), None if whole else lanes
        entry.branch(outer.block)
        line, a_start, b_start = (outer.phi(I64) for _ in range(3))
        before = [outer.phi(VEC) for _ in range(taps)]
        outer.branch(inner.block)
        more, a_at, b_at = (inner.phi(I64) for _ in range(3))
        running = [inner.phi(VEC) for _ in range(taps)]
        value = inner.vector(a_at, left)
        if fetching:
            inner.prefetch(inner.add(a_at, a_ahead), level=2)
            inner.prefetch(inner.add(b_at, b_ahead), level=2)
        result = [
            inner.fma(value, inner.vector(inner.add(b_at, place), left), total)
            for place, total in zip(places, running, strict=True)
        ]
        fewer = inner.sub(more, I64(1))
        steps = [
            (more, count, fewer),
            (a_at, a_start, inner.add(a_at, a_step)),
            (b_at, b_start, inner.add(b_at, b_step)),
        ]
        carry([*steps, *zip(running, before, result, strict=True)], outer, inner)
        inner.cbranch(inner.icmp_signed(">", fewer, I64(0)), inner.block, after.block)
        rest = after.sub(line, I64(1))
        steps = [
            (line, lines, rest),
            (a_start, a, after.add(a_start, a_line)),
            (b_start, b, after.add(b_start, b_line)),
        ]
        carry([*steps, *((total, ZERO, sum_) for total, sum_ in zip(before, result, strict=True))], entry, after)
        after.cbranch(after.icmp_signed(">", rest, I64(0)), outer.block, leave.block)
        for t, total in enumerate(result):
            place = leave.add(sums, I64(BYTES * t))
            leave.put(leave.fadd(leave.vector(place), total), place)
        leave.ret_void()

    return make


_DOTS = (
    {taps: _dot(taps, whole=True, fetching=False) for taps in _AT_ONCE}
    | {taps + _PART: _dot(taps, whole=False, fetching=False) for taps in _AT_ONCE}
    | {_AT_ONCE[0] + _FETCHING: _dot(_AT_ONCE[0], whole=True, fetching=True)}
)


@routine(choice("dot", _DOTS))
def _dot_some(which, sums, a, b, shifts, lines, a_line, b_line, count, a_step, b_step, lanes, ahead, b_ahead):
    """One of _DOTS."""


@inner
def _at_once(taps):
    """How many of so many taps are done next."""
    for n in _AT_ONCE:
        if taps >= n:
            return n
    return 0


@inner
def dot_taps(lanes, taps, sums, a, b, shifts, lines, a_line, b_line, count, a_step, b_step, a_ahead, b_ahead):
    """Vector sums[t] += Σ_{l, i} a[l, i] · b[l, i] at shifts[t]; addresses, steps in bytes; lines and count >= 1.

    Elements have so many lanes; others are not read, and count as zero. What lies `a_ahead` and `b_ahead` bytes behind
    the elements of a and b is fetched for later, if that is not 0.
    """
    t = 0
    while t < taps:
        to, table, some = sums + 4 * VECTOR * t, shifts + 8 * t, _at_once(taps - t)
        which = some
        if lanes < VECTOR:
            which += _PART
        elif a_ahead and some == _AT_ONCE[0]:
            which += _FETCHING
        _dot_some(which, to, a, b, table, lines, a_line, b_line, count, a_step, b_step, lanes, a_ahead, b_ahead)
        t += some
