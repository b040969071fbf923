"""BatchNormForwardTraining: against loops and onnxruntime, whatever a model knows or leaves out, special numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

import onnx_backprop as ob
from onnx_backprop.opset import KERNELS
from tests.declarations.calls import to_data
from tests.opset.bodies.body_models import KNOWLEDGE, model_of, plain_session
from tests.opset.operators import naive
from tests.support import single_op
from tests.support.checks import evaluate_all, infer

f32 = np.float32
BF = "BatchNormForwardTraining"
PATTERNS = [(), (3,), (4,), (3, 4)]  # which of gamma and beta are there
NUMBERS = {"epsilon": 1e-3, "momentum": 0.75}

Inputs = list[np.ndarray | None]


def call(rng, shape: tuple[int, ...], layout: str, given: tuple[int, ...] = (3, 4)) -> tuple[dict[str, Any], Inputs]:
    x = to_data((rng.standard_normal(shape) + 0.5).astype(f32), layout)
    parameters = [(rng.random(shape[1]) + 0.5).astype(f32) for _ in range(4)]
    inputs: Inputs = [x, *(array if n in (1, 2, *given) else None for n, array in enumerate(parameters, 1))]
    while inputs[-1] is None:
        inputs.pop()
    return NUMBERS | {"data_format": layout}, inputs


def by_loops(attributes: dict[str, Any], inputs: Inputs) -> list[np.ndarray]:
    x, mean, variance, gamma, beta = [*inputs, None, None][:5]
    assert x is not None
    assert mean is not None
    assert variance is not None
    last = attributes["data_format"] == "NXC"
    epsilon, momentum = (float(f32(attributes[name])) for name in ("epsilon", "momentum"))
    y, *statistics = naive.batch_norm(
        np.moveaxis(x, -1, 1) if last else x,
        mean,
        variance,
        np.ones_like(mean) if gamma is None else gamma,
        np.zeros_like(mean) if beta is None else beta,
        epsilon=epsilon,
        momentum=momentum,
    )
    return [np.moveaxis(y, 1, -1) if last else y, *statistics]


def assert_close(answers, expected, message: str = "") -> None:
    for got, want in zip(answers, expected, strict=True):
        scale = max(1.0, float(np.abs(want).max(initial=0)))
        np.testing.assert_allclose(np.asarray(got), want.astype(f32), rtol=0, atol=2e-5 * scale, err_msg=message)


@pytest.mark.parametrize("layout", ["NCX", "NXC"])
@pytest.mark.parametrize("given", PATTERNS, ids=str)
def test_the_reference_is_what_loops_give(rng, given: tuple[int, ...], layout: str) -> None:
    for shape in ((2, 3, 4, 5), (3, 4), (1, 2, 6), (5, 1), (1, 1), (0, 3, 2), (2, 3, 0)):
        attributes, inputs = call(rng, shape, layout, given)
        for got, want in zip(evaluate_all(BF, attributes, inputs), by_loops(attributes, inputs), strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-7, err_msg=str(shape))


@pytest.mark.parametrize("layout", ["NCX", "NXC"])
@pytest.mark.parametrize("given", PATTERNS, ids=str)
@pytest.mark.parametrize("knowledge", KNOWLEDGE)
def test_the_body_is_right_whatever_is_known(rng, knowledge: str, given: tuple[int, ...], layout: str) -> None:
    for shape in ((2, 3, 4, 5), (3, 4), (1, 2, 6)):
        attributes, inputs = call(rng, shape, layout, given)
        session = plain_session(model_of(BF, attributes, inputs, knowledge, constants=False))
        assert_close(session.run(None, single_op.feeds(BF, inputs)), by_loops(attributes, inputs))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("layout", ["NCX", "NXC"])
@pytest.mark.parametrize(
    "shape", [(0, 3, 4), (2, 3, 0), (2, 0, 3), (0, 3), (4, 0), (1, 1), (3, 130, 2), (2, 2, 700), (5, 1, 1, 1), (3, 200)]
)
def test_shapes(rng, shape: tuple[int, ...], layout: str, kernels: str) -> None:
    """Also without any element, where the statistics are zeros and the running ones decay."""
    attributes, inputs = call(rng, shape, layout)
    answers = single_op.run_all(BF, attributes, inputs, kernels=kernels)
    assert_close(answers, by_loops(attributes, inputs), str(shape))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 5), (3, 70, 4, 5), (2, 2, 3, 4, 2)])
def test_onnxruntime_gives_the_same(rng, shape: tuple[int, ...], kernels: str) -> None:
    attributes, inputs = call(rng, shape, "NCX")
    names = ["src", "gamma", "beta", "mean", "variance"]
    node = helper.make_node("BatchNormalization", names, ["y", "m", "v"], training_mode=1, **NUMBERS)
    values = [helper.make_tensor_value_info(n, 1, [None] * (len(shape) if n == "src" else 1)) for n in names]
    graph = helper.make_graph([node], "g", values, [helper.make_tensor_value_info(n, 1, None) for n in "ymv"])
    theirs = plain_session(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    ).run(None, single_op.feeds(BF, inputs))  # fmt: skip
    ours = single_op.run_all(BF, attributes, inputs, kernels=kernels)
    for got, want in zip(ours[:3], theirs, strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=2e-6, atol=4e-6, strict=True)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kept", [(0,), (1,), (2,), (3,), (4,), (0, 3, 4), (0, 1, 4)], ids=str)
def test_outputs_that_nobody_reads_may_be_left_out(rng, kept: tuple[int, ...], kernels: str) -> None:
    attributes, inputs = call(rng, (2, 3, 4), "NCX")
    model = single_op.model(BF, attributes, inputs)
    names = [name if n in kept else "" for n, name in enumerate(single_op.results_of(BF))]
    while not names[-1]:
        names.pop()
    casts = [node for node in model.graph.node[1:] if node.input[0] in names]
    outputs = [model.graph.output[n] for n in kept]
    model.graph.node[0].output[:] = names
    del model.graph.node[1:]
    model.graph.node.extend(casts)
    del model.graph.output[:]
    model.graph.output.extend(outputs)
    answers = ob.session(model, kernels=kernels).run(None, single_op.feeds(BF, inputs))
    expected = by_loops(attributes, inputs)
    assert_close(answers, [expected[n] for n in kept])


def test_statistics_have_as_many_entries_as_any_parameter_says(rng) -> None:
    attributes, inputs = call(rng, (2, 3, 4), "NXC", (4,))
    model = single_op.model(BF, attributes, inputs, dtype="f16")
    model.graph.input[3].type.tensor_type.shape.dim[0].dim_value = 3  # beta
    types = {v.name: v.type.tensor_type for v in infer(model).graph.value_info}
    for name in single_op.results_of(BF):
        lengths = [d.dim_value or d.dim_param for d in types[name].shape.dim]
        assert lengths == (["src_0", "src_1", 3] if name == "result" else [3])
        assert types[name].elem_type == (10 if name == "result" else 1)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_half_types_have_statistics_in_float32(kernels: str, dtype: str) -> None:
    """Σ x is 131072, the variance 2²⁸: both beyond float16."""
    x = np.where(np.arange(512) % 2, 16384 + 512, -16384 + 512).astype(f32).reshape(2, 1, 256)
    inputs = [x, *(np.array([v], f32) for v in (1.0 + 2.0**-20, 3.0, 2.0, 0.5))]
    attributes = NUMBERS | {"epsilon": 0.0, "data_format": "NCX"}
    answers = single_op.run_all(BF, attributes, inputs, dtype=dtype, kernels=kernels)
    expected = [0.75 * float(inputs[1][0]) + 128, 0.75 * 3 + 2.0**26, 512, 2.0**28]
    np.testing.assert_allclose([float(a[0]) for a in answers[1:]], expected, rtol=2e-7)
    np.testing.assert_array_equal(answers[0], np.where(x > 0, 2.5, -1.5))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("layout", ["NCX", "NXC"])
@pytest.mark.parametrize("where", ["src", "mean", "variance"])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_in_its_channel(rng, where: str, number: float, layout: str, kernels: str) -> None:
    """In a running statistic it stays there; that of the batch, and dst, do not depend on it."""
    attributes, inputs = call(rng, (2, 3, 4), layout)
    expected = by_loops(attributes, inputs)
    at = {"src": 0, "mean": 1, "variance": 2}[where]
    broken = np.array(inputs[at])
    broken[((0, 1, 2) if layout == "NCX" else (0, 2, 1)) if where == "src" else 1] = number
    inputs[at] = broken
    answers = [np.asarray(a) for a in single_op.run_all(BF, attributes, inputs, kernels=kernels)]
    channel = (slice(None), 1) if layout == "NCX" else (..., 1)
    for n, (got, want) in enumerate(zip(answers, expected, strict=True)):
        place = channel if n == 0 else 1
        if where == "src" or n == at:
            got = got.copy()
            assert not np.isfinite(got[place]).any(), (n, got)
            if n != 0:
                assert not np.isfinite(got[place])
            got[place] = want[place]
        assert_close([got], [want], str(n))


@pytest.mark.parametrize("kernels", ["native", "onnx"])
@pytest.mark.parametrize("layout", ["NCX", "NXC"])
@pytest.mark.parametrize("value", [0.0, 2.0, 0.1, 3e20])
def test_a_channel_that_is_the_same_everywhere(rng, value: float, layout: str, kernels: str) -> None:
    """Its variance is 0, and dst beta, but for rounding of the mean on the route "onnx"; without ε it is no number."""
    attributes, inputs = call(rng, (5, 2, 7), layout)
    x, beta = inputs[0], inputs[4]
    assert x is not None
    assert beta is not None
    x[(slice(None), 1) if layout == "NCX" else (..., 1)] = value
    for epsilon in (1e-3, 0.0):
        answers = single_op.run_all(BF, attributes | {"epsilon": epsilon}, inputs, kernels=kernels)
        dst = answers[0][:, 1] if layout == "NCX" else answers[0][..., 1]
        assert answers[3][1] == pytest.approx(f32(value), rel=1e-6)
        if kernels == "native":
            assert (answers[3][1], answers[4][1]) == (f32(value), 0)
        if epsilon and value < 3:
            np.testing.assert_allclose(dst, np.full_like(dst, beta[1]), rtol=0, atol=1e-5)
        elif value in (0.0, 2.0) or kernels == "native":
            assert np.isnan(dst).all() == (epsilon == 0)


WRONG = [
    ([(2, 3, 4), (4,), (3,)], "mean of one entry per channel"),
    ([(2, 3, 4), (3,), (1,)], "variance of one entry per channel"),
    ([(2, 3, 4), (3,), (3,), (2,)], "gamma of one entry per channel"),
    ([(2, 3, 4), (3,), (3,), None, (6,)], "beta of one entry per channel"),
    ([(2, 3, 4), (3,), (3,), None, (1, 3)], "beta of one entry per channel"),
]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("shapes", "message"), WRONG)
def test_what_does_not_fit_fails_the_run(shapes, message: str, kernels: str) -> None:
    inputs = [None if shape is None else np.ones(shape, f32) for shape in shapes]
    model = single_op.model(BF, NUMBERS | {"data_format": "NCX"}, inputs)
    for value in model.graph.input:
        value.type.tensor_type.ClearField("shape")
    session = ob.session(model, kernels=kernels)
    with pytest.raises(Exception, match=message if kernels == "onnx" else f"{BF}: "):
        session.run(None, single_op.feeds(BF, inputs))
