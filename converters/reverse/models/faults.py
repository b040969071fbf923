"""What onnxruntime's optimisers break, in forms that they leave alone. What is computed stays the same.

MatmulTransposeFusion (from 1.24 on) moves a Cast in front of a Transpose, then declines to fuse a Transpose that moves
the first axis behind the batch into a MatMul of operands of unlike ranks, and leaves the graph torn: the process ends
when it loads the model. Every float16 MatMul has such Casts on a processor.

    MatMul(Transpose(x), w) -> Transpose(MatMul(x, w))          or, where that is another product,
    MatMul(Transpose(x), w) -> Cast(MatMul(Transpose(Cast(x)), Cast(w)))

It also fuses a Transpose into a product by a vector, which the fused node computes without it (1.32):

    MatMul(Transpose(x), v) -> Squeeze(MatMul(Transpose(x), Unsqueeze(v, 1)), -1)

QDQPropagation moves a DequantizeLinear behind a Transpose and others, with a QuantizeLinear before it. That has the
type of the zero point, or without one, before opset 21, uint8, where numbers below 0 are 0: a zero point is stated.
Where a sub-graph reads what the Transpose gives, the process ends: an Identity behind the first, which stays until
then, prevents it.

The transpose optimiser moves a Transpose through a cubic Resize to cancel another one; no kernel takes what results. A
Reshape to the same shape behind the Resize, which costs nothing, keeps it from doing so.

A MatMulNBits of accuracy_level 4 packs a constant weight before it knows scales or zero points that are no constants,
and takes what it has then (1.32: its result is zero, or far off). Without the attribute it does neither that nor round.
Scales in float16 are none either: a session that goes without FuseFp16InitializerToFp32NodeTransformer, as those on
files in float16 do, reads them through a Cast.

DivMulFusion takes a product with 1/z for a quotient, and reads a Cast or an Identity that CastElimination or
EliminateIdentity has just taken away: "Node input is not a graph input, initializer, or output of a previous node".

    Mul(Identity(x), Div(1, z)) -> Mul(Identity(x), Identity(Div(1, z)))        beside a Cast to the type of x likewise

The copy stays, since a later derivative may stop at it, or be taken by it.

A BatchNormalization in training mode writes its new statistics over those that it reads, whoever else reads them: other
nodes, later runs, and what was joined with equal numbers, as the zeros of a fresh mean and of a bias. Where they or the
new ones are read, and no training feeds them for each step, it gets others of its own, which its result does not depend
on, and the new ones are computed beside it. Elsewhere they become inputs with defaults, which are not joined.
"""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.prepare.exporters.statistics import STATISTICS
from onnx_backprop.converters.prepare.stops import put_identity
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import constant_value, dims
from onnx_backprop.opset.functions.mat_mul_n_bits import NAME as MAT_MUL_N_BITS
from onnx_backprop.opset.graphs.names import RENEWED, used_names
from onnx_backprop.opset.graphs.walk import is_standard

_UNLIKE_OTHERS = 0.3125  # is added to statistics, which are zeros and ones at first, as what others read is
_MOVED = ("MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")  # that QDQPropagation passes
_WITH_OUTPUT_TYPE = 21  # the opset from which on a QuantizeLinear may state the type of its output
_SIGNED = (ir.DataType.INT4, ir.DataType.INT8, ir.DataType.INT16)
_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def avoid_faults(model: ir.Model, carried: Collection[str] = ()) -> None:
    """Rewrite what onnxruntime breaks, in place. carried: running statistics that are fed anew for each step."""
    graphs = [model.graph, *model.graph.subgraphs()]
    for node in (node for graph in graphs for node in graph if node.op_type == MAT_MUL_N_BITS):
        if _is_half(node.inputs[2]) or not all(map(_is_constant, node.inputs[2:4])):
            node.attributes.pop("accuracy_level", None)
    nodes = [(graph, node) for graph in graphs for node in graph if not node.domain]
    norms = [one for one in nodes if one[1].op_type == "BatchNormalization" and _trains(one[1])]
    while unsafe := [one for one in norms if not all(_is_safe(one[1], n, carried) for n in STATISTICS)]:
        _keep_statistics(*unsafe[0], used_names(model.graph))  # whose new readers another one may be unsafe for
    read = [node.inputs[n] for graph, node in norms if graph is model.graph for n in STATISTICS]
    stored = dict.fromkeys(x for x in read if x is not None and x.is_initializer())
    model.graph.inputs.extend(x for x in stored if not x.is_graph_input())
    for value in dict.fromkeys(node.inputs[0] for graph, node in nodes if _is_moved_into_a_body(graph, node)):
        assert value is not None
        put_identity(model.graph if value.graph is None else value.graph, value, used_names(model.graph))
    old = model.opset_imports.get("", 0) < _WITH_OUTPUT_TYPE
    for graph, node in [one for one in nodes if old and _lacks_zero_point(one[1])]:
        _state_zero_point(graph, node, Builder(used_names(model.graph)))
    for graph, node in [one for one in nodes if one[1].op_type == "MatMul" and _is_by_vector(one[1])]:
        names, vector = used_names(model.graph), node.inputs[1]
        op = Builder(names)
        node.replace_input_with(1, op.Unsqueeze(vector, [1]))
        last = op.ints([-1])
        graph.insert_before(node, op.nodes)
        behind = _behind(graph, node.outputs[0], names, "Squeeze")
        behind.resize_inputs(2)
        behind.replace_input_with(1, last)
        node.outputs[0].shape = None
    quotients = [(graph, node) for graph, node in nodes if node.op_type == "Mul" and any(map(_is_copy, node.inputs))]
    transposes = any(node.op_type == "Transpose" for _, node in nodes)
    products = [one for one in nodes if one[1].op_type == "MatMul" and _is_torn(one[1])]
    resizes = [one for one in nodes if transposes and _is_moved_through(one[1])]
    if not products and not resizes and not quotients:
        return
    names = used_names(model.graph)
    for graph, node in quotients:
        op = Builder(names)
        for n, x in enumerate(node.inputs):
            if x is not None and _is_reciprocal(x):
                node.replace_input_with(n, op.Identity(x))
        graph.insert_before(node, op.nodes)
    for graph, node in products:
        _rewrite_product(graph, node, Builder(names), names)
    for graph, node in resizes:
        op = Builder(names)
        shape = op.ints([0] * len(dims(node.outputs[0]) or ()))
        graph.insert_before(node, op.nodes)
        behind = _behind(graph, node.outputs[0], names, "Reshape")
        behind.resize_inputs(2)
        behind.replace_input_with(1, shape)


def _is_copy(value: ir.Value | None) -> bool:
    """Whether a value is another's copy, by Identity or by a Cast to the type that is there."""
    node = None if value is None else value.producer()
    if node is None or not is_standard(node, "Cast", "Identity"):
        return False
    source = node.inputs[0]
    return node.op_type == "Identity" or (source is not None and source.dtype in (None, node.outputs[0].dtype))


def _is_reciprocal(value: ir.Value) -> bool:
    """Whether a value is 1 / z, as far as that is known."""
    node = value.producer()
    one = node.inputs[0] if node is not None and is_standard(node, "Div") else None
    if one is None:
        return False
    array = constant_value(one)
    return all(length == 1 for length in dims(one) or ()) if array is None else array.size == 1 and array.item() == 1


def _is_half(value: ir.Value | None) -> bool:
    return value is not None and value.dtype in _HALF


def _is_constant(value: ir.Value | None) -> bool:
    """Whether onnxruntime knows a value, or its absence, when it loads the model."""
    if value is None or (value.is_initializer() and not value.is_graph_input()):
        return True
    node = value.producer()
    return node is not None and is_standard(node, "Constant")


def _is_moved_through(node: ir.Node) -> bool:
    """Whether a node is a Resize that the transpose optimiser moves a Transpose through in vain."""
    mode, smooth = node.attributes.get("mode"), node.attributes.get("antialias")
    cubic = node.op_type == "Resize" and mode is not None and mode.as_string() == "cubic"
    return cubic and not (smooth and smooth.as_int()) and dims(node.outputs[0]) is not None


def _trains(node: ir.Node) -> bool:
    mode = node.attributes.get("training_mode")
    return mode is not None and mode.as_int() == 1


def _is_safe(node: ir.Node, place: int, carried: Collection[str]) -> bool:
    """Whether a BatchNormalization may overwrite the statistic that it reads, or is in inference mode, and does not."""
    value = node.inputs[place]
    if value is None or not _trains(node):
        return True
    others = [reader for reader, n in value.uses() if (n, reader.op_type) != (place, "BatchNormalization")]
    if others or value.is_graph_output():
        return False
    new = node.outputs[place - STATISTICS[0] + 1] if len(node.outputs) > place - STATISTICS[0] + 1 else None
    unread = new is None or not (new.uses() or new.is_graph_output())
    earlier = value.producer()
    renewed = earlier is not None and is_standard(earlier, "BatchNormalization") and bool(value.index())
    return unread or renewed or value.name in carried


def _keep_statistics(graph: ir.Graph, node: ir.Node, names: set[str]) -> None:
    """m' = p·m + (1 - p)·mean(x), and of the variance likewise, beside a node that reads other statistics."""
    op, momentum = Builder(names), node.attributes.get("momentum")
    p, x = float(np.float32(0.9)) if momentum is None else momentum.as_float(), node.inputs[0]
    assert x is not None
    op.prefix = node.name or str(node.outputs[0].name)
    wide, rank = op.Cast(x, to=ir.DataType.FLOAT) if x.dtype in _HALF else x, _rank(x)
    axes = op.Concat([0], op.Range(2, op.rank(x), 1), axis=0) if rank is None else [0, *range(2, rank)]
    for place, old in zip(STATISTICS, node.outputs[1:], strict=False):
        statistic = node.inputs[place]
        assert statistic is not None
        if old.uses() or old.is_graph_output():
            around = wide if place == STATISTICS[0] else op.Sub(wide, op.ReduceMean(wide, axes, keepdims=1))
            now = op.ReduceMean(around if around is wide else op.Mul(around, around), axes, keepdims=0)
            behind = _behind(graph, old, names, "CastLike")
            behind.replace_input_with(0, op.Add(op.Mul(op.CastLike(statistic, now), p), op.Mul(now, 1 - p)))
            behind.resize_inputs(2)
            behind.replace_input_with(1, statistic)
            behind.metadata_props[RENEWED] = str(statistic.name)
        node.replace_input_with(place, op.Add(statistic, _UNLIKE_OTHERS))
        op.nodes[-1].metadata_props[RENEWED] = str(statistic.name)
    graph.insert_before(node, op.nodes)


def _is_moved_into_a_body(graph: ir.Graph, node: ir.Node) -> bool:
    """Whether a DequantizeLinear is moved behind a node that a sub-graph reads."""
    earlier = node.inputs[0].producer() if node.op_type in _MOVED and node.inputs[0] is not None else None
    return (
        earlier is not None
        and is_standard(earlier, "DequantizeLinear", *_MOVED)
        and any(reader.graph is not graph for reader, _ in node.outputs[0].uses())
    )


def _lacks_zero_point(node: ir.Node) -> bool:
    """Whether a node dequantises numbers that may be below 0, by a scale alone."""
    signed = node.op_type == "DequantizeLinear" and node.inputs[0] is not None and node.inputs[0].dtype in _SIGNED
    return signed and (len(node.inputs) < 3 or node.inputs[2] is None)


def _state_zero_point(graph: ir.Graph, node: ir.Node, op: Builder) -> None:
    stored, scale = node.inputs[:2]
    assert stored is not None
    assert scale is not None
    assert stored.dtype is not None
    lengths = dims(scale)
    if lengths is not None and all(isinstance(length, int) for length in lengths):
        zero = op.constant(np.zeros([int(length or 0) for length in lengths], stored.dtype.numpy()))
    else:
        zero = op.Cast(op.ConstantOfShape(op.Shape(scale), value=ir.tensor([0.0])), to=stored.dtype)
    graph.insert_before(node, op.nodes)
    node.resize_inputs(3)
    node.replace_input_with(2, zero)


def _is_by_vector(node: ir.Node) -> bool:
    """Whether a node multiplies a matrix by a vector: what made it may be a Transpose behind nodes that are removed."""
    matrix, vector = node.inputs
    computed = matrix is not None and matrix.producer() is not None
    return computed and vector is not None and _rank(vector) == 1


def _is_torn(node: ir.Node) -> bool:
    """Whether MatmulTransposeFusion moves a Cast of an operand and then declines."""
    a, b = node.inputs
    moved = [_batch_transpose(x) for x in (a, b) if x is not None]
    ranks = [None if x is None or x.shape is None else x.shape.rank() for x in (a, b)]
    return any(moved) and node.outputs[0].dtype is not None and (None in ranks or ranks[0] != ranks[1])


def _batch_transpose(value: ir.Value) -> tuple[ir.Value, list[int]] | None:
    """What a Transpose before a Cast, or before a float16 product, moves the first axis of; and its perm."""
    node = value.producer()
    if node is not None and is_standard(node, "Cast") and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    elif value.dtype not in _HALF:
        return None
    if node is None or not is_standard(node, "Transpose") or node.inputs[0] is None:
        return None
    given = node.attributes.get("perm")
    perm = [] if given is None else list(given.as_ints())  # none reverses the axes
    last = len(perm) - 1
    return (node.inputs[0], perm) if last > 1 and perm[0] == 1 and last in perm[-2:] else None


def _rewrite_product(graph: ir.Graph, node: ir.Node, op: Builder, names: set[str]) -> None:
    a, b = node.inputs
    y = node.outputs[0]
    assert a is not None
    assert b is not None
    moved, half = _batch_transpose(a), y.dtype in _HALF
    if half and moved is not None and moved[0].dtype == y.dtype and moved[1][-1] == len(moved[1]) - 1 and _rank(b) == 2:
        node.replace_input_with(0, moved[0])
        behind = _behind(graph, y, names, "Transpose")
        behind.attributes["perm"] = ir.AttrInt64s("perm", moved[1])
        y.shape = None
        return
    wide = ir.DataType.FLOAT if half else y.dtype or ir.DataType.FLOAT
    for n, value in enumerate((a, b)):
        transposed = _batch_transpose(value)
        if transposed is not None:
            node.replace_input_with(n, op.Transpose(op.Cast(transposed[0], to=wide), perm=transposed[1]))
        elif value.dtype != wide:
            node.replace_input_with(n, op.Cast(value, to=wide))
    graph.insert_before(node, op.nodes)
    if half:
        behind = _behind(graph, y, names, "Cast")
        behind.attributes["to"] = ir.AttrInt64("to", int(y.dtype or wide))
        y.type = ir.TensorType(wide)


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else value.shape.rank()


def _behind(graph: ir.Graph, value: ir.Value, names: set[str], op_type: str) -> ir.Node:
    """A new node between a value and all that reads it, whose other inputs and attributes the caller adds."""
    node = put_identity(graph, value, names).producer()
    assert node is not None
    node.op_type = op_type
    return node
