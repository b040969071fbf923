"""Gradients by and of values inside the graph, as Grad-CAM asks for them, against the formula and differences."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.opset import KERNELS
from tests.support.numeric import outputs

RNG = np.random.default_rng(11)
X = RNG.standard_normal((2, 4)).astype(np.float32)
W, V = (0.4 * RNG.standard_normal(shape).astype(np.float32) for shape in ((4, 5), (5, 3)))
# e = exp(x·w), whose rule reads its output, y = tanh(e·v), s = Σ y²
NET = """<ir_version: 10, opset_import: ["": 21]> net (float[N, 4] x) => (float[N, 3] y, float s)
    { a = MatMul(x, w) e = Exp(a) b = MatMul(e, v) y = Tanh(b) q = Mul(y, y) s = ReduceSum<keepdims = 0>(q) }"""


def network(text: str = NET) -> ModelProto:
    model = parser.parse_model(text)
    model.graph.initializer.extend([numpy_helper.from_array(W, "w"), numpy_helper.from_array(V, "v")])
    return model


def names(model: ModelProto) -> list[str]:
    return [value.name for value in (*model.graph.input, *model.graph.output)]


def from_e(e: np.ndarray) -> np.ndarray:
    return np.tanh(e @ V.astype(np.float64))


def by_e(e: np.ndarray) -> np.ndarray:
    """ds/de in float64."""
    y = from_e(e)
    return (2 * y * (1 - y * y)) @ V.astype(np.float64).T


E = np.exp(X.astype(np.float64) @ W.astype(np.float64))


@pytest.mark.parametrize("kernels", KERNELS)
def test_by_a_value_inside(kernels: str) -> None:
    derived = ob.backward(network(), wrt=["e"], of=["s"], kernels=kernels)
    assert names(derived) == ["x", "y", "s", "e_grad"]
    np.testing.assert_allclose(outputs(derived, {"x": X})["e_grad"], by_e(E), rtol=1e-4)


def test_each_is_the_whole_derivative() -> None:
    """By e as if it were an input; by a, by x and by w with the part through e, whether or not e is named too."""
    got = outputs(ob.backward(network(), wrt=["x", "w", "a", "e"], of=["s"]), {"x": X})
    alone = outputs(ob.backward(network(), wrt=["x", "w"], of=["s"]), {"x": X})
    by_a = by_e(E) * E
    expected = {"e": by_e(E), "a": by_a, "x": by_a @ W.T, "w": X.T @ by_a}
    for name, value in expected.items():
        np.testing.assert_allclose(got[f"{name}_grad"], value, rtol=1e-4, err_msg=name)
    for name in ("x_grad", "w_grad"):
        np.testing.assert_allclose(got[name], alone[name], rtol=1e-6)


def test_of_a_value_inside() -> None:
    """It becomes an output behind the model's own."""
    derived = ob.backward(network(), wrt=["x"], of=["e"])
    assert names(derived) == ["x", "e_grad", "y", "s", "e", "x_grad"]
    seed = RNG.standard_normal(E.shape).astype(np.float32)
    got = outputs(derived, {"x": X, "e_grad": seed})
    np.testing.assert_allclose(got["e"], E, rtol=1e-5)
    np.testing.assert_allclose(got["x_grad"], (seed * E) @ W.T, rtol=1e-4)
    again = outputs(ob.backward(network(), wrt=["e"], of=["e"]), {"x": X, "e_grad_2": seed})
    assert sorted(again) == ["e", "e_grad", "s", "y"]
    np.testing.assert_array_equal(again["e_grad"], seed)


def test_products() -> None:
    u, t = RNG.standard_normal((2, 3)).astype(np.float32), RNG.standard_normal((2, 5)).astype(np.float32)
    y = from_e(E)
    got = outputs(ob.vjp(network(), wrt=["e"], of=["b"]), {"x": X, "b_grad": u})
    np.testing.assert_allclose(got["e_grad"], u @ V.T, rtol=1e-4)
    derived = ob.jvp(network(), wrt=["e"], of=["y", "b"])
    assert names(derived) == ["x", "e_tangent", "y", "s", "b", "y_tangent", "b_tangent"]
    got = outputs(derived, {"x": X, "e_tangent": t})
    np.testing.assert_allclose(got["b_tangent"], t @ V, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(got["y_tangent"], (1 - y * y) * (t @ V), rtol=1e-4, atol=1e-6)
    batched = outputs(ob.vjp(network(), wrt=["e"], of=["b"], batched=True), {"x": X, "b_grad": np.stack([u, 2 * u])})
    np.testing.assert_allclose(batched["e_grad"], [u @ V.T, 2 * u @ V.T], rtol=1e-4)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_jacobian(direction: str) -> None:
    got = outputs(ob.jacobian(network(), wrt=["e"], of=["b"], direction=direction), {"x": X})["b_jacobian_e"]
    expected = np.einsum("nm,ij->njmi", np.eye(2), V)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)


def test_second_derivatives() -> None:
    """∂²s/∂e∂e by differences; and beside x, of which e is the exponential: a rule reads e, no derivative does."""
    direction, step = RNG.standard_normal(E.shape), 1e-6
    differences = (by_e(E + step * direction) - by_e(E - step * direction)) / (2 * step)
    product = outputs(ob.hvp(network(), wrt=["e"], of=["s"]), {"x": X, "e_direction": direction.astype(np.float32)})
    np.testing.assert_allclose(product["e_hvp"], differences, rtol=1e-3, atol=1e-5)
    full = outputs(ob.hessian(network(), wrt=["x", "e"], of=["s"]), {"x": X})
    np.testing.assert_allclose(
        np.einsum("ijkl,kl->ij", full["e_hessian_e"], direction), differences, rtol=1e-3, atol=1e-5
    )
    # d/dδ of ds/dx at e = exp(a) + δ: (ds/de moved along δ) · exp(a), through w
    mixed = (differences * E) @ W.T
    np.testing.assert_allclose(np.einsum("ijkl,kl->ij", full["x_hessian_e"], direction), mixed, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(np.einsum("klij,kl->ij", full["e_hessian_x"], direction), mixed, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("element", ["float16", "double"])
def test_other_types(element: str) -> None:
    text = NET.replace("float", element)
    model = parser.parse_model(text)
    kind = np.float16 if element == "float16" else np.float64
    model.graph.initializer.extend([numpy_helper.from_array(a.astype(kind), n) for a, n in ((W, "w"), (V, "v"))])
    got = outputs(ob.backward(model, wrt=["e", "x"], of=["s"]), {"x": X.astype(kind)})
    assert got["e_grad"].dtype == kind
    tolerance = 2e-2 if element == "float16" else 1e-6
    np.testing.assert_allclose(got["e_grad"], by_e(E), rtol=tolerance, atol=tolerance / 10)
    np.testing.assert_allclose(got["x_grad"], (by_e(E) * E) @ W.T, rtol=tolerance, atol=tolerance / 10)


def test_grad_cam() -> None:
    """The gradient of each class score by the features of a classifier, an image at a time."""
    rng = np.random.default_rng(0)
    kernel, head = (rng.standard_normal(s).astype(np.float32) for s in ((4, 3, 3, 3), (4, 5)))
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["features"]),
        helper.make_node("Relu", ["features"], ["a"]),
        helper.make_node("GlobalAveragePool", ["a"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "v"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["probs"]),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [info("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [info("probs", TensorProto.FLOAT, ["n", 5])],
        [numpy_helper.from_array(kernel, "w"), numpy_helper.from_array(head, "v")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    derived = ob.vjp(model, wrt=["features"], of=["scores"])
    assert [v.name for v in derived.graph.output] == ["probs", "scores", "features_grad"]
    x = rng.standard_normal((2, 3, 8, 8)).astype(np.float32)
    got = outputs(derived, {"x": x, "scores_grad": np.eye(5, dtype=np.float32)[[1, 3]]})
    features = outputs(
        ob.backward(model, wrt=["x"], of=["features"]), {"x": x, "features_grad": np.zeros((2, 4, 6, 6), "f")}
    )
    expected = head[:, [1, 3]].T[:, :, None, None] * (features["features"] > 0) / 36
    np.testing.assert_allclose(got["features_grad"], expected, rtol=1e-5, atol=1e-7)


def test_fused_nodes_keep_their_names() -> None:
    text = """<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> net (float[N, 4] x) => (float[N, 3] y)
        { e = com.microsoft.FusedMatMul(x, w) g = com.microsoft.Gelu(e) y = MatMul(g, v) }"""
    u = RNG.standard_normal((2, 3)).astype(np.float32)
    got = outputs(ob.backward(network(text), wrt=["g"]), {"x": X, "y_grad": u})
    np.testing.assert_allclose(got["g_grad"], u @ V.T, rtol=1e-5)


REFUSED = {
    "near misses": (
        {"wrt": ["ee"]},
        "wrt: expected the name of a graph input or an initializer, or of a value inside the graph, got 'ee'. Did you mean 'e'",
    ),
    "of": (
        {"of": ["ss"]},
        "of: expected the name of a graph output, or of a value inside the graph, got 'ss'. Did you mean 's'",
    ),
    "twice": ({"wrt": ["e", "e"]}, "wrt: 'e' is given twice"),
    "integers": ({"wrt": ["n"]}, "wrt: 'n' has type INT64; gradients exist for floats only"),
    "in a branch": ({"wrt": ["t"]}, "wrt: 't' is a value inside a branch or the body of a loop"),
    "of a branch": ({"of": ["u"]}, "of: 'u' is a value inside a branch or the body of a loop"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    arguments, message = REFUSED[case]
    text = NET.replace(
        "y = Tanh(b)",
        """n = Shape(b) z = Constant<value = bool {0}>() c = Not(z)
        y = If(c) <then_branch = p () => (float[N, 3] t) { t = Tanh(b) },
                   else_branch = r () => (float[N, 3] u) { u = Neg(b) }>""",
    )
    for function in (ob.backward, ob.jvp, ob.jacobian, ob.explain_gradients):
        if case == "integers" and function is ob.explain_gradients:
            continue  # which says so in its table
        with pytest.raises(ob.InvalidArgumentError, match=message):
            function(network(text), **({"wrt": ["x"], "of": ["s"]} | arguments))


def test_explain_takes_them_too() -> None:
    explanation = ob.explain_gradients(network(), wrt=["e"], of=["b"])
    assert explanation.ok
    assert [(v.name, v.reached) for v in explanation.variables] == [("e", True)]
    assert [(n.op, n.node, n.status) for n in explanation.nodes][:2] == [
        ("MatMul-13", "b", "served"),
        ("Tanh-13", "y", "aside"),
    ]


def test_a_check_says_what_it_cannot_move() -> None:
    with pytest.raises(ob.InvalidArgumentError, match="wrt: 'e' is a value inside the graph, which a run"):
        ob.check_gradients(network(), wrt=["e"])
    for wrt in (["x"], None):
        report = ob.check_gradients(network(), wrt=wrt, of=["b"], nodes=True)
        assert report.ok, report
        assert [node.node for node in report.nodes if node.node in ("y", "q", "s")] == []


def test_value_and_grad_of_a_value_inside() -> None:
    f = ob.value_and_grad(network(NET.replace("float s)", "float[N, 3] q)")), wrt=["x"], of=["s"], feeds={"x": X})
    value, gradient = f(X.ravel())
    np.testing.assert_allclose(value, (from_e(E) ** 2).sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient.reshape(X.shape), (by_e(E) * E) @ W.T, rtol=1e-4)
