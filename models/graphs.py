"""Forward networks layer by layer, as plain ONNX: what PyTorch would export, without PyTorch.

    net = Network("edges", seed=0)
    x = net.input("image", channels=1)
    x = net.relu(net.conv(x, 8, kernel=3))
    model = net.model("edges", net.conv(x, 1, kernel=1))

Tensors are (N, C, H, W), float32; batch and image sizes are symbolic. Weights are drawn from the seed in the order of
the layers, so the same calls give the same model, byte for byte.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

IR_VERSION = 10  # onnx writes a newer one by default, which onnxruntime refuses to load
OPSET = 18


@dataclass(frozen=True)
class Value:
    """A tensor of the graph: its name and its number of channels."""

    name: str
    channels: int


class Network:
    """A feed-forward network under construction. Each method adds one layer and returns its output."""

    def __init__(self, name: str, *, seed: int) -> None:
        self.name = name
        self._rng = np.random.default_rng(seed)
        self._nodes: list[NodeProto] = []
        self._inputs: list[ValueInfoProto] = []
        self._weights: list[TensorProto] = []
        self._counts: dict[str, int] = {}

    def input(self, name: str, channels: int) -> Value:
        """A graph input (N, channels, H, W)."""
        self._inputs.append(_tensor(name, channels, ("H", "W")))
        return Value(name, channels)

    def conv(
        self, x: Value, channels: int, *, kernel: int, stride: int = 1, zero: bool = False, bias: bool = True
    ) -> Value:
        """Convolution, padded so that stride 1 keeps the image size; kernel is odd.

        Weights are N(0, 2 / (C · kernel²)) (He et al. 2015), the bias, if there is one, 0; zero=True starts from zero
        weights.
        """
        if kernel % 2 == 0:
            raise ValueError(f"conv: expected an odd kernel, which keeps the image size, got {kernel}")
        shape = (channels, x.channels, kernel, kernel)
        deviation = 0.0 if zero else np.sqrt(2 / (x.channels * kernel**2))
        return self._convolution("Conv", x, channels, shape, deviation, stride=stride, pad=kernel // 2, bias=bias)

    def conv_transpose(
        self, x: Value, channels: int, *, kernel: int, scale: int, pad: int, zero: bool = False
    ) -> Value:
        """Transposed convolution with bias that makes the image exactly `scale` times as large.

        A length I becomes (I - 1) · scale + kernel - 2 · pad + output_padding; output_padding, at the far end only,
        is what is missing there to I · scale and must lie in 0 … scale - 1.
        Weights are N(0, 2 · scale² / (C · kernel²)): a pixel of the output sees one in scale² taps of the kernel.
        """
        output_padding = scale - kernel + 2 * pad
        if not 0 <= output_padding < scale:
            raise ValueError(
                f"conv_transpose: kernel {kernel} with pad {pad} needs output_padding {output_padding} for scale "
                f"{scale}, expected 0 … {scale - 1}. Change pad"
            )
        shape = (x.channels, channels, kernel, kernel)
        deviation = 0.0 if zero else scale * np.sqrt(2 / (x.channels * kernel**2))
        attributes: dict[str, Any] = {"output_padding": [output_padding] * 2} if output_padding else {}
        return self._convolution("ConvTranspose", x, channels, shape, deviation, stride=scale, pad=pad, **attributes)

    def relu(self, x: Value) -> Value:
        """max(x, 0)."""
        return self._layer("Relu", [x.name], x.channels)

    def prelu(self, x: Value) -> Value:
        """x where x >= 0, else slope · x: one slope per channel, 0.25 at the start."""
        name = self._next("PRelu")
        slope = self._weight(f"{name}.slope", np.full((x.channels, 1, 1), 0.25))
        return self._layer("PRelu", [x.name, slope], x.channels, name=name)

    def batch_norm(self, x: Value) -> Value:
        """BatchNormalization in training mode: batch statistics, running ones kept with momentum 0.9."""
        name = self._next("BatchNormalization")
        start = {"scale": 1.0, "bias": 0.0, "mean": 0.0, "variance": 1.0}
        weights = [self._weight(f"{name}.{part}", np.full(x.channels, value)) for part, value in start.items()]
        y = self._layer("BatchNormalization", [x.name, *weights], x.channels, name=name, training_mode=1)
        self._nodes[-1].output.extend([f"{name}.mean_new", f"{name}.variance_new"])
        return y

    def classify(self, x: Value, classes: int) -> Value:
        """The mean over the image, then a linear layer: logits (N, classes)."""
        pooled = self._layer("GlobalAveragePool", [x.name], x.channels)
        flat = self._layer("Flatten", [pooled.name], x.channels)
        name = self._next("Gemm")
        deviation = 1 / np.sqrt(x.channels)
        weight = self._weight(f"{name}.weight", deviation * self._rng.standard_normal((classes, x.channels)))
        bias = self._weight(f"{name}.bias", np.zeros(classes))
        return self._layer("Gemm", [flat.name, weight, bias], classes, name=name, transB=1)

    def max_pool(self, x: Value) -> Value:
        """The largest value of each 2 × 2 block; an odd last row or column is dropped."""
        return self._layer("MaxPool", [x.name], x.channels, kernel_shape=[2, 2], strides=[2, 2])

    def resize(self, x: Value, scale: int, **attributes: Any) -> Value:
        """Resize of the image axes by a whole factor; the attributes are those of ONNX Resize."""
        name = self._next("Resize")
        scales = f"{name}.scales"  # a Constant node: as an initializer it would look like a weight
        self._nodes.append(
            helper.make_node("Constant", [], [scales], name=scales, value_floats=[1.0, 1.0, float(scale), float(scale)])
        )
        return self._layer("Resize", [x.name, "", scales], x.channels, name=name, **attributes)

    def add(self, a: Value, b: Value) -> Value:
        """a + b, of one shape."""
        if a.channels != b.channels:
            raise ValueError(f"add: expected equal channels, got {a.channels} and {b.channels}")
        return self._layer("Add", [a.name, b.name], a.channels)

    def concat(self, a: Value, b: Value) -> Value:
        """The channels of a, then those of b."""
        return self._layer("Concat", [a.name, b.name], a.channels + b.channels, axis=1)

    def model(self, name: str, y: Value, *, size: tuple[str, ...] = ("H", "W")) -> ModelProto:
        """The finished model, y being its output under the given name; `size` names the axes of y behind channels."""
        for node in self._nodes:
            for names in (node.input, node.output):
                names[:] = [name if n == y.name else n for n in names]
        graph = helper.make_graph(
            self._nodes, self.name, self._inputs, [_tensor(name, y.channels, size)], self._weights
        )
        return helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="onnx-backprop models",
        )

    def _convolution(
        self,
        op_type: str,
        x: Value,
        channels: int,
        shape: tuple[int, ...],
        deviation: float,
        *,
        stride: int,
        pad: int,
        bias: bool = True,
        **attributes: Any,
    ) -> Value:
        name = self._next(op_type)
        weight = self._weight(f"{name}.weight", deviation * self._rng.standard_normal(shape))
        biases = [self._weight(f"{name}.bias", np.zeros(channels))] if bias else []
        attributes |= {"kernel_shape": shape[2:], "strides": [stride] * 2, "pads": [pad] * 4}
        return self._layer(op_type, [x.name, weight, *biases], channels, name=name, **attributes)

    def _layer(
        self, op_type: str, inputs: Sequence[str], channels: int, *, name: str | None = None, **attributes: Any
    ) -> Value:
        name = name or self._next(op_type)
        self._nodes.append(helper.make_node(op_type, inputs, [f"{name}.out"], name=name, **attributes))
        return Value(f"{name}.out", channels)

    def _weight(self, name: str, values: ArrayLike) -> str:
        self._weights.append(numpy_helper.from_array(np.asarray(values, np.float32), name))
        return name

    def _next(self, op_type: str) -> str:
        """Conv_1, Conv_2, … in the order of the layers."""
        self._counts[op_type] = self._counts.get(op_type, 0) + 1
        return f"{op_type}_{self._counts[op_type]}"


def _tensor(name: str, channels: int, size: tuple[str, ...]) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", channels, *size])


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary name beside `path` to write to, renamed to it at the end: the file is complete or not there.

    Makes the folder. After an error the temporary file is removed and a file already under `path` is untouched.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def save(model: ModelProto, path: str | Path) -> None:
    """Write a model; the file is complete or not there."""
    with replacing(path) as temporary:
        temporary.write_bytes(model.SerializeToString())


def main(build: Callable[..., ModelProto], arguments: Sequence[str] | None = None) -> int:
    """The command of a builder, `python -m models.NAME [-o OUT.onnx] [--seed N]`; returns the exit code."""
    name = Path(build.__code__.co_filename).stem
    parser = argparse.ArgumentParser(
        prog=f"python -m models.{name}", description=(build.__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("-o", "--output", default=f"demo/{name}.onnx", help="the ONNX file to write (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, >= 0 (%(default)s)")
    given = parser.parse_args(arguments)
    try:
        model = build(seed=given.seed)
        save(model, given.output)
    except (ValueError, OSError) as e:
        parser.error(str(e))
    weights = sum(math.prod(tensor.dims) for tensor in model.graph.initializer)
    print(f"written: {given.output} ({len(model.graph.node)} nodes, {weights} weights)")
    return 0
