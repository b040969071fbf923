"""Straight-through estimators whose detach() a file has lost: y = a + (b - a), where b rounds or picks by a.

That is b, and without the stop its gradient by a is 1 - 1 = 0: nobody writes it for that. With it y passes the gradient
of b on to a, as round(a) and a codebook's entry need it. Where b is computed from nothing that a trained a is, or by a
derivative from what both are computed from, y is b and nothing else: the stop would take b's own gradient away.
"""

from collections.abc import Collection, Mapping

import onnx_ir as ir

from onnx_backprop.converters.prepare.exporters.detached import STOP
from onnx_backprop.converters.reverse.known import is_float
from onnx_backprop.converters.reverse.path import find_path
from onnx_backprop.opset.core.errors import warn
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.opset.graphs.walk import is_standard, values_read

_ROUNDING = ("Ceil", "Floor", "Round", "Sign")


def stop_estimators(graph: ir.Graph) -> list[str]:
    """Stop the gradient of b - a where it is added to a, or a - b where it is taken from a, in place; the nodes."""
    stopped: list[str] = []
    dependence: _Dependence | None = None
    for node in list(graph):
        for index in (0, 1) if is_standard(node, "Add") else (1,) if is_standard(node, "Sub") else ():
            a, difference = node.inputs[1 - index], node.inputs[index]
            inner = None if difference is None else difference.producer()
            if a is None or difference is None or inner is None or not is_standard(inner, "Sub") or not is_float(a):
                continue
            b, same = inner.inputs if node.op_type == "Add" else reversed(inner.inputs)
            if same is not a or b is None or b is a:
                continue
            dependence = dependence or _Dependence(graph)
            if not dependence.picks(a, b):
                continue
            stop = ir.node("Identity", [difference], name=unique(f"{difference.name}/stop", used_names(graph)))
            stop.metadata_props[STOP] = "straight through"
            stop.outputs[0].name, stop.outputs[0].type = stop.name, difference.type
            stop.outputs[0].shape = difference.shape
            graph.insert_before(node, stop)
            node.replace_input_with(index, stop.outputs[0])
            stopped.append(node.name or str(node.outputs[0].name))
    return stopped


class _Dependence:
    """What the values of a graph are computed from, and what of that they have a derivative by, for trained values."""

    def __init__(self, graph: ir.Graph) -> None:
        self.floats = {value for value in graph.initializers.values() if is_float(value)}
        path = find_path(graph, [value for node in graph for value in node.outputs], self.floats)
        self._reads = {node: values_read(node) for node in graph}
        self._flows = {node: self._reads[node] & path.active for node in path.nodes}

    def picks(self, a: ir.Value, b: ir.Value) -> bool:
        """Whether b is computed from trained values on the way to a, and has no derivative by any, nor by a.

        Or none but by a mean or a largest number, as the scale of weights of one bit is: b rounds then.
        """
        way, source = _before(a, self._flows), _before(b, self._reads)
        if way.isdisjoint(self.floats):
            return False
        shared = way.difference(self.floats - {a}) & source
        if not shared or shared.isdisjoint(_before(b, self._flows)):
            return bool(shared)
        makers = [value.producer() for value in source - _before(a, self._reads)]
        unreduced = {node: flows for node, flows in self._flows.items() if not node.op_type.startswith("Reduce")}
        rounds = any(maker is not None and is_standard(maker, *_ROUNDING) for maker in makers)
        return rounds and shared.isdisjoint(_before(b, unreduced))


def _before(value: ir.Value, reads: Mapping[ir.Node, Collection[ir.Value]]) -> set[ir.Value]:
    """A value, and all that leads to it by what some nodes read."""
    seen, waiting = {value}, [value]
    while waiting:
        node = waiting.pop().producer()
        new = () if node is None else [read for read in reads.get(node, ()) if read not in seen]
        seen.update(new)
        waiting += new
    return seen


def warn_of_estimators(stopped: list[str]) -> None:
    """Say what was taken for an estimator, once."""
    if stopped:
        warn(
            f"{', '.join(map(repr, stopped))} compute a + (b - a), where b rounds or picks by a: taken for a "
            "straight-through estimator, a + (b - a).detach(), whose detach() the exporter has left out. Gradients of "
            "b pass to a"
        )
