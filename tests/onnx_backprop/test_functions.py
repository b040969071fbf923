"""`value_and_grad`: what SciPy is given, from several threads, and what is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser
from scipy.optimize import check_grad, minimize

import onnx_backprop as ob

# Rosenbrock's valley in float64, through a and b, shifted by c
VALLEY = """<ir_version: 10, opset_import: ["": 21]> valley (double a, double[1] b, double c) => (double[1] y)
    <double one = {1.0}, double hundred = {100.0}>
    { d = Sub(a, c) e = Sub(one, d) f = Mul(e, e) g = Mul(d, d) h = Sub(b, g) i = Mul(h, h) j = Mul(i, hundred) y = Add(f, j) }"""
ZERO = {"c": np.zeros(())}


def test_as_scipy_calls_it() -> None:
    f = ob.value_and_grad(parser.parse_model(VALLEY), ["a", "b"], ["y"], feeds=ZERO, hvp=True)
    np.testing.assert_array_equal(f.start, [0, 0])
    assert check_grad(lambda x: f(x)[0], lambda x: f(x)[1], np.array([0.3, -1.2])) < 1e-5
    for method, options in (("Newton-CG", {"hessp": f.hvp}), ("BFGS", {}), ("trust-ncg", {"hessp": f.hvp})):
        solution = minimize(f, [-1.2, 1.0], jac=True, method=method, **options)
        np.testing.assert_allclose(solution.x, [1, 1], atol=1e-4, err_msg=method)
    moved = minimize(f, [-1.2, 1.0], args=({"c": np.array(2.0)},), jac=True, hessp=f.hvp, method="Newton-CG")
    np.testing.assert_allclose(moved.x, [3, 1], atol=1e-4)
    assert {n: v.tolist() for n, v in f.split(np.array([3.0, 1.0])).items()} == {"a": 3.0, "b": [1.0]}


def test_start_is_taken_from_feeds() -> None:
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        g (double[4] x, double[N] z) => (double s) { a = Mul (x, z) s = ReduceSum <keepdims = 0> (a) }""")
    f = ob.value_and_grad(model, ["x", "z"], ["s"], feeds={"x": np.arange(4.0), "z": np.ones(4)})
    np.testing.assert_array_equal(f.start, [0, 1, 2, 3, 1, 1, 1, 1])
    with pytest.raises(ob.InvalidArgumentError, match=r"feeds: 'x' has the shape \(4,\), got an array of \(3,\)"):
        ob.value_and_grad(model, ["x"], ["s"], feeds={"x": np.ones(3), "z": np.ones(4)})


WEIGHTS = """<ir_version: 10, opset_import: ["": 21]> g (float[N, 2] x) => (float s) <float[2, 3] w = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}>
    { a = MatMul(x, w) b = Sin(a) s = ReduceMean<keepdims = 0>(b) }"""


def test_weights_and_the_shape_of_one_variable() -> None:
    x = np.array([[1, 2], [0.5, -1], [0, 3]], np.float32)
    f = ob.value_and_grad(parser.parse_model(WEIGHTS), feeds={"x": x})
    np.testing.assert_array_equal(f.start, np.arange(1, 7))
    value, gradient = f(f.start.reshape(2, 3))
    assert (gradient.shape, gradient.dtype) == ((2, 3), np.float64)
    w = np.arange(1, 7).reshape(2, 3)
    assert value == pytest.approx(np.sin(x @ w).mean(), rel=1e-5)
    np.testing.assert_allclose(gradient, x.T @ np.cos(x @ w) / 9, rtol=1e-4, atol=1e-6)
    flat = f(f.start)[1]
    np.testing.assert_array_equal(flat, gradient.ravel())
    longer = f(f.start, {"x": np.concatenate([x, x])})  # another shape, and back
    assert longer[0] == pytest.approx(value)
    assert f(f.start)[0] == value


def test_from_several_threads() -> None:
    f = ob.value_and_grad(parser.parse_model(VALLEY), ["a", "b"], feeds=ZERO, hvp=True)
    points = np.random.default_rng(0).standard_normal((200, 2))
    expected = [(*f(p), f.hvp(p, p)) for p in points]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda p: (*f(p), f.hvp(p, p)), points))
    for a, b in zip(got, expected, strict=True):
        assert a[0] == b[0]
        np.testing.assert_array_equal(a[1], b[1])
        np.testing.assert_array_equal(a[2], b[2])


def test_results_are_the_callers() -> None:
    f = ob.value_and_grad(parser.parse_model(VALLEY), ["a", "b"], feeds=ZERO)
    first = f(np.array([1.0, 2.0]))[1]
    kept = first.copy()
    f(np.array([5.0, 5.0]))
    np.testing.assert_array_equal(first, kept)


def test_invalid_use_is_refused() -> None:
    model = parser.parse_model(VALLEY)
    f = ob.value_and_grad(model, ["a", "b"])
    with pytest.raises(ob.InvalidArgumentError, match="feeds: expected values of c"):
        f(np.zeros(2))
    with pytest.raises(ob.InvalidArgumentError, match="expected a vector of 2 numbers, got an array of shape \\(3,\\)"):
        f(np.zeros(3), ZERO)
    with pytest.raises(ob.InvalidArgumentError, match="the model has no input 'q'"):
        f(np.zeros(2), {**ZERO, "q": np.zeros(1)})
    with pytest.raises(ob.InvalidArgumentError, match="Give value_and_grad hvp=True"):
        f.hvp(np.zeros(2), np.zeros(2))
    with pytest.raises(ob.InvalidArgumentError, match="feeds: 'c' has the type float64, got an array of complex128"):
        f(np.zeros(2), {"c": np.zeros((), complex)})
    with pytest.raises(ob.InvalidArgumentError, match=r"Write \['y'\]"):
        ob.value_and_grad(model, ["a"], "y")
    rows = ob.value_and_grad(rows_of_numbers(), ["w"], feeds={"x": np.ones((1, 3))}, reduction="sum")
    with pytest.raises(ob.InvalidArgumentError, match="onnxruntime cannot run this batch, .*'x' \\(1, 2\\)"):
        rows(np.zeros(3), {"x": np.ones((1, 2))})
    with pytest.raises(ob.InvalidArgumentError, match="the shape of 'x' is not known"):
        ob.value_and_grad(parser.parse_model(WEIGHTS), ["x"])
    with pytest.raises(ob.InvalidArgumentError, match="expected an output of one element"):
        ob.value_and_grad(parser.parse_model(WEIGHTS.replace("(float s)", "(float[N, 3] b, float s)")), ["w"], ["b"])


def rows_of_numbers() -> ModelProto:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (double[N, 3] x) => (double[N, 1] y) { a = MatMul(x, w) y = Sin(a) }'
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array([[1.0], [2.0], [-0.5]]), "w"))
    return model


def test_whole_numbers_are_fed_as_floats_and_it_says_what_it_is() -> None:
    f = ob.value_and_grad(parser.parse_model(VALLEY), ["a", "b"])
    assert f(np.ones(2), {"c": 2})[0] == f(np.ones(2), {"c": np.array(2.0)})[0]
    assert "of y by a scalar, b 1: 2 numbers>" in repr(f)


def test_one_row_of_a_symbolic_batch() -> None:
    model = rows_of_numbers()
    f = ob.value_and_grad(model, wrt=["x"], of=["y"], feeds={"x": np.zeros((1, 3))}, hvp=True)
    x, w = np.array([0.1, 0.2, 0.3]), np.array([1, 2, -0.5])
    value, gradient = f(x)
    np.testing.assert_allclose(value, np.sin(x @ w))
    np.testing.assert_allclose(gradient, np.cos(x @ w) * w)
    np.testing.assert_allclose(f.hvp(x, np.ones(3)), -np.sin(x @ w) * w * w.sum())
    assert model == rows_of_numbers()


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_reduced_output(reduction: str) -> None:
    f = ob.value_and_grad(rows_of_numbers(), wrt=["x"], feeds={"x": np.zeros((4, 3))}, reduction=reduction)
    x, w = np.random.default_rng(0).standard_normal((4, 3)), np.array([1, 2, -0.5])
    share = 1 if reduction == "sum" else 1 / 4
    value, gradient = f(x.ravel())
    np.testing.assert_allclose(value, np.sin(x @ w).sum() * share)
    np.testing.assert_allclose(gradient.reshape(4, 3), np.cos(x @ w)[:, None] * w * share)


def test_several_numbers_are_refused_with_what_to_do() -> None:
    for arguments in ({}, {"feeds": {"x": np.zeros((4, 3))}}):
        with pytest.raises(ob.InvalidArgumentError, match=r"has the shape \[('N'|4), 1\]. reduction='sum' adds"):
            ob.value_and_grad(rows_of_numbers(), wrt=["x"], of=["y"], **arguments)
    with pytest.raises(ob.InvalidArgumentError, match="reduction: expected None, 'sum' or 'mean', got 'max'"):
        ob.value_and_grad(rows_of_numbers(), wrt=["x"], reduction="max")
    with pytest.raises(ob.InvalidArgumentError, match="the shape of 'x' is not known. Give a value of it in feeds"):
        ob.value_and_grad(rows_of_numbers(), wrt=["x"], reduction="sum")
