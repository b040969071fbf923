"""Gradients of normalisations: what a model may know or leave out, special shapes and numbers, on every route."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

import onnx_backprop as ob
from onnx_backprop.opset import KERNELS
from tests.declarations.calls import to_data
from tests.opset.bodies.body_models import KNOWLEDGE, model_of, plain_session
from tests.support import single_op
from tests.support.checks import evaluate_all

f32 = np.float32
BN = "BatchNormTrainingBackward"
PATTERNS = [(), (2,), (3,), (4,), (2, 3), (2, 3, 4)]  # which of the optional inputs are there


def call(rng, shape: tuple[int, ...], layout: str, given: tuple[int, ...] = (4,)) -> tuple[dict[str, Any], list]:
    x, dy = (to_data((rng.standard_normal(shape) + 0.5).astype(f32), layout) for _ in range(2))
    parameters = [rng.random(shape[1]).astype(f32) + 0.5 if n in given else None for n in (2, 3, 4)]
    inputs = [x, dy, *parameters]
    while inputs[-1] is None:
        inputs.pop()
    return {"epsilon": 1e-3, "data_format": layout}, inputs


def assert_close(answers, expected, message: str = "") -> None:
    for got, want in zip(answers, expected, strict=True):
        scale = max(1.0, float(np.abs(want).max(initial=0)))
        np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=2e-5 * scale, strict=True, err_msg=message)


@pytest.mark.parametrize("layout", ["NCX", "NXC"])
@pytest.mark.parametrize("given", PATTERNS, ids=str)
@pytest.mark.parametrize("knowledge", KNOWLEDGE)
def test_the_body_is_right_whatever_is_known(rng, knowledge: str, given: tuple[int, ...], layout: str) -> None:
    for shape in ((2, 3, 4, 5), (3, 4), (1, 2, 6)):
        attributes, inputs = call(rng, shape, layout, given)
        session = plain_session(model_of(BN, attributes, inputs, knowledge, constants=False))
        assert_close(session.run(None, single_op.feeds(BN, inputs)), evaluate_all(BN, attributes, inputs))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("layout", ["NCX", "NXC"])
@pytest.mark.parametrize(
    "shape", [(0, 3, 4), (2, 3, 0), (2, 0, 3), (0, 3), (1, 1), (3, 130, 2), (2, 2, 700), (5, 1, 1, 1)]
)
def test_shapes(rng, shape: tuple[int, ...], layout: str, kernels: str) -> None:
    """Also without any element, where the gradients of scale and bias are zeros."""
    attributes, inputs = call(rng, shape, layout)
    answers = single_op.run_all(BN, attributes, inputs, kernels=kernels)
    assert_close(answers, evaluate_all(BN, attributes, inputs), str(shape))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("names", [["result"], ["", "result_1"], ["", "", "result_2"], ["result", "", "result_2"]])
def test_outputs_that_nobody_reads_may_be_left_out(rng, names: list[str], kernels: str) -> None:
    attributes, inputs = call(rng, (2, 3, 4), "NCX")
    model = single_op.model(BN, attributes, inputs)
    wanted = single_op.leave_out_outputs(model, names)
    answers = ob.session(model, kernels=kernels).run(None, single_op.feeds(BN, inputs))
    expected = evaluate_all(BN, attributes, inputs)
    assert_close(answers, [expected[n] for n in wanted])


@pytest.mark.parametrize("kernels", KERNELS)
def test_half_types_with_sums_beyond_their_range(kernels: str) -> None:
    """Σ dy is 131072, the variance 10⁸: both beyond float16, whose gradients are right all the same."""
    x = np.where(np.arange(512) % 2, 20000, -20000).astype(f32).reshape(2, 1, 256)
    dy = np.full((2, 1, 256), 256, f32)
    dy[0, 0, ::2] = 128
    attributes = {"epsilon": 1e-5, "data_format": "NCX"}
    answers = single_op.run_all(
        BN, attributes, [x, dy, None, None, np.array([3000], f32)], dtype="f16", kernels=kernels
    )
    expected = evaluate_all(BN, attributes, [x, dy, None, None, np.array([3000], f32)], "f16")
    assert float(answers[2][0]) == 131072 - 128 * 128
    assert np.isfinite(answers[0]).all()
    assert_close(answers[1:], expected[1:])
    np.testing.assert_allclose(answers[0], expected[0].astype(f32), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_nan_stays_in_its_channel(rng, kernels: str) -> None:
    attributes, inputs = call(rng, (2, 3, 4), "NCX")
    inputs[1][0, 1, 2] = np.nan
    answers = single_op.run_all(BN, attributes, inputs, kernels=kernels)
    for answer, axis in zip(answers, (1, 0, 0), strict=True):
        bad = np.isnan(np.moveaxis(answer, axis, 0)).reshape(3, -1)
        assert bad.all(axis=1).tolist() == [False, True, False]
        assert bad.any(axis=1).tolist() == [False, True, False]


@pytest.mark.parametrize("kernels", ["native", "onnx"])
@pytest.mark.parametrize("op", [BN, "LayerNormBackward"])
@pytest.mark.parametrize("layout", ["NCX", "NXC"])
def test_a_variance_of_zero_without_epsilon(rng, layout: str, op: str, kernels: str) -> None:
    """Where x is constant dx and diff_gamma are not defined: no number stands there. All else is as ever."""
    attributes, inputs = call(rng, (6, 2, 8), layout, ())
    attributes["epsilon"] = 0.0
    if op == BN:
        constant = (slice(None), 1) if layout == "NCX" else (..., 1)
    else:
        attributes, constant = {"epsilon": 0.0, "begin_norm_axis": 1, "use_affine": 0}, (1,)
    inputs[0][constant] = 2.0
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = evaluate_all(op, attributes, inputs)
    answers = single_op.run_all(op, attributes, inputs, kernels=kernels)
    assert np.isnan(expected[0][constant]).all()
    assert not np.isfinite(answers[0][constant]).any()
    for got, want in zip(answers, expected, strict=True):
        numbers = np.isfinite(want)
        assert_close([got[numbers]], [want[numbers]])


def unknown(model: ModelProto) -> ModelProto:
    for value in model.graph.input:
        value.type.tensor_type.ClearField("shape")
    return model


WRONG = [
    ([(2, 3, 4), (2, 3, 5)], "diff_dst of the shape of src"),
    ([(2, 3, 4), (2, 3, 1)], "diff_dst of the shape of src"),
    ([(2, 3, 4), (3, 2, 4)], "diff_dst of the shape of src"),
    ([(2, 3, 4), (2, 3)], "diff_dst of the shape of src"),
    ([(2, 3, 4), (2, 3, 4), None, None, (4,)], "gamma of one entry per channel"),
    ([(2, 3, 4), (2, 3, 4), (1,)], "mean of one entry per channel"),
]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("shapes", "message"), WRONG)
def test_what_does_not_fit_fails_the_run(shapes, message: str, kernels: str) -> None:
    inputs = [None if shape is None else np.ones(shape, f32) for shape in shapes]
    model = unknown(single_op.model(BN, {"epsilon": 1e-5, "data_format": "NCX"}, inputs))
    session = ob.session(model, kernels=kernels)
    with pytest.raises(Exception, match=message if kernels == "onnx" else f"{BN}: "):
        session.run(None, single_op.feeds(BN, inputs))
