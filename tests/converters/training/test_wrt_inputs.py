"""The gradient of the loss by inputs, beside those of the parameters: FGSM and adversarial training in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.training.metadata import METADATA
from tests.support.numeric import outputs

RNG = np.random.default_rng(5)
X, T = (RNG.standard_normal(shape).astype(np.float32) for shape in ((3, 4), (3, 2)))
W, V = (0.5 * RNG.standard_normal(shape).astype(np.float32) for shape in ((4, 6), (6, 2)))
TEXT = '<ir_version: 10, opset_import: ["": 21]> net (float[N, 4] x) => (float[N, 2] y) { a = MatMul(x, w) h = Tanh(a) y = MatMul(h, v) }'


def network(text: str = TEXT) -> ModelProto:
    model = parser.parse_model(text)
    model.graph.initializer.extend([numpy_helper.from_array(W, "w"), numpy_helper.from_array(V, "v")])
    return model


def expected(x: np.ndarray = X, t: np.ndarray = T, w: np.ndarray = W, v: np.ndarray = V) -> np.ndarray:
    """d mean((y - t)²) / dx in float64."""
    h = np.tanh(x.astype(np.float64) @ w)
    return ((2 * (h @ v - t) / t.size) @ v.T * (1 - h * h)) @ w.T


def test_beside_the_parameters() -> None:
    graph = ob.training_graph(network(), loss="mse", wrt_inputs=["x"])
    assert [v.name for v in graph.model.graph.output] == ["loss", "y", "x_grad", "w_grad", "v_grad"]
    assert (graph.input_gradients, list(graph.parameters)) == ({"x": "x_grad"}, ["w", "v"])
    feeds = {"x": X, "target": T}
    got, plain = outputs(graph.model, feeds), outputs(ob.training_graph(network(), loss="mse").model, feeds)
    np.testing.assert_allclose(got["x_grad"], expected(), rtol=1e-4)
    for name in plain:
        np.testing.assert_array_equal(got[name], plain[name])


def test_targets_are_inputs_too() -> None:
    graph = ob.training_graph(network(), loss="mse", wrt_inputs=["target", "x"])
    got = outputs(graph.model, {"x": X, "target": T})
    assert list(graph.input_gradients) == ["target", "x"]
    np.testing.assert_allclose(got["target_grad"], -2 * (np.tanh(X @ W) @ V - T) / T.size, rtol=1e-4)
    np.testing.assert_allclose(got["x_grad"], expected(), rtol=1e-4)


@pytest.mark.parametrize("arguments", [{"trainable": ["x"]}, {"wrt_inputs": ["x"], "frozen": ["w", "v"]}], ids=str)
def test_inputs_alone(arguments: dict[str, Any]) -> None:
    graph = ob.training_graph(network(), loss="mse", **arguments)
    assert (graph.parameters, graph.input_gradients, graph.frozen) == ({}, {"x": "x_grad"}, ("w", "v"))
    assert [v.name for v in graph.model.graph.output] == ["loss", "y", "x_grad"]
    np.testing.assert_allclose(outputs(graph.model, {"x": X, "target": T})["x_grad"], expected(), rtol=1e-4)
    assert "0 parameters trained, 2 frozen" in graph.summary()
    other = graph.inference_model({"w": 2 * W})
    np.testing.assert_allclose(outputs(other, {"x": X})["y"], np.tanh(X @ (2 * W)) @ V, rtol=1e-4)


def test_a_model_without_parameters() -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[N, 2] x) => (float[N, 2] y) { y = Sin(x) }'
    )
    graph = ob.training_graph(model, loss="mse", wrt_inputs=["x"])
    x = X[:, :2]
    got = outputs(graph.model, {"x": x, "target": T})["x_grad"]
    np.testing.assert_allclose(got, 2 * (np.sin(x) - T) * np.cos(x) / T.size, rtol=1e-4)
    with pytest.raises(ob.InvalidArgumentError, match="no float initializer"):
        ob.training_graph(model, loss="mse", wrt_inputs=["x"], optimizer="sgd")


STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"optimizer": ob.optimizers.Adam(clip_norm=1e-3, clip_value=1e-4)},
    "accumulated": {"optimizer": ob.optimizers.SGD(accumulate=2)},
    "norms": {"gradient_norms": True},
    "fp16": {"precision": "fp16"},
    "bf16": {"precision": "bf16"},
}


@pytest.mark.parametrize("kernels", ["native", "onnx"])
@pytest.mark.parametrize("case", STEPS)
def test_steps_give_them_before_the_update(case: str, kernels: str, tmp_path: Path) -> None:
    """Unscaled, not clipped, at the weights that the step has read; batches may change their length."""
    graph = ob.training_graph(network(), loss="mse", wrt_inputs=["x"], **({"optimizer": "adam"} | STEPS[case]))
    graph.save(tmp_path / "graph.onnx")
    assert ob.TrainingGraph.load(tmp_path / "graph.onnx").input_gradients == {"x": "x_grad"}
    trainer = ob.Trainer(tmp_path / "graph.onnx", learning_rate=0.1, kernels=kernels)
    plain = ob.Trainer(
        ob.training_graph(network(), loss="mse", **({"optimizer": "adam"} | STEPS[case])),
        learning_rate=0.1,
        kernels=kernels,
    )
    rtol, atol = {"fp16": (2e-2, 1e-3), "bf16": (1e-1, 1e-2)}.get(case, (1e-4, 1e-6))
    for rows in (3, 2, 3):
        before = trainer.parameters()
        assert trainer.step(x=X[:rows], target=T[:rows]) == plain.step(x=X[:rows], target=T[:rows])
        wanted = expected(X[:rows], T[:rows], before["w"], before["v"])
        np.testing.assert_allclose(trainer.input_gradients["x"], wanted, rtol=rtol, atol=atol)
    for name, value in plain.parameters().items():
        np.testing.assert_array_equal(trainer.parameters()[name], value)


def test_a_budget_of_memory_keeps_their_bits() -> None:
    body = "".join(f"a{n} = Sin(s{n}) s{n + 1} = Mul(a{n}, s{n}) " for n in range(8))
    text = TEXT.replace("h = Tanh(a)", f"s0 = Tanh(a) {body}").replace("MatMul(h, v)", "MatMul(s8, v)")
    plain, small = (
        ob.training_graph(network(text), loss="mse", wrt_inputs=["x"], memory=memory, lengths={"N": 3})
        for memory in (None, "70%")
    )
    assert len(small.model.graph.node) > len(plain.model.graph.node)
    feeds = {"x": X, "target": T}
    np.testing.assert_array_equal(outputs(small.model, feeds)["x_grad"], outputs(plain.model, feeds)["x_grad"])


def test_fp16_without_an_optimizer() -> None:
    graph = ob.training_graph(network(), loss="mse", wrt_inputs=["x"], precision="fp16")
    for scale in (1.0, 1024.0):
        got = outputs(graph.model, {"x": X, "target": T, "loss_scale": np.array(scale, np.float32)})
        np.testing.assert_allclose(got["x_grad"], expected(), rtol=2e-2, atol=1e-3)


def test_a_trainer_says_what_it_has_not() -> None:
    trainer = ob.Trainer(ob.training_graph(network(), loss="mse", optimizer="sgd"))
    with pytest.raises(ob.InvalidArgumentError, match=r"no gradients of inputs. Make it with wrt_inputs=\[…\]"):
        _ = trainer.input_gradients
    trainer = ob.Trainer(ob.training_graph(network(), loss="mse", optimizer="sgd", wrt_inputs=["x"]))
    with pytest.raises(ob.InvalidArgumentError, match="before the first step"):
        _ = trainer.input_gradients


def test_zeros_are_told() -> None:
    with pytest.warns(ob.OnnxBackpropWarning, match="wrt_inputs: the derivative by 'x' is zero: Identity 'h/stop'"):
        graph = ob.training_graph(network(), loss="mse", wrt_inputs=["x"], stop=["h"])
    assert list(graph.parameters) == ["v"]
    assert not outputs(graph.model, {"x": X, "target": T})["x_grad"].any()
    with pytest.raises(ob.InvalidArgumentError, match="wrt_inputs: 'x' does not influence"):
        ob.training_graph(network(), loss="mse", wrt_inputs=["x"], stop=["h"], strict=True)
    integers = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (int64[N] i) => (float[N, 6] y) { y = Gather(w, i) }'
    )
    integers.graph.initializer.append(numpy_helper.from_array(W, "w"))
    with pytest.raises(ob.InvalidArgumentError, match="wrt_inputs: 'i' has type INT64"):
        ob.training_graph(integers, loss="mse", wrt_inputs=["i"])


def test_an_earlier_file_has_none(tmp_path: Path) -> None:
    """A graph without them says nothing of them, as graphs of earlier versions do."""
    graph = ob.training_graph(network(), loss="mse")
    text = next(entry.value for entry in graph.model.metadata_props if entry.key == METADATA)
    assert "input_gradients" not in text
    assert ob.TrainingGraph.load(graph.model).input_gradients == {}
    step = ob.training_graph(network(), loss="mse", optimizer="sgd", wrt_inputs=["x"])
    assert ob.from_training_info(ob.to_training_info(step)).input_gradients == {"x": "x_grad"}
    wrong = ob.training_graph(network(), loss="mse", wrt_inputs=["x"])
    entry = next(entry for entry in wrong.model.metadata_props if entry.key == METADATA)
    for good, bad in (('{"x": "x_grad"}', '{"w": "x_grad"}'), ('{"x": "x_grad"}', '{"x": "h"}')):
        assert good in entry.value
        damaged = ModelProto.FromString(wrong.model.SerializeToString())
        next(e for e in damaged.metadata_props if e.key == METADATA).value = entry.value.replace(good, bad)
        with pytest.raises(ob.InvalidModelError, match="input_gradients: expected names of"):
            ob.TrainingGraph.load(damaged)
