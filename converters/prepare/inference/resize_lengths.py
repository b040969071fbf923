"""Resize nodes whose output length onnx's shape inference gets wrong, made unreadable to it.

Of a length and a scale onnx's inference takes the product in float64, onnxruntime in float32: 3 · (5/3 in float32) is
4.9999999 for the one and 5 for the other, and the lengths follow. It also takes a default that a caller may override,
an initializer listed as an input, for what the run will have. Such scales and sizes are made to look as if only the run
knew them, so that the length counts as unknown. What the node computes does not change.
"""

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from onnx_backprop.converters.prepare.inference.conv_lengths import forget_shapes
from onnx_backprop.converters.prepare.inference.driver import Correct
from onnx_backprop.opset.core.errors import InvalidModelError
from onnx_backprop.opset.graphs.edit import insert
from onnx_backprop.opset.graphs.emit import Emitter
from onnx_backprop.opset.graphs.names import used_names
from onnx_backprop.opset.graphs.scope import Scope
from onnx_backprop.opset.graphs.walk import attributes_of, called, is_standard

SCALES, SIZES = 2, 3


def hidden_scales(proto: ModelProto) -> Correct:
    """The scales and sizes that inference misreads are hidden from it, in the main graph."""
    defaults = {value.name for value in proto.graph.input} & {tensor.name for tensor in proto.graph.initializer}
    for node in list(filter(_is_resize, proto.graph.node)):
        for index in (SCALES, SIZES):
            if len(node.input) > index and node.input[index] in defaults:
                _hide(proto.graph, node, index)

    def correct(inferred: ModelProto) -> ModelProto | None:
        misread = _misread(inferred.graph)
        node = next((n for n in proto.graph.node if _is_resize(n) and n.output[0] in misread), None)
        if node is None:
            return None
        _hide(proto.graph, node, SCALES)
        return proto

    return correct


def _is_resize(node: NodeProto) -> bool:
    return is_standard(node, "Resize")


def _misread(graph: GraphProto) -> set[str]:
    """The outputs of Resize nodes that have another length by onnxruntime than by inference."""
    resizes = list(filter(_is_resize, graph.node))
    scope = Scope(graph if resizes else None)
    result: set[str] = set()
    for node in resizes:
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
                values = [float(s) for s in scales]
                message = f"expected scales above 0 that leave lengths, got {values}"
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
    op = Emitter(f"{node.output[0]}/hidden", used_names(graph))
    first = op.Gather(op.Reshape(node.input[0], op.constant([-1])), op.constant([0]))
    node.input[index] = op.Where(op.Cast(first, to=TensorProto.BOOL), node.input[index], node.input[index])
    insert(graph, position, op.nodes)
    forget_shapes(graph, node.output)
