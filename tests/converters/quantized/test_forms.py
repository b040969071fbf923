"""Every form: the float model against float64, the file against it, and the way back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from typing import TypeVar

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, numpy_helper

import onnx_backprop as ob
from tests.converters.quantized.form import Form, other_names
from tests.converters.quantized.forms import FORMS
from tests.support.batch import check_each
from tests.support.renamed import joined

A = TypeVar("A")
CLOSE = 3e-6  # of float32, relative to the largest number


def run(model: ModelProto, x: np.ndarray) -> np.ndarray:
    """`run_all` of a model with one input and one output."""
    return run_all(model, {"x": x})[0]


def run_all(model: ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs, node by node: onnxruntime's optimiser rounds some values that the file does not."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(array) for array in session.run(None, feeds)]


def tensors(model: ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def again(trained: ModelProto, original: ModelProto) -> ModelProto:
    """Requantised with the scales of activations that the file has."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the scales of .* stay|rounding to the integers", ob.OnnxBackpropWarning)
        return ob.requantize(trained, original)


def changed(floats: ModelProto, form: Form, seed: int = 5) -> ModelProto:
    """`changed_all` of the model of one form."""
    return changed_all(floats, form.weights, seed)


def changed_all(floats: ModelProto, weights: Iterable[str], seed: int = 5) -> ModelProto:
    """The float model with other weights of about the same size."""
    result = ModelProto()
    result.CopyFrom(floats)
    rng = np.random.default_rng(seed)
    for tensor in result.graph.initializer:
        if tensor.name in weights:
            old = numpy_helper.to_array(tensor)
            new = (old * rng.uniform(0.5, 1.3, old.shape)).astype(old.dtype)
            tensor.CopyFrom(numpy_helper.from_array(new, tensor.name))
    return result


def operators(model: ModelProto) -> list[str]:
    """The operators; Constant nodes of floats become initializers."""
    return [node.op_type for node in model.graph.node if node.op_type != "Constant"]


def levels_of(name: str) -> int:
    return 7 if "4 bits" in name or name == "GatherBlockQuantized" else 127


NAMES = ["as they are", "no names", "slashes", "numbers", "ours", "constants"]
Tensors = dict[str, np.ndarray]


def side_by_side(names: Sequence[str], kind: str) -> tuple[ModelProto, Tensors]:
    """The models of forms in one, under other names, and what it is fed."""
    model = joined([FORMS[name].model() for name in names])
    model = model if kind == "as they are" else other_names(model, kind)
    return model, {f"{n}/x": FORMS[name].x for n, name in enumerate(names)}


def of_each(model: ModelProto, count: int) -> list[Tensors]:
    """The tensors of the models in one, each by the name that it has alone."""
    arrays = tensors(model)
    return [{k.removeprefix(f"{n}/"): v for k, v in arrays.items() if k.startswith(f"{n}/")} for n in range(count)]


def check_forms(
    names: Iterable[str], answer: Callable[[Sequence[str]], Sequence[A]], check: Callable[[str, A], object]
) -> None:
    """Those of one opset in one model."""
    alike: dict[int, list[str]] = {}
    for name in names:
        alike.setdefault(FORMS[name].opset, []).append(name)
    for group in alike.values():
        check_each(group, answer, check)


@pytest.mark.parametrize("kind", NAMES)
def test_the_float_model(kind: str) -> None:
    """Its weights have the names without the quantiser's ending, y is that of float64, and the file's is near."""

    def answer(names: Sequence[str]) -> list[tuple[Tensors, np.ndarray, np.ndarray]]:
        model, feeds = side_by_side(names, kind)
        before = model.SerializeToString(deterministic=True)
        floats = ob.dequantize(model)
        assert model.SerializeToString(deterministic=True) == before
        onnx.checker.check_model(floats, full_check=True)
        kinds = {node.op_type for node in floats.graph.node}
        assert not any("uantize" in kind or "Integer" in kind or kind.startswith(("QL", "QG")) for kind in kinds)
        integers = {"int8", "uint8", "int32", "int4", "uint4"}
        assert integers.isdisjoint(array.dtype.name for array in tensors(floats).values())
        parts = of_each(floats, len(names)), run_all(floats, feeds), run_all(model, feeds)
        return list(zip(*parts, strict=True))

    def check(name: str, answer: tuple[Tensors, np.ndarray, np.ndarray]) -> None:
        form, (weights, y, rounded) = FORMS[name], answer
        for weight, expected in form.weights.items():
            np.testing.assert_allclose(weights[weight], expected, rtol=1e-6, atol=1e-9)
        expected = form.y(form.x, form.floats())
        size = np.abs(expected).max()
        np.testing.assert_allclose(y, expected, rtol=0, atol=CLOSE * size)
        np.testing.assert_allclose(rounded, expected, rtol=0, atol=form.bound + 5 * CLOSE * size)

    check_forms(FORMS, answer, check)


def test_unchanged_weights_give_the_file() -> None:
    def answer(names: Sequence[str]) -> list[tuple[Tensors, Tensors]]:
        model, _ = side_by_side(names, "as they are")
        result = again(ob.dequantize(model), model)
        return list(zip(of_each(model, len(names)), of_each(result, len(names)), strict=True))

    def check(_: str, answer: tuple[Tensors, Tensors]) -> None:
        given, result = answer
        for tensor, array in given.items():
            if array.dtype.name == "float32":
                np.testing.assert_allclose(result[tensor], array, rtol=2e-7)
            else:
                assert result[tensor].dtype == array.dtype
                np.testing.assert_array_equal(result[tensor].astype(int), array.astype(int))

    # that one's scale was not the one that fits
    check_forms([name for name in FORMS if name != "a float weight"], answer, check)


WEIGHTED = [name for name, form in FORMS.items() if form.weights]


@pytest.mark.parametrize("kind", NAMES)
def test_other_weights(kind: str) -> None:
    """Each is rounded to the nearest number that the file can hold, by a scale for which the largest still fits."""

    def answer(names: Sequence[str]) -> list[tuple[Tensors, Tensors, np.ndarray]]:
        model, feeds = side_by_side(names, kind)
        weights = {f"{n}/{weight}" for n, name in enumerate(names) for weight in FORMS[name].weights}
        trained = changed_all(ob.dequantize(model), weights)
        result = again(trained, model)
        onnx.checker.check_model(result, full_check=True)
        assert operators(result) == operators(model)
        parts = of_each(ob.dequantize(result), len(names)), of_each(trained, len(names)), run_all(result, feeds)
        return list(zip(*parts, strict=True))

    def check(name: str, answer: tuple[Tensors, Tensors, np.ndarray]) -> None:
        form, (new, given, rounded) = FORMS[name], answer
        assert_near(name, new, given)
        assert not any(np.array_equal(new[weight], given[weight]) for weight in form.weights)
        y = form.y(form.x, form.floats() | {n: new[n].astype(np.float64) for n in form.weights})
        np.testing.assert_allclose(rounded, y, rtol=0, atol=1.3 * form.bound + 1e-5 * np.abs(y).max())

    check_forms(WEIGHTED, answer, check)


def assert_near(name: str, new: Tensors, given: Tensors) -> None:
    """The weights in the file are about half a step from those that were given, at most."""
    for weight in FORMS[name].weights:
        step = np.abs(given[weight]).max() / levels_of(name)
        assert np.abs(new[weight] - given[weight]).max() <= 0.51 * step * (2 if "zero points" in name else 1), weight


@pytest.mark.parametrize(("name", "kind"), [*zip(WEIGHTED, cycle(["as they are", "no names", "ours"]), strict=False)])
def test_it_trains(name: str, kind: str) -> None:
    """Ten steps lower the loss; the weights of integers are the parameters, and the trained file takes them up."""
    form = FORMS[name]
    model = form.model() if kind == "as they are" else other_names(form.model(), kind)
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
    assert_near(name, tensors(ob.dequantize(result)), {k: np.asarray(v) for k, v in trainer.parameters().items()})
    run(result, form.x)
