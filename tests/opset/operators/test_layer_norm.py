"""LayerNormBackward: against differences of loops, whatever a model knows or leaves out, special shapes and numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

import onnx_backprop as ob
from onnx_backprop.opset import KERNELS
from onnx_backprop.ort_ops.normalization.layer_norm_backward import BLOCK, CHUNK, FLUSH, GROUP, LONG, PART
from tests.opset.bodies.body_models import KNOWLEDGE, model_of, plain_session
from tests.opset.operators import naive
from tests.support import single_op
from tests.support.checks import evaluate_all

f32 = np.float32
LN = "LayerNormBackward"
PATTERNS = [(), (4,), (4, 5), (2,), (3, 4), (2, 3), (2, 3, 4, 5)]  # which of the optional inputs are there

Inputs = list[np.ndarray | None]


def call(rng, shape: tuple[int, ...], axis: int, given: tuple[int, ...] = (4,)) -> tuple[dict[str, Any], Inputs]:
    x, dy = ((rng.standard_normal(shape) + 0.5).astype(f32) for _ in range(2))
    shapes = {2: shape[:axis], 3: shape[:axis], 4: shape[axis:], 5: shape[axis:]}
    more = [np.asarray(rng.random(dims) + 0.5, f32) if n in given else None for n, dims in shapes.items()]
    inputs: Inputs = [x, dy, *more]
    while inputs[-1] is None:
        inputs.pop()
    return {"epsilon": 1e-3, "begin_norm_axis": axis, "use_affine": int(4 in given)}, inputs


def assert_close(answers, expected, message: str = "") -> None:
    for got, want in zip(answers, expected, strict=True):
        scale = max(1.0, float(np.abs(want).max(initial=0)))
        np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=2e-5 * scale, strict=True, err_msg=message)


@pytest.mark.parametrize(("shape", "axis"), [((2, 3, 4), -1), ((2, 3, 4), 1), ((3, 2), 0), ((5,), -1)])
def test_the_reference_against_differences_of_loops(rng, shape: tuple[int, ...], axis: int) -> None:
    """With the statistics of src, the three gradients are those of the forward, cell by cell."""
    attributes, inputs = call(rng, shape, axis, (4, 5))
    x, dy, _, _, gamma, beta = (None if v is None else v.astype(np.float64) for v in inputs)
    assert x is not None and dy is not None and gamma is not None and beta is not None  # noqa: PT018 - for pyright
    step, values = 1e-5, {"x": x, "gamma": gamma, "beta": beta}
    for (name, value), got in zip(values.items(), evaluate_all(LN, attributes, inputs), strict=True):
        expected = np.zeros_like(value)
        for place in np.ndindex(value.shape):
            ends = []
            for sign in (1, -1):
                moved = value.copy()
                moved[place] += sign * step
                y = naive.layer_norm(**(values | {name: moved}), axis=axis, epsilon=1e-3)
                ends.append(float((y * dy).sum()))
            expected[place] = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6 * max(1, np.abs(expected).max()), err_msg=name)


@pytest.mark.parametrize("given", PATTERNS, ids=str)
@pytest.mark.parametrize("knowledge", KNOWLEDGE)
def test_the_body_is_right_whatever_is_known(rng, knowledge: str, given: tuple[int, ...]) -> None:
    for shape, axis in (((2, 3, 4), 2), ((2, 3, 4), -2), ((2, 3, 4), -3), ((3, 4), 0), ((6,), -1), ((1, 1, 1), 1)):
        attributes, inputs = call(rng, shape, axis, given)
        session = plain_session(model_of(LN, attributes, inputs, knowledge, constants=False))
        answers = session.run(None, single_op.feeds(LN, inputs))
        assert_close(answers, evaluate_all(LN, attributes, inputs), f"{shape} {axis}")


SHAPES = [
    ((0, 4), 1),
    ((4, 0), 1),
    ((0, 0), 1),
    ((2, 0, 3), 1),
    ((1, 1), 1),
    ((1000, 3), 1),  # more rows than are added up in float32, in one part
    ((FLUSH + GROUP + 1, 2 * PART // FLUSH), 1),  # two parts, neither of whole groups
    ((1, LONG), 1),
    ((2, CHUNK + 5), 1),
    ((1, LONG + 1), 1),  # in blocks of columns
    ((GROUP + 1, 33, BLOCK), 1),
    ((FLUSH + 2, LONG // 16, 17), 1),
]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_shapes(rng, shape: tuple[int, ...], axis: int, kernels: str) -> None:
    """Without any element the gradients of scale and bias are zeros."""
    for given in ((), (3, 4)):
        attributes, inputs = call(rng, shape, axis, given)
        answers = single_op.run_all(LN, attributes, inputs, kernels=kernels)
        assert_close(answers, evaluate_all(LN, attributes, inputs), str(shape))


def test_the_shapes_take_both_ways_of_the_kernel() -> None:
    lengths = [int(np.prod(shape[axis:])) for shape, axis in SHAPES]
    assert sum(length > LONG for length in lengths) >= 3
    assert LONG in lengths


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("names", [["result"], ["", "result_1"], ["", "", "result_2"], ["result", "", "result_2"]])
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, LONG)])
def test_outputs_that_nobody_reads_may_be_left_out(rng, shape, names: list[str], kernels: str) -> None:
    attributes, inputs = call(rng, shape, 1)
    model = single_op.model(LN, attributes, inputs)
    wanted = single_op.leave_out_outputs(model, names)
    answers = ob.session(model, kernels=kernels).run(None, single_op.feeds(LN, inputs))
    expected = evaluate_all(LN, attributes, inputs)
    assert_close(answers, [expected[n] for n in wanted])


@pytest.mark.parametrize("shape", [(300, 600), (70, LONG + 100)])
def test_threads_do_not_change_a_bit(rng, shape: tuple[int, int]) -> None:
    """Rows in parts, and in blocks of columns."""
    attributes, inputs = call(rng, shape, 1)
    answers = set()
    for threads in (1, 2, 3, 3):
        model = single_op.model(LN, attributes, inputs)
        session = ob.session(model, kernels="native", session_options=single_op.options(threads))
        results = session.run(None, single_op.feeds(LN, inputs))
        answers.add(b"".join(np.asarray(result).tobytes() for result in results))
    assert len(answers) == 1


@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_far_from_zero(rng, kernels: str) -> None:
    """A mean of 10⁴ beside a variance of 1, whose square a sum of squares would lose."""
    x = (rng.integers(-8, 9, (3, 600)) / 4 + 1e4).astype(f32)
    dy = rng.standard_normal((3, 600)).astype(f32)
    attributes = {"epsilon": 1e-5, "use_affine": 0}
    answers = single_op.run_all(LN, attributes, [x, dy], kernels=kernels)
    for got, want in zip(answers, evaluate_all(LN, attributes, [x, dy]), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-3 * float(np.abs(want).max()))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_half_types_with_sums_beyond_their_range(dtype: str, kernels: str) -> None:
    """Σ dy is 512 · 257, which neither type holds, and so is the variance of 10⁸."""
    x = np.where(np.arange(512) % 2, 8192, -8192).astype(f32).reshape(1, 512).repeat(512, axis=0)
    dy = np.full((512, 512), 256, f32)
    dy[0] = 512
    dy[:, ::2] *= 2
    inputs: Inputs = [x, dy, None, None, np.full(512, 3000, f32)]
    answers = single_op.run_all(LN, {"epsilon": 1e-5}, inputs, dtype=dtype, kernels=kernels)
    expected = evaluate_all(LN, {"epsilon": 1e-5}, inputs, dtype)
    assert float(answers[2][1]) == 512 * 256 + 256
    assert_close(answers[1:], expected[1:])
    np.testing.assert_allclose(answers[0], expected[0].astype(f32), rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("which", [0, 1])
def test_a_nan_stays_in_its_row_and_column(rng, which: int, kernels: str) -> None:
    """Of dy in its column of the gradients of scale and bias; of x in all of the former and none of the latter."""
    attributes, inputs = call(rng, (6, 40), 1)
    tensor = inputs[which]
    assert tensor is not None
    tensor[2, 7] = np.nan
    dx, dgamma, dbeta = (np.isnan(a) for a in single_op.run_all(LN, attributes, inputs, kernels=kernels))
    assert dx.all(axis=1).tolist() == dx.any(axis=1).tolist() == [row == 2 for row in range(6)]
    column = [n == 7 for n in range(40)]
    assert dgamma.tolist() == (column if which else [True] * 40)
    assert dbeta.tolist() == (column if which else [False] * 40)


def unknown(model: ModelProto) -> ModelProto:
    for value in model.graph.input:
        value.type.tensor_type.ClearField("shape")
    return model


WRONG = [
    (-1, [(2, 3, 4), (2, 3, 5), None, None, (4,)], "diff_dst of the shape of src"),
    (-1, [(2, 3, 4), (2, 4, 3), None, None, (4,)], "diff_dst of the shape of src"),
    (-1, [(2, 3, 4), (3, 4), None, None, (4,)], "diff_dst of the shape of src"),
    (-1, [(2, 3, 4), (2, 3, 4), (3, 2), None, (4,)], "mean of the shape of src before the normalised axes"),
    (-1, [(2, 3, 4), (2, 3, 4), (2, 3, 1), None, (4,)], "mean of the shape of src before the normalised axes"),
    (-1, [(2, 3, 4), (2, 3, 4), None, (1, 3), (4,)], "variance of the shape of src before the normalised axes"),
    (1, [(2, 3, 4), (2, 3, 4), None, None, (4, 3)], "gamma of the shape of the normalised axes of src"),
    (1, [(2, 3, 4), (2, 3, 4), None, None, (12,)], "gamma of the shape of the normalised axes of src"),
    (1, [(2, 3, 3), (2, 3, 3), None, None, (3, 3), (3,)], "beta of the shape of the normalised axes of src"),
    (0, [(4,), (4,), (1,), None, (4,)], "mean of the shape of src before the normalised axes"),
    (0, [(), (), None, None, ()], "expected rank 1 or more"),
    (0, [(1,), (1,), None, None, ()], "gamma of the shape of the normalised axes of src"),
]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("axis", "shapes", "message"), WRONG)
def test_what_does_not_fit_fails_the_run(axis: int, shapes, message: str, kernels: str) -> None:
    inputs: Inputs = [None if shape is None else np.ones(shape, f32) for shape in shapes]
    model = unknown(single_op.model(LN, {"begin_norm_axis": axis}, inputs))
    session = ob.session(model, kernels=kernels)
    with pytest.raises(Exception, match=message if kernels == "onnx" else f"{LN}: "):
        session.run(None, single_op.feeds(LN, inputs))
