"""`adapted`: a model as a provider of limited kernels runs it, and what of it is for the host."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TensorShapeProto, helper, numpy_helper
from onnx_ir.passes.common import InlinePass

from onnx_backprop.converters.devices.bounds import ML, REFUSES, within_bounds
from onnx_backprop.converters.devices.expand import FORMS, Known
from onnx_backprop.converters.devices.limits import HOST, Limits
from onnx_backprop.converters.devices.narrow import to_float32
from onnx_backprop.converters.prepare.ir_models import to_ir, to_proto
from onnx_backprop.converters.prepare.large_weights import set_aside
from onnx_backprop.converters.prepare.lengths.fold import folded_lengths
from onnx_backprop.converters.prepare.load import infer
from onnx_backprop.opset import DOMAIN
from onnx_backprop.opset.functions.scope import custom_nodes
from onnx_backprop.opset.functions.use_kernels import DEFAULT_KERNELS, MIN_BODY_OPSET, attach_kernels
from onnx_backprop.opset.graphs.edit import assign
from onnx_backprop.opset.graphs.emit import Emitter
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.opset.graphs.types import Dims, shapes_of
from onnx_backprop.opset.graphs.walk import all_graphs, all_nodes, attributes_of, constant_tensor, is_standard, reads

_ANNOTATION = "layer_ann"  # which onnxruntime reads in a node's metadata
_NO_INDICES = "its kernel gives no Indices"
_NO_HALF = "the device has no arithmetic in float16"
_NO_TRAINING = "its kernel has no training mode"
_NO_ANTIALIAS = "its kernel has no antialias"
_MOST_NUMBERS = 4096  # of a constant that a form may look at


@dataclass(frozen=True)
class Adapted:
    """A model for a provider. host: the nodes that are annotated for the CPU, and why each is."""

    model: ModelProto
    host: Mapping[str, str] = field(default_factory=dict)


def adapted(
    model: ModelProto,
    limits: Limits,
    *,
    lengths: Mapping[str, Sequence[int]] | None = None,
    host: Mapping[str, str] | None = None,
) -> Adapted:
    """A copy of a model with functions written out, for a provider: the same results, float64 arithmetic rounded.

    Inputs and outputs keep names and types, but defaults in float64 that nobody feeds are constants. Every node has a
    name of its own.
    lengths: of inputs, whose defaults are left out; those of other inputs with the same symbols follow. host: further
    nodes for the CPU, by the names in what an earlier call gave, with reasons.

    What is done otherwise:
    - arithmetic in float64, where there is none, is done in float32, see `to_float32`;
    - operators without a kernel are written in others, see `expand.FORMS`, from opset 18 on;
    - what is left of them, as a MaxPool whose Indices are read, is annotated for the CPU, where that is possible;
    - indices that are data are looked up on the CPU, which refuses those outside of what they index;
    - attributes of Conv and ConvTranspose that are left to their defaults are written down.
    """
    light, weights = set_aside(model)
    numbers = {t.name for t in light.graph.initializer if t.data_type == TensorProto.DOUBLE and not t.dims}
    assign(light.graph.input, [value for value in light.graph.input if value.name not in numbers])
    if lengths:
        assign(light.graph.initializer, [tensor for tensor in light.graph.initializer if tensor.name not in lengths])
        fix_lengths(light, lengths)
    light = infer(light)
    if any(custom_nodes(light)):
        attach_kernels(light, DEFAULT_KERNELS)
    expands = max((o.version for o in light.opset_import if not o.domain), default=0) >= MIN_BODY_OPSET
    if expands and "MaxPool" in limits.lacks:
        _expand(light, {"MaxPoolBackward"}, DOMAIN)
    ir_model = to_ir(light)
    InlinePass()(ir_model)
    result = to_proto(ir_model)
    del result.functions[:]  # which the pass leaves where no node calls them
    result.training_info.extend(model.training_info)
    result = infer(result)
    if not limits.float64 and to_float32(result):
        result = infer(result)
    if limits.fixed_lengths:
        result = folded_lengths(result)
        _drop_unread(result.graph)
    _write_attributes(result)
    if checks := _look_up(result, limits):
        result = infer(result)
    if expands:
        _expand(result, limits.lacks, "")
    _name_nodes(result)
    looked_up = {node.name: REFUSES for node in all_nodes(result) if not checks.isdisjoint(node.output)}
    reasons = {**looked_up, **dict(_left(result, limits)), **(host or {})}
    for node in all_nodes(result) if limits.annotations else ():
        if node.name in reasons:
            node.metadata_props.add(key=_ANNOTATION, value=HOST)
    return Adapted(weights.put_back(infer(result)), reasons)


def fix_lengths(model: ModelProto, lengths: Mapping[str, Sequence[int]]) -> None:
    """Give inputs these lengths, in place, and others with their symbols; what was inferred is forgotten."""
    known: dict[str, int] = {}
    for value in model.graph.input:
        if value.name in lengths:
            dims = value.type.tensor_type.shape.dim
            if not value.type.tensor_type.HasField("shape"):
                dims.extend(TensorShapeProto.Dimension() for _ in lengths[value.name])
            for dim, length in zip(dims, lengths[value.name], strict=True):
                if dim.dim_param:
                    known[dim.dim_param] = length
                dim.dim_value = length
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in known:
                dim.dim_value = known[dim.dim_param]
    for graph in all_graphs(model):
        del graph.value_info[:]


def _around(model: ModelProto, graph: GraphProto) -> list[GraphProto]:
    """Those graphs whose values a graph's nodes may read, itself the last."""
    graphs = all_graphs(model.graph) if graph is not model.graph else ()
    return [one for one in graphs if any(inner is graph for inner in all_graphs(one))] or [graph]


def _known(model: ModelProto, graph: GraphProto) -> Known:
    """What is known of the values that a graph's nodes read, of the graphs around it too."""
    lengths: dict[str, Dims] = {}
    types: dict[str, int] = {}
    constants: dict[str, np.ndarray] = {}
    for one in _around(model, graph):
        lengths |= shapes_of(one)
        types |= {v.name: v.type.tensor_type.elem_type for v in (*one.input, *one.output, *one.value_info)}
        types |= {tensor.name: tensor.data_type for tensor in one.initializer}
        inputs = {value.name for value in one.input}
        tensors = [(t.name, t) for t in one.initializer if t.name not in inputs]
        tensors += [(n.output[0], t) for n in one.node if (t := constant_tensor(n)) is not None]
        constants |= {
            name: numpy_helper.to_array(t) for name, t in tensors if np.prod(t.dims, dtype=int) <= _MOST_NUMBERS
        }
    numbers = {name: [d for d in dims if isinstance(d, int)] for name, dims in lengths.items()}
    shapes = {name: known for name, known in numbers.items() if len(known) == len(lengths[name])}
    return Known(lengths, shapes, types, constants)


def _look_up(model: ModelProto, limits: Limits) -> set[str]:
    taken, checks = used_names(model.graph), set[str]()
    inputs = {value.name for value in model.graph.input}
    for graph in all_graphs(model):
        around = _around(model, graph)
        constants = {t.name for one in around for t in one.initializer} - inputs
        constants |= {node.output[0] for one in around for node in one.node if node.op_type == "Constant"}
        checks |= within_bounds(graph, _known(model, graph), constants, taken, annotations=limits.annotations)
    if checks and not limits.annotations and all(opset.domain != ML for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(ML, 1))
    return checks


def _expand(model: ModelProto, operators: Collection[str], domain: str) -> None:
    """Write operators out where there is a form for a node, in the graphs inside nodes too."""
    taken = used_names(model.graph)
    for graph in all_graphs(model.graph):
        if not any(node.op_type in operators and node.op_type in FORMS for node in graph.node):
            continue
        known = _known(model, graph)
        nodes: list[NodeProto] = []
        for node in graph.node:
            form = FORMS.get(node.op_type) if node.op_type in operators else None
            outputs = None
            if form is not None and (node.domain == domain or (not domain and is_standard(node))):
                op = Emitter(node.name or node.output[0], taken)
                outputs = form(op, node, known)
                if outputs is not None:
                    nodes += op.finish(outputs)
            if outputs is None:
                nodes.append(node)
        assign(graph.node, nodes)


def _drop_unread(graph: GraphProto) -> None:
    """Take away constants that nobody reads since others have taken their place."""
    read = {value.name for value in graph.output}.union(*map(reads, graph.node))
    assign(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in read])
    assign(graph.node, [n for n in graph.node if n.op_type != "Constant" or n.output[0] in read])
    assign(graph.value_info, [value for value in graph.value_info if value.name in read])


def _left(model: ModelProto, limits: Limits) -> Iterator[tuple[str, str]]:
    """The nodes that a provider takes and cannot run, with the reason of each."""
    half = set[str]()
    for graph in () if limits.float16 else all_graphs(model.graph):
        half |= {name for name, kind in _known(model, graph).types.items() if kind == TensorProto.FLOAT16}
    for node in all_nodes(model.graph):
        if not half.isdisjoint((*node.input, *node.output)):
            yield node.name, _NO_HALF
        if node.op_type not in limits.lacks or not is_standard(node):
            continue
        if node.op_type == "MaxPool" and len(node.output) > 1 and node.output[1]:
            yield node.name, _NO_INDICES
        elif node.op_type == "BatchNormalization" and attributes_of(node).get("training_mode"):
            yield node.name, _NO_TRAINING
        elif node.op_type == "Resize" and attributes_of(node).get("antialias"):
            yield node.name, _NO_ANTIALIAS


def _name_nodes(model: ModelProto) -> None:
    """Give each node a name of its own."""
    seen: set[str] = set()
    for node in all_nodes(model.graph):
        node.name = unique(node.name or f"{node.op_type}/{next(iter(node.output), '')}", seen)


def _write_attributes(model: ModelProto) -> None:
    """Strides, dilations and padding of Conv and ConvTranspose that are left to their defaults."""
    for graph in all_graphs(model.graph):
        shapes = _known(model, graph).shapes if any(map(_convolves, graph.node)) else {}
        for node in filter(_convolves, graph.node):
            given = {a.name for a in node.attribute}
            kernel = shapes.get(node.input[1], ())[2:]
            if not kernel:
                continue
            defaults = {"kernel_shape": kernel, "strides": [1] * len(kernel), "dilations": [1] * len(kernel)}
            if not given & {"auto_pad", "output_shape"}:
                defaults["pads"] = [0, 0] * len(kernel)
                if node.op_type == "ConvTranspose":
                    defaults["output_padding"] = [0] * len(kernel)
            node.attribute.extend(helper.make_attribute(n, v) for n, v in defaults.items() if n not in given)


def _convolves(node: NodeProto) -> bool:
    return is_standard(node, "Conv", "ConvTranspose")
