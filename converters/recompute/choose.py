"""Which values to compute again: the cheapest found that keep the memory of a step within a budget.

What counts is the excess, Σ over the nodes of a step of the bytes that are there beyond the budget. Values are let go one after the
other, the one first that takes most excess away for the time it costs; then those are kept again that the budget has room for, the
dearest first. A value is computed from the nearest that are kept, so chains grow where that pays.
"""

from __future__ import annotations

import heapq
from itertools import count

import numpy as np

from onnx_backprop.converters.recompute.program import Buffer, Program
from onnx_backprop.converters.recompute.replay import Choice, ImpossibleError, Replay

_SEARCHES = 5  # for the least memory, where a budget cannot be met


def choose(program: Program, budget: int) -> Replay:
    """The cheapest replay found within a budget in bytes; where there is none, one of the least memory found."""
    found = _search(program, budget)
    if found.peak <= budget:
        return _kept_again(program, found, budget)
    least = found
    for _ in range(_SEARCHES):
        found = _search(program, round(0.95 * least.peak))
        if found.peak >= least.peak:
            break
        least = found
    return least if least.peak > budget else _kept_again(program, least, budget)


def _search(program: Program, budget: int) -> Replay:
    """Let values go until the budget is kept, or nothing that is left helps; the replay of the least memory."""
    current = best = Replay(program, Choice())
    improved = True
    while improved and current.peak > budget:
        improved = False
        order = count()
        heap = [(-np.inf, next(order), buffer) for buffer in program.saved - current.choice.dropped]
        heapq.heapify(heap)
        while heap and current.peak > budget:
            _, _, buffer = heapq.heappop(heap)
            move = _best_move(program, current, buffer, budget)
            if move is None:
                continue
            score, replay = move
            if heap and -heap[0][0] > score:  # of some the last score is old, and no better than this one's
                heapq.heappush(heap, (-score, next(order), buffer))
                continue
            current, improved = replay, True
            best = min(best, current, key=lambda replay: replay.peak)
    return current if current.peak <= budget else best


def _best_move(program: Program, current: Replay, buffer: Buffer, budget: int) -> tuple[float, Replay] | None:
    """Letting a buffer go, and perhaps holding what is dear to compute on the way to it: less excess for the cost."""
    choice = current.choice
    dropped = Choice(choice.dropped | {buffer}, choice.held - {buffer})
    moves: list[Replay] = []
    try:
        moves.append(Replay(program, dropped))
        held = _dear(program, moves[0], current)
        if held:
            moves.append(Replay(program, Choice(dropped.dropped, dropped.held | held)))
    except ImpossibleError:
        return None
    before, best = excess(current, budget), None
    for replay in moves:
        gain = before - excess(replay, budget)
        if gain > 0:
            score = gain / max(replay.cost - current.cost, 1.0)
            if best is None or score > best[0]:
                best = score, replay
    return best


def _dear(program: Program, replay: Replay, current: Replay) -> frozenset[Buffer]:
    """What new copies make by products and could be held instead."""
    new = [b for b in replay.copied if b not in current.copied and b not in replay.choice.dropped]
    return frozenset(
        b for b in new if program.sizes.products(b.node) and b.node in program.forward and program.can_hold(b.value)
    )


def excess(replay: Replay, budget: int) -> int:
    """Σ of the bytes beyond the budget, over the nodes of a step that allocate much."""
    return int(np.maximum(replay.memory - budget, 0)[replay.program.large].sum())


def _kept_again(program: Program, replay: Replay, budget: int) -> Replay:
    """The replay without what the budget has room for after all."""
    for buffer in sorted(replay.choice.dropped, key=lambda b: (-program.costs[b.node], b.made)):
        less = Choice(replay.choice.dropped - {buffer}, replay.choice.held)
        try:
            other = Replay(program, less)
        except ImpossibleError:
            continue
        if other.peak <= budget and other.cost <= replay.cost:
            replay = other
    return replay
