"""Operators of com.microsoft: attention and embeddings as they are fused for BERT, weights packed in a few bits."""

from __future__ import annotations

import numpy as np

from tests.converters.quantized.form import F32, RNG, Arrays, Form, f32, ints, linear, real, scale

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

    named = (
        ", ".join(f"{kind}{name}{end}" for name in tables) for kind, end in (("", "_quantized"), ("s", ""), ("z", ""))
    )
    first, second, third = named
    given: dict[str, np.ndarray] = {"n": np.array(0)}
    for name, array in tables.items():
        given |= {
            f"{name}_quantized": array,
            f"s{name}": scale(scales[name]),
            f"z{name}": np.array(zeros[name], np.uint8),
        }
    return Form(
        "i = Cast <to = 6> (x) m = Mul(x, n) j = Cast <to = 6> (m) "
        f"y, u = com.microsoft.QEmbedLayerNormalization <epsilon = 0.00001> (i, j, {first}, , {second}, {third})",
        given,
        {name: real(array, scales[name], zeros[name]) for name, array in tables.items()},
        y,
        np.array([[3, 0, 6], [1, 5, 2]]),
        1e-5,
    )


def _packed() -> dict[str, Form]:
    forms: dict[str, Form] = {}
    for bits in (4, 8):
        for points in (False, True):
            n, k, size = 5, 40, 16
            q = RNG.integers(0, 1 << bits, (n, 3 * size))
            q[:, ::size], q[:, 1::size] = 0, (1 << bits) - 1
            q[:, k:] = 0
            z = RNG.integers(1, (1 << bits) - 1, (n, 3)) if points else np.full((n, 3), 1 << (bits - 1))
            s = RNG.uniform(0.02, 0.1, (n, 3)).astype(F32)
            w = real(q, np.repeat(s, size, 1), np.repeat(z, size, 1))[:, :k].T
            half = 8 // bits
            b = _bytes(q, bits).reshape(n, 3, size // half)
            tensors = {f"w_Q{bits}": b, "w_scales": s}
            if points:
                tensors["zp"] = _bytes(z, bits).reshape(-1)
            forms[f"MatMulNBits, {bits} bits{', with zero points' if points else ''}"] = Form(
                f"y = com.microsoft.MatMulNBits <K = 40, N = 5, bits = {bits}, block_size = 16> "
                f"(x, w_Q{bits}, w_scales{', zp' if points else ''})",
                tensors,
                {"w": w},
                linear,
                f32(3, k),
                0,
            )
    q, s = RNG.integers(0, 16, (7, 32)), RNG.uniform(0.02, 0.1, (7, 2)).astype(F32)
    q[:, ::16], q[:, 1::16] = 0, 15
    forms["GatherBlockQuantized"] = Form(
        "y = com.microsoft.GatherBlockQuantized <bits = 4, block_size = 16, gather_axis = 0, quantize_axis = 1> "
        "(w_Q4, x, w_scales)",
        {"w_Q4": _bytes(q, 4), "w_scales": s},
        {"w": real(q, np.repeat(s, 16, 1), 8)},
        lambda x, t: t["w"][x],
        np.array([3, 0, 5]),
        0,
    )
    return forms


def _bytes(q: np.ndarray, bits: int) -> np.ndarray:
    """Numbers along the last axis in bytes, written out one by one."""
    each = 8 // bits
    rows = q.reshape(-1, q.shape[-1])
    result = np.zeros((len(rows), -(-q.shape[-1] // each)), np.uint8)
    for row, numbers in enumerate(rows):
        for n, number in enumerate(numbers):
            result[row, n // each] |= int(number) << bits * (n % each)
    return result.reshape(*q.shape[:-1], -1)


FUSED = {"QAttention": _attention(), "QEmbedLayerNormalization": _embedding()} | _packed()
