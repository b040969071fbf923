"""Straight-through estimators by their form, where a file has lost the detach()."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

import onnx_backprop as ob

W = np.random.default_rng(2).standard_normal((4, 3)).astype(np.float32)
X = np.linspace(-1.5, 2.0, 8, dtype=np.float32).reshape(2, 4)
FORMS = {
    "added": "d = Sub(b, a) y = Add(a, d)",
    "in front": "d = Sub(b, a) y = Add(d, a)",
    "taken away": "d = Sub(a, b) y = Sub(a, d)",
}
ROUNDED = {"round": "b = Round(a)", "sign": "b = Sign(a)", "steps": "c = Mul(a, four) r = Floor(c) b = Div(r, four)"}


def file_of(body: str, **tensors: object) -> ModelProto:
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> g (float[2,4] x) => (float[2,3] y) {{ a = MatMul(x, w) {body} }}'
    )
    arrays = {"w": W, "four": np.float32(4.0), **tensors}
    read = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in arrays.items() if n in read)
    return model


def trained(file: ModelProto, name: str = "w") -> tuple[np.ndarray, str]:
    """dL/dw of L = mean (y - t)² at t = 1, and what is said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph = ob.training_graph(file, loss="mse", optimizer="sgd")
        trainer = ob.Trainer(graph, learning_rate=1.0)
    before = trainer.parameters()[name].copy()
    trainer.step(x=X, target=np.ones((2, 3), np.float32))
    return before - trainer.parameters()[name], "\n".join(str(w.message) for w in caught)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rounded", ROUNDED)
def test_the_gradient_passes_straight_through(form: str, rounded: str) -> None:
    gradient, warned = trained(file_of(f"{ROUNDED[rounded]} {FORMS[form]}"))
    a = X.astype(np.float64) @ W
    b = {"round": np.rint(a), "sign": np.sign(a), "steps": np.floor(4 * a) / 4}[rounded]
    np.testing.assert_allclose(gradient, X.T @ (2 * (b - 1) / 6), rtol=1e-5, atol=1e-6)
    assert "'y' compute a + (b - a)" in warned


def test_an_entry_of_a_codebook_is_trained_by_the_other_terms_alone() -> None:
    """VQ-VAE: q - z is also in a loss of its own, whose gradient stays."""
    code = np.random.default_rng(4).standard_normal((5, 3)).astype(np.float32)
    body = (
        "u = Unsqueeze(a, one) e = Sub(u, code) s = ReduceSumSquare<keepdims=0>(e, last) i = ArgMin<axis=1, keepdims=0>(s) "
        "b = Gather(code, i) d = Sub(b, a) z = Add(a, d) q = Mul(d, d) y = Add(z, q)"
    )
    gradient, warned = trained(file_of(body, code=code, one=np.array([1]), last=np.array([2])), "code")
    a = X.astype(np.float64) @ W
    i = np.square(a[:, None] - code).sum(2).argmin(1)
    d = code[i] - a
    expected = np.zeros(code.shape)
    np.add.at(expected, i, 2 * (code[i] + d**2 - 1) / 6 * 2 * d)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
    assert "'z' compute" in warned


@pytest.mark.parametrize(
    "body",
    [
        "b = Tanh(a) d = Sub(b, a) y = Add(a, d)",  # as of steps that are joined
        "r = Round(a) b = Mul(a, r) d = Sub(b, a) y = Add(a, d)",
        "b = ReduceMean<keepdims=1>(a) d = Sub(b, a) y = Add(a, d)",
        "b = Round(a) d = Sub(b, a) y = Add(b, d)",
        "b = Round(a) d = Sub(a, b) y = Add(a, d)",
        "b = Round(a) d = Sub(b, a) e = Mul(d, four) y = Add(a, e)",
    ],
)
def test_what_is_no_estimator(body: str) -> None:
    assert "compute a + (b - a)" not in trained(file_of(body))[1]


@pytest.mark.parametrize(
    "body",
    [
        "b = Tanh(a) d = Sub(b, mean) y = Add(mean, d)",  # of a constant, of which nothing is trained
        "b = MatMul(a, v) c = MatMul(a, v2) d = Sub(b, c) y = Add(c, d)",  # of two heads
        "b = MatMul(x, v3) d = Sub(b, a) y = Add(a, d)",  # of two branches
    ],
)
def test_a_separate_branch_keeps_its_gradient(body: str) -> None:
    """y is b: the gradient of what b is computed from is the one without the sum and the difference."""
    rng = np.random.default_rng(6)
    more = {"v": rng.standard_normal((3, 3)), "v2": rng.standard_normal((3, 3)), "v3": rng.standard_normal((4, 3))}
    arrays = {name: array.astype(np.float32) for name, array in more.items()} | {"mean": np.float32([0.3, -1, 2])}
    name = next((name for name in ("v", "v3") if f"{name})" in body), "w")
    gradient, warned = trained(file_of(body, **arrays), name)
    plain, _ = trained(file_of(body.partition(" d = ")[0].replace("b = ", "y = "), **arrays), name)
    assert np.abs(plain).max() > 1e-2
    np.testing.assert_allclose(gradient, plain, rtol=1e-4, atol=1e-6)
    assert "compute a + (b - a)" not in warned


WIDTH = {
    "mean": "m = Abs(w) s = ReduceMean<keepdims=1>(m) ",  # of one bit, and of 1.58
    "largest of each column": "m = Abs(w) s = ReduceMax<keepdims=1>(m, zero) ",
}


@pytest.mark.parametrize("width", WIDTH)
@pytest.mark.parametrize("rounded", ["n = Div(w, s) r = Round(n) b = Mul(r, s)", "r = Sign(w) b = Mul(r, s)"])
def test_weights_that_are_rounded_by_a_scale_of_their_own(width: str, rounded: str) -> None:
    """The scale alone has a derivative by w, and the detach() holds it too."""
    body = f"{WIDTH[width]} {rounded} d = Sub(b, w) q = Add(w, d) y = MatMul(x, q)"
    gradient, warned = trained(file_of(body, zero=np.array([0])))
    w = W.astype(np.float64)
    s = np.abs(w).mean() if width == "mean" else np.abs(w).max(0, keepdims=True)
    b = np.sign(w) * s if "Sign" in rounded else np.rint(w / s) * s
    np.testing.assert_allclose(gradient, X.T @ (2 * (X @ b - 1) / 6), rtol=1e-4, atol=1e-6)
    assert "'q' compute a + (b - a)" in warned


def test_the_hard_choice_of_a_softmax_passes_straight_through() -> None:
    """One-hot numbers of ArgMax of what the softmax is of, not of the softmax itself."""
    body = "p = Softmax(a) i = ArgMax<axis=1, keepdims=0>(a) b = OneHot(i, depth, values) d = Sub(b, p) y = Add(d, p)"
    gradient, warned = trained(file_of(body, depth=np.array(3), values=np.float32([0, 1])))
    a = X.astype(np.float64) @ W
    p = np.exp(a) / np.exp(a).sum(1, keepdims=True)
    dp = 2 * (np.eye(3)[a.argmax(1)] - 1) / 6
    np.testing.assert_allclose(gradient, X.T @ (p * (dp - (dp * p).sum(1, keepdims=True))), rtol=1e-4, atol=1e-6)
    assert "'y' compute a + (b - a)" in warned


def test_an_input_of_integers_is_left_alone() -> None:
    file = file_of("b = Mul(n, n) d = Sub(b, n) e = Add(n, d) f = Cast<to=1>(e) y = Mul(a, f)")
    file.graph.input.append(helper.make_tensor_value_info("n", TensorProto.INT64, [2, 3]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ob.training_graph(file, loss="mse")
    assert not any("compute a + (b - a)" in str(w.message) for w in caught)
