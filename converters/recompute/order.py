"""The order that a backward part holds least in: what belongs to one parameter alone runs as soon as it can.

dW = xᵀ · dy and db need dy and x, which can go once they have run; so they come before dx, and long before the update
that reads them. The default order of onnxruntime goes from the outputs to what they need and computes every dx first,
holding all x and dy to the end; its PRIORITY_BASED order runs nodes in the order of the file.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from math import inf, prod

import onnx_ir as ir

from onnx_backprop.converters.reverse.known import dims
from onnx_backprop.opset.graphs.walk import values_read

_BATCH, _SIDE = 8, 64  # for the first length, and others, that only a run knows


def exclusive_nodes(backward: Sequence[ir.Node], gradients: Sequence[ir.Value]) -> dict[ir.Node, ir.Value]:
    """The nodes of the backward part that lead to the gradient of one parameter only, and that gradient."""
    reached: dict[ir.Node, int] = defaultdict(int)
    for n, value in enumerate(gradients):
        if (producer := value.producer()) is not None:
            reached[producer] |= 1 << n
    for node in reversed(backward):
        for producer in (value.producer() for value in values_read(node)):
            if producer is not None:
                reached[producer] |= reached[node]
    return {n: gradients[reached[n].bit_length() - 1] for n in backward if reached[n].bit_count() == 1}


def ordered(backward: Sequence[ir.Node], exclusive: Collection[ir.Node]) -> list[ir.Node]:
    """The nodes of the backward part with those of one parameter right behind the last of the others that they need."""
    place = {node: n for n, node in enumerate(backward)}
    needs: dict[ir.Node, int] = {}
    behind: dict[int, list[ir.Node]] = defaultdict(list)
    for node in backward:
        producers = [p for v in values_read(node) if (p := v.producer()) is not None and p in place]
        if node in exclusive:
            needs[node] = max((needs[p] if p in exclusive else place[p] for p in producers), default=-1)
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
        if node not in exclusive:
            put(node)
            for waiting in behind.get(n, ()):
                put(waiting)
    for node in behind.get(-1, ()):  # that nothing else needs
        put(node)
    return result


def weights_early(graph: ir.Graph, forward: Collection[ir.Node], gradients: Sequence[ir.Value]) -> None:
    """Give a graph whose backward part follows its forward part this order.

    Gradients that are larger than all that they are made of come last: they would fill the memory that is to be freed.
    """
    nodes, first = list(graph), set(forward)
    start = 1 + max((n for n, node in enumerate(nodes) if node in first), default=-1)
    backward = sorted(nodes[start:], key=lambda node: node.op_type != "Constant")  # which several may read
    exclusive = exclusive_nodes(backward, gradients)
    read: dict[ir.Value, set[ir.Value]] = defaultdict(set)
    for node, gradient in exclusive.items():
        read[gradient].update(
            v for v in values_read(node) if v.producer() is not None and v.producer() not in exclusive
        )
    large = {gradient for gradient, values in read.items() if _nbytes(gradient) > sum(map(_nbytes, values))}
    late = [node for node in backward if exclusive.get(node) in large]
    graph.remove(backward)
    graph.extend(ordered([node for node in backward if exclusive.get(node) not in large], exclusive))
    graph.extend(late)


def _nbytes(value: ir.Value) -> float:
    """Of a value, in a small batch; infinitely many of one that nothing is known of."""
    shape = dims(value)
    if shape is None or value.dtype is None:
        return inf
    known = [d if isinstance(d, int) else _SIDE if n else _BATCH for n, d in enumerate(shape)]
    return prod(known) * value.dtype.itemsize
