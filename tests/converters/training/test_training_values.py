"""Every optimizer and every loss against the values that PyTorch gives, stored by tests/data/torch_values.py."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, helper, numpy_helper

import onnx_backprop as ob
from onnx_backprop.converters.training import losses, optimizers
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
    assert {case.ours.name.lower() for case in OPTIMIZERS.values()} == set(optimizers.OPTIMIZERS)
    assert {case.ours.name for case in LOSSES.values()} == set(losses.LOSSES)


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symbolic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("name", LOSSES)
def test_loss(name: str, dtype: str, symbolic: bool) -> None:
    """y = x + p with p = 0, so that the gradient by p is that by the prediction."""
    case, values = LOSSES[name], stored(LOSS_VALUES)
    kind, tolerance = DTYPES[dtype]
    y, target = values[f"{name}/y"].astype(kind), values[f"{name}/target"]
    element = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    shape = [f"d{axis}" for axis in range(y.ndim)] if symbolic else list(y.shape)
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "p"], ["y"])],
        "shifted",
        [helper.make_tensor_value_info("x", element, shape)],
        [helper.make_tensor_value_info("y", element, shape)],
        [numpy_helper.from_array(np.zeros(y.shape, kind), "p")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    training = ob.training_graph(model, loss=case.ours)
    onnx.checker.check_model(training.model, full_check=True)
    fed = target if target.dtype == np.int64 else target.astype(kind)
    feeds = {"x": y, str(training.target): fed}
    loss, gradient = map(np.asarray, ob.session(training.model).run(["loss", "p_grad"], feeds))
    np.testing.assert_allclose(loss, values[f"{name}/loss"], rtol=tolerance)
    np.testing.assert_allclose(gradient, values[f"{name}/gradient"], rtol=tolerance, atol=tolerance / 10)
    assert loss.dtype == gradient.dtype == kind
