"""Every loss: its value and gradient against the formula in float64 NumPy, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser
from onnxruntime.capi import onnxruntime_pybind11_state as state  # pyright: ignore[reportAttributeAccessIssue]

import onnx_backprop as ob
from onnx_backprop.converters.training.losses import LOSSES
from tests.support.numeric import central_differences, outputs

SEED = 20240
SHAPES = {"rank2": (4, 5), "rank3": (2, 3, 4), "rank4": (2, 3, 2, 3)}
DTYPES = {"f32": (np.float32, 2e-6), "f64": (np.float64, 1e-12), "f16": (np.float16, 2e-3)}


def mse(y: np.ndarray, t: np.ndarray) -> float:
    return float(np.mean((y - t) ** 2))


def l1(y: np.ndarray, t: np.ndarray) -> float:
    return float(np.mean(np.abs(y - t)))


def huber(y: np.ndarray, t: np.ndarray) -> float:
    d = np.abs(y - t)
    return float(np.mean(np.where(d <= 1, d * d / 2, d - 0.5)))


def bce_with_logits(y: np.ndarray, t: np.ndarray) -> float:
    return float(np.mean(np.maximum(y, 0) - y * t + np.log1p(np.exp(-np.abs(y)))))


def softmax_cross_entropy(y: np.ndarray, t: np.ndarray) -> float:
    y = np.moveaxis(y, 1, -1).reshape(-1, y.shape[1])
    shifted = y - y.max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return float(-np.mean(log_p[np.arange(len(y)), t.reshape(-1)]))


def smooth_l1(y: np.ndarray, t: np.ndarray) -> float:
    return huber(y, t)  # of β = 1


def focal(y: np.ndarray, t: np.ndarray) -> float:
    p = 1 / (1 + np.exp(-y))
    missed, alpha = p + t - 2 * p * t, 0.25 * t + 0.75 * (1 - t)
    return float(np.mean(alpha * missed**2 * (np.maximum(y, 0) - y * t + np.log1p(np.exp(-np.abs(y))))))


def kl_div(y: np.ndarray, t: np.ndarray) -> float:
    return float(np.sum(t * (np.log(t) - y)) / len(y))


# of numbers that are no probabilities, or of other shapes: tests/converters/training/test_training_values.py
ELSEWHERE = {"bce", "nll", "dice", "tversky", "cosine_embedding", "ctc", "next_token"}
FORMULAS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "mse": mse,
    "l1": l1,
    "huber": huber,
    "smooth_l1": smooth_l1,
    "focal": focal,
    "kl_div": kl_div,
    "bce_with_logits": bce_with_logits,
    "softmax_cross_entropy": softmax_cross_entropy,
}


def gain_model(x: np.ndarray, *, symbolic: bool = False) -> ModelProto:
    """y = x · gain, a gain of ones in the shape of x; symbolic: one number, so that nothing tells the shape of y."""
    element = helper.np_dtype_to_tensor_dtype(x.dtype)
    shape = [f"d{axis}" for axis in range(x.ndim)] if symbolic else list(x.shape)
    gain = np.ones((1,) * x.ndim if symbolic else x.shape, x.dtype)
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "gain"], ["y"], name="scale")],
        "gain",
        [helper.make_tensor_value_info("x", element, shape)],
        [helper.make_tensor_value_info("y", element, shape)],
        [numpy_helper.from_array(gain, "gain")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def a_target(rng: np.random.Generator, loss: str, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    if loss == "softmax_cross_entropy":
        return rng.integers(0, shape[1], (shape[0], *shape[2:]))
    if loss in ("bce_with_logits", "focal", "kl_div"):
        return rng.random(shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def test_every_loss_is_tested() -> None:
    assert FORMULAS.keys() | ELSEWHERE == set(LOSSES)


@pytest.mark.parametrize("symbolic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("loss", FORMULAS)
def test_value_and_gradient(loss: str, shape: str, dtype: str, symbolic: bool) -> None:
    rng = np.random.default_rng(SEED)
    kind, tolerance = DTYPES[dtype]
    x = rng.standard_normal(SHAPES[shape]).astype(kind)
    target = a_target(rng, loss, x.shape, kind)
    graph = ob.training_graph(gain_model(x, symbolic=symbolic), loss=loss)
    onnx.checker.check_model(graph.model, full_check=True)
    assert graph.target is not None
    result = outputs(graph.model, {"x": x, graph.target: target})

    formula = FORMULAS[loss]
    y, t = x.astype(np.float64), target if target.dtype == np.int64 else target.astype(np.float64)
    np.testing.assert_allclose(result["loss"], formula(y, t), rtol=tolerance, err_msg=f"seed {SEED}")
    expected = central_differences(lambda at: formula(at, t), y) * y
    expected = expected.sum(keepdims=True) if symbolic else expected
    got = result["gain_grad"]
    np.testing.assert_allclose(
        got, expected, rtol=max(tolerance, 1e-7), atol=max(tolerance / 10, 1e-9), err_msg=f"seed {SEED}"
    )
    assert got.dtype == x.dtype
    assert result["loss"].dtype == (np.float64 if dtype == "f64" else np.float32)
    assert result["loss"].shape == ()


@pytest.mark.parametrize("loss", FORMULAS)
def test_target_input(loss: str) -> None:
    x = np.zeros((2, 3, 4), np.float32)
    graph = ob.training_graph(gain_model(x, symbolic=True), loss=loss)
    value = {value.name: value.type.tensor_type for value in graph.model.graph.input}[str(graph.target)]
    dims = [d.dim_param for d in value.shape.dim]
    if loss == "softmax_cross_entropy":
        assert (graph.target, value.elem_type, dims) == ("labels", TensorProto.INT64, ["d0", "d2"])
    else:
        assert (graph.target, value.elem_type, dims) == ("target", TensorProto.FLOAT, ["d0", "d1", "d2"])


def logits_gradient(y: np.ndarray, t: np.ndarray) -> tuple[float, np.ndarray]:
    """bce_with_logits and its gradient by the logits, which here are the parameter."""
    model = gain_model(np.ones_like(y))
    del model.graph.initializer[:]
    model.graph.initializer.append(numpy_helper.from_array(y, "gain"))
    graph = ob.training_graph(model, loss="bce_with_logits")
    result = outputs(graph.model, {"x": np.ones_like(y), "target": t})
    return float(result["loss"]), result["gain_grad"]


@pytest.mark.parametrize("logit", [-100.0, -20.0, 0.0, 20.0, 100.0])
@pytest.mark.parametrize("target", [0.0, 0.25, 1.0])
def test_bce_with_logits_is_stable(logit: float, target: float) -> None:
    loss, gradient = logits_gradient(np.array([[logit]], np.float32), np.array([[target]], np.float32))
    y, t = np.array(logit), np.array(target)
    np.testing.assert_allclose(loss, bce_with_logits(y, t), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(gradient, [[1 / (1 + np.exp(-y)) - t]], rtol=1e-6, atol=1e-7)


def test_bce_with_logits_does_not_cancel() -> None:
    """A confident right answer: the loss is far below the logit, and still has its digits."""
    loss, _ = logits_gradient(np.array([[8.0]], np.float32), np.array([[1.0]], np.float32))
    np.testing.assert_allclose(loss, np.log1p(np.exp(-8.0)), rtol=5e-4)


def test_l1_gradient_is_zero_at_the_kink() -> None:
    x = np.array([[1.0, 2.0, 3.0]], np.float32)
    graph = ob.training_graph(gain_model(x), loss="l1")
    result = outputs(graph.model, {"x": x, "target": np.array([[1.0, 0.0, 5.0]], np.float32)})
    np.testing.assert_allclose(result["gain_grad"], [[0.0, 2 / 3, -3 / 3]], rtol=1e-6)


def test_float16_mean_over_more_elements_than_float16_counts() -> None:
    """70 000 elements: in float16 their number is infinite and a mean over them would be 0."""
    x = np.full((70_000,), 2.0, np.float16)
    graph = ob.training_graph(gain_model(x), loss="mse")
    result = outputs(graph.model, {"x": x, "target": np.full_like(x, -100.0)})
    np.testing.assert_allclose(result["loss"], 102.0**2, rtol=1e-3)
    np.testing.assert_allclose(result["gain_grad"], np.full(70_000, 2 * 102.0 * 2.0 / 70_000), rtol=1e-3)


@pytest.mark.parametrize("loss", FORMULAS)
def test_bfloat16_is_widened_before_the_loss(loss: str) -> None:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        agraph (float[N, 3] x) => (bfloat16[N, 3] y) <float[3] gain = {1.0, 2.0, 3.0}>
        { scaled = Mul(x, gain)  y = Cast<to = 16>(scaled) }
    """)
    graph = ob.training_graph(model, loss=loss)
    onnx.checker.check_model(graph.model, full_check=True)
    rng = np.random.default_rng(SEED)
    x = rng.integers(-4, 4, (6, 3)).astype(np.float32)  # exact in bfloat16
    target = a_target(rng, loss, (6, 3), np.float32)
    fed: object = target
    if loss != "softmax_cross_entropy":
        narrow = target.astype(helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16))
        fed = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(narrow, TensorProto.BFLOAT16)
        target = narrow.astype(np.float64)
    value, gradient = map(
        np.asarray, ob.session(graph.model).run(["loss", "gain_grad"], {"x": x, str(graph.target): fed})
    )
    y = x.astype(np.float64) * [1.0, 2.0, 3.0]
    np.testing.assert_allclose(value, FORMULAS[loss](y, target), rtol=1e-5)
    dy = central_differences(lambda at: FORMULAS[loss](at, target), y)
    np.testing.assert_allclose(gradient, (dy * x).sum(axis=0), rtol=2e-2, atol=2e-3)


RUN_ERRORS = (state.Fail, state.InvalidArgument, state.RuntimeException)


def quiet_session(model: ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return ob.session(model, session_options=options)


@pytest.mark.parametrize("loss", FORMULAS)
@pytest.mark.parametrize("wrong", [(1, 3, 4), (6, 3, 1), (12, 3, 2), (4, 3, 6)], ids=str)
def test_target_of_another_shape_fails_the_run(loss: str, wrong: tuple[int, ...]) -> None:
    """(1, 3, 4) and (6, 3, 1) would broadcast, (12, 3, 2) and (4, 3, 6) hold as many elements as (6, 3, 4)."""
    x = np.ones((6, 3, 4), np.float32)
    graph = ob.training_graph(gain_model(x, symbolic=True), loss=loss)
    rng = np.random.default_rng(SEED)
    session = quiet_session(graph.model)
    right = {"x": x, str(graph.target): a_target(rng, loss, x.shape, np.float32)}
    session.run(["loss"], right)
    with pytest.raises(RUN_ERRORS, match=f"{graph.target}_must_have_the_shape_of_y"):
        session.run(["loss"], {"x": x, str(graph.target): a_target(rng, loss, wrong, np.float32)})


@pytest.mark.parametrize("label", [-1, -3, 3], ids=str)
def test_label_outside_the_classes_fails_the_run(label: int) -> None:
    x = np.ones((2, 3), np.float32)
    graph = ob.training_graph(gain_model(x), loss="softmax_cross_entropy")
    session = quiet_session(graph.model)
    session.run(None, {"x": x, "labels": np.array([0, 2])})
    with pytest.raises(RUN_ERRORS, match=r"GatherElements op: Out of range"):
        session.run(None, {"x": x, "labels": np.array([0, label])})


def test_cross_entropy_refuses_a_vector() -> None:
    with pytest.raises(ob.InvalidArgumentError, match=r"\(N, C\) or \(N, C, d1, …\), got 'y' of shape \(5\)"):
        ob.training_graph(gain_model(np.ones(5, np.float32)), loss="softmax_cross_entropy")


def test_unknown_loss_names_the_near_miss() -> None:
    with pytest.raises(ob.InvalidArgumentError, match=r"got 'bce_with_logit'. Did you mean 'bce_with_logits'"):
        ob.training_graph(gain_model(np.ones((1, 2), np.float32)), loss="bce_with_logit")
