"""What onnxruntime takes and onnx's checker does not, put in order."""

import re
from contextlib import suppress
from graphlib import CycleError
from itertools import chain

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, checker

from onnx_backprop.converters.prepare.exporters.detached import mark_detached
from onnx_backprop.opset.core.errors import InvalidModelError, OnnxBackpropError, UnsupportedError, warn
from onnx_backprop.opset.core.mapped import to_array
from onnx_backprop.opset.core.sound import tensors
from onnx_backprop.opset.graphs.edit import assign, copied
from onnx_backprop.opset.graphs.order import topological
from onnx_backprop.opset.graphs.walk import all_graphs, all_nodes, called, is_standard

MICROSOFT = "com.microsoft"
LEAST_OPSET = 18  # of the default domain, where a model imports others alone
_FIELDS = ("float_data", "double_data", "int32_data", "int64_data", "uint64_data", "string_data")
# operators that onnxruntime has in every opset of the default domain, and onnx from this one on or never
EARLIER = {"LayerNormalization": 17, "SimplifiedLayerNormalization": 1 << 30}

_LENGTHS = re.compile(r"gemm_(in|out)put_shape(_token_\d+)?")
_UNKNOWN = frozenset({"any", "dynamic", "none", "undefined", "unk", "unknown"})  # what lengths are called, equal or not
_NEWEST = {MICROSOFT: 1, "ai.onnx.ml": 5}  # what onnxruntime takes a domain for that a model does not import


def put_in_order(proto: ModelProto) -> None:
    """Change what says the same to onnxruntime and is wrong to onnx, and check the rest.

    Lengths below 0 count as unknown, as do those that all have one name for that, such as "?" of Paddle. A model before
    IR version 4 is one of 4, its initializers being constants. Operators that onnxruntime alone has in the default
    domain move to its own, and its domains and that of ai.onnx.ml are imported where they are used. Nodes that
    mean a stop become one, see `detached`. Nodes are sorted; of two initializers of one name the last counts, as of two
    sets of data the raw one. A warning tells where the checker found more than that shapes are missing.

    Raises: InvalidModelError for what neither of them takes.
    """
    initializers_are_constants(proto)
    for graph in all_graphs(proto):
        for dim in chain.from_iterable(v.type.tensor_type.shape.dim for v in (*graph.input, *graph.output)):
            if dim.dim_value < 0 or (dim.dim_param and _names_nothing(dim.dim_param)):
                dim.Clear()
        graph.name = graph.name or "graph"
    for one in (*all_nodes(proto), *proto.opset_import):
        one.domain = "" if one.domain == "ai.onnx" else one.domain
    opset = max((o.version for o in proto.opset_import if not o.domain), default=0)
    contributed = [node for node in all_nodes(proto) if not node.domain and opset < EARLIER.get(node.op_type, 0)]
    for node in contributed:
        node.domain = MICROSOFT
    for domain in {node.domain for node in all_nodes(proto)} & _NEWEST.keys() - {o.domain for o in proto.opset_import}:
        proto.opset_import.add(domain=domain, version=_NEWEST[domain])
    if not opset:
        proto.opset_import.add(domain="", version=LEAST_OPSET)  # a model of other domains alone
    mark_detached(proto)
    _rename_shapes(proto.graph)
    for graph in all_graphs(proto):
        sparse = [tensor.values.name for tensor in graph.sparse_initializer]
        for name in [*sparse, *(called(node) for node in graph.node if _is_sparse(node))]:
            raise UnsupportedError(f"{name!r} is a sparse tensor. Store it as a dense one")
    complaint = _complaint(proto)
    if complaint is None:
        return
    for graph in all_graphs(proto):
        _merge(graph)
        with suppress(CycleError):  # which the checker finds
            assign(graph.node, topological(graph.node))
    for tensor in filter(lambda t: t.HasField("raw_data"), tensors(proto)):
        for name in _FIELDS:
            tensor.ClearField(name)
    again = _complaint(proto)
    if again is not None:
        raise InvalidModelError(f"the model does not pass onnx.checker: {again}") from again
    text = str(complaint).splitlines()[0]
    warn(f"the model does not pass onnx.checker, onnxruntime takes it: {text}")


def _rename_shapes(graph: GraphProto) -> None:
    """Give the lengths that onnxruntime has written beside a Gemm of its own other names.

    It writes them again for the products of a gradient, under the same names, and does not load what has both.
    """
    names = {t.name: f"optimised/{t.name}" for t in graph.initializer if _LENGTHS.fullmatch(t.name)}
    for tensor in graph.initializer if names else ():
        tensor.name = names.get(tensor.name, tensor.name)
    for node in graph.node if names else ():
        assign(node.input, [names.get(name, name) for name in node.input])


def put_back_domains(proto: ModelProto) -> None:
    """Move the operators back that `put_in_order` has moved: onnxruntime has them in the default domain alone."""
    for node in all_nodes(proto):
        if node.domain == MICROSOFT and node.op_type in EARLIER:
            node.domain = ""


def initializers_are_constants(proto: ModelProto) -> None:
    """Before IR version 4 every initializer had to be listed as an input too, which did not make it one."""
    if proto.ir_version >= 4:
        return
    names = {i.name for i in proto.graph.initializer}
    assign(proto.graph.input, [i for i in proto.graph.input if i.name not in names])
    proto.ir_version = 4


def _complaint(proto: ModelProto) -> checker.ValidationError | None:
    """What the checker says of a model, but for missing shapes."""
    if proto.ByteSize() > checker.MAXIMUM_PROTOBUF:
        return None  # the checker cannot read a model of this size from memory
    checked = copied(proto)
    for value in (v for graph in all_graphs(checked) for v in (*graph.input, *graph.output)):
        if value.type.WhichOneof("value") in (None, "tensor_type") and not value.type.tensor_type.HasField("shape"):
            value.type.tensor_type.shape.SetInParent()
            value.type.tensor_type.elem_type = value.type.tensor_type.elem_type or TensorProto.FLOAT
    for part in (checked, *checked.functions):
        part.opset_import.add(domain="deprecated", version=1)
    # GroupNormalization's first version, of scales per group, which onnx has withdrawn, and what is onnxruntime's alone
    for node in all_nodes(checked):
        if is_standard(node, "GroupNormalization") or node.domain == MICROSOFT:
            node.domain = "deprecated"
    try:
        checker.check_model(checked)
    except OnnxBackpropError:
        raise
    except checker.ValidationError as e:
        return e
    return None


def _names_nothing(name: str) -> bool:
    return name.lower() in _UNKNOWN or not any(character.isalpha() for character in name)


def _is_sparse(node: NodeProto) -> bool:
    return any(attribute.HasField("sparse_tensor") for attribute in node.attribute)


def _merge(graph: GraphProto) -> None:
    """Of two initializers of one name and the same numbers keep one; of others onnxruntime takes this one or that."""
    first: dict[str, TensorProto] = {}
    for tensor in graph.initializer:
        other = first.setdefault(tensor.name, tensor)
        if other is not tensor and not np.array_equal(to_array(other), to_array(tensor)):
            raise InvalidModelError(
                f"two initializers are called {tensor.name!r} and hold different numbers. Rename one"
            )
    if len(first) < len(graph.initializer):
        assign(graph.initializer, first.values())
