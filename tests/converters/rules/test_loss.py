"""The gradients of SoftmaxCrossEntropyLoss and Cast, against finite differences of onnxruntime's own forward."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper
from onnx.reference import ReferenceEvaluator

import onnx_backprop as ob
from tests.support.adjoint import forward_session
from tests.support.numeric import central_differences, outputs

SEED = 977
SHAPES = [(4, 3), (2, 3, 4), (2, 3, 2, 2)]
REDUCTIONS = ["mean", "sum", "none"]


def loss_model(
    shape: tuple[int, ...],
    *,
    attributes: Mapping[str, Any],
    element: int = TensorProto.DOUBLE,
    label_type: int = TensorProto.INT64,
    weights: bool = False,
    log_prob: bool = False,
    symbolic: bool = False,
    opset: int = 18,
) -> ModelProto:
    dims = [f"d{axis}" for axis in range(len(shape))] if symbolic else list(shape)
    positions = [dims[0], *dims[2:]]
    names = ["x", "labels", *(["weights"] if weights else [])]
    inputs = [
        helper.make_tensor_value_info("x", element, dims),
        helper.make_tensor_value_info("labels", label_type, positions),
        helper.make_tensor_value_info("weights", element, dims[1:2]),
    ]
    results = [
        helper.make_tensor_value_info("loss", element, positions if attributes.get("reduction") == "none" else []),
        helper.make_tensor_value_info("log_prob", element, dims),
    ]
    count = 1 + log_prob
    node = helper.make_node(
        "SoftmaxCrossEntropyLoss", names, [r.name for r in results[:count]], name="sce", **attributes
    )
    return helper.make_model(
        helper.make_graph([node], "loss", inputs[: len(names)], results[:count]),
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=10,
    )


def check(model: ModelProto, feeds: dict[str, np.ndarray], wrt: list[str], message: str) -> None:
    """Every gradient against central differences of Σ <output, seed> through the forward model."""
    graph = ob.backward(model, wrt=wrt)
    onnx.checker.check_model(graph, full_check=True)
    forward = forward_session(model)
    names = [value.name for value in model.graph.output]
    rng = np.random.default_rng(SEED)
    plain = {name: np.asarray(y) for name, y in zip(names, forward.run(names, feeds), strict=True)}
    seeds = {name: rng.standard_normal(y.shape) for name, y in plain.items()}
    fed_seeds = {f"{name}_grad": seed for name, seed in seeds.items()}
    wanted = {value.name for value in graph.graph.input}
    seeds = {name: seed if f"{name}_grad" in wanted else np.ones_like(seed) for name, seed in seeds.items()}
    got = outputs(graph, feeds | {name: seed for name, seed in fed_seeds.items() if name in wanted})
    for name in wrt:

        def total(value: np.ndarray, name: str = name) -> float:
            results = forward.run(names, feeds | {name: value})
            return sum(float((np.asarray(y) * seeds[key]).sum()) for key, y in zip(names, results, strict=True))

        expected = central_differences(total, feeds[name])
        np.testing.assert_allclose(got[f"{name}_grad"], expected, rtol=1e-6, atol=1e-8, err_msg=f"{message} {name}")
        assert np.abs(expected).max() > 1e-3, f"{message}: nothing to compare"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("symbolic", [False, True], ids=["fixed", "symbolic"])
def test_every_combination(shape: tuple[int, ...], reduction: str, symbolic: bool) -> None:
    for weights, ignore, log_prob in itertools.product([False, True], [None, 1, -100], [False, True]):
        rng = np.random.default_rng(SEED)
        labels = rng.integers(0, 3, (shape[0], *shape[2:]))
        labels.flat[:3] = [0, 1, 2]
        if ignore is not None:
            labels.flat[1] = ignore
        attributes: dict[str, Any] = {"reduction": reduction}
        if ignore is not None:
            attributes["ignore_index"] = ignore
        model = loss_model(shape, attributes=attributes, weights=weights, log_prob=log_prob, symbolic=symbolic)
        feeds = {"x": rng.standard_normal(shape), "labels": labels}
        if weights:
            feeds["weights"] = rng.random(3) + 0.5
        message = f"seed {SEED}, weights {weights}, ignore_index {ignore}, log_prob {log_prob}"
        check(model, feeds, ["x", "weights"] if weights else ["x"], message)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_row_without_an_axis(reduction: str) -> None:
    """x (C), labels (), as PyTorch exports one row and onnxruntime does not load: all as of x (1, C), labels (1)."""
    x, w, seed = np.random.default_rng(SEED).standard_normal((3, 1, 3)).astype(np.float32)
    fed: dict[str, np.ndarray] = {"x": x, "labels": np.array([2]), "weights": w[0] ** 2 + 1}
    fed |= {"loss_grad": np.array([1.7], np.float32), "log_prob_grad": seed}
    for weights, ignore, log_prob in itertools.product([False, True], [None, 0, 2], [False, True]):
        if (reduction, ignore) == ("mean", 2):  # 0 / 0
            continue
        attributes = {"reduction": reduction} | ({} if ignore is None else {"ignore_index": ignore})
        rows = loss_model((1, 3), attributes=attributes, element=TensorProto.FLOAT, weights=weights, log_prob=log_prob)
        lone = onnx.ModelProto()
        lone.CopyFrom(rows)
        for value in (*lone.graph.input[:2], *lone.graph.output):
            if value.type.tensor_type.shape.dim:
                del value.type.tensor_type.shape.dim[0]
        names = ["x", "weights"] if weights else ["x"]
        expected, got = ({}, {})
        for model, results in ((rows, expected), (lone, got)):
            graph = ob.backward(model, wrt=names)
            given = {value.name for value in graph.graph.input}
            feeds = {
                n: a if n == "weights" or model is rows else np.asarray(a[0]) for n, a in fed.items() if n in given
            }
            results.update(outputs(graph, feeds))
        message = f"seed {SEED}, {attributes}, weights {weights}, log_prob {log_prob}"
        np.testing.assert_allclose(got["x_grad"], expected["x_grad"][0], 1e-5, 1e-7, err_msg=message, strict=True)
        if weights:
            np.testing.assert_allclose(got["weights_grad"], expected["weights_grad"], 1e-5, 1e-7, err_msg=message)
        if ignore != 2:
            assert np.abs(got["x_grad"]).max() > 1e-3, message


def test_a_loss_with_log_probabilities_keeps_its_rule() -> None:
    """A few nodes; the body of its function has twice as many."""
    explanation = ob.explain_gradients(loss_model((4, 3), attributes={}, log_prob=True))
    assert [node.by for node in explanation.nodes] == ["rules.loss.softmax_cross_entropy_loss"]


def test_default_reduction_is_the_mean() -> None:
    rng = np.random.default_rng(SEED)
    model = loss_model((4, 3), attributes={})
    check(model, {"x": rng.standard_normal((4, 3)), "labels": np.array([0, 1, 2, 1])}, ["x"], "default")


@pytest.mark.parametrize("opset", [13, 22])
def test_other_opsets(opset: int) -> None:
    rng = np.random.default_rng(SEED)
    model = loss_model((4, 3), attributes={"ignore_index": 2}, opset=opset)
    check(model, {"x": rng.standard_normal((4, 3)), "labels": np.array([0, 1, 2, 1])}, ["x"], f"opset {opset}")


def test_labels_may_be_int32() -> None:
    rng = np.random.default_rng(SEED)
    model = loss_model((4, 3), attributes={}, label_type=TensorProto.INT32)
    labels = np.array([0, 1, 2, 1], np.int32)
    check(model, {"x": rng.standard_normal((4, 3)), "labels": labels}, ["x"], "int32")


def test_ignored_positions_get_exact_zeros() -> None:
    model = loss_model((3, 3), attributes={"ignore_index": 255}, element=TensorProto.FLOAT)
    x = np.random.default_rng(SEED).standard_normal((3, 3)).astype(np.float32)
    got = outputs(ob.backward(model, wrt=["x"]), {"x": x, "labels": np.array([2, 255, 0])})["x_grad"]
    np.testing.assert_array_equal(got[1], np.zeros(3, np.float32))
    p = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(got[[0, 2]], (p - np.eye(3)[[2, 1, 0]])[[0, 2]] / 2, rtol=1e-5, atol=1e-7)


def test_float16_is_computed_in_float32() -> None:
    """70 000 positions: their number is infinite in float16, and dy / count would be 0."""
    count = 70_000
    model = loss_model((count, 2), attributes={"reduction": "mean"}, element=TensorProto.FLOAT16)
    graph = ob.backward(model, wrt=["x"])
    x = np.zeros((count, 2), np.float16)
    got = ob.session(graph).run(["x_grad"], {"x": x, "labels": np.zeros(count, np.int64)})[0]
    expected = np.float16(0.5 / count)  # a subnormal of float16
    assert expected > 0
    np.testing.assert_array_equal(got, np.tile(np.array([-expected, expected]), (count, 1)))


def test_float16_keeps_the_digits_of_a_confident_prediction() -> None:
    """p - 1 = -3.35e-4 where float16 steps by 4.9e-4: p itself must not be rounded.

    By the reference evaluator, for onnxruntime runs float16 nodes on its CPU in float32 and drops the casts between.
    """
    model = loss_model((1, 2), attributes={}, element=TensorProto.FLOAT16)
    feeds = {"x": np.array([[8.0, 0.0]], np.float16), "labels": np.array([0])}
    results = ReferenceEvaluator(ob.backward(model, wrt=["x"])).run(["x_grad"], feeds)
    got = np.asarray(cast("list[np.ndarray]", results)[0])
    assert got.dtype == np.float16
    expected = 1 / (1 + np.exp(8.0))
    np.testing.assert_allclose(got.astype(np.float64), [[-expected, expected]], rtol=1e-3)


def test_float16_gradient() -> None:
    rng = np.random.default_rng(SEED)
    x = rng.standard_normal((5, 4)).astype(np.float16)
    weights = (rng.random(4) + 0.5).astype(np.float16)
    feeds = {"x": x, "labels": np.array([0, 1, 2, 3, 1]), "weights": weights}
    half = loss_model((5, 4), attributes={}, element=TensorProto.FLOAT16, weights=True)
    full = loss_model((5, 4), attributes={}, weights=True)
    got = outputs(ob.backward(half, wrt=["x", "weights"]), feeds)
    wide = {name: a.astype(np.float64) if a.dtype == np.float16 else a for name, a in feeds.items()}
    expected = outputs(ob.backward(full, wrt=["x", "weights"]), wide)
    for name in ("x_grad", "weights_grad"):
        assert got[name].dtype == np.float16
        np.testing.assert_allclose(got[name], expected[name], rtol=2e-3, atol=2e-3)


def cast_model(source: int, target: int) -> ModelProto:
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], name="change", to=target)],
        "cast",
        [helper.make_tensor_value_info("x", source, ["N", 2])],
        [helper.make_tensor_value_info("y", target, ["N", 2])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=10)


@pytest.mark.parametrize("source", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("target", [np.float16, np.float32, np.float64])
def test_cast(source: type, target: type) -> None:
    types = (helper.np_dtype_to_tensor_dtype(np.dtype(t)) for t in (source, target))
    graph = ob.backward(cast_model(*types), wrt=["x"])
    onnx.checker.check_model(graph, full_check=True)
    dy = np.array([[0.1, -3.0], [7.0, 1e-3]]).astype(target)
    got = outputs(graph, {"x": np.ones((2, 2), source), "y_grad": dy})["x_grad"]
    np.testing.assert_array_equal(got, dy.astype(source), strict=True)


def test_cast_to_a_float_of_8_bits_is_refused() -> None:
    with pytest.raises(ob.UnsupportedAttributeError, match=r"Cast 'change'.*got 'FLOAT to FLOAT8E4M3FN'"):
        ob.backward(cast_model(TensorProto.FLOAT, TensorProto.FLOAT8E4M3FN), wrt=["x"])


def test_cast_to_integers_lets_no_gradient_through() -> None:
    with pytest.raises(ob.InvalidArgumentError):
        ob.backward(cast_model(TensorProto.FLOAT, TensorProto.INT64), wrt=["x"], strict=True)
