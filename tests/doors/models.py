"""The models that the doors are tested on, with their mathematics in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import ModelProto, numpy_helper, parser

W = np.arange(1.0, 7.0).reshape(3, 2) / 4
X, B, K = np.random.default_rng(0).standard_normal((4, 3)), np.array([0.5, -1.0, 2.0]), np.arange(4)


def waves(dtype: str = "double") -> ModelProto:
    """y = sin(x + b) W of rows, z = Σ y², c = Σ k."""
    text = f"""<ir_version: 10, opset_import: ["": 18]>
        waves ({dtype}[N, 3] x, {dtype}[3] b, int64[N] k) => ({dtype}[N, 2] y, {dtype} z, int64 c) {{
            shifted = Add (x, b) wave = Sin (shifted) y = MatMul (wave, W)
            z = ReduceSumSquare <keepdims = 0> (y) c = ReduceSum <keepdims = 0> (k) }}"""
    return with_weights(parser.parse_model(text), W=W.astype("f" if dtype == "float" else "d"))


def jacobian_of_waves(x: np.ndarray, b: np.ndarray, w: np.ndarray = W) -> np.ndarray:
    """Of (y, z), flat, by (x, b), flat."""
    y, slope = np.sin(x + b) @ w, np.cos(x + b)
    by_x = np.einsum("nm,nd,dc->ncmd", np.eye(len(x)), slope, w)
    of_y = np.concatenate([by_x.reshape(y.size, x.size), np.einsum("nd,dc->ncd", slope, w).reshape(y.size, 3)], axis=1)
    return np.concatenate([of_y, 2 * y.reshape(1, -1) @ of_y])


def residuals() -> ModelProto:
    """a exp(-d t) sin(f t) - measured, (d, f) being one input, and the sum of its squares."""
    return parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        oscillation (double a, double[2] df, double[n] t, double[n] measured) => (double[n] residual, double error) {
            d, f = Split <num_outputs = 2> (df) phase = Mul (f, t) wave = Sin (phase)
            exponent = Mul (d, t) rising = Exp (exponent) damped = Div (wave, rising) y = Mul (a, damped)
            residual = Sub (y, measured) error = ReduceSumSquare <keepdims = 0> (residual) }""")


def classifier() -> ModelProto:
    """A small network of images (N, 1, 6, 6) with three classes, float32."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        classifier (float[N, 1, 6, 6] image) => (float[N, 3] logits) {
            convolved = Conv <pads = [1, 1, 1, 1]> (image, kernel, bias) features = Relu (convolved)
            pooled = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (features) flat = Flatten (pooled)
            logits = Gemm (flat, head, shift) }""")
    rng = np.random.default_rng(5)
    shapes = {"kernel": (4, 1, 3, 3), "bias": (4,), "head": (36, 3), "shift": (3,)}
    return with_weights(model, **{n: 0.5 * rng.standard_normal(s).astype("f") for n, s in shapes.items()})


def images(count: int = 5) -> np.ndarray:
    return np.random.default_rng(6).random((count, 1, 6, 6), np.float32)


def row() -> ModelProto:
    """A network of one row (1, 3) with one number, float32: a likelihood as exporters without dynamic axes write it."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        row (float[1, 3] x) => (float[1, 1] y) { a = Gemm (x, w) b = Tanh (a) y = Gemm (b, v) }""")
    rng = np.random.default_rng(1)
    return with_weights(model, w=rng.standard_normal((3, 8)).astype("f"), v=rng.standard_normal((8, 1)).astype("f"))


def with_weights(model: ModelProto, **arrays: Any) -> ModelProto:
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return model


def weights_of(model: ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
