"""A forward ONNX model in PyTorch, node by node: what PyTorch eager does with the same network and weights.

Covers the operators of `models/`. Needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

torch: Any = import_module("torch")
functional: Any = torch.nn.functional


class Twin:
    """The model as a function of its inputs; `parameters` are its float initializers but for running statistics."""

    def __init__(self, model: ModelProto, *, dtype: Any = None) -> None:
        self.nodes = list(model.graph.node)
        self.output = model.graph.output[0].name
        statistics = {name for n in self.nodes if n.op_type == "BatchNormalization" for name in n.input[3:5]}
        self.parameters: dict[str, Any] = {}
        self.buffers: dict[str, Any] = {}
        for tensor in model.graph.initializer:
            value = torch.tensor(np.array(numpy_helper.to_array(tensor)))
            if not value.is_floating_point():
                self.buffers[tensor.name] = value
            elif tensor.name in statistics:
                self.buffers[tensor.name] = value.to(dtype)
            else:
                self.parameters[tensor.name] = value.to(dtype).requires_grad_()

    def __call__(self, feeds: Mapping[str, Any]) -> Any:
        """The first output of the model."""
        return self.run(self.nodes, [self.output], feeds)[0]

    def run(self, nodes: Sequence[NodeProto], wanted: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        """What some of its nodes make of values by name."""
        values = {**self.parameters, **self.buffers, **feeds, "": None}
        for node in nodes:
            attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            if node.op_type == "Constant":
                values[node.output[0]] = _constant(attributes)
                continue
            inputs = [values[name] for name in node.input]
            values[node.output[0]] = _OPERATORS[node.op_type](node, attributes, *inputs)
        return [values[name] for name in wanted]


def _constant(attributes: dict[str, Any]) -> Any:
    ((name, value),) = attributes.items()
    return torch.tensor(np.array(numpy_helper.to_array(value)) if name == "value" else value)


def _conv(_: NodeProto, a: dict[str, Any], x: Any, w: Any, b: Any = None) -> Any:
    pads, half = a.get("pads", [0, 0, 0, 0]), len(a.get("pads", [0] * 4)) // 2
    assert pads[:half] == pads[half:]
    return functional.conv2d(x, w, b, stride=a.get("strides", 1), padding=pads[:half], groups=a.get("group", 1))


def _conv_transpose(_: NodeProto, a: dict[str, Any], x: Any, w: Any, b: Any = None) -> Any:
    pads = a.get("pads", [0] * 4)
    extra = a.get("output_padding", 0)
    return functional.conv_transpose2d(x, w, b, stride=a.get("strides", 1), padding=pads[:2], output_padding=extra)


def _resize(_: NodeProto, a: dict[str, Any], x: Any, _roi: Any, scales: Any) -> Any:
    factor = [float(s) for s in scales[2:]]
    if a["mode"] == b"linear":
        return functional.interpolate(x, scale_factor=factor, mode="bilinear", align_corners=False)
    return functional.interpolate(x, scale_factor=factor, mode="nearest")


def _batch_norm(_: NodeProto, a: dict[str, Any], x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Any:
    training = bool(a.get("training_mode", 0))
    return functional.batch_norm(
        x,
        mean,
        variance,
        scale,
        bias,
        training=training,
        momentum=1 - a.get("momentum", 0.9),
        eps=a.get("epsilon", 1e-5),
    )


def _reshape(_: NodeProto, _a: dict[str, Any], x: Any, shape: Any) -> Any:
    return x.reshape([x.shape[n] if d == 0 else int(d) for n, d in enumerate(shape)])


def _gemm(_: NodeProto, a: dict[str, Any], x: Any, w: Any, b: Any = None) -> Any:
    return functional.linear(x, w if a.get("transB") else w.T, b)


_OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": lambda _n, _a, x, y: x + y,
    "BatchNormalization": _batch_norm,
    "Concat": lambda _n, a, *xs: torch.cat(xs, dim=a["axis"]),
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Erf": lambda _n, _a, x: torch.erf(x),
    "Flatten": lambda _n, _a, x: x.flatten(1),
    "Gemm": _gemm,
    "GlobalAveragePool": lambda _n, _a, x: x.mean(dim=(2, 3), keepdim=True),
    "Identity": lambda _n, _a, x: x,
    "LayerNormalization": lambda _n, a, x, s, b: functional.layer_norm(x, s.shape, s, b, a.get("epsilon", 1e-5)),
    "MatMul": lambda _n, _a, x, y: x @ y,
    "MaxPool": lambda _n, a, x: functional.max_pool2d(x, a["kernel_shape"], a["strides"]),
    "Mul": lambda _n, _a, x, y: x * y,
    "ReduceMean": lambda _n, a, x, axes: x.mean(dim=[int(d) for d in axes], keepdim=bool(a.get("keepdims", 1))),
    "Relu": lambda _n, _a, x: torch.relu(x),
    "Reshape": _reshape,
    "Resize": _resize,
    "Softmax": lambda _n, a, x: torch.softmax(x, dim=a.get("axis", -1)),
    "Transpose": lambda _n, a, x: x.permute(a["perm"]),
}
