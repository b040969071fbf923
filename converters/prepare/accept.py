"""What onnxruntime takes and onnx's checker does not, put in order; and files whose tensors lie beside them."""

import contextlib
import os
import warnings
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, checker, numpy_helper
from onnx.external_data_helper import ExternalDataInfo, load_external_data_for_tensor, uses_external_data

from onnx_backprop.converters.prepare.graphs import all_nodes, assign, called, copied, reads, subgraphs
from onnx_backprop.opset.core.errors import InvalidModelError, OnnxBackpropError, OnnxBackpropWarning, UnsupportedError

MICROSOFT = "com.microsoft"
LEAST_OPSET = 18  # of the default domain, where a model imports others alone
_FIELDS = ("float_data", "double_data", "int32_data", "int64_data", "uint64_data", "string_data")
# operators that onnxruntime has in every opset of the default domain, and onnx from this one on or never
_EARLIER = {"LayerNormalization": 17, "SimplifiedLayerNormalization": 1 << 30}

_NEWEST = {MICROSOFT: 1, "ai.onnx.ml": 5}  # what onnxruntime takes a domain for that a model does not import


def read_file(path: Path) -> ModelProto:
    """A model file and the tensors beside it; a link to tensors may lead to where the model itself really lies.

    So does a Hugging Face cache: its files are links to blobs in one folder. Any other link is onnx's to refuse.
    """
    proto = onnx.load(path, load_external_data=False)
    real, folder = Path(os.path.realpath(path)).parent, path.parent
    for tensor in _tensors(proto):
        if not uses_external_data(tensor):
            continue
        base, location = folder, ExternalDataInfo(tensor).location
        target = Path(os.path.realpath(folder / location))
        if (folder / location).is_symlink() and target.parent == real:
            base = real
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = target.name
        load_external_data_for_tensor(tensor, str(base))
        tensor.data_location = TensorProto.DEFAULT
        del tensor.external_data[:]
    return proto


def external_files(path: str | Path) -> list[Path]:
    """The files beside a model that its tensors lie in; none for what cannot be read."""
    with contextlib.suppress(Exception):  # of each of onnx's file formats its own
        tensors = filter(uses_external_data, _tensors(onnx.load(path, load_external_data=False)))
        return [Path(path).parent / name for name in {ExternalDataInfo(tensor).location for tensor in tensors}]
    return []


def put_in_order(proto: ModelProto) -> None:
    """Change what says the same to onnxruntime and is wrong to onnx, and check the rest.

    Names that are no UTF-8 get escapes, lengths below 0 count as unknown, a model before IR version 4 is one of 4, its
    initializers being constants. Operators that onnxruntime alone has in the default domain move to its own, and
    its domains and that of ai.onnx.ml are imported where they are used. Nodes are sorted; of two initializers of
    one name the last counts, as of two sets of data the raw one. A warning tells where the checker found more than
    that shapes are missing.

    Raises: InvalidModelError for what neither of them takes.
    """
    initializers_are_constants(proto)
    if not _are_texts(proto):
        _decode(proto)
    for graph in _graphs(proto):
        for dim in chain.from_iterable(v.type.tensor_type.shape.dim for v in (*graph.input, *graph.output)):
            if dim.dim_value < 0:
                dim.Clear()
        graph.name = graph.name or "graph"
    for one in (*all_nodes(proto), *proto.opset_import):
        one.domain = "" if one.domain == "ai.onnx" else one.domain
    opset = max((o.version for o in proto.opset_import if not o.domain), default=0)
    own = [node for node in all_nodes(proto) if not node.domain and opset < _EARLIER.get(node.op_type, 0)]
    for node in own:
        node.domain = MICROSOFT
    for domain in {node.domain for node in all_nodes(proto)} & _NEWEST.keys() - {o.domain for o in proto.opset_import}:
        proto.opset_import.add(domain=domain, version=_NEWEST[domain])
    if not opset:
        proto.opset_import.add(domain="", version=LEAST_OPSET)  # a model of other domains alone
    for graph in _graphs(proto):
        sparse = [tensor.values.name for tensor in graph.sparse_initializer]
        for name in [*sparse, *(called(node) for node in graph.node if _is_sparse(node))]:
            raise UnsupportedError(f"{name!r} is a sparse tensor. Store it as a dense one")
    complaint = _complaint(proto)
    if complaint is None:
        return
    for graph in _graphs(proto):
        _merge(graph)
        _sort(graph)
    for tensor in filter(lambda t: t.HasField("raw_data"), _tensors(proto)):
        for name in _FIELDS:
            tensor.ClearField(name)
    again = _complaint(proto)
    if again is not None:
        raise InvalidModelError(f"the model does not pass onnx.checker: {again}") from again
    text = str(complaint).splitlines()[0]
    warnings.warn(f"the model does not pass onnx.checker, onnxruntime takes it: {text}", OnnxBackpropWarning, 2)


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
    for value in (v for graph in _graphs(checked) for v in (*graph.input, *graph.output)):
        if value.type.WhichOneof("value") in (None, "tensor_type") and not value.type.tensor_type.HasField("shape"):
            value.type.tensor_type.shape.SetInParent()
            value.type.tensor_type.elem_type = value.type.tensor_type.elem_type or TensorProto.FLOAT
    checked.opset_import.add(domain="deprecated", version=1)
    for node in all_nodes(checked):  # its first version, of scales per group, which onnx has withdrawn
        if node.op_type == "GroupNormalization" and not node.domain:
            node.domain = "deprecated"
    try:
        checker.check_model(checked)
    except OnnxBackpropError:
        raise
    except checker.ValidationError as e:
        return e
    return None


def _graphs(proto: ModelProto) -> Iterator[GraphProto]:
    yield proto.graph
    for node in all_nodes(proto):
        yield from subgraphs(node)


def _tensors(proto: ModelProto) -> Iterator[TensorProto]:
    for graph in _graphs(proto):
        yield from graph.initializer
    for node in all_nodes(proto):
        for attribute in node.attribute:
            yield from ([attribute.t] if attribute.HasField("t") else attribute.tensors)


def _is_sparse(node: NodeProto) -> bool:
    return any(attribute.HasField("sparse_tensor") for attribute in node.attribute)


def _merge(graph: GraphProto) -> None:
    """Of two initializers of one name and the same numbers keep one; of others onnxruntime takes this one or that."""
    first: dict[str, TensorProto] = {}
    for tensor in graph.initializer:
        other = first.setdefault(tensor.name, tensor)
        if other is not tensor and not np.array_equal(numpy_helper.to_array(other), numpy_helper.to_array(tensor)):
            raise InvalidModelError(
                f"two initializers are called {tensor.name!r} and hold different numbers. Rename one"
            )
    if len(first) < len(graph.initializer):
        assign(graph.initializer, first.values())


def _sort(graph: GraphProto) -> None:
    """Each node behind those that make what it reads; cycles stay for the checker to find."""
    makers = {name: n for n, node in enumerate(graph.node) for name in node.output if name}
    before = {n: sorted({makers[name] for name in reads(node) & makers.keys()}) for n, node in enumerate(graph.node)}
    try:
        order = list(TopologicalSorter(before).static_order())
    except CycleError:
        return
    assign(graph.node, [graph.node[n] for n in order])


def _are_texts(proto: ModelProto) -> bool:
    """Whether all names are UTF-8; protobuf gives others out as bytes."""
    named: Iterable[Any] = chain(_tensors(proto), *((*g.input, *g.output, *g.value_info) for g in _graphs(proto)))
    names = chain((one.name for one in named), *((n.name, *n.input, *n.output) for n in all_nodes(proto)))
    return all(isinstance(name, str) for name in names)


def _decode(message: Any) -> None:
    for field, value in message.ListFields():
        repeated = field.is_repeated
        if field.message_type is not None:
            for inner in value if repeated else (value,):
                _decode(inner)
        elif field.type == field.TYPE_STRING:
            texts = [_text(v) for v in (value if repeated else (value,))]
            if repeated:
                assign(value, texts)
            else:
                setattr(message, field.name, texts[0])


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
