"""Straight-through estimators whose detach() a file has lost: y = a + (b - a), where b rounds or picks by a.

That is b, and without the stop its gradient by a is 1 - 1 = 0: nobody writes it for that. With it y passes the gradient
of b on to a, as round(a) and a codebook's entry need it. Where b is computed from nothing that a trained a is, or by a
derivative from what both are computed from, y is b and nothing else: the stop would take b's own gradient away.
"""

import onnx_ir as ir

from onnx_backprop.converters.prepare.exporters.detached import STOP
from onnx_backprop.converters.reverse.known import is_float
from onnx_backprop.converters.reverse.path import find_path
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.opset.graphs.order import dependencies
from onnx_backprop.opset.graphs.walk import is_standard


def stop_estimators(graph: ir.Graph) -> list[str]:
    """Stop the gradient of b - a where it is added to a, or a - b where it is taken from a, in place; the nodes."""
    found: list[str] = []
    for node in list(graph):
        for index in (0, 1) if is_standard(node, "Add") else (1,) if is_standard(node, "Sub") else ():
            a, difference = node.inputs[1 - index], node.inputs[index]
            inner = None if difference is None else difference.producer()
            if a is None or difference is None or inner is None or not is_standard(inner, "Sub") or not is_float(a):
                continue
            b, same = inner.inputs if node.op_type == "Add" else reversed(inner.inputs)
            if same is not a or b is None or b is a or not _picks(graph, a, b):
                continue
            stop = ir.node("Identity", [difference], name=unique(f"{difference.name}/stop", used_names(graph)))
            stop.metadata_props[STOP] = "straight through"
            stop.outputs[0].name, stop.outputs[0].type = stop.name, difference.type
            stop.outputs[0].shape = difference.shape
            graph.insert_before(node, stop)
            node.replace_input_with(index, stop.outputs[0])
            found.append(node.name or str(node.outputs[0].name))
    return found


def _picks(graph: ir.Graph, a: ir.Value, b: ir.Value) -> bool:
    """Whether b is computed from trained values on the way to a, a among them, and has no derivative by any of them."""
    floats = [value for value in graph.initializers.values() if is_float(value)]
    way = {value for value in find_path(graph, [a], floats).active if value is a or value not in floats}
    shared = way & dependencies(graph, [b])
    return bool(shared) and b not in find_path(graph, [b], {*shared, a}).active


def describe(nodes: list[str]) -> str:
    """What was taken for an estimator, in a sentence."""
    return (
        f"{', '.join(map(repr, nodes))} compute a + (b - a), where b rounds or picks by a: taken for a "
        "straight-through estimator, a + (b - a).detach(), whose detach() the exporter has left out. Gradients of b "
        "pass to a"
    )
