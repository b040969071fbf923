"""Conv nodes whose weights change from run to run, as Convolution nodes of our domain.

A file keeps Conv, which every tool knows. Where onnxruntime cannot arrange the weights beforehand, as in a training
graph, our native kernels take less time for kernels of several cells, depthwise ones a fifth (docs/performance.md).
"""

import math
from typing import Any

from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from onnx_backprop.opset import DOMAIN
from onnx_backprop.opset.functions.use_kernels import MIN_BODY_OPSET

_DEFAULT = ("", "ai.onnx")


def own_convolutions(model: ModelProto) -> ModelProto:
    """Make Convolution nodes, in place, of the Conv nodes whose weights are inputs of the graph; returns the model.

    Left alone: weights that are no float32 or whose shape is unknown, kernels of one cell, auto_pad SAME, negative
    pads; all of a model whose opset is older than the bodies of our kernels.
    """
    if any(o.domain in _DEFAULT and o.version < MIN_BODY_OPSET for o in model.opset_import):
        return model
    initialized = {tensor.name for tensor in model.graph.initializer}
    weights = {v.name: shape for v in model.graph.input if v.name not in initialized and (shape := _shape(v))}
    for node in model.graph.node:
        if node.op_type == "Conv" and node.domain in _DEFAULT and node.input[1] in weights:
            attributes = _attributes(node, weights[node.input[1]])
            if attributes is not None:
                node.op_type, node.domain = "Convolution", DOMAIN
                del node.attribute[:]
                node.attribute.extend(helper.make_attribute(k, v) for k, v in attributes.items())
    return model


def _shape(value: ValueInfoProto) -> tuple[int, ...] | None:
    """The shape of a float32 tensor, where all of it is known."""
    kind = value.type.tensor_type
    if kind.elem_type != TensorProto.FLOAT or not kind.HasField("shape"):
        return None
    return tuple(d.dim_value for d in kind.shape.dim) if all(d.dim_value for d in kind.shape.dim) else None


def _attributes(node: NodeProto, weights: tuple[int, ...]) -> dict[str, Any] | None:
    """The attributes of the same Convolution; None where the Conv is to stay."""
    given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    axes = len(weights) - 2
    pads, auto_pad = given.get("pads", [0] * 2 * axes), given.get("auto_pad", b"NOTSET").decode()
    if math.prod(weights[2:]) == 1 or min(pads) < 0 or auto_pad not in ("NOTSET", "VALID"):
        return None
    return {
        "strides": given.get("strides", [1] * axes),
        "pads_begin": pads[:axes],
        "pads_end": pads[axes:],
        "dilations": given.get("dilations", [1] * axes),
        "auto_pad": "None" if auto_pad == "NOTSET" else auto_pad,
        "groups": given.get("group", 1),
        "data_format": "NCX",
        "weights_format": "OIX",
    }
