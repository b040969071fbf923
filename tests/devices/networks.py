"""The networks that `make devices` trains, small enough for a software adapter, and a batch for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from models import resnet, super_resolution, transformer, unet_conv_transpose, unet_resize
from models.graphs import Network, Value
from onnx_backprop.text import projections

Batch = dict[str, np.ndarray]
# Of networks whose last layers standardise by four to sixteen numbers: at 1e-3 one weight that is changed by 1e-6 changes the
# losses of ResNet-18 by 0.2 within 20 steps, on the CPU too; at this rate by 1e-6 (by 1e-4 where two images of 16×16 are a
# batch, and two numbers are standardised).
SLOW = 1e-5
LLAMA = Path(__file__).parents[1] / "data" / "text" / "model.onnx"  # as onnxruntime-genai's builder writes it


@dataclass(frozen=True)
class Case:
    """A network, what makes its training graph, its batches. convolutional: at least 97 % of it is for the device.

    rate: of learning.
    """

    name: str
    graph: Callable[[], ob.TrainingGraph]
    batch: Callable[[np.random.Generator], Batch]
    convolutional: bool = False
    about: str = ""
    rate: float = 1e-3

    def batches(self, steps: int) -> Iterator[Batch]:
        """As many of them as steps, the same each time."""
        rng = np.random.default_rng(0)
        return (self.batch(rng) for _ in range(steps))


def mobilenet_v3(*, classes: int = 10, seed: int = 0) -> ModelProto:
    """MobileNetV3-Small: image (N, 3, H, W) -> logits (N, classes).

    Source: Howard et al., "Searching for MobileNetV3", ICCV 2019, table 2.
    """
    net = _Mobile("mobilenet_v3_small", seed=seed)
    x = net.hard_swish(net.batch_norm(net.conv(net.input("image", 3), 16, kernel=3, stride=2, bias=False)))
    for kernel, wide, out, squeezed, hard, stride in (
        (3, 16, 16, True, False, 2),
        (3, 72, 24, False, False, 2),
        (3, 88, 24, False, False, 1),
        (5, 96, 40, True, True, 2),
        (5, 240, 40, True, True, 1),
        (5, 240, 40, True, True, 1),
        (5, 120, 48, True, True, 1),
        (5, 144, 48, True, True, 1),
        (5, 288, 96, True, True, 2),
        (5, 576, 96, True, True, 1),
        (5, 576, 96, True, True, 1),
    ):
        x = net.block(x, kernel, wide, out, squeezed=squeezed, hard=hard, stride=stride)
    x = net.hard_swish(net.batch_norm(net.conv(x, 576, kernel=1, bias=False)))
    return net.model("logits", net.classify(x, classes), size=())


class _Mobile(Network):
    """What MobileNetV3 has beside the layers of the other networks."""

    def hard_swish(self, x: Value) -> Value:
        """x · relu6(x + 3) / 6."""
        return self._layer("HardSwish", [x.name], x.channels)

    def depthwise(self, x: Value, *, kernel: int, stride: int) -> Value:
        """A convolution of each channel for itself."""
        shape = (x.channels, 1, kernel, kernel)
        deviation = float(np.sqrt(2) / kernel)
        return self._convolution(
            "Conv", x, x.channels, shape, deviation, stride=stride, pad=kernel // 2, bias=False, group=x.channels
        )

    def squeeze(self, x: Value) -> Value:
        """Each channel times a number that the means of all channels decide."""
        mean = self._layer("GlobalAveragePool", [x.name], x.channels)
        small = self.relu(self.conv(mean, max(8, x.channels // 4), kernel=1))
        share = self._layer("HardSigmoid", [self.conv(small, x.channels, kernel=1).name], x.channels, alpha=1 / 6)
        return self._layer("Mul", [x.name, share.name], x.channels)

    def block(self, x: Value, kernel: int, wide: int, out: int, *, squeezed: bool, hard: bool, stride: int) -> Value:
        """An inverted residual."""
        bend = self.hard_swish if hard else self.relu
        y = bend(self.batch_norm(self.conv(x, wide, kernel=1, bias=False))) if wide != x.channels else x
        y = self.batch_norm(self.depthwise(y, kernel=kernel, stride=stride))
        y = bend(self.squeeze(y) if squeezed else y)
        y = self.batch_norm(self.conv(y, out, kernel=1, bias=False))
        return self.add(x, y) if stride == 1 and out == x.channels else y


def lstm(*, inputs: int = 6, hidden: int = 8, seed: int = 0) -> ModelProto:
    """An LSTM over (T, N, inputs) and a linear layer on its last state: numbers (N, 2)."""
    model = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        lstm (float[T, N, {inputs}] x) => (float[N, 2] y) {{
            all, last, cell = LSTM <hidden_size = {hidden}> (x, w, r, b)
            first = Constant <value = int64[1] {{0}}> ()
            state = Squeeze (last, first)
            y = Gemm (state, head, bias) }}""")
    rng = np.random.default_rng(seed)
    shapes = {"w": (1, 4 * hidden, inputs), "r": (1, 4 * hidden, hidden), "b": (1, 8 * hidden), "head": (hidden, 2)}
    for name, shape in {**shapes, "bias": (2,)}.items():
        values = rng.standard_normal(shape).astype(np.float32) / np.sqrt(hidden)
        model.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), name))
    return model


def _llama() -> ob.TrainingGraph:
    """Products in float32: the file allows 8 bits, to which the CPU rounds and a GPU need not."""
    model = onnx.load(LLAMA)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 1
    adapted = ob.lora(model, projections(LLAMA), rank=4)
    return ob.training_graph(
        adapted.model, loss=ob.losses.NextToken(), optimizer="adamw", trainable=list(adapted.trainable)
    )


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def _pictures(rows: int, channels: int, side: int, classes: int = 10) -> Callable[[np.random.Generator], Batch]:
    def drawn(rng: np.random.Generator) -> Batch:
        return {"image": _normal(rng, rows, channels, side, side), "labels": rng.integers(0, classes, rows)}

    return drawn


def _masks(rng: np.random.Generator) -> Batch:
    image = _normal(rng, 2, 1, 16, 16)
    return {"image": image, "target": (image > 0.5).astype(np.float32)}


def _tokens(rng: np.random.Generator) -> Batch:
    ids = rng.integers(5, 300, (2, 12))
    return {"input_ids": ids, "labels": ids}


def _classifier(build: Callable[[], ModelProto]) -> Callable[[], ob.TrainingGraph]:
    return lambda: ob.training_graph(build(), loss="softmax_cross_entropy", optimizer="adamw")


def _segmentation(build: Callable[[], ModelProto]) -> Callable[[], ob.TrainingGraph]:
    return lambda: ob.training_graph(build(), loss="bce_with_logits", optimizer="adamw")


CASES = (
    Case(
        "demo",
        lambda: ob.training_graph(super_resolution.build(), loss="mse", optimizer="adamw"),
        lambda rng: {"low": _normal(rng, 2, 1, 8, 8), "target": _normal(rng, 2, 1, 16, 16)},
        convolutional=True,
        about="`models/super_resolution.py`, 8×8 to 16×16",
    ),
    Case("U-Net, ConvTranspose", _segmentation(unet_conv_transpose.build), _masks, True, "16×16"),
    Case("U-Net, Resize", _segmentation(unet_resize.build), _masks, True, "16×16"),
    Case(
        "ResNet-18",
        _classifier(lambda: resnet.build(features=16)),
        _pictures(4, 3, 32),
        convolutional=True,
        about="16 features, 32×32",
        rate=SLOW,
    ),
    Case(
        "MobileNetV3-Small",
        _classifier(mobilenet_v3),
        _pictures(4, 3, 64),
        convolutional=True,
        about="64×64",
        rate=SLOW,
    ),
    Case(
        "ViT-S",
        _classifier(lambda: transformer.build(width=384, heads=6, layers=12, image=8, classes=10)),
        _pictures(2, 1, 8),
        about="width 384, 12 layers, 16 patches",
    ),
    Case("Llama, LoRA", _llama, _tokens, about="the small one of `tests/data/text`, 4 bits, rank 4; see below"),
    Case(
        "LSTM",
        lambda: ob.training_graph(lstm(), loss="mse", optimizer="adamw"),
        lambda rng: {"x": _normal(rng, 5, 4, 6), "target": _normal(rng, 4, 2)},
        about="8 cells, 5 steps of time",
    ),
)


def tiny() -> Case:
    """For `make test`: a product, a pool and labels, in some seconds."""
    text = """
        <ir_version: 10, opset_import: ["": 18]>
        tiny (float[N, 1, 4, 4] image) => (float[N, 3] logits) {
            a = Relu (image) b = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (a) c = Flatten (b)
            logits = Gemm (c, w, bias) }"""

    def build() -> ModelProto:
        model = parser.parse_model(text)
        rng = np.random.default_rng(0)
        for name, shape in {"w": (4, 3), "bias": (3,)}.items():
            model.graph.initializer.append(numpy_helper.from_array(_normal(rng, *shape), name))
        return model

    return Case("tiny", _classifier(build), _pictures(4, 1, 4, 3))
