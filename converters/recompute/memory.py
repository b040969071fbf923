"""`fit_memory`: a training graph whose steps keep to a budget of memory."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import floor
from typing import Any

import onnx_ir as ir

from onnx_backprop.converters.recompute.choose import choose
from onnx_backprop.converters.recompute.emit import RecomputeEmitter
from onnx_backprop.converters.recompute.order import exclusive_nodes, ordered
from onnx_backprop.converters.recompute.program import GraphProgram
from onnx_backprop.converters.recompute.replay import Replay, ReplayChoice
from onnx_backprop.converters.recompute.sizes import sizes
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.tables import format_bytes
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.graphs.names import used_names

_UNITS = {"": 1, "b": 1} | {f"{p}b": 1000**n for n, p in enumerate("kmgt", 1)}
_UNITS |= {f"{p}ib": 1024**n for n, p in enumerate("kmgt", 1)}


@dataclass(frozen=True)
class Forecast:
    """Bytes of activations in memory at once; the time of a step over that without a budget; nodes run again."""

    without: int
    with_budget: int
    time: float
    copies: int


def check_memory(memory: int | str) -> float | int:
    """A budget: a number of bytes, or a share (a float) of what is needed without one."""
    text = memory.strip().lower() if isinstance(memory, str) else ""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%|[a-z]*)", text)
    if match and match[2] == "%" and 0 < float(match[1]) <= 100:
        return float(match[1]) / 100
    if match and match[2] in _UNITS and (size := floor(float(match[1]) * _UNITS[match[2]])) > 0:
        return size
    if type(memory) is int and memory > 0:
        return memory
    raise InvalidArgumentError(
        f"expected a number of bytes, as '512MB', '2GiB' or 512_000_000, or a share as '50%', got {memory!r}", "memory"
    )


def fit_memory(
    model: ir.Model,
    forward: Collection[ir.Node],
    backward: Collection[ir.Node],
    gradients: Sequence[ir.Value],
    memory: float | int,
    lengths: Mapping[str, int],
) -> dict[str, float]:
    """Rewrite a training graph so that its activations keep to a budget; what is expected of it, as plain values.

    Activations are everything that the forward and the backward part compute but the gradients of the parameters.
    Errors: InvalidArgumentError for symbolic dimensions without a length, and for a budget that cannot be kept.
    """
    graph = model.graph
    known = sizes(model, lengths)
    back = [node for node in graph if node in backward]
    exclusive = exclusive_nodes(back, gradients)
    before = [node for node in graph if node in forward]
    behind = [node for node in graph if node not in forward and node not in backward]
    program = GraphProgram(
        graph, [*before, *ordered(back, exclusive), *behind], forward, backward, known, set(gradients)
    )
    without = Replay(program, ReplayChoice()).peak
    budget = floor(memory * without) if isinstance(memory, float) else memory
    replay = choose(program, budget)
    time = 1 + replay.cost / max(sum(program.costs.values()), 1.0)
    if replay.peak > budget:
        raise InvalidArgumentError(
            f"a budget of {format_bytes(budget)} for activations cannot be kept. The least found is "
            f"{format_bytes(replay.peak)} ({replay.peak / max(without, 1):.0%} of {format_bytes(without)} without one) "
            f"for about {time:.2f} times the time of a step",
            "memory",
        )
    nodes = RecomputeEmitter(program, replay, exclusive, Builder(used_names(graph))).write()
    graph.remove(list(graph))
    graph.extend(nodes)
    return asdict(Forecast(without, replay.peak, round(time, 4), sum(map(len, replay.copies_at.values()))))


def describe(expected: Mapping[str, Any]) -> str:
    """What `fit_memory` expects, in one sentence; nothing for what is none of its answers."""
    without, budget, time, copies = (expected.get(f.name) for f in fields(Forecast))
    if not (isinstance(without, int | float) and isinstance(budget, int | float)):
        return ""
    if not (isinstance(time, int | float) and isinstance(copies, int | float)):
        return ""
    return (
        f"{format_bytes(budget)} at once, {format_bytes(without)} without a budget; {copies} nodes run again, "
        f"for about {time:.2f} times the time of a step"
    )
