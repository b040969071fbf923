"""Last matrix products in the forms that files have, and the loss of a next token, against float64 NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import ModelProto, numpy_helper, parser

WIDTH, CLASSES = 6, 11


def head(kind: str, rng: np.random.Generator, dims: str = "B, T") -> ModelProto:
    """x · m, and logits of it: in float64 `logits` computes the same."""
    shapes: dict[str, tuple[int, ...]] = {"m": (WIDTH, WIDTH), "w": (WIDTH, CLASSES), "b": (CLASSES,)}
    nodes = {
        "MatMul": "y = MatMul(h, w)",
        "bias": "a = MatMul(h, w) y = Add(b, a)",
        "tied": "wt = Transpose<perm = [1, 0]>(e) y = MatMul(h, wt)",
        "softcap": "a = MatMul(h, w) c = Div(a, cap) d = Tanh(c) y = Mul(d, cap)",
        "scale": "a = MatMul(h, w) y = Mul(a, cap)",
        "lora": "a = MatMul(h, w) p = MatMul(h, la) q = MatMul(p, lb) r = Mul(q, cap) y = Add(a, r)",
        "Gemm": "f = Reshape(h, rows) a = Gemm<transB = 1, alpha = 0.5>(f, e, b) s = Shape(h) n = Slice(s, zero, two) "
        "k = Concat<axis = 0>(n, last) y = Reshape(a, k)",
    }[kind]
    wanted = {
        "MatMul": "w", "bias": "w b", "tied": "e", "softcap": "w", "scale": "w", "lora": "w la lb", "Gemm": "e b",
    }[kind].split()  # fmt: skip
    shapes |= {"e": (CLASSES, WIDTH), "la": (WIDTH, 2), "lb": (2, CLASSES)}
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[{dims}, {WIDTH}] x) => (float[{dims}, {CLASSES}] y) <float cap = {{2.5}}, int64[2] rows = {{-1, {WIDTH}}},
        int64[1] zero = {{0}}, int64[1] two = {{2}}, int64[1] last = {{{CLASSES}}}> {{ h = MatMul(x, m) {nodes} }}""")
    for name in ["m", *wanted]:
        values = rng.standard_normal(shapes[name]).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    used = {name for node in model.graph.node for name in node.input}
    for tensor in [t for t in model.graph.initializer if t.name not in used]:
        model.graph.initializer.remove(tensor)
    return model


def logits(kind: str, x: np.ndarray, p: dict[str, np.ndarray]) -> np.ndarray:
    h = x @ p["m"]
    if kind in ("tied", "Gemm"):
        return h @ p["e"].T if kind == "tied" else 0.5 * (h @ p["e"].T) + p["b"]
    a = h @ p["w"]
    if kind == "lora":
        return a + 2.5 * (h @ p["la"] @ p["lb"])
    return {"MatMul": a, "bias": a + p.get("b", 0), "softcap": 2.5 * np.tanh(a / 2.5), "scale": 2.5 * a}[kind]


def next_token(y: np.ndarray, labels: np.ndarray, loss: Any, weights: np.ndarray | None = None) -> float:
    """The formula of NextToken in float64."""
    w = np.ones(labels.shape) if weights is None else weights.astype(np.float64)
    if loss.shift:
        y, labels, w = y[..., :-1, :], labels[..., 1:], w[..., 1:]
    y, labels, w = y.reshape(-1, y.shape[-1]), labels.reshape(-1), w.reshape(-1)
    kept = labels != loss.ignore_index
    y, labels, w = y[kept], labels[kept], w[kept]
    if not len(labels):
        return 0.0
    largest = y.max(1, keepdims=True)
    lse = largest[:, 0] + np.log(np.exp(y - largest).sum(1))
    log_p = y - lse[:, None]
    each = -(1 - loss.label_smoothing) * log_p[np.arange(len(labels)), labels] - loss.label_smoothing * log_p.mean(1)
    total = float((w * (each + loss.z_loss * lse**2)).sum())
    divisor = w.sum() if loss.reduction == "mean" else 1.0
    return total / divisor if divisor else 0.0


KINDS = ("MatMul", "bias", "tied", "softcap", "scale", "lora", "Gemm")
