"""Every optimizer and every loss against the values that PyTorch gives, stored by tests/data/torch_values.py."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, helper, numpy_helper

import onnx_backprop as ob
from onnx_backprop.converters.training import losses, optimizers
from onnx_backprop.converters.training.losses.cross_entropy import LABEL_TYPES
from tests.support.training_cases import LOSS_VALUES, LOSSES, OPTIMIZER_VALUES, OPTIMIZERS, RATES, STEPS

DTYPES = {"f64": (np.float64, 1e-11), "f32": (np.float32, 2e-5)}


@cache
def stored(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def linear(dtype: type) -> ModelProto:
    """y = x · Wᵀ + b, from the stored weights."""
    values = stored(OPTIMIZER_VALUES)
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "weight", "bias"], ["y"], name="linear", transB=1)],
        "linear",
        [helper.make_tensor_value_info("x", element, ["N", 2])],
        [helper.make_tensor_value_info("y", element, ["N", 3])],
        [numpy_helper.from_array(values[name].astype(dtype), name) for name in ("weight", "bias")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def plain_session(model: ModelProto) -> onnxruntime.InferenceSession:
    """Stock onnxruntime, nothing registered."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def test_every_optimizer_has_a_case() -> None:
    assert {case.ours.name.lower() for case in OPTIMIZERS.values()} == {o.name.lower() for o in optimizers._READY}
    elsewhere = {"next_token"}  # tests/converters/training/test_linear_cross_entropy.py
    assert {case.ours.name for case in LOSSES.values()} - {"sum"} | elsewhere == {loss.name for loss in losses._READY}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name: str, dtype: str) -> None:
    case, values = OPTIMIZERS[name], stored(OPTIMIZER_VALUES)
    kind, tolerance = DTYPES[dtype]
    graph = ob.training_graph(linear(kind), loss="mse", optimizer=case.ours)
    onnx.checker.check_model(graph.model, full_check=True)
    session = plain_session(graph.model)
    state = graph.initial_state()
    outputs = [graph.loss, *graph.updates.values()]
    for run in range(STEPS):
        feeds = {"x": values["x"][run].astype(kind), "target": values["target"][run].astype(kind)}
        feeds["learning_rate"] = np.array(RATES[run], kind)
        loss, *new = map(np.asarray, session.run(outputs, feeds | state))
        np.testing.assert_allclose(loss, values[f"{name}/loss"][run], rtol=tolerance, err_msg=f"run {run}")
        for (key, old), value in zip(state.items(), new, strict=True):
            assert (value.dtype, value.shape) == (old.dtype, old.shape), key
        state = dict(zip(state, new, strict=True))
        for key in ("weight", "bias", "weight.ema", "bias.ema"):
            assert (key in state) == (f"{name}/{key}" in values)
            if key in state:
                np.testing.assert_allclose(
                    state[key],
                    values[f"{name}/{key}"][run],
                    rtol=tolerance,
                    atol=tolerance,
                    err_msg=f"{key}, run {run}",
                )
    assert state["optimizer_step"] == STEPS // case.ours.accumulate


def shifted(shape: list[Any], sizes: tuple[int, ...], kind: type) -> ModelProto:
    """y = x + p with p = 0, so that the gradient by p is that by the prediction."""
    element = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "p"], ["y"])],
        "shifted",
        [helper.make_tensor_value_info("x", element, shape)],
        [helper.make_tensor_value_info("y", element, shape)],
        [numpy_helper.from_array(np.zeros(sizes, kind), "p")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def check_stored(
    name: str, ours: Any, dtype: str, *, symbolic: bool, last: bool = False, labels: type[np.generic] = np.int64
) -> None:
    """A loss and its gradient are the stored ones; last: with the classes moved to the last axis."""
    values = stored(LOSS_VALUES)
    kind, tolerance = DTYPES[dtype]
    y, target, gradient = (values[f"{name}/{key}"] for key in ("y", "target", "gradient"))
    if last:
        y, gradient = (np.moveaxis(array, 1, -1) for array in (y, gradient))
    shape = [f"d{axis}" for axis in range(y.ndim)] if symbolic else list(y.shape)
    training = ob.training_graph(shifted(shape, y.shape, kind), loss=ours)
    onnx.checker.check_model(training.model, full_check=True)
    fed = target.astype(labels if target.dtype == np.int64 else kind)
    feeds = {"x": y.astype(kind), str(training.target): fed}
    feeds |= {key: values[f"{name}/{key}"] for key in LOSSES[name].more}
    got_loss, got = map(np.asarray, ob.session(training.model).run(["loss", "p_grad"], feeds))
    np.testing.assert_allclose(got_loss, values[f"{name}/loss"], rtol=tolerance)
    np.testing.assert_allclose(got, gradient, rtol=tolerance, atol=tolerance / 10)
    assert got_loss.dtype == got.dtype == kind


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symbolic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("name", LOSSES)
def test_loss(name: str, dtype: str, symbolic: bool) -> None:
    check_stored(name, LOSSES[name].ours, dtype, symbolic=symbolic)


OF_CLASSES = [
    name
    for name, case in LOSSES.items()
    if getattr(case.ours, "axis", 0)
    and len(case.shape) > 2
    and getattr(case.ours, "activation", "softmax") == "softmax"
]


@pytest.mark.parametrize("symbolic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("name", [name for name in OF_CLASSES if "kl" not in name])
def test_classes_last(name: str, symbolic: bool) -> None:
    ours = replace(LOSSES[name].ours, axis=-1)
    check_stored(name, ours, "f64", symbolic=symbolic, last=True)


@pytest.mark.parametrize("name", ["dice", "tversky"])
def test_masks_with_their_classes_last(name: str) -> None:
    case, values = LOSSES[name], stored(LOSS_VALUES)
    y, target, gradient = (np.moveaxis(values[f"{name}/{key}"], 1, -1) for key in ("y", "target", "gradient"))
    ours = replace(case.ours, axis=-1)
    training = ob.training_graph(shifted(list(y.shape), y.shape, np.float64), loss=ours)
    loss, got = map(np.asarray, ob.session(training.model).run(["loss", "p_grad"], {"x": y, "target": target}))
    np.testing.assert_allclose(loss, values[f"{name}/loss"], rtol=1e-12)
    np.testing.assert_allclose(got, gradient, rtol=1e-10)


@pytest.mark.parametrize("label_type", LABEL_TYPES)
@pytest.mark.parametrize("name", ["cross_entropy", "nll", "cross_entropy_everything", "dice_softmax", "nll_everything"])
def test_labels_of_every_type(name: str, label_type: str) -> None:
    """bool: the classes are 0 and 1; unsigned: a label to leave out that fits."""
    ours: Any = LOSSES[name].ours
    if label_type in ("bool", "uint8") and getattr(ours, "ignore_index", None) == -1:
        with pytest.raises(
            ob.InvalidArgumentError, match=f"ignore_index: expected a label of type {label_type}, got -1"
        ):
            replace(ours, label_type=label_type)
        return
    if label_type == "bool":
        with pytest.raises(
            ob.InvalidArgumentError, match="label_type: bool holds labels up to 1, and 'y' has 4 classes"
        ):
            ob.training_graph(shifted([2, 4, 3], (2, 4, 3), np.float32), loss=replace(ours, label_type="bool"))
        return
    check_stored(name, replace(ours, label_type=label_type), "f64", symbolic=True, labels=np.dtype(label_type).type)


def test_labels_that_are_true_or_false(rng) -> None:
    y, labels = rng.standard_normal((5, 2, 3)), rng.random((5, 3)) < 0.5
    results = []
    for label_type in ("bool", "int64"):
        ours = losses.SoftmaxCrossEntropy(label_type=label_type, weight=[1, 3])
        training = ob.training_graph(shifted(["n", 2, "d"], y.shape, np.float64), loss=ours)
        feeds = {"x": y, "labels": labels.astype(label_type)}
        results.append(ob.session(training.model).run(["loss", "p_grad"], feeds))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_cosine_embedding_of_two_predictions() -> None:
    values = stored(LOSS_VALUES)
    one, two, target, loss, *gradients = (
        values[f"cosine_pairs/{key}"] for key in ("one", "two", "target", "loss", "one_grad", "two_grad")
    )
    model = shifted(["n", 3], one.shape, np.float64)
    other = onnx.compose.add_prefix(model, "other_", inplace=False)
    model.graph.MergeFrom(other.graph)
    ours = losses.CosineEmbedding("y", "other_y", margin=0.2)
    training = ob.training_graph(model, loss=ours, trainable=["p", "other_p"])
    feeds = {"x": one, "other_x": two, "target": target}
    got = ob.session(training.model).run(["loss", "p_grad", "other_p_grad"], feeds)
    for value, expected in zip(got, (loss, *gradients), strict=True):
        np.testing.assert_allclose(np.asarray(value), expected, rtol=1e-10)


def test_ctc_rows_that_do_not_fit() -> None:
    """Without zero_infinity their loss is infinite; every row's gradient stays finite."""
    values = stored(LOSS_VALUES)
    y, labels, steps, counts = (values[f"ctc_zero/{key}"] for key in ("y", "target", "input_lengths", "target_lengths"))
    assert (steps < counts).any()
    training = ob.training_graph(shifted(list(y.shape), y.shape, np.float64), loss=losses.CTC(form="logits"))
    feeds = {"x": y, "labels": labels, "input_lengths": steps, "target_lengths": counts}
    loss, gradient = map(np.asarray, ob.session(training.model).run(["loss", "p_grad"], feeds))
    assert loss == np.inf
    np.testing.assert_allclose(gradient, values["ctc_zero/gradient"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("lengths", ["input_lengths", "target_lengths"])
def test_negative_lengths_of_ctc_fail(lengths: str) -> None:
    """As an index, -1 would count from the end."""
    y, labels = np.zeros((6, 2, 5)), np.array([[1, 2], [1, 1]])
    training = ob.training_graph(shifted(list(y.shape), y.shape, np.float64), loss=losses.CTC(form="logits"))
    feeds = {"x": y, "labels": labels, "input_lengths": np.array([6, 6]), "target_lengths": np.array([2, 1])}
    session = ob.session(training.model)
    assert np.isfinite(np.asarray(session.run([training.loss], feeds)[0]))
    feeds[lengths][1] = -1
    with pytest.raises(Exception, match="out of (data )?bounds"):
        session.run([training.loss], feeds)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("target", ["labels", "input_lengths", "target_lengths"])
def test_targets_of_ctc_with_another_number_of_rows_fail(target: str, rows: int) -> None:
    """The batch has a symbolic length: onnxruntime itself takes any, and one row would be broadcast."""
    training = ob.training_graph(shifted(["t", "n", 5], (5,), np.float64), loss=losses.CTC(form="logits"))
    feeds = {"x": np.zeros((6, 2, 5)), "labels": np.array([[1, 2], [1, 1]])}
    feeds |= {"input_lengths": np.array([6, 6]), "target_lengths": np.array([2, 1])}
    session = ob.session(training.model)
    assert np.isfinite(np.asarray(session.run([training.loss], feeds)[0]))
    feeds[target] = np.tile(feeds[target][:1], (rows, *[1] * (feeds[target].ndim - 1)))
    with pytest.raises(Exception, match=f"{target}_must_have_the_shape_of_y"):
        session.run([training.loss], feeds)


def test_the_softmax_of_kl_divergence_runs_along_axis_1_by_default() -> None:
    y, logits = np.random.default_rng(5).standard_normal((2, 4, 3, 2))
    target = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    graph = ob.training_graph(shifted([4, 3, 2], (4, 3, 2), np.float64), loss=losses.KLDivergence(form="logits"))
    log_p = y - np.log(np.exp(y).sum(axis=1, keepdims=True))
    got = ob.session(graph.model).run([graph.loss], {"x": y, "target": target})[0]
    np.testing.assert_allclose(np.asarray(got), (target * (np.log(target) - log_p)).sum() / 4, rtol=1e-12)


@pytest.mark.parametrize("symbolic", [False, True], ids=["fixed", "symbolic"])
def test_ctc_of_log_probabilities_with_the_batch_first(symbolic: bool) -> None:
    """Of a model that ends in LogSoftmax. The derivative by log p itself is not torch's, which takes Σ p = 1 for granted."""
    values = stored(LOSS_VALUES)
    y, gradient = (values[f"ctc/{key}"].swapaxes(0, 1) for key in ("y", "gradient"))
    shape = ["n", "t", "c"] if symbolic else list(y.shape)
    model = shifted(shape, y.shape, np.float64)
    model.graph.node.append(helper.make_node("LogSoftmax", ["y"], ["log_p"], axis=2))
    model.graph.output[0].name = "log_p"
    training = ob.training_graph(model, loss=losses.CTC(batch_first=True))
    feeds = {"x": y, "labels": values["ctc/target"]}
    feeds |= {key: values[f"ctc/{key}"] for key in ("input_lengths", "target_lengths")}
    loss, got = map(np.asarray, ob.session(training.model).run(["loss", "p_grad"], feeds))
    np.testing.assert_allclose(loss, values["ctc/loss"], rtol=1e-10)
    np.testing.assert_allclose(got, gradient, rtol=1e-9, atol=1e-12)
