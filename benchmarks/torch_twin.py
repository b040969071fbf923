"""A forward ONNX model in PyTorch, node by node: what PyTorch eager does with the same network and weights.

Covers the operators of `models/`. Needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from onnx import ModelProto, helper, numpy_helper

torch: Any = import_module("torch")
functional: Any = torch.nn.functional


Step = tuple[Callable[..., Any], dict[str, Any], list[str], str]  # operator, attributes, inputs, output


class Twin(torch.nn.Module):
    """The model as a function of its input; its parameters are its float initializers but for running statistics."""

    def __init__(self, model: ModelProto, *, dtype: Any = None) -> None:
        super().__init__()
        nodes = list(model.graph.node)
        statistics = {name for n in nodes if n.op_type == "BatchNormalization" for name in n.input[3:5]}
        self.weights: dict[str, Any] = {}
        self.constants: dict[str, Any] = {"": None}
        for tensor in model.graph.initializer:
            value = torch.tensor(np.array(numpy_helper.to_array(tensor)))
            if not value.is_floating_point():
                self.constants[tensor.name] = value.tolist()
            elif tensor.name in statistics:
                self.constants[tensor.name] = value.to(dtype)
            else:
                self.weights[tensor.name] = torch.nn.Parameter(value.to(dtype))
                self.register_parameter(tensor.name.replace(".", "/"), self.weights[tensor.name])
        self.steps: list[Step] = []
        for node in nodes:
            attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            if node.op_type == "Constant":
                ((name, value),) = attributes.items()
                self.constants[node.output[0]] = numpy_helper.to_array(value).tolist() if name == "value" else value
            else:
                self.steps.append((_OPERATORS[node.op_type], attributes, list(node.input), node.output[0]))
        self.input, self.output = model.graph.input[0].name, model.graph.output[0].name

    def forward(self, x: Any) -> Any:
        """The first output of the model."""
        return self.run(self.steps, [self.output], {self.input: x})[0]

    def run(self, steps: Sequence[Step], wanted: Sequence[str], given: Mapping[str, Any]) -> list[Any]:
        """What some of its steps make of values by name."""
        values = {**self.weights, **self.constants, **given}
        for operator, attributes, inputs, output in steps:
            values[output] = operator(attributes, *[values[name] for name in inputs])
        return [values[name] for name in wanted]


def _conv(a: dict[str, Any], x: Any, w: Any, b: Any = None) -> Any:
    pads, half = a.get("pads", [0, 0, 0, 0]), len(a.get("pads", [0] * 4)) // 2
    assert pads[:half] == pads[half:]
    return functional.conv2d(x, w, b, stride=a.get("strides", 1), padding=pads[:half], groups=a.get("group", 1))


def _conv_transpose(a: dict[str, Any], x: Any, w: Any, b: Any = None) -> Any:
    pads = a.get("pads", [0] * 4)
    extra = a.get("output_padding", 0)
    return functional.conv_transpose2d(x, w, b, stride=a.get("strides", 1), padding=pads[:2], output_padding=extra)


def _resize(a: dict[str, Any], x: Any, _roi: Any, scales: Any) -> Any:
    factor = [float(s) for s in scales[2:]]
    if a["mode"] == b"linear":
        return functional.interpolate(x, scale_factor=factor, mode="bilinear", align_corners=False)
    return functional.interpolate(x, scale_factor=factor, mode="nearest")


def _batch_norm(a: dict[str, Any], x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Any:
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


def _reshape(_: dict[str, Any], x: Any, shape: Any) -> Any:
    return x.reshape([x.shape[n] if d == 0 else int(d) for n, d in enumerate(shape)])


def _gemm(a: dict[str, Any], x: Any, w: Any, b: Any = None) -> Any:
    return functional.linear(x, w if a.get("transB") else w.T, b)


_OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": lambda _a, x, y: x + y,
    "BatchNormalization": _batch_norm,
    "Concat": lambda a, *xs: torch.cat(xs, dim=a["axis"]),
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Erf": lambda _a, x: torch.erf(x),
    "Flatten": lambda _a, x: x.flatten(1),
    "Gemm": _gemm,
    "GlobalAveragePool": lambda _a, x: x.mean(dim=(2, 3), keepdim=True),
    "Identity": lambda _a, x: x,
    "LayerNormalization": lambda a, x, s, b: functional.layer_norm(x, s.shape, s, b, a.get("epsilon", 1e-5)),
    "MatMul": lambda _a, x, y: x @ y,
    "MaxPool": lambda a, x: functional.max_pool2d(x, a["kernel_shape"], a["strides"]),
    "Mul": lambda _a, x, y: x * y,
    "ReduceMean": lambda a, x, axes: x.mean(dim=[int(d) for d in axes], keepdim=bool(a.get("keepdims", 1))),
    "Relu": lambda _a, x: torch.relu(x),
    "Reshape": _reshape,
    "Resize": _resize,
    "Softmax": lambda a, x: torch.softmax(x, dim=a.get("axis", -1)),
    "Transpose": lambda a, x: x.permute(a["perm"]),
}
