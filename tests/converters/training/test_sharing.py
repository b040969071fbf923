"""Tensors that an exporter merged, split again; copies of one weight, tied."""

from __future__ import annotations

import warnings

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.training.sharing import describe_shared

RNG = np.random.default_rng(11)
W, V = (RNG.standard_normal((4, 4)).astype(np.float32) for _ in range(2))
X, TARGET = (RNG.standard_normal((3, 4)).astype(np.float32) for _ in range(2))

MERGED = {  # two zero biases as one tensor: read twice, and handed on as PyTorch's exporter does
    "read twice": ("a = Gemm(x, w, bias) r = Relu(a) y = Gemm(r, v, bias)", ["bias", "bias_2"]),
    "handed on": (
        "other_bias = Identity(bias) a = Gemm(x, w, bias) r = Relu(a) y = Gemm(r, v, other_bias)",
        ["bias", "other_bias"],
    ),
    "handed on alone": (
        "b1 = Identity(bias) b2 = Identity(bias) a = Gemm(x, w, b1) r = Relu(a) y = Gemm(r, v, b2)",
        ["b1", "b2"],
    ),
}


def model_of(body: str, **tensors: np.ndarray) -> ModelProto:
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (float[N,4] x) => (float[N,4] y) {{ {body} }}'
    )
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in tensors.items())
    return model


def merged(body: str) -> ModelProto:
    return model_of(body, w=W, v=V, bias=np.zeros(4, np.float32))


def run(model: ModelProto) -> np.ndarray:
    return np.asarray(onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": X})[0])


def gradients(graph: ob.TrainingGraph) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(graph.model.SerializeToString())
    values = session.run(list(graph.parameters.values()), {"x": X, "target": TARGET})
    return {name: np.asarray(value) for name, value in zip(graph.parameters, values, strict=True)}


@pytest.mark.parametrize("case", MERGED)
def test_merged_tensors_are_told_and_split(case: str) -> None:
    body, names = MERGED[case]
    with pytest.warns(ob.OnnxBackpropWarning, match=r"'bias' is read by .*untie=True"):
        together = gradients(ob.training_graph(merged(body), loss="mse"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph = ob.training_graph(merged(body), loss="mse", untie=True, optimizer="sgd")
        apart = gradients(ob.training_graph(merged(body), loss="mse", untie=True))
    assert sorted(apart) == sorted(["w", "v", *names])
    np.testing.assert_allclose(apart[names[0]] + apart[names[1]], together["bias"], rtol=1e-5)
    assert np.abs(apart[names[0]] - apart[names[1]]).max() > 1e-3
    trainer = ob.Trainer(graph, learning_rate=0.1)
    trainer.step(x=X, target=TARGET)
    state = trainer.parameters()
    np.testing.assert_allclose(state[names[0]], -0.1 * apart[names[0]], rtol=1e-5)
    np.testing.assert_allclose(state[names[1]], -0.1 * apart[names[1]], rtol=1e-5)
    y = run(graph.inference_model(state))
    want = np.maximum(X @ state["w"] + state[names[0]], 0) @ state["v"] + state[names[1]]
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)


def test_weights_that_differ_within_stay_shared() -> None:
    model = model_of("a = MatMul(x, w) t = Identity(w) y = MatMul(a, t)", w=W)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(ob.training_graph(model, loss="mse", untie=True).parameters) == ["w"]


@pytest.mark.parametrize("transposed", [False, True])
def test_tied(transposed: bool) -> None:
    """The gradient of one tensor that is read twice; both copies stay equal."""
    model = model_of("a = MatMul(x, w) r = Tanh(a) y = MatMul(r, head)", w=W, head=W.T.copy() if transposed else W)
    with pytest.warns(ob.OnnxBackpropWarning, match=r"'w' and 'head' hold the same .*tie=\[\('w', 'head'\)\] keeps"):
        apart = gradients(ob.training_graph(model, loss="mse"))
    tied = gradients(ob.training_graph(model, loss="mse", tie=[("w", "head")]))
    assert list(tied) == ["w"]
    np.testing.assert_allclose(
        tied["w"], apart["w"] + (apart["head"].T if transposed else apart["head"]), rtol=1e-4, atol=1e-6
    )
    graph = ob.training_graph(model, loss="mse", tie=[("w", "head")], optimizer="sgd")
    trainer = ob.Trainer(graph, learning_rate=0.1)
    trainer.step(x=X, target=TARGET)
    w = trainer.parameters()["w"]
    y = run(graph.inference_model({"w": w}))
    np.testing.assert_allclose(y, np.tanh(X @ w) @ (w.T if transposed else w), rtol=1e-4, atol=1e-5)


def test_what_cannot_be_tied() -> None:
    model = model_of("a = MatMul(x, w) y = MatMul(a, v)", w=W, v=V)
    with pytest.raises(ob.InvalidArgumentError, match="tie: 'w' .* and 'v' .*hold different numbers"):
        ob.training_graph(model, loss="mse", tie=[("w", "v")])
    with pytest.raises(ob.InvalidArgumentError, match="tie: expected the name of an initializer, got 'wo'"):
        ob.training_graph(model, loss="mse", tie=[("w", "wo")])
    with pytest.raises(ob.InvalidArgumentError, match="tie: expected pairs of names"):
        ob.training_graph(model, loss="mse", tie=["w"])


def test_a_tied_weight_that_is_an_output_and_an_input() -> None:
    model = model_of("a = MatMul(x, w) r = Tanh(a) y = MatMul(r, head)", w=W, head=W)
    for place in (model.graph.input, model.graph.output):
        place.append(helper.make_tensor_value_info("head", TensorProto.FLOAT, [4, 4]))
    graph = ob.training_graph(model, loss="mse", prediction="y", tie=[("w", "head")], optimizer="sgd")
    assert graph.inputs == ("x", "target")
    assert graph.outputs == ("y", "head")
    exported = graph.inference_model({"w": V})
    assert [value.name for value in exported.graph.input] == ["x"]
    session = onnxruntime.InferenceSession(exported.SerializeToString())
    y, head = (np.asarray(value) for value in session.run(None, {"x": X}))
    np.testing.assert_array_equal(head, V)
    np.testing.assert_allclose(y, np.tanh(X @ V) @ V, rtol=1e-4, atol=1e-5)


def test_names_that_are_none() -> None:
    model = model_of("a = MatMul(x, w) y = MatMul(a, v)", w=W, v=V)
    with pytest.raises(ob.InvalidArgumentError, match="tie: expected names, got 1"):
        ob.training_graph(model, loss="mse", tie=[(1, 2)])
    with pytest.raises(ob.InvalidArgumentError, match="trainable: expected names or patterns, got None"):
        ob.training_graph(model, loss="mse", trainable=[None])
    with pytest.raises(ob.InvalidArgumentError, match="wrt: expected names, got None"):
        ob.backward(model, wrt=[None])


def fresh_normalisation() -> ModelProto:
    """Of a fresh BatchNormalization gain and variance are ones, shift and mean zeros: two tensors for four."""
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[N,4] x) => (float[N,4] y) '
        "{ a = MatMul(x, w) y = BatchNormalization(a, ones, zeros, zeros, ones) }"
    )
    tensors = {"w": W, "ones": np.ones(4, np.float32), "zeros": np.zeros(4, np.float32)}
    model.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in tensors.items())
    return model


@pytest.mark.parametrize("training_mode", [False, True])
def test_statistics_are_not_weights(training_mode: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph = ob.training_graph(fresh_normalisation(), loss="mse", optimizer="sgd", training_mode=training_mode)
    assert set(graph.parameters) == {"w", "ones", "zeros"}
    trainer = ob.Trainer(graph, learning_rate=0.1)
    for _ in range(3):
        trainer.step(x=X, target=TARGET)
    trained = trainer.parameters()
    state = trainer.state()
    a = X @ W
    if training_mode:
        assert np.abs(state["zeros/statistic"]).max() > 1e-3
        np.testing.assert_allclose(np.sign(state["zeros/statistic"]), np.sign(a.mean(0)))
    assert np.abs(trained["ones"] - 1).max() < 0.9
    assert np.abs(trained["zeros"]).max() > 1e-4


def test_merged_tensors_in_branches_are_split() -> None:
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[N,4] x, bool c) => (float[N,4] y) { a = Add(x, bias) '
        "b = MatMul(a, w) y = If(c) <then_branch = t () => (float[N,4] d) { i = Identity(bias) d = Add(b, i) },"
        " else_branch = e () => (float[N,4] f) { f = Neg(b) }> }"
    )
    model.graph.initializer.extend(
        numpy_helper.from_array(v, n) for n, v in {"w": W, "bias": np.zeros(4, np.float32)}.items()
    )
    graph = ob.training_graph(model, loss="mse", untie=True)
    assert set(graph.parameters) == {"w", "bias", "i"}
    onnxruntime.InferenceSession(graph.model.SerializeToString())


def test_every_shared_tensor_is_named() -> None:
    description = describe_shared({f"m{n}.weight": ["a", "b"] for n in range(6)})
    assert all(f"'m{n}.weight'" in description for n in range(6))
    assert "and 3 more" in describe_shared({f"m{n}.weight": ["a", "b"] for n in range(47)})
