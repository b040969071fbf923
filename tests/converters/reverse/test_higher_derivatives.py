"""Gradients of gradients: `Gradient` nodes that read what others give."""

from __future__ import annotations

import ast

import numpy as np
import onnx
import onnxruntime
import pytest

import onnx_backprop as ob
from tests.converters.training.gradient_nodes import gradient, model_of, run


def test_second_and_third_derivatives() -> None:
    model = model_of(
        "g (float[3] x) => (float[3] d1, float[3] d2, float[3] d3) { s = Mul(x, x)  q = Mul(s, s) y = Mul(q, x)"
        + gradient("d1", "x", xs="x", y="y", name="first")
        + gradient("d2", "x", xs="x", y="d1", name="second")
        + gradient("d3", "x", xs="x", y="d2", name="third")
        + "}"
    )
    x = np.array([1, -2, 0.5])
    got = run(model, x=x)
    np.testing.assert_allclose(got["d1"], 5 * x**4, rtol=1e-5)
    np.testing.assert_allclose(got["d2"], 20 * x**3, rtol=1e-5)
    np.testing.assert_allclose(got["d3"], 60 * x**2, rtol=1e-5)


def test_the_second_order_example_of_the_documentation() -> None:
    """O = mean((X·W - L)²): d²O/dW² and d(dO/dW)/dX of the sum of dO/dW."""
    model = model_of(
        "g (float[N, 3] X, float[3, 1] W, float[N, 1] L) => (float O, float[3, 1] dW, float[N, 3] dXW, float[3, 1] dWW)"
        "{ Y = MatMul(X, W)  e = Sub(Y, L)  s = Mul(e, e)  O = ReduceMean<keepdims = 0>(s) "
        + gradient('"", dW', "X, W, L", xs="X W", zs="L", y="O", name="first")
        + gradient("dXW, dWW", "X, W, L", xs="X W", zs="L", y="dW", name="second")
        + "}"
    )
    rng = np.random.default_rng(0)
    x, w, label = rng.standard_normal((4, 3)), rng.standard_normal((3, 1)), rng.standard_normal((4, 1))

    def slope(x: np.ndarray, w: np.ndarray) -> float:
        return float((2 * x.T @ (x @ w - label) / 4).sum())

    got = run(model, X=x, W=w, L=label)
    np.testing.assert_allclose(got["dW"], 2 * x.T @ (x @ w - label) / 4, rtol=1e-5)
    for name, at in (("dXW", x), ("dWW", w)):
        for index in np.ndindex(at.shape):
            step = np.zeros(at.shape)
            step[index] = 1e-5
            moved = [(x + s * step, w) if name == "dXW" else (x, w + s * step) for s in (1, -1)]
            expected = (slope(*moved[0]) - slope(*moved[1])) / 2e-5
            assert got[name][index] == pytest.approx(expected, rel=1e-4, abs=1e-4), (name, index)


def test_a_gradient_at_other_values_of_a_gradient() -> None:
    model = model_of(
        "g (float[2] x, float[2] v) => (float[2] d1, float[2] d2) { s = Mul(x, x)  y = Mul(s, x)"
        + gradient("d1", "x", xs="x", y="y", name="first")
        + gradient("d2", "v", xs="x", y="d1", name="second")
        + "}"
    )
    x, v = np.array([1.0, 2]), np.array([3.0, 5])
    got = run(model, x=x, v=v)
    np.testing.assert_allclose(got["d1"], 3 * x**2, rtol=1e-6)
    np.testing.assert_allclose(got["d2"], 6 * v, rtol=1e-6)


def test_a_second_derivative_that_is_zero() -> None:
    model = model_of(
        "g (float[N] a) => (float[N] d2) { r = Relu(a) "
        + gradient("d1", "a", xs="a", y="r", name="first")
        + gradient("d2", "a", xs="a", y="d1", name="second")
        + "}"
    )
    np.testing.assert_array_equal(run(model, a=[2, -3, 1])["d2"], np.zeros(3, np.float32), strict=True)


TWICE = [
    ("[1, 2, 4, 4]", "w = Constant<value = float[2,2,2,1] {1.0,2.0,-1.0,0.5,3.0,1.0,-2.0,1.0}>() y = Conv(x, w)"),
    ("[1, 2, 4, 4]", "y = Relu(x)"),
    ("[1, 2, 3, 4]", "y = Softmax<axis = 2>(x)"),
    (
        "[2, 2, 4, 4]",
        "k = Constant<value = float[2] {1.0, 2.0}>() b = Constant<value = float[2] {0.5, 1.5}>() "
        "m0 = Constant<value = float[2] {0.25, -1.0}>() v0 = Constant<value = float[2] {3.0, 0.75}>() "
        "y, m, v = BatchNormalization<training_mode = 1, epsilon = 0.5>(x, k, b, m0, v0)",
    ),
    (
        "[2, 3, 2, 4]",
        "k = Constant<value = float[2,4] {1.0, 2.0, -1.0, 0.5, 3.0, 1.0, -2.0, 1.0}>() "
        "y = LayerNormalization<axis = 2, epsilon = 0.5>(x, k)",
    ),
    ("[1, 2, 4, 5]", "y = AveragePool<kernel_shape = [3, 2], strides = [2, 1], pads = [1, 0, 0, 1]>(x)"),
    ("[1, 2, 4, 5]", 'y = AveragePool<kernel_shape = [3, 2], strides = [2, 2], auto_pad = "SAME_LOWER">(x)'),
    ("[1, 2, 4, 4]", "y = MaxPool<kernel_shape = [3, 2], strides = [2, 1], pads = [1, 0, 0, 1]>(x)"),
    ("[1, 2, 5, 4]", "y = MaxPool<kernel_shape = [2, 2], dilations = [3, 1], ceil_mode = 1>(x)"),
]


@pytest.mark.parametrize("shape", ["known", "unknown"])
@pytest.mark.parametrize(("dims", "text"), TWICE)
def test_second_derivatives_through_our_operators(dims: str, text: str, shape: str) -> None:
    """<d2, v> is the difference of Σ d1² along v; operators of our domain are differentiated through their bodies."""
    declared = dims if shape == "known" else "[A, B, C, D]"
    model = model_of(
        f"g (float{declared} x) => (float{declared} d1, float{declared} d2) {{ {text} c = Mul(y, y) s = Mul(c, y) "
        + gradient("d1", "x", xs="x", y="s", name="first")
        + "q = Mul(d1, d1) "
        + gradient("d2", "x", xs="x", y="q", name="second")
        + "}"
    )
    expanded = ob.expand_gradients(model)
    assert any(node.domain == ob.DOMAIN for node in expanded.graph.node), "the first derivative is one of ours"
    session = onnxruntime.InferenceSession(expanded.SerializeToString(), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(3)
    x = rng.permutation(np.prod(ast.literal_eval(dims))).reshape(ast.literal_eval(dims)).astype(np.float32) / 8
    d2 = np.asarray(session.run(["d2"], {"x": x})[0])
    assert np.abs(d2).max() > 1e-3
    step = np.float32(1 / 128)
    for _ in range(6):
        v = rng.choice([-1, 1], x.shape).astype(np.float32)
        above, below = (np.asarray(session.run(["d1"], {"x": x + sign * step * v})[0], np.float64) for sign in (1, -1))
        want = ((above**2).sum() - (below**2).sum()) / (2 * step)
        have = float((d2.astype(np.float64) * v).sum())
        assert abs(want - have) <= 2e-3 * float(np.abs(d2).sum()), (want, have)


def test_a_mean_over_nothing_has_second_derivatives() -> None:
    """Which is 0 in onnxruntime: H v = 2 v · m² by w, not 0 / 0."""
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]> g (double[A, B] x, double[2] w) => (double y) '
        "{ m = ReduceMean (x) p = Mul (w, m) q = Mul (p, p) y = ReduceSum <keepdims = 0> (q) }"
    )
    feeds = {"x": np.zeros((3, 0)), "w": np.ones(2)}
    derived = ob.hvp(model, ["x", "w"], ["y"])
    session = ob.session(derived)
    feeds |= {v.name: np.ones_like(feeds[n]) for v in session.get_inputs() for n in "xw" if v.name.startswith(f"{n}_")}
    results = ob.derivatives(derived)[-1].results
    for name, answer in zip(results, session.run(list(results.values()), feeds), strict=True):
        assert np.isfinite(np.asarray(answer)).all(), name
