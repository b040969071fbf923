"""Surrogates as people put into CasADi, in ONNX and, for the truth, in CasADi's own operators, whose derivatives are exact."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from onnx import ModelProto, numpy_helper, parser

KINDS = ("mlp", "conv", "lstm", "gp")
SHAPES: dict[str, list[int]] = {"mlp": [8], "conv": [1, 2, 6, 6], "lstm": [5, 3], "gp": [4]}
SIZES = {"mlp": "[3]", "conv": "[3]", "lstm": "[2]", "gp": ""}  # of y
HIDDEN, STEPS, KERNEL = 8, 5, 3
GP = "{ d = Sub (x, points) q = Mul (d, d) s = ReduceSum <keepdims = 0> (q, one) m = Mul (s, scale) k = Exp (m)"
TEXTS = {
    "mlp": "{ r = Unsqueeze (x, zero) a = Gemm <transB = 1> (r, w1, b1) b = Tanh (a) c = Gemm <transB = 1> (b, w2, b2)"
    " y = Squeeze (c, zero) }",
    "gp": GP + " p = Mul (k, alpha) y = ReduceSum <keepdims = 0> (p) }",
    "conv": "{ a = Conv (x, k1) b = Tanh (a) c = Flatten (b) d = MatMul (c, w2) y = Squeeze (d, zero) }",
    "lstm": "{ s = Unsqueeze (x, one) all, last = LSTM <hidden_size = 8> (s, w, r, b) h = Squeeze (last, zero)"
    " o = MatMul (h, w2) y = Squeeze (o, zero) }",
}


def weights(kind: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Of every surrogate, in float64."""
    rng = np.random.default_rng(seed)
    shapes = {
        "mlp": {"w1": (32, 8), "b1": (32,), "w2": (3, 32), "b2": (3,)},
        "conv": {"k1": (4, 2, KERNEL, KERNEL), "w2": (64, 3)},
        "lstm": {"w": (1, 4 * HIDDEN, 3), "r": (1, 4 * HIDDEN, HIDDEN), "b": (1, 8 * HIDDEN), "w2": (HIDDEN, 2)},
        "gp": {"points": (40, 4), "alpha": (40,)},
    }
    return {name: 0.4 * rng.standard_normal(shape) for name, shape in shapes[kind].items()}


def build(kind: str, dtype: type[np.floating]) -> ModelProto:
    """x -> y, a vector or a number."""
    numbers = {name: value.astype(dtype) for name, value in weights(kind).items()}
    if kind == "gp":
        numbers["scale"] = np.array(-0.5, dtype)
    word, shape = "double" if dtype is np.float64 else "float", ",".join(map(str, SHAPES[kind]))
    model = parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 18]> {kind} ({word}[{shape}] x) => ({word}{SIZES[kind]} y) {TEXTS[kind]}'
    )
    read = {name for node in model.graph.node for name in node.input}
    axes = {"zero": np.array([0]), "one": np.array([1])}
    for name, value in {**numbers, **axes}.items():
        if name in read:
            model.graph.initializer.append(numpy_helper.from_array(value, name))
    return model


def _patches() -> np.ndarray:
    """(18, 16) indices of what each tap of each channel sees at each place."""
    taps = product(range(2), range(KERNEL), range(KERNEL))
    return np.array([[36 * c + 6 * (i + m) + j + n for i in range(4) for j in range(4)] for c, m, n in taps])


def symbolic(kind: str, x: Any, casadi: Any) -> Any:
    """y of x, both CasADi's: x of a matrix is that matrix, of more axes the column of its elements."""
    w = weights(kind)

    def sigmoid(a: Any) -> Any:
        return 1 / (1 + casadi.exp(-a))

    if kind == "mlp":
        return w["w2"] @ casadi.tanh(w["w1"] @ x + w["b1"]) + w["b2"]
    if kind == "gp":
        return sum(
            alpha * casadi.exp(-0.5 * casadi.sumsqr(x - point))
            for alpha, point in zip(w["alpha"], w["points"], strict=True)
        )
    if kind == "conv":
        patches, k = _patches(), w["k1"].reshape(4, -1)
        hidden = [casadi.tanh(k @ x[patches[:, n].tolist()]) for n in range(16)]
        return w["w2"].T @ casadi.vec(casadi.horzcat(*hidden).T)
    h = c = casadi.MX.zeros(HIDDEN)
    bias = w["b"][0, : 4 * HIDDEN] + w["b"][0, 4 * HIDDEN :]
    for n in range(STEPS):
        i, o, f, g = casadi.vertsplit(w["w"][0] @ x[n, :].T + w["r"][0] @ h + bias, HIDDEN)
        c = sigmoid(f) * c + sigmoid(i) * casadi.tanh(g)
        h = sigmoid(o) * casadi.tanh(c)
    return w["w2"].T @ h
