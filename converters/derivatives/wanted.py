"""Which values of a graph decide others by what they hold, not by their shapes alone."""

from collections.abc import Iterable

import onnx_ir as ir

from onnx_backprop.opset.functions.declared import operator
from onnx_backprop.opset.graphs.walk import is_standard, subgraphs


def asks_shape(node: ir.Node, index: int) -> bool:
    """Whether a node reads nothing but the shape of an input."""
    if (op := operator(node)) is not None:
        return op.inputs[index].shape_only
    return is_standard(node, "SequenceLength", "Shape", "Size")


def values_of(graph: ir.Graph, outputs: Iterable[ir.Value]) -> set[ir.Value]:
    """Everything of which the values, not the shapes alone, decide the values of some outputs, captured ones too."""
    wanted = set(outputs)
    for node in reversed(list(graph)):
        if wanted.isdisjoint(node.outputs):
            continue
        if is_standard(node, "Loop", "Scan"):
            wanted |= _of_loop(node, wanted)
            continue
        wanted |= {x for n, x in enumerate(node.inputs) if x is not None and not asks_shape(node, n)}
        for inner in subgraphs(node):
            ends = inner.outputs if len(inner.outputs) != len(node.outputs) else _asked(inner.outputs, node, wanted)
            wanted |= values_of(inner, ends)
    return wanted


def _asked(ends: Iterable[ir.Value], node: ir.Node, wanted: set[ir.Value]) -> list[ir.Value]:
    """What a graph puts out for the outputs of a node that are wanted."""
    return [end for end, output in zip(ends, node.outputs, strict=True) if output in wanted]


def _of_loop(node: ir.Node, wanted: set[ir.Value]) -> set[ir.Value]:
    """The same of a Loop or a Scan: a state is wanted where a step makes something wanted of it."""
    (body,) = subgraphs(node)
    loop = node.op_type == "Loop"
    first = 2 if loop else 0  # trip count and condition, which decide in any case
    states = len(node.inputs) - first if loop else len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
    ends = list(body.outputs)[1 if loop else 0 :]
    asked = set(_asked(ends, node, wanted)) | set(list(body.outputs)[: 1 if loop else 0])
    while True:
        inner = values_of(body, asked)
        carried = {end for end, begin in zip(ends, body.inputs[first : first + states], strict=False) if begin in inner}
        if carried <= asked:
            break
        asked |= carried
    decided = {x for x, begin in zip(node.inputs, body.inputs, strict=True) if x is not None and begin in inner}
    return inner | decided | {x for x in node.inputs[:first] if x is not None}
