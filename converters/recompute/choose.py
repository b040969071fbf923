"""Which values to compute again: the cheapest found that keep the memory of a step within a budget.

What counts is the excess, Σ over the nodes of a step of the bytes that are there beyond the budget. Values are let go
one after the other, the one first that takes most excess away for the time it costs; then those are kept again that the
budget has room for, the dearest first. A value is computed from the nearest that are kept, so chains grow where that
pays.
"""

import heapq
from itertools import count

import numpy as np

from onnx_backprop.converters.recompute.program import Buffer, GraphProgram
from onnx_backprop.converters.recompute.replay import ImpossibleError, Replay, ReplayChoice

_AIMS = (1.0, 0.8, 0.6, 0.4)  # of the budget, one after the other: what is aimed too low may pass by it


def choose(program: GraphProgram, budget: int) -> Replay:
    """The cheapest replay found within a budget in bytes; where there is none, one of the least memory found."""
    least = Replay(program, ReplayChoice())
    for share in _AIMS:
        candidate = _search(program, round(share * budget), budget)
        if candidate.peak <= budget:
            return _without_needless(program, candidate, budget)
        least = min(least, candidate, key=lambda replay: replay.peak)
    while (candidate := _search(program, round(0.95 * least.peak), 0)).peak < least.peak:
        least = candidate
    return least


def _search(program: GraphProgram, aim: int, enough: int) -> Replay:
    """Let values go until `enough` is kept to, or nothing helps towards the aim any more; the least replay found."""
    current = best = Replay(program, ReplayChoice())
    improved = True
    while improved and best.peak > max(aim, enough):
        improved = False
        order = count()
        heap = [
            (-np.inf, next(order), b) for b in sorted(program.saved - current.choice.dropped, key=lambda b: b.created)
        ]
        heapq.heapify(heap)
        while heap and current.peak > enough:
            _, _, buffer = heapq.heappop(heap)
            move = _best_move(program, current, buffer, aim)
            if move is None:
                continue
            score, replay = move
            if heap and -heap[0][0] > score:  # of some the last score is old, and no better than this one's
                heapq.heappush(heap, (-score, next(order), buffer))
                continue
            current, improved = replay, True
            best = min(best, current, key=lambda replay: replay.peak)
        if best.peak > enough:
            other = _exchanged_held(program, current, aim)
            improved = improved or other is not current
            current = other
            best = min(best, current, key=lambda replay: replay.peak)
    return best


def _exchanged_held(program: GraphProgram, current: Replay, aim: int) -> Replay:
    """The replay with other values held that are dear to compute, as far as that takes excess away."""
    for buffer in sorted(_expensive(program, current, None) | current.choice.held, key=lambda b: b.created):
        choice = ReplayChoice(current.choice.dropped, current.choice.held ^ {buffer})
        try:
            other = Replay(program, choice)
        except ImpossibleError:
            continue
        if (excess(other, aim), other.cost) < (excess(current, aim), current.cost):
            current = other
    return current


def _best_move(program: GraphProgram, current: Replay, buffer: Buffer, budget: int) -> tuple[float, Replay] | None:
    """Letting a buffer go, and perhaps holding what is dear to compute on the way to it: less excess for the cost."""
    choice = current.choice
    dropped = ReplayChoice(choice.dropped | {buffer}, choice.held - {buffer})
    moves: list[Replay] = []
    try:
        moves.append(Replay(program, dropped))
        held = _expensive(program, moves[0], current)
        if held:
            moves.append(Replay(program, ReplayChoice(dropped.dropped, dropped.held | held)))
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


def _expensive(program: GraphProgram, replay: Replay, current: Replay | None) -> frozenset[Buffer]:
    """What copies, those that are new beside another replay, make by products and could be held instead."""
    known = () if current is None else current.copied
    new = [b for b in replay.copied if b not in known and b not in replay.choice.dropped]
    return frozenset(
        b for b in new if program.sizes.products(b.node) and b.node in program.forward and program.can_hold(b.value)
    )


def excess(replay: Replay, budget: int) -> int:
    """Σ of the bytes beyond the budget, over the nodes of a step that allocate much."""
    return int(np.maximum(replay.memory - budget, 0)[replay.program.large].sum())


def _without_needless(program: GraphProgram, replay: Replay, budget: int) -> Replay:
    """The replay without what the budget has room for after all."""
    for buffer in sorted(replay.choice.dropped, key=lambda b: (-program.costs[b.node], b.created)):
        less = ReplayChoice(replay.choice.dropped - {buffer}, replay.choice.held)
        try:
            other = Replay(program, less)
        except ImpossibleError:
            continue
        if other.peak <= budget and other.cost <= replay.cost:
            replay = other
    return replay
