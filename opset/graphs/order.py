"""What comes before what: the nodes that make values, those that values are computed by, and those that follow them.

Nodes are those of onnx, whose values are names, or those of onnx_ir.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from graphlib import TopologicalSorter
from heapq import heapify, heappop, heappush
from typing import Any

from onnx import NodeProto

from onnx_backprop.opset.graphs.lazy import ir
from onnx_backprop.opset.graphs.walk import reads, values_read


def producers(nodes: Iterable[NodeProto]) -> dict[str, NodeProto]:
    """The node that makes each value."""
    return {name: node for node in nodes for name in node.output if name}


def positions(nodes: Iterable[NodeProto] | Iterable[ir.Node]) -> dict[Any, int]:
    """The position of the node that makes each value."""
    return {value: n for n, node in enumerate(nodes) for value in _outputs_of(node) if value}


def consumers(nodes: Iterable[NodeProto]) -> defaultdict[str, list[NodeProto]]:
    """The nodes that read each value, once each, be it in the graphs inside them."""
    result: defaultdict[str, list[NodeProto]] = defaultdict(list)
    for node in nodes:
        for name in reads(node):
            result[name].append(node)
    return result


def uses(nodes: Iterable[NodeProto]) -> defaultdict[str, list[tuple[NodeProto, int]]]:
    """The inputs that each value is: of which nodes, and their positions there."""
    result: defaultdict[str, list[tuple[NodeProto, int]]] = defaultdict(list)
    for node in nodes:
        for index, name in enumerate(node.input):
            result[name].append((node, index))
    return result


def ancestors(nodes: Iterable[Any], values: Iterable[Any], stops: Collection[Any] = ()) -> list[int]:
    """The positions of the nodes that values are computed by, going no further than `stops`, in order."""
    nodes = list(nodes)
    maker = positions(nodes)
    result: set[int] = set()
    waiting = list(values)
    while waiting:
        n = maker.get(waiting.pop())
        if n is not None and n not in result:
            result.add(n)
            waiting += [value for value in _read(nodes[n]) if value not in stops]
    return sorted(result)


def dependencies(nodes: Iterable[Any], values: Iterable[Any]) -> set[Any]:
    """The values, and all that the nodes they are computed by read."""
    nodes, values = list(nodes), set(values)
    return values.union(*(_read(nodes[n]) for n in ancestors(nodes, values)))


def descendants(nodes: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """The nodes that compute something from values, in order, which is that of the nodes."""
    reached, result = set(values), []
    for node in nodes:
        if not reached.isdisjoint(_read(node)):
            result.append(node)
            reached.update(_outputs_of(node))
    return result


def topological(nodes: Sequence[NodeProto]) -> list[NodeProto]:
    """The nodes, each behind those that make what it reads; CycleError of graphlib where there is no such order."""
    return [nodes[n] for n in TopologicalSorter(_before(nodes)).static_order()]


def for_default_sessions(nodes: Sequence[NodeProto]) -> list[NodeProto]:
    """The nodes in the order in which a file must list them if a session without options is to run them nearly as here.

    onnxruntime's default order is that of a depth-first search from the nodes whose outputs no node reads, and of the
    nodes that one reads it visits the last in the file first. It would run gradients of weights, which the optimizer
    alone reads, after everything else, and hold what they read until then. So of the nodes that may come next, the one
    that was last comes first.
    """
    before = _before(nodes)
    after: defaultdict[int, list[int]] = defaultdict(list)
    for n, earlier in before.items():
        for m in earlier:
            after[m].append(n)
    missing = {n: len(earlier) for n, earlier in before.items()}
    ready = [-n for n in missing if not missing[n]]
    heapify(ready)
    result = []
    while ready:
        n = -heappop(ready)
        result.append(nodes[n])
        for m in after[n]:
            missing[m] -= 1
            if not missing[m]:
                heappush(ready, -m)
    return result


def _before(nodes: Sequence[NodeProto]) -> dict[int, list[int]]:
    """By position: the positions of the nodes that make what each reads."""
    maker = positions(nodes)
    return {n: sorted({maker[name] for name in reads(node) & maker.keys()}) for n, node in enumerate(nodes)}


def _read(node: NodeProto | ir.Node) -> set[Any]:
    """What a node reads: `reads` or `values_read`."""
    return reads(node) if isinstance(node, NodeProto) else values_read(node)


def _outputs_of(node: NodeProto | ir.Node) -> Sequence[Any]:
    return node.output if isinstance(node, NodeProto) else node.outputs
