"""Steps with sums in stages and without, in turn: python -m benchmarks.sums [TURNS [KERNELS]]

Prediction: two or three nodes more for every sum, 3 µs together; over many elements one pass as before, and where no
length is known a cast to float64, 0.8 ns an element, beside tens of nanoseconds that a network spends on each. At most
1 % of a step that is not the loss alone. A gradient of a bias is BiasAddBackward in the place of ReduceSum: no node
more on the route "native", and on "onnx" 1 µs for few rows and no more than before for many.
"""

from __future__ import annotations

import sys
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.reverse import builder
from onnx_backprop.converters.training import training_graph

HEAD = '<ir_version: 10, opset_import: ["": 18]> g '
CONV = "<pads = [1, 1, 1, 1]>"
MODELS: dict[str, tuple[str, dict[str, tuple[int, ...]], tuple[int, ...], Any]] = {
    "MLP, batch 32, cross entropy": (
        "(float[N, 64] x) => (float[N, 10] y) { a = Gemm(x, w1) b = Relu(a) y = Gemm(b, w2) }",
        {"w1": (64, 256), "w2": (256, 10)},
        (32, 64),
        ob.losses.SoftmaxCrossEntropy(),
    ),
    "MLP with biases, batch 32, mse": (
        "(float[N, 64] x) => (float[N, 64] y) { a = Gemm(x, w1, b1) b = Relu(a) c = MatMul(b, w2) y = Add(c, b2) }",
        {"w1": (64, 256), "b1": (256,), "w2": (256, 64), "b2": (64,)},
        (32, 64),
        ob.losses.MSE(),
    ),
    "MLP with biases, batch 1024, mse": (
        "(float[N, 64] x) => (float[N, 64] y) { a = Gemm(x, w1, b1) b = Relu(a) c = MatMul(b, w2) y = Add(c, b2) }",
        {"w1": (64, 256), "b1": (256,), "w2": (256, 64), "b2": (64,)},
        (1024, 64),
        ob.losses.MSE(),
    ),
    "images 8x1x64x64, mse": (
        f"(float[N, 1, H, W] x) => (float[N, 1, H, W] y) {{ a = Conv{CONV}(x, w1) b = Relu(a) y = Conv{CONV}(b, w2) }}",
        {"w1": (16, 1, 3, 3), "w2": (1, 16, 3, 3)},
        (8, 1, 64, 64),
        ob.losses.MSE(),
    ),
    "segmentation 4x3x256x256, weighted cross entropy": (
        f"(float[N, 3, H, W] x) => (float[N, 4, H, W] y) {{ a = Conv{CONV}(x, w1) b = Relu(a) y = Conv{CONV}(b, w2) }}",
        {"w1": (16, 3, 3, 3), "w2": (4, 16, 3, 3)},
        (4, 3, 256, 256),
        ob.losses.SoftmaxCrossEntropy(weight=[0.1, 1, 2, 4]),
    ),
    "language model 8x128, 5000 words": (
        "(float[N, T, 128] x) => (float[N, T, 5000] y) { a = MatMul(x, w1) b = Relu(a) y = MatMul(b, w2) }",
        {"w1": (128, 128), "w2": (128, 5000)},
        (8, 128, 128),
        ob.losses.SoftmaxCrossEntropy(axis=-1, ignore_index=-100),
    ),
}


def main() -> None:
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    kernels = sys.argv[2] if len(sys.argv) > 2 else "native"
    for name, (text, weights, shape, loss) in MODELS.items():
        rng = np.random.default_rng(0)
        model = parser.parse_model(HEAD + text)
        for tensor, size in weights.items():
            values = 0.1 * rng.standard_normal(size, np.float32)
            model.graph.initializer.append(numpy_helper.from_array(values, tensor))
        after = _trainer(model, loss, kernels)
        at_once = patch.object(builder, "sum_over", _at_once)
        with at_once, patch.object(training_graph, "stage_sums", lambda *_: None):
            before = _trainer(model, loss, kernels)
        x = rng.standard_normal(shape, np.float32)
        feeds = (
            {"x": x, "target": x} if after.graph.target == "target" else {"x": x, "labels": _labels(rng, name, shape)}
        )
        times: dict[str, list[float]] = {"before": [], "after": []}
        many = max(1, round(0.3 / _time(after, feeds, 3)))
        for _ in range(turns):
            for which, trainer in (("before", before), ("after", after)):
                times[which].append(_time(trainer, feeds, many))
        old, new = (median(values) for values in times.values())
        ratio = median(b / a for a, b in zip(times["before"], times["after"], strict=True))
        print(f"{name:50} {old * 1e3:9.3f} ms -> {new * 1e3:9.3f} ms, median of ratios {ratio:.3f}", flush=True)


def _at_once(op: builder.Builder, x: Any, axes: Any, _lengths: Any, *, keepdims: int) -> Any:
    return op.ReduceSum(x, axes, keepdims=keepdims)


def _trainer(model: ModelProto, loss: Any, kernels: str) -> ob.Trainer:
    graph = ob.training_graph(model, loss=loss, optimizer="adam")
    return ob.Trainer(graph, learning_rate=1e-6, kernels=kernels)


def _labels(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if "language" in name:
        return rng.integers(0, 5000, shape[:2])
    return rng.integers(0, 4, (shape[0], *shape[2:]) if len(shape) == 4 else shape[:1])


def _time(trainer: ob.Trainer, feeds: dict[str, np.ndarray], steps: int) -> float:
    trainer.step(feeds)
    start = perf_counter()
    for _ in range(steps):
        trainer.step(feeds)
    return (perf_counter() - start) / steps


if __name__ == "__main__":
    main()
