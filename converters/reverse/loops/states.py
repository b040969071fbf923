"""States of a Loop in the middle of it, by running the steps before again: for sequences, which no output can stack."""

from collections.abc import Sequence

import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.expand import Expansion, prune_and_name
from onnx_backprop.converters.reverse.loops.steps import Steps, copy_of
from onnx_backprop.opset.graphs.walk import values_read


def states_at(node: ir.Node, states: Sequence[int], count: ir.Value, op: Builder) -> list[ir.Value]:
    """Some states of a Loop behind so many of its steps, which it has made: `count`, 0-D int64."""
    steps = copy_of(node)
    carried = _deciding(steps, states)
    inner = op.inside()
    inner.prefix = f"{op.prefix}/before"
    inner.nodes.extend(steps.nodes)
    go, before = steps.body_inputs[1], [steps.before[i] for i in carried]
    outputs = [inner.Identity(go), *(inner.typed(inner.Identity(steps.after[i]), steps.after[i]) for i in carried)]
    prune_and_name(Expansion(steps.nodes, []), inner, node, list(inner.nodes), outputs)
    given = [*steps.body_inputs[:2], *before]
    for value in given:
        value.name = inner.unique(f"{inner.prefix}/{value.name}")
    body = ir.Graph(given, outputs, nodes=inner.nodes, name=inner.unique(f"{inner.prefix}/body"))
    inputs = [count, None, *(steps.initial[i] for i in carried)]
    results = op.emit("Loop", inputs, {"body": body}, outputs=len(carried))
    for result, value in zip(results, outputs[1:], strict=True):
        result.type, result.shape = value.type, value.shape
    return [results[carried.index(i)] for i in states]


def _deciding(steps: Steps, states: Sequence[int]) -> list[int]:
    """These states, and those that steps make them of."""
    deciding = set(states)
    while True:
        needed = {steps.after[i] for i in deciding}
        for node in reversed(steps.nodes):
            if not needed.isdisjoint(node.outputs):
                needed |= values_read(node)
        more = {i for i, value in enumerate(steps.before) if value in needed} - deciding
        if not more:
            return sorted(deciding)
        deciding |= more
