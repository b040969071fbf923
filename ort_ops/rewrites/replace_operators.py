"""Operators of ONNX that our native kernels run faster, as those of our domain: Conv and BatchNormalization.

A file keeps what every tool knows. Where onnxruntime cannot arrange the weights of a Conv beforehand, as in a training
graph, our kernels take less time for kernels of several cells, depthwise ones a fifth. BatchNormalization in training
mode takes every core, of which onnxruntime's takes one, and gives out the statistics of the batch, which its gradient
then need not find again (docs/performance.md).
"""

import math
from typing import Any

from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from onnx_backprop.opset import DOMAIN
from onnx_backprop.opset.functions.use_kernels import MIN_BODY_OPSET
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.opset.graphs.walk import DEFAULT_DOMAINS, is_standard


def replace_operators(model: ModelProto) -> ModelProto:
    """Make nodes of our domain, in place, of those that its native kernels are for; returns the model.

    All of a model whose opset is older than the bodies of our kernels is left alone.
    """
    if all(o.domain not in DEFAULT_DOMAINS or o.version >= MIN_BODY_OPSET for o in model.opset_import):
        _replace_convolutions(model)
        _replace_batch_norms(model)
    return model


def _replace_convolutions(model: ModelProto) -> None:
    """Convolution nodes of the Conv nodes whose weights are inputs of the graph.

    Left alone: weights that are no float32 or whose shape is unknown, kernels of one cell, auto_pad SAME, negative
    pads.
    """
    initialized = {tensor.name for tensor in model.graph.initializer}
    weights = {v.name: shape for v in model.graph.input if v.name not in initialized and (shape := _shape(v))}
    for node in model.graph.node:
        if is_standard(node, "Conv") and node.input[1] in weights:
            attributes = _attributes(node, weights[node.input[1]])
            if attributes is not None:
                _replace(node, "Convolution", attributes)


def _replace_batch_norms(model: ModelProto) -> None:
    """BatchNormForwardTraining nodes of the BatchNormalization nodes in training mode, all in float32.

    Their gradients read the statistics that these give out. Left alone: inputs whose rank is unknown or 1, numbers that
    our operator refuses.
    """
    graph = model.graph
    types = {v.name: v.type.tensor_type for v in (*graph.value_info, *graph.output, *graph.input)}
    kinds = {name: kind.elem_type for name, kind in types.items()}
    kinds |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    taken = used_names(graph)
    statistics_of: dict[str, list[str]] = {}  # of an input: its mean and variance
    for node in graph.node:
        if is_standard(node, "BatchNormalization"):
            numbers = _numbers(node)
            ranked = node.input[0] in types and len(types[node.input[0]].shape.dim) > 1
            if numbers and ranked and all(kinds.get(name) == TensorProto.FLOAT for name in node.input):
                x, gamma, beta, mean, variance = node.input
                outputs = [*node.output, *[""] * (3 - len(node.output))]
                statistics = [unique(f"{next(filter(None, outputs))}/{name}", taken) for name in ("mean", "variance")]
                node.input[:] = x, mean, variance, gamma, beta
                node.output[:] = *outputs, *statistics
                _replace(node, "BatchNormForwardTraining", numbers | {"data_format": "NCX"})
                statistics_of.setdefault(x, statistics)
        elif node.op_type == "BatchNormTrainingBackward" and node.domain == DOMAIN and node.input[0] in statistics_of:
            channels_first = any(a.name == "data_format" and a.s == b"NCX" for a in node.attribute)
            if channels_first and not any(node.input[2:4]):
                node.input[:] = *node.input[:2], *statistics_of[node.input[0]], *node.input[4:5]


def _numbers(node: NodeProto) -> dict[str, float] | None:
    """ε and the momentum of a BatchNormalization in training mode; None where our operator refuses them."""
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    numbers = {"epsilon": attributes.get("epsilon", 1e-5), "momentum": attributes.get("momentum", 0.9)}
    fits = attributes.get("training_mode") and all(map(math.isfinite, numbers.values())) and numbers["epsilon"] >= 0
    return numbers if fits else None


def _replace(node: NodeProto, op_type: str, attributes: dict[str, Any]) -> None:
    node.op_type, node.domain = op_type, DOMAIN
    del node.attribute[:]
    node.attribute.extend(helper.make_attribute(k, v) for k, v in attributes.items())


def _shape(value: ValueInfoProto) -> tuple[int, ...] | None:
    """The shape of a float32 tensor, where all of it is known."""
    kind = value.type.tensor_type
    if kind.elem_type != TensorProto.FLOAT or not kind.HasField("shape"):
        return None
    return tuple(d.dim_value for d in kind.shape.dim) if all(d.dim_value for d in kind.shape.dim) else None


def _attributes(node: NodeProto, weights: tuple[int, ...]) -> dict[str, Any] | None:
    """The attributes of the same Convolution; None where the Conv is to stay."""
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    axes = len(weights) - 2
    pads, auto_pad = attributes.get("pads", [0] * 2 * axes), attributes.get("auto_pad", b"NOTSET").decode()
    if math.prod(weights[2:]) == 1 or min(pads) < 0 or auto_pad not in ("NOTSET", "VALID"):
        return None
    return {
        "strides": attributes.get("strides", [1] * axes),
        "pads_begin": pads[:axes],
        "pads_end": pads[axes:],
        "dilations": attributes.get("dilations", [1] * axes),
        "auto_pad": "None" if auto_pad == "NOTSET" else auto_pad,
        "groups": attributes.get("group", 1),
        "data_format": "NCX",
        "weights_format": "OIX",
    }
