"""The divisor of the whole batch: which losses have one, and that a share of the gradient comes out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, parser

import onnx_backprop as ob
from onnx_backprop.distributed.divisor import divide_by_all

losses = ob.losses


def model(nodes: str, outputs: str = "float[N,4] y") -> ModelProto:
    return parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        g (float[N,3] x) => ({outputs}) <float[3,4] w = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}}> {{ {nodes} }}""")


def plain() -> ModelProto:
    return model("y = MatMul(x, w)")


def with_loss() -> ModelProto:
    """With a loss of its own, whose node has no name."""
    return model("y = MatMul(x, w) s = Mul(y, y) own = ReduceMean<keepdims = 0>(s)", "float own")


@pytest.mark.parametrize(
    ("build", "loss", "target"),
    [
        (plain, "mse", "target"),
        (plain, "bce_with_logits", "target"),
        (plain, "softmax_cross_entropy", "labels"),
        (plain, losses.SoftmaxCrossEntropy(ignore_index=1, weight=[1, 2, 3, 4]), "labels"),
        (with_loss, None, ""),
    ],
)
def test_a_share_of_the_gradient(rng, build: Any, loss: Any, target: str) -> None:
    graph = ob.training_graph(build(), loss=loss)
    feeds: dict[str, np.ndarray] = {"x": rng.standard_normal((5, 3), np.float32)}
    if target:
        feeds[target] = np.array([0, 1, 2, 3, 0]) if target == "labels" else rng.random((5, 4), np.float32)
    name = graph.parameters["w"]
    (whole,) = ob.session(graph.model).run([name], feeds)
    scale = divide_by_all(graph.model, graph.loss)
    assert scale is not None
    (part,) = ob.session(graph.model).run([name], feeds | {scale: np.array(2.5)})
    np.testing.assert_allclose(np.asarray(part), np.asarray(whole) / 2.5, rtol=2e-6, atol=1e-8)


@pytest.mark.parametrize(
    "loss", [losses.MSE(reduction="sum"), losses.SoftmaxCrossEntropy(label_smoothing=0.1)], ids=["a sum", "two terms"]
)
def test_others_stay_as_they_are(loss: Any) -> None:
    graph = ob.training_graph(plain(), loss=loss)
    before = graph.model.SerializeToString()
    assert divide_by_all(graph.model, graph.loss) is None
    assert graph.model.SerializeToString() == before


def test_means_beside_the_loss_keep_their_divisors() -> None:
    """And whatever the nodes are called, as here all the same."""
    means = (
        "y = MatMul(x, w) m = ReduceMean<keepdims = 0>(y) n = Mul(y, m) s = Mul(n, n) own = ReduceMean<keepdims = 0>(s)"
    )
    graph = ob.training_graph(model(means, "float own"))
    before = [node.input[1] for node in graph.model.graph.node if node.op_type == "Div"]
    for node in graph.model.graph.node:
        node.name = graph.loss
    assert divide_by_all(graph.model, graph.loss) is not None
    after = [node.input[1] for node in graph.model.graph.node if node.op_type == "Div"]
    assert [a == b for a, b in zip(before, after, strict=True)].count(False) == 1
    assert len(before) == 2
