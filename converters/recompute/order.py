"""The order that a backward part holds least in: what belongs to one parameter alone runs as soon as it can.

dW = xᵀ · dy and db need dy and x, which can go once they have run; so they come before dx, and long before the update
that reads them. onnxruntime goes from the outputs to what they need and would compute every dx first, holding all x and
dy to the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import onnx_ir as ir

from onnx_backprop.converters.prepare.graphs import values_read


def own_nodes(backward: Sequence[ir.Node], gradients: Sequence[ir.Value]) -> set[ir.Node]:
    """The nodes of the backward part that lead to the gradient of one parameter only."""
    leads: dict[ir.Node, int] = defaultdict(int)
    for n, value in enumerate(gradients):
        if (producer := value.producer()) is not None:
            leads[producer] |= 1 << n
    for node in reversed(backward):
        for producer in (value.producer() for value in values_read(node)):
            if producer is not None:
                leads[producer] |= leads[node]
    return {node for node in backward if leads[node].bit_count() == 1}


def ordered(backward: Sequence[ir.Node], own: Collection[ir.Node]) -> list[ir.Node]:
    """The nodes of the backward part with those of one parameter right behind the last of the others that they need."""
    place = {node: n for n, node in enumerate(backward)}
    needs: dict[ir.Node, int] = {}
    behind: dict[int, list[ir.Node]] = defaultdict(list)
    for node in backward:
        producers = [p for v in values_read(node) if (p := v.producer()) is not None and p in place]
        if node in own:
            needs[node] = max((needs[p] if p in own else place[p] for p in producers), default=-1)
            behind[needs[node]].append(node)
    result: list[ir.Node] = []
    done: set[ir.Node] = set()

    def put(node: ir.Node) -> None:
        stack = [node]
        while stack:
            current = stack[-1]
            waiting = [
                p for v in values_read(current) if (p := v.producer()) is not None and p in needs and p not in done
            ]
            if waiting:
                stack.extend(sorted(waiting, key=lambda n: place[n]))
                continue
            stack.pop()
            if current not in done:
                done.add(current)
                result.append(current)

    for n, node in enumerate(backward):
        if node not in own:
            put(node)
            for waiting in behind.get(n, ()):
                put(waiting)
    for node in behind.get(-1, ()):  # that nothing else needs
        put(node)
    return result
