"""Sums over the taps of a kernel with one channel, as vector code.

    dot:   sums[t] += Σ_{l, i} a[l, i] · b[l, i + shift(t)]       the weights' gradient
    weigh: target[i] (+)= Σ_t weights[t] · source[i + shift(t)]   the correlation, or its data gradient

Every element is a vector: cells of a row or channels of a cell, of which the last few may be fewer than a vector holds.
As many taps as registers hold are done at once.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import njit

from .native_llvm import intrinsic
from .native_source import VECTOR
from .native_vectors import (
    BYTES,
    I64,
    MASK,
    VEC,
    ZERO,
    Value,
    below,
    caller,
    fma,
    function_of,
    load,
    load_masked,
    pointer,
    prefetch,
    store,
    store_masked,
)

Make = Callable[[ir.Function], None]
_AT_ONCE = 9, 3, 1  # taps


def _places(b: ir.IRBuilder, shifts: Value, taps: int) -> list[Value]:
    return [b.load(pointer(b, b.add(shifts, I64(8 * t)), I64)) for t in range(taps)]


def _lanes(entry: ir.IRBuilder, lanes: Value, whole: bool) -> Value | None:
    """The mask of the lanes of an element; None where they are all of a vector's."""
    return None if whole else below(entry, lanes)


def _load(b: ir.IRBuilder, address: Value, mask: Value | None) -> Value:
    return load(b, address) if mask is None else load_masked(b, address, mask)


def _dot(taps: int, whole: bool, fetching: bool) -> Make:
    """All lines of some taps."""

    def make(function: ir.Function) -> None:
        sums, a, b, shifts, lines, a_line, b_line, count, a_step, b_step, lanes, a_ahead, b_ahead = function.args
        entry, outer, inner, after, leave = (
            ir.IRBuilder(function.append_basic_block(n)) for n in ("entry", "outer", "inner", "after", "leave")
        )
        places, mask = _places(entry, shifts, taps), _lanes(entry, lanes, whole)
        entry.branch(outer.block)
        line, a_start, b_start = (outer.phi(I64) for _ in range(3))
        before = [outer.phi(VEC) for _ in range(taps)]
        outer.branch(inner.block)
        left, a_at, b_at = (inner.phi(I64) for _ in range(3))
        running = [inner.phi(VEC) for _ in range(taps)]
        value = _load(inner, a_at, mask)
        if fetching:
            prefetch(inner, inner.add(a_at, a_ahead), level=2)
            prefetch(inner, inner.add(b_at, b_ahead), level=2)
        result = [
            fma(inner, value, _load(inner, inner.add(b_at, place), mask), total)
            for place, total in zip(places, running, strict=True)
        ]
        fewer = inner.sub(left, I64(1))
        steps = [
            (left, count, fewer),
            (a_at, a_start, inner.add(a_at, a_step)),
            (b_at, b_start, inner.add(b_at, b_step)),
        ]
        steps += list(zip(running, before, result, strict=True))
        for phi, first, following in steps:
            phi.add_incoming(first, outer.block)
            phi.add_incoming(following, inner.block)
        inner.cbranch(inner.icmp_signed(">", fewer, I64(0)), inner.block, after.block)
        rest = after.sub(line, I64(1))
        steps = [
            (line, lines, rest),
            (a_start, a, after.add(a_start, a_line)),
            (b_start, b, after.add(b_start, b_line)),
        ]
        steps += [(total, ZERO, more) for total, more in zip(before, result, strict=True)]
        for phi, first, following in steps:
            phi.add_incoming(first, entry.block)
            phi.add_incoming(following, after.block)
        after.cbranch(after.icmp_signed(">", rest, I64(0)), outer.block, leave.block)
        for t, total in enumerate(result):
            place = leave.add(sums, I64(BYTES * t))
            store(leave, leave.fadd(load(leave, place), total), place)
        leave.ret_void()

    return make


def _weigh(taps: int, whole: bool, fetching: bool) -> Make:
    """A row of some taps; the weights stay in registers."""

    def make(function: ir.Function) -> None:
        target, target_step, source, source_step, shifts, weights, count, add, start, lanes, *aheads = function.args
        entry, loop, leave = (ir.IRBuilder(function.append_basic_block(n)) for n in ("entry", "loop", "leave"))
        places, mask = _places(entry, shifts, taps), _lanes(entry, lanes, whole)
        factors = [load(entry, entry.add(weights, I64(BYTES * t))) for t in range(taps)]
        every, nothing = (ir.Constant(MASK, [bit] * VECTOR) for bit in (1, 0))
        adding = entry.icmp_signed("!=", add, I64(0))
        before = entry.select(adding, every if mask is None else mask, nothing)
        given = entry.select(entry.icmp_signed("!=", start, I64(0)), every, nothing)
        initial = load_masked(entry, start, given)
        entry.cbranch(entry.icmp_signed(">", count, I64(0)), loop.block, leave.block)
        left, to, at = (loop.phi(I64) for _ in range(3))
        if fetching:
            prefetch(loop, loop.add(to, aheads[0]), writing=True, level=2)
            prefetch(loop, loop.add(at, aheads[1]), level=2)
        total = loop.select(adding, load_masked(loop, to, before), initial)
        for place, factor in zip(places, factors, strict=True):
            total = fma(loop, factor, _load(loop, loop.add(at, place), mask), total)
        if mask is None:
            store(loop, total, to)
        else:
            store_masked(loop, total, to, mask)
        fewer = loop.sub(left, I64(1))
        for phi, first, following in (
            (left, count, fewer),
            (to, target, loop.add(to, target_step)),
            (at, source, loop.add(at, source_step)),
        ):
            phi.add_incoming(first, entry.block)
            phi.add_incoming(following, loop.block)
        loop.cbranch(loop.icmp_signed(">", fewer, I64(0)), loop.block, leave.block)
        leave.ret_void()

    return make


def _chosen(name: str, make: Callable[[int, bool, bool], Make]) -> Make:
    """A function that calls one of those of `make`; its first argument says how many taps that one does at once.

    The last three arguments are lanes, which fill a vector or not, and how far ahead to fetch: for most taps only.
    """
    cases = [(taps, whole, False) for taps in _AT_ONCE for whole in (False, True)]

    def choose(function: ir.Function) -> None:
        taps, *rest = function.args
        lanes, to_ahead, ahead = rest[-3:]
        entry, default = (ir.IRBuilder(function.append_basic_block(n)) for n in ("entry", "default"))
        whole, most = entry.icmp_signed(">=", lanes, I64(VECTOR)), entry.icmp_signed("==", taps, I64(_AT_ONCE[0]))
        wanted = entry.icmp_signed("!=", entry.add(to_ahead, ahead), I64(0))
        fetching = entry.and_(whole, entry.and_(most, wanted))
        code = entry.add(entry.shl(taps, I64(2)), entry.add(entry.zext(whole, I64), entry.zext(fetching, I64)))
        switch = entry.switch(code, default.block)
        for case in [*cases, (_AT_ONCE[0], True, True)]:
            b = ir.IRBuilder(function.append_basic_block("case"))
            b.call(function_of(function.module, "_".join(map(str, (name, *case))), len(rest), make(*case)), rest)
            b.ret_void()
            switch.add_case(I64(4 * case[0] + case[1] + case[2]), b.block)
        default.ret_void()

    return choose


@intrinsic
def _dot_some(_context, taps, sums, a, b, shifts, lines, a_line, b_line, count, a_step, b_step, lanes, ahead, b_ahead):
    """`dot_taps_of` for as many taps as are done at once."""
    return caller("dot", 14, _chosen("dot", _dot))


@intrinsic
def _weigh_some(
    _context, taps, target, target_step, source, source_step, shifts, weights, count, add, start, lanes, to_ahead, ahead
):
    """`weigh_taps_of` for as many taps as are done at once."""
    return caller("weigh", 13, _chosen("weigh", _weigh))


@njit
def _at_once(taps):
    """How many of so many taps are done next."""
    for n in _AT_ONCE:
        if taps >= n:
            return n
    return 0


@njit
def dot_taps(taps, sums, a, b, shifts, lines, a_line, b_line, count, a_step, b_step):
    """Vector sums[t] += Σ_{l, i} a[l, i] · b[l, i] at shifts[t]; addresses, steps in bytes; lines and count >= 1."""
    dot_taps_of(VECTOR, taps, sums, a, b, shifts, lines, a_line, b_line, count, a_step, b_step, 0, 0)


@njit
def dot_taps_of(lanes, taps, sums, a, b, shifts, lines, a_line, b_line, count, a_step, b_step, a_ahead, b_ahead):
    """The same of elements of so many lanes; others are not read, and count as zero.

    What lies `a_ahead` and `b_ahead` bytes behind the elements of a and b is fetched for later, unless they are 0.
    """
    t = 0
    while t < taps:
        to, table, some = sums + 4 * VECTOR * t, shifts + 8 * t, _at_once(taps - t)
        _dot_some(some, to, a, b, table, lines, a_line, b_line, count, a_step, b_step, lanes, a_ahead, b_ahead)
        t += some


@njit
def weigh_taps(taps, to, to_step, at, step, shifts, weights, count):
    """Vector to[i] = Σ_t weights[t] · at[i] at shifts[t], tap after tap; addresses, steps in bytes."""
    weigh_taps_of(VECTOR, taps, to, to_step, at, step, shifts, weights, count, 0, 0, 0, 0)


@njit
def weigh_taps_of(lanes, taps, to, to_step, at, step, shifts, weights, count, add, start, to_ahead, ahead):
    """The same of elements of so many lanes, no others are read or written; added to `to` or to a vector, `start`.

    start: its address, 0 for none. What lies `to_ahead` and `ahead` bytes behind the elements is fetched for later,
    unless they are 0.
    """
    t = 0
    while t < taps:
        table, factors, some = shifts + 8 * t, weights + 4 * VECTOR * t, _at_once(taps - t)
        _weigh_some(some, to, to_step, at, step, table, factors, count, add + t, start, lanes, to_ahead, ahead)
        t += some
