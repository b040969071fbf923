"""Integers that constants, or lengths that are known, decide: computed once, in the place of the nodes that would."""

from collections.abc import Mapping

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnx_backprop.converters.prepare.lengths.search import with_lengths
from onnx_backprop.converters.prepare.load import infer
from onnx_backprop.opset.graphs.edit import assign, copied
from onnx_backprop.opset.graphs.facts import DRAWS, SHAPE
from onnx_backprop.opset.graphs.types import Dim, shapes_of
from onnx_backprop.opset.graphs.walk import attributes_of, subgraphs

_WHOLE = (TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64)
_ROUNDS = 8  # of folding and inference, each of which may make more lengths known


def folded(proto: ModelProto) -> ModelProto:
    """The model with integers that constants alone decide as constants: shapes that exporters write as nodes."""
    result = _once(proto, {})
    return proto if result is None else infer(with_lengths(result, {}))


def folded_lengths(proto: ModelProto) -> ModelProto:
    """An inferred model with what known lengths decide as constants, integers and single numbers; inferred again."""
    for _ in range(_ROUNDS):
        result = _once(proto, shapes_of(proto.graph))
        if result is None:
            break
        proto = infer(result)
    return proto


def _once(proto: ModelProto, shapes: Mapping[str, tuple[Dim, ...]]) -> ModelProto | None:
    """A copy with constants in the place of nodes; None where there is nothing to fold."""
    graph = proto.graph
    known = {t.name for t in graph.initializer} | {n.output[0] for n in graph.node if n.op_type == "Constant"}
    types = {v.name: v.type.tensor_type for v in graph.value_info}
    known -= {v.name for v in graph.input}
    ends = {v.name for v in graph.output}
    nodes: list[NodeProto] = []
    constants: dict[str, np.ndarray] = {}
    for node in graph.node:
        if not ends.isdisjoint(node.output):
            continue
        if node in SHAPE and (lengths := _lengths(node, shapes)) is not None:
            constants[node.output[0]] = lengths
            known.update(node.output)
            continue
        constant = node.op_type == "Constant" or (node.input and known.issuperset(filter(None, node.input)))
        if (
            node.domain
            or not constant
            or node in DRAWS
            or not all(_folds(types.get(name), bool(shapes)) for name in node.output if name)
        ):
            continue
        if not subgraphs(node):
            nodes.append(node)
            known.update(node.output)
    names = [name for node in nodes if node.op_type != "Constant" for name in node.output if name]
    if not names and not constants:
        return None
    read = {name for node in nodes for name in node.input}
    part = helper.make_graph(
        nodes, "folded", [], [helper.make_tensor_value_info(name, types[name].elem_type, None) for name in names]
    )
    part.initializer.extend(t for t in graph.initializer if t.name in read)
    part.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    try:
        with np.errstate(all="ignore"):  # of a mean over nothing, which runs all the same
            values = ReferenceEvaluator(helper.make_model(part, opset_imports=proto.opset_import)).run(None, {})
    except Exception:  # noqa: BLE001 - it lacks operators; the nodes stay as they are
        values, names = [], []
    constants |= dict(zip(names, map(np.asarray, values), strict=True))
    if not constants:
        return None
    result = copied(proto)
    kept = [copied(n) for n in result.graph.node if constants.keys().isdisjoint(n.output)]
    assign(result.graph.node, kept)
    assign(result.graph.value_info, [copied(v) for v in result.graph.value_info if v.name not in constants])
    result.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    return result


def _folds(declared: TypeProto.Tensor | None, numbers: bool) -> bool:
    """Whether a value of a type is folded: integers, and single numbers of any type where these are wanted."""
    if declared is None:
        return False
    return declared.elem_type in _WHOLE or (numbers and declared.HasField("shape") and not declared.shape.dim)


def _lengths(node: NodeProto, shapes: Mapping[str, tuple[Dim, ...]]) -> np.ndarray | None:
    """What a Shape or Size node gives, where its lengths are known."""
    dims = shapes.get(node.input[0])
    if dims is None:
        return None
    attributes = attributes_of(node)
    if node.op_type == "Shape":
        dims = dims[attributes.get("start", 0) : attributes.get("end")]
    lengths = [d for d in dims if isinstance(d, int)]
    if len(lengths) != len(dims):
        return None
    return np.array(lengths if node.op_type == "Shape" else np.prod(lengths, dtype=np.int64), np.int64)
