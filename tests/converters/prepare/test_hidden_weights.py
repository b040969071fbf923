"""Weights in Constant nodes, behind Identity, in If branches and in functions: found, and trained under their names."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnxruntime
import pytest
from onnx import FunctionProto, GraphProto, ModelProto, helper, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.prepare.load import prepare

RNG = np.random.default_rng(3)
W, V = (RNG.standard_normal((3, 2)).astype(np.float32) for _ in range(2))
X = RNG.standard_normal((4, 3)).astype(np.float32)


def model_of(text: str, opset: int = 17) -> ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}, "local": 1]> {text}')


def insert(graph: GraphProto | FunctionProto, name: str, value: np.ndarray) -> None:
    """A Constant node in front."""
    tensor = numpy_helper.from_array(value, f"{name}_value")
    graph.node.insert(0, helper.make_node("Constant", [], [name], value=tensor))


def in_constants() -> ModelProto:
    """As Paddle's exporter writes every weight."""
    model = model_of("g (float[N,3] x) => (float[N,2] y) { w1 = Identity(w) y = MatMul(x, w1) }")
    insert(model.graph, "w", W)
    return model


def in_branches() -> ModelProto:
    """As silero's two sampling rates: the same names in both branches, once in a Constant and once stored."""
    model = model_of(
        "g (float[N,3] x, bool c) => (float[N,2] y) {"
        " y = If(c) <then_branch = t () => (float[N,2] a) { wt = Identity(w) a = MatMul(x, wt) },"
        " else_branch = e () => (float[N,2] b) { d = MatMul(x, w) b = Neg(d) }> }"
    )
    branches = {a.name: a.g for a in model.graph.node[0].attribute}
    insert(branches["then_branch"], "w", W)
    branches["else_branch"].initializer.append(numpy_helper.from_array(V, "w"))
    return model


def in_a_function() -> ModelProto:
    model = model_of(
        'g (float[N,3] x) => (float[N,2] y) { y = local.linear(x) } <domain: "local", opset_import: ["": 17]> linear (x) => (y) { y = MatMul(x, w) }'
    )
    insert(model.functions[0], "w", W)
    return model


def gradients(model: ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    converted = ob.backward(model)
    names = [o.name for o in converted.graph.output if o.name.endswith("_grad")]
    columns = converted.graph.output[0].type.tensor_type.shape.dim[1].dim_value
    seed = {"y_grad": np.ones((4, columns), np.float32)}
    values = onnxruntime.InferenceSession(converted.SerializeToString()).run(names, feeds | seed)
    return {name: np.asarray(value) for name, value in zip(names, values, strict=True)}


def test_constants() -> None:
    grads = gradients(in_constants(), {"x": X})
    assert list(grads) == ["w_grad"]
    np.testing.assert_allclose(grads["w_grad"], X.T @ np.ones((4, 2)), rtol=1e-5)


@pytest.mark.parametrize("taken", [True, False])
def test_branches(taken: bool) -> None:
    grads = gradients(in_branches(), {"x": X, "c": np.array(taken)})
    assert list(grads) == ["w_grad", "w_2_grad"]
    want = X.T @ np.ones((4, 2))
    np.testing.assert_allclose(grads["w_grad"], want if taken else 0 * want, rtol=1e-5)
    np.testing.assert_allclose(grads["w_2_grad"], 0 * want if taken else -want, rtol=1e-5)


def test_a_function() -> None:
    (grad,) = gradients(in_a_function(), {"x": X}).values()
    np.testing.assert_allclose(grad, X.T @ np.ones((4, 2)), rtol=1e-5)


def test_a_function_that_is_called_twice_has_one_weight() -> None:
    """dW of X W W is Xᵀ G Wᵀ + (X W)ᵀ G."""
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18, "own": 1]> g (float[4,3] x) => (float[4,3] y) {
             a = own.twice(x)  y = own.twice(a)
           } <domain: "own", opset_import: ["": 18]> twice (x) => (y) {
             w = Constant<value = float[3,3] {1,2,3,4,5,6,7,8,9}>()  y = MatMul(x, w)
           }"""
    )
    w, g = np.arange(1, 10, dtype=np.float32).reshape(3, 3), np.ones((4, 3), np.float32)
    (grad,) = gradients(model, {"x": X}).values()
    np.testing.assert_allclose(grad, X.T @ g @ w.T + (X @ w).T @ g, rtol=1e-5)


@pytest.mark.parametrize("build", [in_constants, in_branches, in_a_function])
def test_training(build: Callable[[], ModelProto]) -> None:
    model = build()
    before = model.SerializeToString(deterministic=True)
    graph = ob.training_graph(model, loss="mse", optimizer="adam")
    assert model.SerializeToString(deterministic=True) == before
    trainer = ob.Trainer(graph, learning_rate=0.1)
    feeds = {"x": X, "target": np.zeros((4, 2), np.float32)} | ({"c": np.array(True)} if "c" in graph.inputs else {})
    losses = [trainer.step(**feeds) for _ in range(5)]
    assert losses[-1] < losses[0]
    exported = onnxruntime.InferenceSession(graph.inference_model(trainer.parameters()).SerializeToString())
    (y,) = exported.run(None, {n: v for n, v in feeds.items() if n != "target"})
    assert np.mean(np.asarray(y) ** 2) < losses[-1]


def test_outputs_that_are_constants_stay() -> None:
    model = model_of("g (float[N,3] x) => (float[N,3] y, float[3,2] w) { y = Relu(x) }")
    insert(model.graph, "w", W)
    prepared = prepare(model)
    assert [node.op_type for node in prepared.graph.node] == ["Constant", "Relu"]


def test_a_name_that_the_graph_uses_otherwise() -> None:
    model = in_branches()
    model.graph.node[0].output[0] = "u"
    for branch in [a.g for a in model.graph.node[0].attribute]:
        for node in branch.node:
            node.output[:] = ["y" if name == "w" else name for name in node.output]
            node.input[:] = ["y" if name == "w" else name for name in node.input]
        for tensor in branch.initializer:
            tensor.name = "y"
    model.graph.node.append(helper.make_node("Neg", ["u"], ["y"]))
    assert [t.name for t in prepare(model).graph.initializer] == ["y_2", "y_3"]
    assert set(gradients(model, {"x": X, "c": np.array(True)})) == {"y_2_grad", "y_3_grad"}


@pytest.mark.parametrize("form", ["Constant", "initializer"])
def test_what_a_branch_gives_out(form: str) -> None:
    """A weight that a branch gives out as it is, beside one in a Constant of the main graph."""
    model = model_of(
        "g (float[N,3] x, bool c) => (float[N,2] y) {"
        " w = If(c) <then_branch = t () => (float[3,2] r) { k = Neg(v) r = Neg(k) },"
        " else_branch = e () => (float[3,2] s) { q = Relu(x) }> y = MatMul(x, w) }"
    )
    then, other = (a.g for a in model.graph.node[0].attribute)
    if then.name != "t":
        then, other = other, then
    del other.node[:]
    if form == "Constant":
        insert(other, "s", W)
    else:
        other.initializer.append(numpy_helper.from_array(W, "s"))
    insert(model.graph, "v", V)
    for taken in (True, False):
        grads = gradients(model, {"x": X, "c": np.array(taken)})
        want = X.T @ np.ones((4, 2))
        assert set(grads) == {"v_grad", "s/weight_grad"}
        np.testing.assert_allclose(grads["v_grad"], want if taken else 0 * want, rtol=1e-5)
        np.testing.assert_allclose(grads["s/weight_grad"], 0 * want if taken else want, rtol=1e-5)
