"""Resize nodes whose output length onnx's shape inference gets wrong, made unreadable to it.

Of a length and a scale onnx's inference takes the product in float64, onnxruntime in float32: 3 · (5/3 in float32) is
4.9999999 for the one and 5 for the other, and the lengths follow. It also takes a default that a caller may override,
an initializer listed as an input, for what the run will have. Such scales and sizes are made to look as if only the run
knew them, so that the length counts as unknown. What the node computes does not change.
"""

from collections.abc import Callable

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backprop.converters.prepare.graphs import DEFAULT_DOMAINS, attributes_of, called, copied
from onnx_backprop.converters.prepare.inference.conv_lengths import forget_shapes
from onnx_backprop.opset.core.errors import InvalidModelError
from onnx_backprop.opset.functions.scope import Scope

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
        inferred = infer(copied(proto))
        misread = _misread(inferred.graph)
        node = next((n for n in proto.graph.node if _is_resize(n) and n.output[0] in misread), None)
        if node is None:
            return inferred
        _hide(proto.graph, node, SCALES)


def _is_resize(node: NodeProto) -> bool:
    return node.op_type == "Resize" and node.domain in DEFAULT_DOMAINS


def _misread(graph: GraphProto) -> set[str]:
    """The outputs of Resize nodes that have another length by onnxruntime than by inference."""
    scope = Scope(graph)
    result: set[str] = set()
    for node in filter(_is_resize, graph.node):
        scales = scope.constant(node.input[SCALES]) if len(node.input) > SCALES and node.input[SCALES] else None
        x, y = scope.dims(node.input[0]), scope.dims(node.output[0])
        if scales is None or not x or not y or len(x) != len(y):
            continue
        if scales.ndim != 1:
            message = f"expected scales in one axis, got the shape {list(scales.shape)}"
            raise InvalidModelError(message, op_type="Resize", node=called(node))
        axes = attributes_of(node).get("axes") or range(len(x))
        for axis, scale in zip(axes, scales, strict=False):
            length, inferred = (d[axis] if -len(d) <= axis < len(d) else None for d in (x, y))
            if not isinstance(length, int) or not isinstance(inferred, int):
                continue
            with np.errstate(over="ignore"):
                product = np.float32(length) * np.float32(scale)
            if not (scale > 0 and np.isfinite(product)):
                told = [float(s) for s in scales]
                message = f"expected scales above 0 that leave lengths, got {told}"
                raise InvalidModelError(message, op_type="Resize", node=called(node))
            if inferred != int(product):
                result.add(node.output[0])
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
    forget_shapes(graph, node.output)
