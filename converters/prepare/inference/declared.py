"""What a file declares of the tensors inside it, which a run does not keep to: onnxruntime infers them anew.

Whoever makes a batch dynamic by editing inputs and outputs leaves the old lengths behind everywhere else. A declared
length is believed of graph inputs only, which onnxruntime holds the caller to.
"""

from collections.abc import Mapping

from onnx import GraphProto, ModelProto, TensorShapeProto, TypeProto, ValueInfoProto, helper

from onnx_backprop.converters.prepare.inference.driver import Correct
from onnx_backprop.converters.prepare.large_weights import FLOATS
from onnx_backprop.opset.graphs.edit import copied, insert
from onnx_backprop.opset.graphs.emit import Emitter
from onnx_backprop.opset.graphs.names import rename, unique, used_names
from onnx_backprop.opset.graphs.walk import all_nodes, subgraphs

_TRAINING = "ai.onnx.preview.training"
# operators without a schema that have a gradient rule -> whether an output has the first input's shape too
LIKE_INPUT: dict[tuple[str, str], bool] = {}


def forget_declared(proto: ModelProto) -> dict[str, TypeProto]:
    """Drop the declared types and lengths of everything but graph inputs; what was declared in the main graph.

    An output that is an input or an initializer has its shape. Bodies of Loop are never without a counter and a
    condition, which onnxruntime wants to know the shapes of; of what Loop and Scan stack it wants the rank, which the
    body of a Scan may have of its inputs alone.
    """
    declared = {v.name: copied(v.type) for v in (*proto.graph.value_info, *proto.graph.output)}
    inputs = {v.name: v for v in proto.graph.input}
    tensors = {t.name: t for t in proto.graph.initializer}
    del proto.graph.value_info[:]
    for value in proto.graph.output:
        if value.name in inputs:
            value.type.CopyFrom(inputs[value.name].type)
        elif value.name in tensors:
            tensor = tensors[value.name]
            value.CopyFrom(helper.make_tensor_value_info(value.name, tensor.data_type, tensor.dims))
        else:
            _forget_shape(value)
    for node in all_nodes(proto):
        kept = 2 if node.op_type == "Loop" else 0
        for graph in subgraphs(node):
            del graph.value_info[:]
            for value in list(graph.input)[kept:]:
                _forget_shape(value, rank=node.op_type != "Scan")
            for value in graph.output:
                _forget_shape(value, rank=node.op_type not in ("Loop", "Scan"))
    return declared


def _forget_shape(value: ValueInfoProto, *, rank: bool = True) -> None:
    if value.type.sequence_type.elem_type.HasField("tensor_type"):
        value.type.sequence_type.elem_type.tensor_type.ClearField("shape")
    if not value.type.HasField("tensor_type"):
        return
    if rank:
        value.type.tensor_type.ClearField("shape")
    for dim in value.type.tensor_type.shape.dim if value.type.tensor_type.HasField("shape") else ():
        dim.Clear()


def as_declared(declared: Mapping[str, TypeProto], _: ModelProto) -> Correct:
    """Where inference finds no element type or rank, what is declared; the run then checks the rank.

    An operator of `LIKE_INPUT` has the type of its first input where none is declared.
    """
    left = dict(declared)
    return lambda inferred: inferred if _follow_inputs(inferred.graph, left) or _state(inferred.graph, left) else None


def _state(graph: GraphProto, declared: dict[str, TypeProto]) -> bool:
    """Write down what is declared of the first values that nothing is known of; whether there are any."""
    known = {v.name: v for v in (*graph.value_info, *graph.output)}
    behind: set[str] = set()  # values that may be known once these are
    missing: list[tuple[int, str]] = []
    for position, node in enumerate(graph.node):
        if node.domain == _TRAINING:
            continue  # a Gradient node stands for others and never runs
        for name in node.output:
            type_ = declared.get(name, TypeProto())
            if not type_.tensor_type.elem_type:
                continue
            if not behind.isdisjoint(node.input):
                behind.add(name)
            elif name not in known or not known[name].type.tensor_type.elem_type:
                info = known[name] if name in known else graph.value_info.add(name=name)
                info.type.tensor_type.elem_type = type_.tensor_type.elem_type
                known[name] = info
            elif not known[name].type.tensor_type.HasField("shape") and type_.tensor_type.HasField("shape"):
                missing.append((position, name))
            else:
                continue
            behind.add(name)
    for position, name in reversed(missing):
        _check_rank(graph, position, name, len(declared.pop(name).tensor_type.shape.dim))
    return bool(behind)


def _follow_inputs(graph: GraphProto, declared: dict[str, TypeProto]) -> bool:
    """Give the outputs of nodes of `LIKE_INPUT` declared types, or those of inputs; whether there was one to give."""
    known = {v.name: v for v in (*graph.value_info, *graph.input, *graph.output)}
    known |= {t.name: helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in graph.initializer}
    given = False
    for node in graph.node:
        shaped = LIKE_INPUT.get((node.domain, node.op_type))
        types = [known[name].type.tensor_type for name in node.input if name in known]
        source = next((t for t in types if t.elem_type in FLOATS and (t is types[0] or not shaped)), None)
        if shaped is None or source is None:
            continue
        for n, name in enumerate(node.output):
            info = known.get(name) or graph.value_info.add(name=name)
            type_, known[name] = info.type.tensor_type, info
            if name and not type_.elem_type:
                type_.elem_type = declared.get(name, TypeProto()).tensor_type.elem_type or source.elem_type
                given = True
            if name and shaped and n == 0 and not type_.HasField("shape") and source.HasField("shape"):
                type_.shape.CopyFrom(source.shape)
                given = True
    return given


def _check_rank(graph: GraphProto, position: int, name: str, rank: int) -> None:
    """x = Reshape(what the node makes, Reshape(its Shape, [rank])), which fails in a run where the rank is another."""
    op = Emitter(name, used_names(graph))
    unranked = unique(f"{name}/made", op.taken)
    node = graph.node[position]
    if not node.name:  # its output's, which another node may be called by
        node.name = name if all(other.name != name for other in graph.node) else unique(name, op.taken)
    rename(node, {name: unranked})
    info = graph.value_info.add(name=unranked)
    info.CopyFrom(next(v for v in (*graph.value_info, *graph.output) if v.name == name))
    info.name = unranked
    info.type.tensor_type.shape.dim.extend(TensorShapeProto.Dimension() for _ in range(rank))
    lengths = op.Reshape(op.Shape(unranked), op.constant([rank]), allowzero=1)
    insert(graph, position + 1, op.finish({name: op.Reshape(unranked, lengths, allowzero=1, name="ranked")}))
