"""Dropout in training graphs: what it drops, and that its masks follow from seed and run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper, parser

import onnx_backprop as ob
from tests.converters.training.classifier import rate, run


def dropout_step(ratio: float, size: int = 40_000) -> tuple[ob.TrainingGraph, Any]:
    """y = dropout(x · gain), one gain for each element, and a function that gives the mask of a seed and a run."""
    model = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        drops (float[{size}] x) => (float[{size}] y) <float ratio = {{{float(ratio)}}}, bool mode = {{1}}>
        {{ scaled = Mul(x, gain)  y = Dropout(scaled, ratio, mode) }}
    """)
    model.graph.initializer.append(numpy_helper.from_array(np.ones(size, np.float32), "gain"))
    graph = ob.training_graph(model, loss="mse", optimizer="sgd", trainable=["gain"])
    session = ob.session(graph.model, kernels=None)
    x = np.ones(size, np.float32)

    def step(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        feeds = {"x": x, "target": 0 * x, "learning_rate": rate(size / 2), **graph.initial_state()}
        if "random_state" in feeds:
            feeds["random_state"] = np.array([seed, count])
        y, gain = session.run(["y", "gain_new"], feeds)
        return np.asarray(y), np.asarray(gain)

    return graph, step


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_dropout_drops_its_share_and_scales_the_rest(ratio: float) -> None:
    _, step = dropout_step(ratio)
    y, gain = step(1, 2)
    kept = y != 0
    assert abs(kept.mean() - (1 - ratio)) < 5 * np.sqrt(max(ratio * (1 - ratio), 1e-9) / y.size) + 1e-9
    scale = 1 / (1 - ratio) if ratio < 1 else 0.0
    np.testing.assert_allclose(y[kept], scale, rtol=1e-6)
    # loss = mean y², d/dgain = 2 y · scale / size where kept: the gradient drops what this run dropped
    np.testing.assert_allclose(gain, np.where(kept, 1 - scale**2, 1), rtol=1e-4, atol=1e-4)


def test_dropout_masks_are_a_function_of_seed_and_run() -> None:
    graph, step = dropout_step(0.5)
    masks = {(seed, count): step(seed, count)[0] != 0 for seed in (0, 1) for count in (0, 1, 2)}
    np.testing.assert_array_equal(masks[0, 1], step(0, 1)[0] != 0)
    signs = {key: 2.0 * mask - 1 for key, mask in masks.items()}
    limit = 5 / np.sqrt(40_000)
    for key, a in signs.items():
        for other, b in signs.items():
            assert key == other or abs(np.mean(a * b)) < limit, (key, other)
        for lag in (1, 2, 3, 8, 64, 1000):  # neither neighbours nor rows of an image go together
            assert abs(np.mean(a[lag:] * a[:-lag])) < limit, (key, lag)
    first, second = signs[0, 0], signs[0, 1]
    assert max(abs(np.mean(first[n:] * second[: len(first) - n])) for n in range(1, 200)) < limit
    state = graph.initial_state() | {"random_state": np.array([7, 41])}
    x = np.ones(40_000, np.float32)
    assert list(run(graph.model, {"x": x, "target": x, "learning_rate": rate()} | state)["random_state_new"]) == [7, 42]


def test_a_ratio_of_0_draws_nothing() -> None:
    graph, _ = dropout_step(0.0)
    assert "random_state" not in graph.initial_state()
    assert "BitwiseXor" not in {n.op_type for n in graph.model.graph.node}


def test_two_dropouts_draw_different_masks() -> None:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        drops (float[1000] x) => (float[1000] y, float[1000] z) <float[1] gain = {1.0}, bool mode = {1}>
        { scaled = Mul(x, gain)  y = Dropout(scaled, , mode)  z = Dropout(scaled, , mode) }
    """)
    graph = ob.training_graph(model, loss="mse", prediction="y", optimizer="sgd")
    x = np.ones(1000, np.float32)
    result = run(graph.model, {"x": x, "target": x, "learning_rate": rate()} | graph.initial_state())
    assert 0.4 < np.mean((result["y"] > 0) == (result["z"] > 0)) < 0.6


def test_a_mask_that_is_read_is_refused() -> None:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        drops (float[4] x) => (float[4] y, bool[4] mask) <float[1] gain = {1.0}, bool mode = {1}>
        { scaled = Mul(x, gain)  [drop] y, mask = Dropout(scaled, , mode) }
    """)
    with pytest.raises(ob.UnsupportedError, match="Dropout 'drop': its mask is read"):
        ob.training_graph(model, loss="mse", optimizer="sgd")
