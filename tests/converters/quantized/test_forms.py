"""Every form: the float model against float64, the file against it, and the way back."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, numpy_helper

import onnx_backprop as ob
from tests.converters.quantized.form import Form, other_names
from tests.converters.quantized.forms import FORMS

CLOSE = 3e-6  # of float32, relative to the largest number


def run(model: ModelProto, x: np.ndarray) -> np.ndarray:
    """y, node by node: onnxruntime's optimiser rounds some values that the file does not."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["y"], {"x": x})[0])


def tensors(model: ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def again(trained: ModelProto, original: ModelProto) -> ModelProto:
    """Requantised with the scales of activations that the file has."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the scales of .* stay|rounding to the integers", ob.OnnxBackpropWarning)
        return ob.requantize(trained, original)


def changed(floats: ModelProto, form: Form, seed: int = 5) -> ModelProto:
    """The float model with other weights of about the same size."""
    result = ModelProto()
    result.CopyFrom(floats)
    rng = np.random.default_rng(seed)
    for tensor in result.graph.initializer:
        if tensor.name in form.weights:
            old = numpy_helper.to_array(tensor)
            new = (old * rng.uniform(0.5, 1.3, old.shape)).astype(old.dtype)
            tensor.CopyFrom(numpy_helper.from_array(new, tensor.name))
    return result


def operators(model: ModelProto) -> list[str]:
    """The operators; Constant nodes of floats become initializers."""
    return [node.op_type for node in model.graph.node if node.op_type != "Constant"]


def levels_of(name: str) -> int:
    return 7 if "4 bits" in name or name == "GatherBlockQuantized" else 127


@pytest.mark.parametrize("names", ["as they are", "no names", "slashes", "numbers", "ours", "constants"])
@pytest.mark.parametrize("name", FORMS)
def test_the_float_model(name: str, names: str) -> None:
    """Its weights have the names without the quantiser's ending, y is that of float64, and the file's is near."""
    form = FORMS[name]
    model = form.model() if names == "as they are" else other_names(form.model(), names)
    before = model.SerializeToString(deterministic=True)
    floats = ob.dequantize(model)
    assert model.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(floats, full_check=True)
    found = tensors(floats)
    for weight, expected in form.weights.items():
        np.testing.assert_allclose(found[weight], expected, rtol=1e-6, atol=1e-9)
    kinds = {node.op_type for node in floats.graph.node}
    assert not any("uantize" in kind or "Integer" in kind or kind.startswith(("QL", "QG")) for kind in kinds)
    assert not any(a.dtype.name in ("int8", "uint8", "int32", "int4", "uint4") for a in found.values())
    y, expected = run(floats, form.x), form.y(form.x, form.floats())
    size = np.abs(expected).max()
    np.testing.assert_allclose(y, expected, rtol=0, atol=CLOSE * size)
    np.testing.assert_allclose(run(model, form.x), expected, rtol=0, atol=form.bound + 5 * CLOSE * size)


@pytest.mark.parametrize("name", FORMS)
def test_unchanged_weights_give_the_file(name: str) -> None:
    model = FORMS[name].model()
    if name == "a float weight":  # whose scale was not the one that fits
        return
    result = tensors(again(ob.dequantize(model), model))
    for tensor, array in tensors(model).items():
        if array.dtype.name == "float32":
            np.testing.assert_allclose(result[tensor], array, rtol=2e-7)
        else:
            assert result[tensor].dtype == array.dtype
            np.testing.assert_array_equal(result[tensor].astype(int), array.astype(int))


@pytest.mark.parametrize("names", ["as they are", "no names", "slashes", "numbers", "ours", "constants"])
@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.weights])
def test_other_weights(name: str, names: str) -> None:
    """Each is rounded to the nearest number that the file can hold, by a scale for which the largest still fits."""
    form = FORMS[name]
    model = form.model() if names == "as they are" else other_names(form.model(), names)
    trained = changed(ob.dequantize(model), form)
    result = again(trained, model)
    onnx.checker.check_model(result, full_check=True)
    assert operators(result) == operators(model)
    new, given = tensors(ob.dequantize(result)), tensors(trained)
    for weight in form.weights:
        step = np.abs(given[weight]).max() / levels_of(name)
        assert np.abs(new[weight] - given[weight]).max() <= 0.51 * step * (2 if "zero points" in name else 1), weight
        assert not np.array_equal(new[weight], given[weight])
    y = form.y(form.x, form.floats() | {n: new[n].astype(np.float64) for n in form.weights})
    np.testing.assert_allclose(run(result, form.x), y, rtol=0, atol=1.3 * form.bound + 1e-5 * np.abs(y).max())


@pytest.mark.parametrize("names", ["as they are", "no names", "ours"])
@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.weights])
def test_it_trains(name: str, names: str) -> None:
    """Ten steps lower the loss; the weights of integers are the parameters, and the trained file takes them up."""
    form = FORMS[name]
    model = form.model() if names == "as they are" else other_names(form.model(), names)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the file does not say|trained as one", ob.OnnxBackpropWarning)
        graph = ob.training_graph(ob.dequantize(model), loss="mse", optimizer="adamw")
    assert set(form.weights) <= set(graph.parameters)
    trainer = ob.Trainer(graph, learning_rate=0.01, kernels="onnx")
    y = form.y(form.x, form.floats())
    target = (y + np.random.default_rng(3).uniform(0.1, 0.5, y.shape)).astype(np.float32)
    losses = [trainer.step({"x": form.x, str(graph.target): target}) for _ in range(10)]
    assert losses[-1] < losses[0]
    trained = graph.inference_model(trainer.parameters())
    result = again(trained, model)
    now = tensors(ob.dequantize(result))
    for weight in form.weights:
        learnt = trainer.parameters()[weight]
        step = np.abs(learnt).max() / levels_of(name)
        assert np.abs(now[weight] - learnt).max() <= 0.51 * step * (2 if "zero points" in name else 1), weight
    run(result, form.x)
