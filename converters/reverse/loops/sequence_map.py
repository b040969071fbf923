"""SequenceMap as the Loop that it stands for, with what its body reads from outside."""

import onnx_ir as ir

from onnx_backprop.converters.reverse.expand import Expansion, graph_copy
from onnx_backprop.converters.reverse.known import element_type
from onnx_backprop.converters.reverse.sequences import is_sequence, sequence_type
from onnx_backprop.opset.core.errors import InvalidModelError


def map_as_loop(node: ir.Node) -> Expansion:
    """y_k = body(x_k, …) for every k: each sequence gives its k-th element, a tensor itself."""
    inputs = [x for x in node.inputs if x is not None]
    body, given = graph_copy(node.attributes["body"].as_graph())
    elements = [y for y in body.outputs if y is not None]
    if len(given) != len(inputs) or len(elements) != len(node.outputs) or not inputs:
        raise InvalidModelError("its body has other inputs or outputs", op_type=node.op_type, node=str(node.name))
    k, go = _value("k", ir.TensorType(ir.DataType.INT64), []), _value("go", ir.TensorType(ir.DataType.BOOL), [])
    taken: list[ir.Node] = []
    for x, part in zip(inputs, given, strict=True):
        if is_sequence(x):
            taken.append(_node("SequenceAt", [x, k], part.type or ir.TensorType(element_type(x)), part.shape))
            part.replace_all_uses_with(taken[-1].outputs[0])
        else:
            part.replace_all_uses_with(x)
        elements = [(taken[-1].outputs[0] if is_sequence(x) else x) if y is part else y for y in elements]
    types = [sequence_type(element_type(y)) for y in elements]
    before = [_value("before", type_) for type_ in types]
    on = _node("Identity", [go], go.type, go.shape)
    after = [_node("SequenceInsert", [s, y], s.type) for s, y in zip(before, elements, strict=True)]
    nodes = [on, *taken, *body.nodes, *after]
    results = [n.outputs[0] for n in (on, *after)]
    graph = ir.Graph([k, go, *before], results, nodes=nodes, name="map")
    count = _node("SequenceLength", [inputs[0]], ir.TensorType(ir.DataType.INT64), ir.Shape([]))
    empty = [_node("SequenceEmpty", [], type_, dtype=type_.dtype.value) for type_ in types]
    states = [n.outputs[0] for n in empty]
    loop = ir.node("Loop", [count.outputs[0], None, *states], {"body": graph}, num_outputs=len(elements))
    for y, type_, like in zip(loop.outputs, types, node.outputs, strict=True):
        y.name, y.type = f"{like.name}/mapped", type_
    return Expansion([count, *empty, loop], list(loop.outputs))


def _value(name: str, type_: ir.TypeProtocol, shape: list[int] | None = None) -> ir.Value:
    return ir.Value(name=name, type=type_, shape=None if shape is None else ir.Shape(shape))


def _node(
    op_type: str,
    inputs: list[ir.Value],
    type_: ir.TypeProtocol | None,
    shape: ir.Shape | None = None,
    **attributes: int,
) -> ir.Node:
    node = ir.node(op_type, inputs, attributes)
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = op_type, type_, shape
    return node
