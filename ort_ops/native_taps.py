"""Sums over the taps of a kernel with one channel, as vector code.

    dot:   sums[t] += Σ_{l, i} a[l, i] · b[l, i + shift(t)]       the weights' gradient
    weigh: target[i] (+)= Σ_t weights[t] · source[i + shift(t)]   the correlation, or its data gradient

Every element is a vector: cells of a row or channels of a cell, of which the last few may be fewer than a vector holds.
As many taps as registers hold are done at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    load,
    load_masked,
    pointer,
    prefetch,
    store,
    store_masked,
)

Make = Callable[[ir.Function], None]


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


def _dot_function(taps: int, *, whole: bool, fetching: bool = False) -> Any:
    @intrinsic
    def dot(_context, sums, a, b, shifts, lines, a_line, b_line, count, a_step, b_step, lanes, a_ahead, b_ahead):
        return caller(f"dot_{taps}_{whole}_{fetching}", 13, _dot(taps, whole, fetching))

    return dot


def _weigh_function(taps: int, *, whole: bool, fetching: bool = False) -> Any:
    @intrinsic
    def weigh(
        _context, target, target_step, source, source_step, shifts, weights, count, add, start, lanes, to_ahead, ahead
    ):
        return caller(f"weigh_{taps}_{whole}_{fetching}", 12, _weigh(taps, whole, fetching))

    return weigh


_dot_9, _dot_3, _dot_1 = (_dot_function(taps, whole=True) for taps in (9, 3, 1))
_ahead_9 = _dot_function(9, whole=True, fetching=True)
_part_9, _part_3, _part_1 = (_dot_function(taps, whole=False) for taps in (9, 3, 1))
_weigh_9, _weigh_3, _weigh_1 = (_weigh_function(taps, whole=True) for taps in (9, 3, 1))
_weigh_ahead_9 = _weigh_function(9, whole=True, fetching=True)
_few_9, _few_3, _few_1 = (_weigh_function(taps, whole=False) for taps in (9, 3, 1))


@njit
def dot_taps(taps, sums, a, b, shifts, lines, a_line, b_line, count, a_step, b_step):
    """Vector sums[t] += Σ_{l, i} a[l, i] · b[l, i] at shifts[t]; addresses, steps in bytes; lines and count >= 1."""
    dot_taps_of(VECTOR, taps, sums, a, b, shifts, lines, a_line, b_line, count, a_step, b_step, 0, 0)


@njit
def dot_taps_of(lanes, taps, sums, a, b, shifts, lines, a_line, b_line, count, a_step, b_step, a_ahead, b_ahead):
    """The same of elements of so many lanes; others are not read, and count as zero.

    What lies `a_ahead` and `b_ahead` bytes behind the elements of a and b is fetched for later, if that is not 0.
    """
    t = 0
    while t < taps:
        to, table = sums + 4 * VECTOR * t, shifts + 8 * t
        if lanes >= VECTOR:
            if taps - t >= 9:
                if a_ahead:
                    _ahead_9(to, a, b, table, lines, a_line, b_line, count, a_step, b_step, lanes, a_ahead, b_ahead)
                else:
                    _dot_9(to, a, b, table, lines, a_line, b_line, count, a_step, b_step, lanes, 0, 0)
                t += 9
            elif taps - t >= 3:
                _dot_3(to, a, b, table, lines, a_line, b_line, count, a_step, b_step, lanes, 0, 0)
                t += 3
            else:
                _dot_1(to, a, b, table, lines, a_line, b_line, count, a_step, b_step, lanes, 0, 0)
                t += 1
        elif taps - t >= 9:
            _part_9(to, a, b, table, lines, a_line, b_line, count, a_step, b_step, lanes, 0, 0)
            t += 9
        elif taps - t >= 3:
            _part_3(to, a, b, table, lines, a_line, b_line, count, a_step, b_step, lanes, 0, 0)
            t += 3
        else:
            _part_1(to, a, b, table, lines, a_line, b_line, count, a_step, b_step, lanes, 0, 0)
            t += 1


@njit
def weigh_taps(taps, to, to_step, at, step, shifts, weights, count):
    """Vector to[i] = Σ_t weights[t] · at[i] at shifts[t], tap after tap; addresses, steps in bytes."""
    weigh_taps_of(VECTOR, taps, to, to_step, at, step, shifts, weights, count, 0, 0, 0, 0)


@njit
def weigh_taps_of(lanes, taps, to, to_step, at, step, shifts, weights, count, add, start, to_ahead, ahead):
    """The same of elements of so many lanes, no others are read or written; added to `to` or to a vector, `start`.

    start: its address, 0 for none. What lies `to_ahead` and `ahead` bytes behind the elements is fetched for later, if
    `ahead` is not 0.
    """
    t = 0
    while t < taps:
        table, factors = shifts + 8 * t, weights + 4 * VECTOR * t
        if lanes >= VECTOR:
            if taps - t >= 9:
                if ahead:
                    _weigh_ahead_9(to, to_step, at, step, table, factors, count, add + t, start, lanes, to_ahead, ahead)
                else:
                    _weigh_9(to, to_step, at, step, table, factors, count, add + t, start, lanes, 0, 0)
                t += 9
            elif taps - t >= 3:
                _weigh_3(to, to_step, at, step, table, factors, count, add + t, start, lanes, 0, 0)
                t += 3
            else:
                _weigh_1(to, to_step, at, step, table, factors, count, add + t, start, lanes, 0, 0)
                t += 1
        elif taps - t >= 9:
            _few_9(to, to_step, at, step, table, factors, count, add + t, start, lanes, 0, 0)
            t += 9
        elif taps - t >= 3:
            _few_3(to, to_step, at, step, table, factors, count, add + t, start, lanes, 0, 0)
            t += 3
        else:
            _few_1(to, to_step, at, step, table, factors, count, add + t, start, lanes, 0, 0)
            t += 1
