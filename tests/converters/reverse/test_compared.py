"""Gradients of half-precision models through operators whose result is compared with their inputs."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper, parser

import onnx_backprop as ob

COMPARED = {
    "GlobalMaxPool": "m = GlobalMaxPool(a)",
    "Max": "m = Max(a, b)",
    "Min": "m = Min(a, b)",
    "ReduceMax": "m = ReduceMax(a, axes)",
    "ReduceMin": "m = ReduceMin(a, axes)",
}


@pytest.mark.parametrize("output", ["m", "a"])
@pytest.mark.parametrize("op_type", COMPARED)
def test_what_is_compared_is_rounded_alike(op_type: str, output: str, rng: np.random.Generator) -> None:
    """onnxruntime leaves the rounding between two nodes out: a result is then no input of its own, bit by bit."""
    model = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        g (float[500,3,8] x) => (float[?,?,?] y, float16[?,?,?] {output}) <int64[1] axes = {{2}}>
        {{
            h = Cast<to = 10>(x)
            a = Mul(h, w)  b = Mul(h, v)
            {COMPARED[op_type]}
            y = Cast<to = 1>(m)
        }}
    """)
    x, w, v = (rng.standard_normal(shape, np.float32) for shape in ((500, 3, 8), (3, 8), (3, 8)))
    x, w, v = (array.astype(np.float16).astype(np.float64) for array in (x, w, v))
    for name, array in (("w", w), ("v", v)):
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float16), name))
    pick = np.min if "Min" in op_type else np.max
    both = np.stack([x * w, x * v])
    if op_type in ("Max", "Min"):
        best, gap = both == pick(both, 0), np.abs(both[0] - both[1])
        dx = best[0] * w + best[1] * v
    else:
        ranked = np.sort(both[0], 2)
        best = both[0] == pick(both[0], 2, keepdims=True)
        gap = np.broadcast_to(
            (ranked[..., -1:] - ranked[..., -2:-1] if pick is np.max else ranked[..., 1:2] - ranked[..., :1]), x.shape
        )
        dx = best * w
    session = ob.session(ob.backward(model, wrt=["x"]))
    shape = (500, 3, 8) if op_type in ("Max", "Min") else (500, 3, 1)
    feeds = {"x": x.astype(np.float32), "y_grad": np.ones(shape, np.float32)}
    feeds[f"{output}_grad"] = np.zeros(shape if output == "m" else (500, 3, 8), np.float16)
    (got,) = session.run(["x_grad"], feeds)
    clear = gap > 0.05
    assert clear.mean() > 0.5
    np.testing.assert_allclose(np.asarray(got)[clear], dx[clear], rtol=1e-2, atol=1e-6)
