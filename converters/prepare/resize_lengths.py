"""Resize nodes whose output length onnx's shape inference gets wrong, made unreadable to it.

Of a length and a scale onnx's inference takes the product in float64, onnxruntime in float32: 3 · (5/3 in float32) is
4.9999999 for the one and 5 for the other, and the lengths follow. It also takes a default that a caller may override,
an initializer listed as an input, for what the run will have. Such scales and sizes are made to look as if only the run
knew them, so that the length counts as unknown. What the node computes does not change.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

SCALES, SIZES = 2, 3


def infer_without_misread_scales(proto: ModelProto, infer: Callable[[ModelProto], ModelProto]) -> ModelProto:
    """`infer(proto)`, after the scales and sizes that it misreads are hidden, in the main graph."""
    if not any(_is_resize(node) for node in proto.graph.node):
        return infer(proto)
    defaults = {value.name for value in proto.graph.input} & {tensor.name for tensor in proto.graph.initializer}
    for node in list(proto.graph.node):
        for index in (SCALES, SIZES):
            if _is_resize(node) and len(node.input) > index and node.input[index] in defaults:
                _hide(proto.graph, node, index)
    while True:
        copy = ModelProto()
        copy.CopyFrom(proto)
        inferred = infer(copy)
        misread = _misread(inferred.graph)
        node = next((n for n in proto.graph.node if _is_resize(n) and n.output[0] in misread), None)
        if node is None:
            return inferred
        _hide(proto.graph, node, SCALES)


def _is_resize(node: NodeProto) -> bool:
    return node.op_type == "Resize" and node.domain in ("", "ai.onnx")


def _misread(graph: GraphProto) -> set[str]:
    """The outputs of Resize nodes that have another length by onnxruntime than by inference."""
    lengths = {
        value.name: [d.dim_value if d.HasField("dim_value") else None for d in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.value_info, *graph.output)
    }
    lengths |= {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    constants = _constants(graph)
    result: set[str] = set()
    for node in filter(_is_resize, graph.node):
        scales = constants.get(node.input[SCALES]) if len(node.input) > SCALES else None
        x, y = lengths.get(node.input[0]), lengths.get(node.output[0])
        if scales is None or not x or not y or len(x) != len(y):
            continue
        axes = next((list(a.ints) for a in node.attribute if a.name == "axes"), []) or list(range(len(x)))
        values = numpy_helper.to_array(scales).reshape(-1)
        for axis, scale in zip(axes, values, strict=False):
            length, inferred = (d[axis] if -len(d) <= axis < len(d) else None for d in (x, y))
            if length is not None and inferred is not None and inferred != int(np.float32(length) * np.float32(scale)):
                result.add(node.output[0])
    return result


def _constants(graph: GraphProto) -> dict[str, TensorProto]:
    inputs = {value.name for value in graph.input}
    result = {tensor.name: tensor for tensor in graph.initializer if tensor.name not in inputs}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            result[node.output[0]] = node.attribute[0].t
    return result


def _hide(graph: GraphProto, node: NodeProto, index: int) -> None:
    """Where(some bit of X, scales, scales), or the same with sizes.

    An Identity would hide them from onnx alone: onnxruntime removes it when a session starts, infers the wrong length
    and puts it wherever a Shape of the result is asked for.
    """
    position = next(n for n, other in enumerate(graph.node) if other is node or other == node)
    names = [f"{node.output[0]}/hidden/{part}" for part in ("all", "first", "flat", "bit", "scales")]
    every, first, flat, bit, hidden = names
    graph.initializer.append(numpy_helper.from_array(np.array([-1], np.int64), every))
    graph.initializer.append(numpy_helper.from_array(np.array([0], np.int64), first))
    nodes = [
        helper.make_node("Reshape", [node.input[0], every], [flat], name=flat),
        helper.make_node("Gather", [flat, first], [f"{bit}/value"], name=f"{bit}/value"),
        helper.make_node("Cast", [f"{bit}/value"], [bit], name=bit, to=TensorProto.BOOL),
        helper.make_node("Where", [bit, node.input[index], node.input[index]], [hidden], name=hidden),
    ]
    node.input[index] = hidden
    for one in reversed(nodes):
        graph.node.insert(position, one)
    _forget_shapes(graph, node.output[0])


def _forget_shapes(graph: GraphProto, name: str) -> None:
    """Drop what is stated of the lengths of a value and of all that follows from it; onnx may have inferred it."""
    names = {name}
    for node in graph.node:
        if names & set(node.input):
            names |= set(node.output)
    kept = [value for value in graph.value_info if value.name not in names]
    del graph.value_info[:]
    graph.value_info.extend(kept)
    for output in graph.output:
        if output.name in names:
            for d in output.type.tensor_type.shape.dim:
                d.Clear()
