"""Losses at the edges of their formulas."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import parser

import onnx_backprop as ob


@pytest.mark.parametrize("negative", [0.0, -0.0])
def test_kl_div_where_a_target_is_zero(negative: float) -> None:
    """t log t = 0 at t = 0: a target of one class costs -log p of it, and the gradient is that of -log p."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (float[2,3] x) => (float[2,3] y) <float one = {1.0}> { y = Mul(x, one) }'
    )
    loss = ob.losses.KLDivergence(form="logits", reduction="sum")
    graph = ob.training_graph(model, loss=loss, wrt_inputs=["x"])
    x = np.array([[1, 2, 3], [0, -1, 4]], np.float32)
    t = np.array([[negative, 1, 0], [0, 0, 1]], np.float32)
    log_p = x - np.log(np.exp(x).sum(1, keepdims=True))
    value, dx = ob.session(graph.model).run([graph.loss, "x_grad"], {"x": x, graph.target: t})
    np.testing.assert_allclose(np.asarray(value), -(log_p * (t == 1)).sum(), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(dx), np.exp(log_p) - (t == 1), rtol=1e-5, atol=1e-6)
