"""Quantised attention and embeddings, as onnxruntime's optimiser and quantiser fuse them for BERT."""

from __future__ import annotations

import numpy as np

from tests.converters.quantized.form import Arrays, Form, f32, ints, real, scale

HEADS, HIDDEN, LENGTH = 2, 4, 3


def _attention() -> Form:
    w, s = ints("int8", HIDDEN, 3 * HIDDEN), scale(0.01)
    x = np.clip(f32(2, LENGTH, HIDDEN), -2, 2)

    def y(x: np.ndarray, t: Arrays) -> np.ndarray:
        q, k, v = np.split(x.astype(np.float64) @ t["w"] + t["b"], 3, axis=-1)
        q, k, v = (a.reshape(2, LENGTH, HEADS, -1).transpose(0, 2, 1, 3) for a in (q, k, v))
        scores = np.exp(q @ k.transpose(0, 1, 3, 2) / np.sqrt(HIDDEN // HEADS))
        mixed = scores / scores.sum(axis=-1, keepdims=True) @ v
        return mixed.transpose(0, 2, 1, 3).reshape(2, LENGTH, HIDDEN)

    return Form(
        "q, a, z = DynamicQuantizeLinear(x) "
        "y = com.microsoft.QAttention <num_heads = 2> (q, w_quantized, b, a, sw, , z, zw)",
        {"w_quantized": w, "sw": s, "zw": np.array(0, np.int8), "b": f32(3 * HIDDEN)},
        {"w": real(w, s)},
        y,
        x,
        0.15,
    )


def _embedding() -> Form:
    tables = {"w": ints("uint8", 7, HIDDEN), "p": ints("uint8", 5, HIDDEN), "t": ints("uint8", 2, HIDDEN)}
    tables |= {"g": ints("uint8", HIDDEN), "e": ints("uint8", HIDDEN)}
    scales = dict(zip(tables, (0.02, 0.01, 0.005, 0.008, 0.01), strict=True))
    zeros = dict(zip(tables, (130, 120, 100, 20, 110), strict=True))

    def y(x: np.ndarray, t: Arrays) -> np.ndarray:
        rows = t["w"][x] + t["p"][: x.shape[1]] + t["t"][0]
        rows = rows - rows.mean(axis=-1, keepdims=True)
        return rows / np.sqrt(np.mean(rows**2, axis=-1, keepdims=True) + 1e-5) * t["g"] + t["e"]

    named = (", ".join(f"{kind}{name}{end}" for name in tables) for kind, end in (("", "_quantized"), ("s", ""), ("z", "")))
    first, second, third = named
    given: dict[str, np.ndarray] = {"n": np.array(0)}
    for name, array in tables.items():
        given |= {f"{name}_quantized": array, f"s{name}": scale(scales[name]), f"z{name}": np.array(zeros[name], np.uint8)}
    return Form(
        "i = Cast <to = 6> (x) m = Mul(x, n) j = Cast <to = 6> (m) "
        f"y, u = com.microsoft.QEmbedLayerNormalization <epsilon = 0.00001> (i, j, {first}, , {second}, {third})",
        given,
        {name: real(array, scales[name], zeros[name]) for name, array in tables.items()},
        y,
        np.array([[3, 0, 6], [1, 5, 2]]),
        1e-5,
    )


FUSED = {"QAttention": _attention(), "QEmbedLayerNormalization": _embedding()}
