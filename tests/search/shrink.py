"""The smallest model that shows a finding: nodes, outputs and inputs go as long as the oracle still says the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from onnx import GraphProto, ModelProto, helper, numpy_helper

from onnx_backprop.opset.graphs.walk import all_graphs, reads, subgraphs
from tests.search.dress import copy, without_functions
from tests.search.generate import Feeds, run_stock

Pair = tuple[ModelProto, Feeds]


def shrunk(model: ModelProto, feeds: Feeds, shows: Callable[[ModelProto, Feeds], bool], seconds: float = 60) -> Pair:
    """Try changes, one after the other from the start whenever one helped, until none does or the time is over."""
    until = time.monotonic() + seconds
    current = model, feeds
    again = True
    while again:
        again = False
        for change in (_inlined, _fewer_outputs, _bare, _cut, _bypassed, _inner):
            for candidate in _each(change, current):
                if time.monotonic() > until:
                    return current
                pair = _swept(*candidate)
                if pair is not None and _size(pair) < _size(current) and shows(*pair):
                    current, again = pair, True
                    break
            if again:
                break
    return current


def _each(change: Callable[[ModelProto, Feeds], Iterator[Pair]], pair: Pair) -> Iterator[Pair]:
    try:
        yield from change(*pair)
    except Exception:  # noqa: BLE001 - a change that does not go here
        return


def _size(pair: Pair) -> tuple[int, int]:
    graphs = list(all_graphs(pair[0]))
    fields = (len(pair[0].graph.value_info), len(pair[0].graph.output), len(pair[0].graph.input))
    return sum(len(g.node) for g in graphs), sum(fields) + pair[0].ByteSize() // 8


def _swept(model: ModelProto, feeds: Feeds) -> Pair | None:
    """Without what no output needs; None where onnxruntime does not run it."""
    graph = model.graph
    needed = {v.name for v in graph.output}
    for node in reversed(list(graph.node)):
        if needed.isdisjoint(node.output):
            graph.node.remove(node)
        else:
            needed |= reads(node)
    for field in (graph.input, graph.initializer):
        for value in [v for v in field if v.name not in needed]:
            field.remove(value)
    fed = {k: v for k, v in feeds.items() if k in {v.name for v in graph.input}}
    try:
        run_stock(model, fed)
    except Exception:  # noqa: BLE001 - of many classes
        return None
    return model, fed


def _inlined(model: ModelProto, feeds: Feeds) -> Iterator[Pair]:
    if model.functions:
        yield without_functions(model), feeds


def _fewer_outputs(model: ModelProto, feeds: Feeds) -> Iterator[Pair]:
    for index in range(len(model.graph.output)):
        for keep in (True, False):
            result = copy(model)
            kept = [v for n, v in enumerate(model.graph.output) if (n == index) == keep]
            if kept:
                del result.graph.output[:]
                result.graph.output.extend(kept)
                yield result, feeds


def _bare(model: ModelProto, feeds: Feeds) -> Iterator[Pair]:
    """Without what is declared inside, with the shapes of outputs left out, initializers no inputs, lengths numbers."""
    for part in range(4):
        result = copy(model)
        graph = result.graph
        if part == 0:
            del graph.value_info[:]
        elif part == 1:
            tensors = {t.name for t in graph.initializer}
            for value in [v for v in graph.input if v.name in tensors]:
                graph.input.remove(value)
        elif part == 2:
            for value in graph.input:
                if value.name in feeds:
                    for dim, n in zip(value.type.tensor_type.shape.dim, feeds[value.name].shape, strict=True):
                        dim.dim_value = n
        else:
            for value in graph.output:
                value.type.tensor_type.ClearField("shape")
        yield result, feeds


def _cut(model: ModelProto, feeds: Feeds) -> Iterator[Pair]:
    """What a node makes becomes inputs, with the numbers that it had."""
    everything = copy(model)
    declared = {v.name for v in model.graph.output}
    names = [n for node in model.graph.node for n in node.output if n and not _is_sequence(model, node)]
    everything.graph.output.extend(helper.make_empty_tensor_value_info(n) for n in names if n not in declared)
    values = dict(zip(names, run_stock(everything, feeds, names), strict=True))
    for index in range(len(model.graph.node) - 1, -1, -1):
        node = model.graph.node[index]
        if any(n in declared for n in node.output) or not set(node.output) <= {*values, ""}:
            continue
        for fixed in (False, True):
            result = copy(model)
            del result.graph.node[index]
            fed = dict(feeds)
            for n in filter(None, node.output):
                if fixed:
                    result.graph.initializer.append(numpy_helper.from_array(values[n], n))
                else:
                    kind = helper.np_dtype_to_tensor_dtype(values[n].dtype)
                    result.graph.input.append(helper.make_tensor_value_info(n, kind, values[n].shape))
                    fed[n] = values[n]
            yield result, fed


def _is_sequence(model: ModelProto, node) -> bool:
    return node.op_type.startswith(("Sequence", "SplitToSequence")) and node.op_type != "SequenceAt"


def _bypassed(model: ModelProto, feeds: Feeds) -> Iterator[Pair]:
    """A node's output replaced by one of its inputs, onnxruntime deciding whether it fits."""
    for index, node in reversed(list(enumerate(model.graph.node))):
        for name in dict.fromkeys(filter(None, node.input)):
            result = copy(model)
            del result.graph.node[index]
            for other in result.graph.node:
                _renamed(other, node.output[0], name)
            for value in [v for v in result.graph.output if v.name == node.output[0]]:
                value.name = name
            if len({v.name for v in result.graph.output}) == len(result.graph.output):
                yield result, feeds


def _renamed(node, old: str, new: str) -> None:
    node.input[:] = [new if n == old else n for n in node.input]
    for graph in subgraphs(node):
        for inner in graph.node:
            _renamed(inner, old, new)


def _inner(model: ModelProto, feeds: Feeds) -> Iterator[Pair]:
    """The same inside branches and bodies, and results that nobody reads."""
    for which, graph in list(enumerate(all_graphs(model.graph)))[1:]:
        for index, node in reversed(list(enumerate(graph.node))):
            for name in [None, *dict.fromkeys(filter(None, node.input))]:
                result = copy(model)
                inside: GraphProto = list(all_graphs(result.graph))[which]
                del inside.node[index]
                if name is not None:
                    for other in inside.node:
                        _renamed(other, node.output[0], name)
                    for value in inside.output:
                        if value.name == node.output[0]:
                            inside.node.add(op_type="Identity", input=[name], output=[value.name])
                yield result, feeds
