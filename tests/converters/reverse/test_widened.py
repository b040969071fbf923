"""Gradients of models in float16 and bfloat16."""

from collections.abc import Callable

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, numpy_helper, parser

import onnx_backprop as ob

SEED = 20261123


def model_of(body: str, weights: np.ndarray, *, half: str = "float16", y: str = "[N,8]") -> ModelProto:
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> g ({half}[N,4] x) => ({half}{y} y) <{half}[4,8] w> {{ {body} }}'
    )
    tensor = numpy_helper.from_array(weights, "w")
    model.graph.initializer.extend([tensor])
    return model


def data(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(SEED)
    return (
        rng.standard_normal((rows, 4)).astype(np.float16),
        rng.standard_normal((4, 8)).astype(np.float16),
        rng.standard_normal((rows, 8)).astype(np.float16),
    )


def test_a_gradient_below_what_float16_has() -> None:
    """The prediction's is some 5e-8 per element, the sums over 250,000 of them are not."""
    x, w, noise = data(250_000)
    t = (x.astype(np.float32) @ w.astype(np.float32) + 0.05 * noise).astype(np.float16)
    graph = ob.training_graph(model_of("y = MatMul(x, w)", w), loss="mse", trainable=["w"])
    session = onnxruntime.InferenceSession(graph.model.SerializeToString())
    y, dw = (np.asarray(v) for v in session.run(["y", graph.parameters["w"]], {"x": x, "target": t, "w": w}))
    dy = 2 * (y.astype(np.float64) - t) / t.size
    assert np.median(np.abs(dy)) < 2.0**-24
    expected = x.astype(np.float64).T @ dy
    assert np.linalg.norm(dw - expected) < 0.02 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    "body",
    [
        "a = MatMul(x, w) m = ReduceMax<axes=[1]>(a) y = Sub(a, m)",
        "a = MatMul(x, w) b = Unsqueeze<axes=[2]>(a) m = GlobalMaxPool(b) c = Sub(b, m) y = Squeeze<axes=[2]>(c)",
        "a = MatMul(x, w) c = Constant<value_float=0.0>() d = CastLike(c, a) m = Max(a, d) y = Sub(m, a)",
    ],
)
def test_what_is_compared_is_rounded_alike(body: str) -> None:
    """onnxruntime leaves casts out, so that a value in float32 is not bit for bit the one that was rounded."""
    x, w, dy = data(300)
    model = model_of(body.replace("<axes=[1]>", "<keepdims=1>").replace("(a) y = Sub(a", "(a, ax) y = Sub(a"), w)
    for name in ("ax", "sq"):
        model.graph.initializer.append(numpy_helper.from_array(np.array([1]), name))
    for node in model.graph.node:
        if node.op_type in ("Unsqueeze", "Squeeze"):
            del node.attribute[:]
            node.input.append("sq")
    session = onnxruntime.InferenceSession(ob.backward(model, wrt=["x"]).SerializeToString())
    (dx,) = session.run(["x_grad"], {"x": x, "y_grad": dy})
    a, g = x.astype(np.float64) @ w.astype(np.float64), dy.astype(np.float64)
    if " Max(" in body:
        da = -np.where(a > 0, 0, g)
    else:
        best = a == a.max(1, keepdims=True)
        da = g - best * g.sum(1, keepdims=True)
    clear = np.diff(np.sort(a, 1)[:, -2:], axis=1)[:, 0] > 0.05 if " Max(" not in body else np.abs(a).min(1) > 0.01
    assert clear.sum() > 200
    np.testing.assert_allclose(np.asarray(dx)[clear], (da @ w.T.astype(np.float64))[clear], rtol=5e-3, atol=2e-2)


def test_the_types_of_what_is_asked_for() -> None:
    _, w, _ = data(1)
    graph = ob.training_graph(model_of("a = MatMul(x, w) y = Exp(a)", w), loss="mse", trainable=["w"])
    types = {value.name: value.type.tensor_type.elem_type for value in graph.model.graph.output}
    assert types[graph.parameters["w"]] == TensorProto.FLOAT16
    model = ob.backward(model_of("a = MatMul(x, w) y = Exp(a)", w), wrt=["x", "w"])
    assert {v.type.tensor_type.elem_type for v in model.graph.output} == {TensorProto.FLOAT16}
    assert all(value.type.tensor_type.elem_type == TensorProto.FLOAT16 for value in model.graph.input)


@pytest.mark.parametrize("derivative", [ob.vjp, ob.jvp])
def test_a_sequence_before_a_half_result(derivative: Callable[..., ModelProto]) -> None:
    """Its type is that of a sequence, in the gradients too."""
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[N, 4] x) => (float16[N, 4] y) '
        "{ s = SplitToSequence<axis = 0>(x) c = ConcatFromSequence<axis = 0>(s) d = Mul(c, c) y = Cast<to = 10>(d) }"
    )
    derived = derivative(model, ["x"], ["y"])
    x, (seed,) = np.arange(8, dtype=np.float32).reshape(2, 4), ob.derivatives(derived)[-1].seeds.values()
    ones = np.ones_like(x) if derivative is ob.jvp else np.ones((2, 4), np.float16)
    (result,) = ob.derivatives(derived)[-1].results.values()
    np.testing.assert_array_equal(ob.session(derived).run([result], {"x": x, seed: ones})[0], 2 * x)
