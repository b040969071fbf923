"""Quantised models by hand, one for each form, with the floats they stand for: weights, and y in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np

from tests.converters.quantized.form import F32, RNG, Arrays, Form, f32, ints, linear, real, scale
from tests.converters.quantized.forms_fused import FUSED


def conv1(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A convolution by kernels of one pixel."""
    return np.einsum("nchw,oc->nohw", x.astype(np.float64), w[:, :, 0, 0]) + b[:, None, None]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


Z8, ZU = np.array(0, np.int8), np.array(128, np.uint8)
X, SX, SY = np.clip(f32(5, 6), -2.5, 2.4), scale(0.02), scale(0.1)
ROUND_X = "q = QuantizeLinear(x, sx, zu) xd = DequantizeLinear(q, sx, zu)"
ROUND_Y = "r = QuantizeLinear(p, sy, zu) y = DequantizeLinear(r, sy, zu)"
STATIC = {"sx": SX, "zu": ZU, "sy": SY}
W8, S8 = ints("int8", 6, 4), scale(0.01)
WU, SU = ints("uint8", 6, 4), RNG.uniform(0.003, 0.01, 4).astype(F32)
ZW = RNG.integers(90, 160, 4).astype(np.uint8)
ROW = np.array([[255, 1, 30, 200]], np.uint8)
BIAS = RNG.integers(-4000, 4000, 4).astype(np.int32)
K8, SK = ints("int8", 4, 6, 1, 1, axis=1), RNG.uniform(0.003, 0.01, 4).astype(F32)
IMAGE = np.clip(f32(2, 6, 3, 3), -2.5, 2.4)
ACROSS = float(np.abs(real(W8, S8)).sum(axis=0).max() * SX / 2)  # of the rounding of x, behind a product with W8


def _qdq() -> dict[str, Form]:
    w4, s4 = ints("int4", 40, 3, every=32, least=-8), RNG.uniform(0.05, 0.1, (2, 3)).astype(F32)
    z4 = RNG.integers(-4, 5, (2, 3)).astype(ml_dtypes.int4)
    blocked = real(w4, np.repeat(s4, 32, 0)[:40], np.repeat(z4.astype(np.float64), 32, 0)[:40])
    return {
        "per tensor": Form(
            f"{ROUND_X} [dq] wd = DequantizeLinear(w_quantized, sw, zw) p = MatMul(xd, wd) {ROUND_Y}",
            STATIC | {"w_quantized": W8, "sw": S8, "zw": Z8},
            {"w": real(W8, S8)},
            linear,
            X,
            ACROSS + 0.05,
        ),
        "along an axis, with zero points": Form(
            f"{ROUND_X} wd = DequantizeLinear <axis = -1> (w_quantized, sw, zw) p = MatMul(xd, wd) {ROUND_Y}",
            STATIC | {"w_quantized": WU, "sw": SU, "zw": ZW},
            {"w": real(WU, SU, ZW)},
            linear,
            X,
            0.2,
        ),
        "an axis of one element": Form(
            "wd = DequantizeLinear <axis = 1> (w_quantized, sw, zw) y = MatMul(x, wd)",
            {"w_quantized": W8[:, :1], "sw": S8.reshape(1), "zw": np.zeros(1, np.int8)},
            {"w": real(W8[:, :1], S8)},
            linear,
            X,
            0,
        ),
        "blocks of 4 bits": Form(
            "wd = DequantizeLinear <axis = 0, block_size = 32> (w_DQ_Q4, sw, zw) y = MatMul(x, wd)",
            {"w_DQ_Q4": w4, "sw": s4, "zw": z4},
            {"w": blocked},
            linear,
            f32(3, 40),
            0,
        ),
        "a bias of 32 bits": Form(
            f"{ROUND_X} wd = DequantizeLinear <axis = 1> (w_quantized, sw) b = DequantizeLinear <axis = 0> "
            f"(b_quantized, sb) p = Gemm(xd, wd, b) {ROUND_Y}",
            STATIC | {"w_quantized": W8, "sw": SU, "b_quantized": BIAS, "sb": SX * SU},
            {"w": real(W8, SU), "b": real(BIAS, SX * SU)},
            linear,
            X,
            0.2,
        ),
        "a Relu that is gone": Form(
            "q = QuantizeLinear(x, sx, zu) xd = DequantizeLinear(q, sx, zu) wd = DequantizeLinear(w_quantized, sw) "
            "p = MatMul(xd, wd) r = QuantizeLinear(p, sy, zr) h = DequantizeLinear(r, sy, zr) y = Neg(h)",
            STATIC | {"w_quantized": W8, "sw": S8, "zr": np.array(-128, np.int8)},
            {"w": real(W8, S8)},
            lambda x, t: -np.maximum(linear(x, t), 0),
            X,
            ACROSS + 0.05,
        ),
        "a Clip that is gone": Form(
            "wd = DequantizeLinear(w_quantized, sw) p = MatMul(x, wd) r = QuantizeLinear(p, s6, z6) "
            "h = DequantizeLinear(r, s6, z6) y = Neg(h)",
            {"w_quantized": W8, "sw": scale(0.05), "s6": scale(6 / 255), "z6": np.array(0, np.uint8)},
            {"w": real(W8, 0.05)},
            lambda x, t: -np.clip(linear(x, t), 0, 6),
            X,
            0.013,
        ),
        "seven bits by Clip": Form(
            "q = QuantizeLinear(x, s, z) c = Clip(q, low, high) xd = DequantizeLinear(c, s, z) "
            "wd = DequantizeLinear(w_quantized, sw) y = MatMul(xd, wd)",
            {
                "s": scale(0.04),
                "z": np.array(64, np.uint8),
                "low": np.array(0, np.uint8),
                "high": np.array(127, np.uint8),
            }
            | {"w_quantized": W8, "sw": S8},
            {"w": real(W8, S8)},
            linear,
            X,
            2 * ACROSS,
        ),
        "a float weight": Form(
            "q = QuantizeLinear <axis = 1> (w, sw, zw) wd = DequantizeLinear <axis = 1> (q, sw, zw) y = MatMul(x, wd)",
            {"w": f32(6, 4), "sw": np.full(4, 0.05, F32), "zw": np.zeros(4, np.int8)},
            {},
            linear,
            X,
            0.5,
        ),
        "a table": Form(
            "g = Gather(w_quantized, x) y = DequantizeLinear(g, sw, zw)",
            {"w_quantized": WU, "sw": scale(0.02), "zw": np.array(120, np.uint8)},
            {"w": real(WU, 0.02, 120)},
            lambda x, t: t["w"][x],
            np.array([3, 0, 5]),
            0,
        ),
        "moved integers": Form(
            f"{ROUND_X} t = Transpose <perm = [1, 0]> (q) a, b = Split <axis = 1, num_outputs = 2> (t) "
            "c = Concat <axis = 0> (a, b) d = Pad(c, pads, zu) y = DequantizeLinear(d, sx, zu)",
            {"sx": SX, "zu": ZU, "pads": np.array([0, 1, 1, 0])},
            {},
            lambda x, _: np.pad(np.concatenate([x.T[:, :2], x.T[:, 2:]]).astype(np.float64), ((0, 1), (1, 0))),
            X[:4],
            0.011,
        ),
        "cast and scaled": Form(
            "c = Cast <to = 1> (w_q) w = Mul(c, sw) y = MatMul(x, w)",
            {"w_q": W8, "sw": SU[None]},
            {"w": real(W8, SU)},
            linear,
            X,
            0,
        ),
        "cast, centred and scaled": Form(
            "c = Cast <to = 1> (w_q) d = Cast <to = 1> (zw) e = Sub(c, d) w = Mul(sw, e) y = MatMul(x, w)",
            {"w_q": WU, "sw": SU[None], "zw": ZW[None]},
            {"w": real(WU, SU, ZW)},
            linear,
            X,
            0,
        ),
    }


def _qlinear(op: str, second: str, y: Callable[..., np.ndarray], bound: float, **attributes: object) -> Form:
    """An operator of com.microsoft on rounded x, and behind it the floats."""
    return Form(
        f"q = QuantizeLinear(x, sx, zu) r = com.microsoft.{op}(q, sx, zu{second}, sy, zy) y = DequantizeLinear(r, sy, zy)",
        {"sx": SX, "zu": ZU, "sy": scale(0.04), "zy": np.array(110, np.uint8)}
        | ({"c_quantized": ROW, "sc": scale(0.01)} if op in ("QLinearAdd", "QLinearMul", "QLinearWhere") else {}),
        {"c": real(ROW, 0.01, 128)} if "c_quantized" in second else {},
        y,
        X[:, :4],
        bound,
        attributes={op: attributes},
    )


def _qoperator() -> dict[str, Form]:
    out = {"sx": SX, "zu": ZU, "sy": SY}
    c = ", c_quantized, sc, zu"
    forms = {
        "QLinearMatMul": Form(
            "q = QuantizeLinear(x, sx, zu) r = QLinearMatMul(q, sx, zu, w_quantized, sw, zw, sy, zu) "
            "y = DequantizeLinear(r, sy, zu)",
            out | {"w_quantized": WU, "sw": SU, "zw": ZW},
            {"w": real(WU, SU, ZW)},
            linear,
            X,
            0.2,
        ),
        "QLinearConv": Form(
            "q = QuantizeLinear(x, sx, zu) r = QLinearConv <kernel_shape = [1, 1]> "
            "(q, sx, zu, w_quantized, sw, zw, sy, zr, b_quantized) h = DequantizeLinear(r, sy, zr) y = Neg(h)",
            out
            | {"w_quantized": K8, "sw": SK, "zw": np.zeros(4, np.int8), "zr": np.array(0, np.uint8)}
            | {"b_quantized": BIAS},
            {"w": real(K8, SK[:, None, None, None]), "b": real(BIAS, SX * SK)},
            lambda x, t: -np.maximum(conv1(x, t["w"], t["b"]), 0),
            IMAGE,
            0.2,
        ),
        "QGemm": Form(
            "q = QuantizeLinear(x, sx, zu) r = com.microsoft.QGemm <alpha = 0.5, transB = 1> "
            "(q, sx, zu, w_quantized, sw, zw, b_quantized, sy, zu) y = DequantizeLinear(r, sy, zu)",
            out | {"w_quantized": W8.T.copy(), "sw": S8, "zw": Z8, "b_quantized": BIAS},
            {"w": real(W8.T, S8), "b": real(BIAS, 0.5 * float(SX) * float(S8))},
            lambda x, t: 0.5 * x.astype(np.float64) @ t["w"].T + t["b"],
            X,
            ACROSS / 2 + 0.05,
        ),
        "QGemm that gives floats": Form(
            "q = QuantizeLinear(x, sx, zu) y = com.microsoft.QGemm(q, sx, zu, w_quantized, sw, zw, b_quantized)",
            {"sx": SX, "zu": ZU, "w_quantized": W8, "sw": S8, "zw": Z8, "b_quantized": BIAS},
            {"w": real(W8, S8), "b": real(BIAS, float(SX) * float(S8))},
            linear,
            X,
            ACROSS,
        ),
        "QLinearAdd": _qlinear("QLinearAdd", c, lambda x, t: x + t["c"], 0.032),
        "QLinearMul": _qlinear("QLinearMul", c, lambda x, t: x * t["c"], 0.05),
        "QLinearLeakyRelu": _qlinear(
            "QLinearLeakyRelu", "", lambda x, _: np.where(x < 0, x * 0.25, x), 0.032, alpha=0.25
        ),
        "QLinearSigmoid": _qlinear("QLinearSigmoid", "", lambda x, _: 1 / (1 + np.exp(-x.astype(float))), 0.03),
        "QLinearSoftmax": _qlinear(
            "QLinearSoftmax", "", lambda x, _: softmax(x.astype(float)), 0.03, axis=-1, opset=21
        ),
        "QLinearConcat": _qlinear(
            "QLinearConcat", "", lambda x, _: np.concatenate([x, x], axis=1).astype(float), 0.032, axis=1
        ),
        "QLinearWhere": _qlinear("QLinearWhere", c, lambda x, t: np.where(x > 0, x, t["c"]), 0.04),
    }
    joined, where = (forms[name].nodes for name in ("QLinearConcat", "QLinearWhere"))
    for name, nodes in (
        ("QLinearConcat", joined.replace("(q, sx, zu, sy, zy)", "(sy, zy, q, sx, zu, q, sx, zu)")),
        (
            "QLinearWhere",
            "zero = Constant <value_float = 0.0> () b = Greater(x, zero) "
            + where.replace("(q, sx, zu, c", "(b, q, sx, zu, c"),
        ),
    ):
        forms[name] = replace(forms[name], nodes=nodes)
    mean = _qlinear(
        "QLinearGlobalAveragePool", "", lambda x, _: x.astype(float).mean(axis=(2, 3), keepdims=True), 0.032
    )
    every = {"kernel_shape": [1, 1], "strides": [2, 2]}
    some = _qlinear("QLinearAveragePool", "", lambda x, _: x.astype(float)[:, :, ::2, ::2], 0.032, **every)
    return forms | {op: replace(form, x=IMAGE) for form in (mean, some) for op in form.attributes}


DYNAMIC = "q, s, z = DynamicQuantizeLinear(x) "
ONE = float((X.max() - X.min()) / 255 / 2 * np.abs(real(W8, S8)).sum(axis=0).max())


def _dynamic() -> dict[str, Form]:
    c4 = f32(4)
    by = {"w_quantized": W8, "sw": S8, "zw": Z8}
    image = float((IMAGE.max() - IMAGE.min()) / 255 / 2 * np.abs(real(K8, SK[:, None, None, None])).sum(axis=1).max())
    return {
        "MatMulInteger": Form(
            DYNAMIC
            + "i = MatMulInteger(q, w_quantized, z, zw) f = Cast <to = 1> (i) m = Mul(s, sw) p = Mul(f, m) y = Add(p, b)",
            by | {"b": c4},
            {"w": real(W8, S8)},
            linear,
            X,
            ONE,
        ),
        "MatMulInteger along an axis": Form(
            DYNAMIC + "i = MatMulInteger(q, w_quantized, z, zw) f = Cast <to = 1> (i) m = Mul(sw, s) y = Mul(m, f)",
            {"w_quantized": WU, "sw": SU, "zw": ZW},
            {"w": real(WU, SU, ZW)},
            linear,
            X,
            ONE,
        ),
        "two scales, one after the other": Form(
            DYNAMIC + "i = MatMulInteger(q, w_quantized, z, zw) f = Cast <to = 1> (i) m = Mul(f, s) y = Mul(m, sw)",
            by,
            {"w": real(W8, S8)},
            linear,
            X,
            ONE,
        ),
        "two scales, the weight's first": Form(
            DYNAMIC + "i = MatMulInteger(q, w_quantized, z, zw) f = Cast <to = 1> (i) m = Mul(f, sw) y = Mul(m, s)",
            by,
            {"w": real(W8, S8)},
            linear,
            X,
            ONE,
        ),
        "x times x": Form(
            DYNAMIC
            + "v = Transpose <perm = [1, 0]> (x) qv, sv, zv = DynamicQuantizeLinear(v) i = MatMulInteger(q, qv, z, zv) "
            "f = Cast <to = 1> (i) m = Mul(s, sv) y = Mul(f, m)",
            {},
            {},
            lambda x, _: x.astype(float) @ x.T.astype(float),
            X,
            0.3,
        ),
        "ConvInteger": Form(
            DYNAMIC + "i = ConvInteger <kernel_shape = [1, 1]> (q, w_quantized, z, zw) f = Cast <to = 1> (i) "
            "l = Constant <value_ints = [1, 4, 1, 1]> () sr = Reshape(sw, l) m = Mul(s, sr) p = Mul(f, m) "
            "br = Reshape(b, l) y = Add(p, br)",
            {"w_quantized": K8, "sw": SK, "zw": Z8, "b": c4},
            {"w": real(K8, SK[:, None, None, None])},
            lambda x, t: conv1(x, t["w"], t["b"]),
            IMAGE,
            image,
        ),
        "ConvInteger, its bias rounded": Form(
            DYNAMIC + "i = ConvInteger <kernel_shape = [1, 1]> (q, w_quantized, z, zw) m = Mul(s, sw) "
            "d = Div(b, m) fl = Floor(d) bi = Cast <to = 6> (fl) l = Constant <value_ints = [1, 4, 1, 1]> () "
            "br = Reshape(bi, l) a = Add(i, br) f = Cast <to = 1> (a) y = Mul(f, m)",
            {"w_quantized": K8, "sw": scale(0.01), "zw": Z8, "b": c4},
            {"w": real(K8, 0.01)},
            lambda x, t: conv1(x, t["w"], t["b"]),
            IMAGE,
            2 * image,
        ),
        "DynamicQuantizeMatMul": Form(
            "y = com.microsoft.DynamicQuantizeMatMul(x, w_quantized, sw, zw, b)",
            {"w_quantized": W8, "sw": SU, "zw": np.zeros(4, np.int8), "b": c4},
            {"w": real(W8, SU)},
            linear,
            X,
            ONE,
        ),
        "MatMulIntegerToFloat": Form(
            DYNAMIC + "y = com.microsoft.MatMulIntegerToFloat(q, w_quantized, s, sw, z, zw, b)",
            by | {"b": c4},
            {"w": real(W8, S8)},
            linear,
            X,
            ONE,
        ),
    } | {name: _lstm(rows=rows) for name, rows in (("DynamicQuantizeLSTM", False), ("LSTM by rows", True))}


def _lstm(*, rows: bool) -> Form:
    """Two directions over one step of a sequence: h = o · tanh(i · g), all gates from x and the first state."""
    hidden, given = 3, 5
    w, r = (ints("int8", 2, n, 4 * hidden, axis=1) for n in (given, hidden))
    count = (2, 4 * hidden) if rows else (2,)
    sw, sr = (RNG.uniform(0.002, 0.006, count).astype(F32) for _ in range(2))
    zero = np.zeros(count, np.int8)
    spread = (lambda s: s[:, None, :]) if rows else (lambda s: s[:, None, None])
    h0, b = f32(2, 1, hidden), f32(2, 8 * hidden, size=0.3)

    def y(x: np.ndarray, t: Arrays) -> np.ndarray:
        sums = np.einsum("sbi,dgi->dsbg", x.astype(float), t["w"]) + np.einsum("dbi,dgi->dbg", t["h"], t["r"])[:, None]
        sums = sums + (t["b"][:, : 4 * hidden] + t["b"][:, 4 * hidden :])[:, None, None]
        i, o, _, c = np.split(sums, 4, axis=-1)
        state = np.tanh(c) / (1 + np.exp(-i))
        return (np.tanh(state) / (1 + np.exp(-o))).transpose(1, 0, 2, 3)

    return Form(
        'y = com.microsoft.DynamicQuantizeLSTM <direction = "bidirectional", hidden_size = 3> '
        "(x, w_quantized, r_quantized, b, , h, , , sw, zw, sr, zr)",
        {"w_quantized": w, "r_quantized": r, "b": b, "h": h0, "sw": sw, "zw": zero, "sr": sr, "zr": zero},
        {"w": real(w, spread(sw)).transpose(0, 2, 1), "r": real(r, spread(sr)).transpose(0, 2, 1)},
        y,
        np.clip(f32(1, 1, given), -1, 1),
        0.02,
    )


FORMS = _qdq() | _qoperator() | _dynamic() | FUSED
