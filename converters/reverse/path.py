"""Which nodes lie on a differentiable path, what stops a gradient there, and where nothing flows at elements.

    y = Where(IsNaN(x), c, x)  =>  dx = 0 where x is NaN;  x = a · b, b = NaN  =>  da = dx · b would be NaN

Values are thrown away where they are no numbers: nothing flows back there, not 0 · NaN. Whatever an elementwise
operator before x makes of such an element, its part of every gradient is 0 where dx is 0. So it is for Imputer of
ai.onnx.ml and nan_to_num of PyTorch, which preprocessing with logarithms and powers ends in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse import registry
from onnx_backprop.converters.reverse.forward import label, unsupported
from onnx_backprop.converters.reverse.known import constant_value, is_float, type_name
from onnx_backprop.converters.reverse.loops.steps import is_loop, steps_of
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.graphs.facts import ELEMENTWISE, ROUNDS
from onnx_backprop.opset.graphs.order import dependencies
from onnx_backprop.opset.graphs.walk import is_standard, subgraphs, values_read

_ROUNDED_BYTES = 4  # longer integers are lengths and indices


@dataclass(frozen=True)
class GradientPath:
    """The nodes between the values to differentiate and those to differentiate by."""

    nodes: list[ir.Node]  # in forward order
    active: set[ir.Value]  # depend on a `wrt` value and influence an `of` value, differentiably
    stops: dict[ir.Node, registry.Stop]  # nodes that depend on a `wrt` value and let no gradient through


def find_path(graph: Iterable[ir.Node], of: Iterable[ir.Value], wrt: Iterable[ir.Value]) -> GradientPath:
    """Find the nodes on a differentiable path from a `wrt` value to an `of` value."""
    influenced = set(wrt)
    candidates: list[tuple[ir.Node, set[ir.Value]]] = []
    stops: dict[ir.Node, registry.Stop] = {}
    for node in graph:
        read = values_read(node) & influenced
        flowing = registry.FLOWING_INPUTS.get((node.domain, node.op_type))
        if read and flowing is not None:
            reached = {value for n, value in enumerate(node.inputs) if n in flowing and value in read}
            if not reached:
                stops[node] = _wrong_input(node, read)
            read = {value for value in reached if value is not None}
        if not read:
            continue
        stop = registry.stops(node)
        outputs = set() if stop is not None else _differentiable(node, read)
        if outputs and is_standard(node, "If"):
            outputs, read, stop = _through_if(node, read, outputs)
        elif outputs and is_loop(node):
            outputs, read, stop = _through_loop(node, read, outputs)
        if not outputs:
            stops[node] = stop or _wrong_type(node)
            continue
        candidates.append((node, read))
        influenced |= outputs
    active = set(of) & influenced
    nodes: list[ir.Node] = []
    for node, read in reversed(candidates):
        if active.intersection(node.outputs):
            nodes.append(node)
            active |= read
    return GradientPath(nodes[::-1], active, stops)


def _wrong_input(node: ir.Node, read: set[ir.Value]) -> registry.Stop:
    """It is reached through inputs alone that no gradient flows to."""
    zero = registry.ZERO_INPUTS[node.domain, node.op_type]
    if all(n in zero for n, value in enumerate(node.inputs) if value in read):
        return registry.Stop("its derivative by that input is zero almost everywhere")
    return registry.Stop("no gradient flows to that input", zero=False)


def _wrong_type(node: ir.Node) -> registry.Stop:
    """None of its outputs is of floats."""
    types = dict.fromkeys(type_name(value) for value in node.outputs if value.name)
    reason = f"its output has type {', '.join(types)}"
    if all(value.dtype != ir.DataType.STRING for value in node.outputs):
        return registry.Stop(reason)
    hidden = (
        "and of a number that is read back from text no gradient is known. Keep text out of the way by `wrt` and `of`"
    )
    return registry.Stop(f"{reason}, {hidden}", zero=False, refused=True)


def _through_if(
    node: ir.Node, read: set[ir.Value], outputs: set[ir.Value]
) -> tuple[set[ir.Value], set[ir.Value], registry.Stop]:
    """Those of the outputs that a branch leads to, and what it leads there from; why there are none."""
    branches = subgraphs(node)
    inside = [find_path(branch, branch.outputs, read) for branch in branches]
    reached = {
        outer
        for path, branch in zip(inside, branches, strict=True)
        for outer, y in zip(node.outputs, branch.outputs, strict=True)
        if y in path.active
    }
    stops = {inner: stop for path in inside for inner, stop in path.stops.items()}
    flowing = {value for value in read if any(value in path.active for path in inside)}
    return outputs & reached, flowing, _stopped_inside(stops)


def _through_loop(
    node: ir.Node, read: set[ir.Value], outputs: set[ir.Value]
) -> tuple[set[ir.Value], set[ir.Value], registry.Stop]:
    """The same for the steps of a Scan or a Loop. A state leads to its last value, if there is no step at all."""
    steps = steps_of(node)
    start = steps.started(read, values_between)
    path = find_path(steps.nodes, steps.body_outputs, read | start)
    states = list(zip(steps.initial, steps.final, steps.after, strict=True))
    reached = {y for x, y, after in states if x in read or after in path.active}
    reached |= {y for y, part in steps.stacked if part in path.active}
    flowing = {value for value in read if value in path.active} | {x for x, _, _ in states if x in read}
    flowing |= {x for x, part in steps.sliced if x in read and part in path.active}
    return outputs & reached, flowing, _stopped_inside(path.stops)


def values_between(nodes: Iterable[ir.Node], of: Iterable[ir.Value], wrt: Iterable[ir.Value]) -> set[ir.Value]:
    """The values on the paths from `wrt` to `of`."""
    return find_path(nodes, of, wrt).active


def _stopped_inside(stops: Mapping[ir.Node, registry.Stop]) -> registry.Stop:
    """Why no output of a node with graphs inside lets a gradient through."""
    reason = describe_stops(stops) or "no output of the graphs inside depends on it"
    return registry.Stop(reason, zero=all(stop.zero for stop in stops.values()))


def _differentiable(node: ir.Node, read: set[ir.Value]) -> set[ir.Value]:
    """The outputs that a gradient may arrive at: floats, and numbers that were rounded from floats."""
    rounds = node in ROUNDS or bool(subgraphs(node)) or any(is_rounded(value) for value in read)
    return {y for y in node.outputs if is_float(y) or y.dtype is None or (rounds and is_rounded(y))}


def is_rounded(value: ir.Value) -> bool:
    """Whether a value on a path is of integers, as quantisation and the sums of its products make them."""
    return value.dtype is not None and value.dtype.is_integer() and value.dtype.itemsize <= _ROUNDED_BYTES


def refuse_rounding(graph: Iterable[ir.Node], of: Iterable[ir.Value], path: GradientPath) -> None:
    """Raise where a part of the gradient would be left out: a stop that may not lie on a way does."""
    refused = [node for node, stop in path.stops.items() if stop.refused]
    if refused:
        leads = dependencies(graph, of)
        for node in refused:
            if not leads.isdisjoint(node.outputs):
                raise unsupported(node, path.stops[node].reason)


def describe_stops(stops: Mapping[ir.Node, registry.Stop]) -> str:
    """The first nodes that stop a gradient, and why, for messages."""
    return "; ".join(f"{n.op_type} '{label(n)}' stops it ({stop.reason})" for n, stop in list(stops.items())[:4])


def explain_unreached(
    name: str, of: Sequence[str], path: GradientPath, *, argument: str = "wrt"
) -> InvalidArgumentError:
    """The error for a value that no gradient reaches, though the caller's `argument` names it."""
    reasons = describe_stops(path.stops)
    return InvalidArgumentError(
        f"{name!r} does not influence {', '.join(of)} along a differentiable path"
        + (f": {reasons}" if reasons else "")
        + f". Leave it out of {argument}",
        argument,
    )


def imputed(nodes: Iterable[ir.Node]) -> set[ir.Node]:
    """The elementwise nodes, of some in their order, that lead to a value whose NaN or infinity is thrown away."""
    result: set[ir.Node] = set()
    values: set[ir.Value] = set()
    for node in reversed(list(nodes)):
        if node not in ELEMENTWISE:
            continue
        if not values.isdisjoint(node.outputs):
            result.add(node)
            values.update(x for x in node.inputs if x is not None)
        if node.op_type == "Where" and _throws_away(node):
            values.update(x for x in node.inputs[1:] if x is not None)
    return result


def _throws_away(node: ir.Node) -> bool:
    """Whether a Where leaves out what is no number of one of its operands."""
    condition, a, b = node.inputs
    test = None if condition is None else condition.producer()
    if test is not None and test.op_type == "Not" and test.inputs[0] is not None:
        test = test.inputs[0].producer()
    if test is None or test.domain or not test.inputs or test.inputs[0] not in (a, b):  # Constant has no inputs
        return False
    other = constant_value(test.inputs[1]) if test.op_type == "Equal" else None
    return test.op_type in ("IsNaN", "IsInf") or (other is not None and not np.isfinite(other).any())
