"""`register_gradient`: operators of a domain of one's own, run by onnx's reference evaluator."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import ModelProto, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

import onnx_backprop as ob
from onnx_backprop.converters.prepare.inference.declared import LIKE_INPUT
from onnx_backprop.converters.reverse import registry
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.extending.arithmetic import arithmetic
from tests.support.numeric import central_differences

RNG = np.random.default_rng(23)
X, W = RNG.standard_normal((2, 3)), RNG.standard_normal((3, 4))


class Cube(OpRun):
    op_domain = "my.ops"

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (x**3,)


class Blend(OpRun):
    op_domain = "my.ops"

    def _run(self, a: np.ndarray, b: np.ndarray, alpha: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
        return alpha * a + b, a * b


@pytest.fixture(autouse=True)
def restored_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers ends with it, and what an example of the documentation has registered is not there."""
    for table in ("RULES", "FLOWING_INPUTS", "ZERO_INPUTS"):
        known = {key: value for key, value in getattr(registry, table).items() if "my.ops" not in str(key)}
        monkeypatch.setattr(registry, table, known)
    before = dict(LIKE_INPUT)
    yield
    LIKE_INPUT.clear()
    LIKE_INPUT.update(before)


def model_of(body: str, outputs: str = "double[2, 4] y", inputs: str = "double[2, 3] x") -> ModelProto:
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18, "my.ops": 1]> g ({inputs}) => ({outputs}) {{ {body} }}'
    )
    model.graph.initializer.append(numpy_helper.from_array(W, "w"))
    return model


def run(model: ModelProto, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    evaluator = ReferenceEvaluator(model, new_ops=[Cube, Blend, *ob.reference_ops()])
    given = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer if t.name in evaluator.input_names}
    names = [str(name) for name in evaluator.output_names]
    return dict(zip(names, map(np.asarray, evaluator.run(None, given | feeds)), strict=True))


def cube(**options: Any) -> None:
    @ob.register_gradient("my.ops::Cube", **options)
    def rule(op: Any, node: Any, dy: Any) -> Any:
        x = node.input(0)
        return op.Mul(dy, op.Mul(op.Mul(x, x), 3))


INSIDE = "a = MatMul(x, w) c = my.ops.Cube(a) y = Sin(c)"


@pytest.mark.parametrize("elementwise", [False, True])
@pytest.mark.parametrize("body", [INSIDE, INSIDE.replace("Sin(c)", "Mul(c, c)")])
def test_gradients_and_tangents(body: str, elementwise: bool) -> None:
    cube(elementwise=elementwise)
    dy, v = RNG.standard_normal((2, 4)), RNG.standard_normal((3, 4))
    model = model_of(body)

    def loss(w: np.ndarray) -> float:
        c = (X @ w) ** 3
        return float((dy * (np.sin(c) if "Sin" in body else c * c)).sum())

    expected = central_differences(loss, W)
    got = run(ob.backward(model, wrt=["w"]), x=X, y_grad=dy)["w_grad"]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    tangent = run(ob.jvp(model, wrt=["w"]), x=X, w_tangent=v)["y_tangent"]
    np.testing.assert_allclose((tangent * dy).sum(), (expected * v).sum(), rtol=1e-5)
    assert ("my.ops", "Cube", 0) in ob.supported_ops()
    assert ob.explain_gradients(model, wrt=["w"]).ok


def test_second_derivatives() -> None:
    cube(elementwise=True)
    model = model_of("a = MatMul(x, w) c = my.ops.Cube(a) y = ReduceSum<keepdims = 0>(c)", "double y")
    v = RNG.standard_normal((3, 4))
    got = run(ob.hvp(model, wrt=["w"]), x=X, w_direction=v)["w_hvp"]
    np.testing.assert_allclose(got, X.T @ (6 * (X @ W) * (X @ v)), rtol=1e-6)


def test_shapes_and_types_without_a_schema() -> None:
    """Nothing is declared behind the node: it has the type of its input, and its shape where that is said."""
    body = "a = MatMul(x, w) c = my.ops.Cube(a) y = MatMul(c, v)"
    model = model_of(body, "double[n, m] y")
    model.graph.initializer.append(numpy_helper.from_array(RNG.standard_normal((4, 2)), "v"))
    cube()
    with pytest.raises(ob.OnnxBackpropError, match="rank"):
        ob.backward(model, wrt=["w"], of=["y"])
    cube(elementwise=True)  # in the place of the first
    graph = ob.training_graph(model, loss="mse", optimizer="sgd")
    assert list(graph.parameters) == ["w", "v"]
    declared = {v.name: v.type.tensor_type for v in graph.model.graph.value_info}["c"]
    assert (declared.elem_type, [d.dim_value for d in declared.shape.dim]) == (11, [2, 4])


def test_several_inputs_and_outputs() -> None:
    @ob.register_gradient("my.ops::Blend", all_outputs=True)
    def blend(op: Any, node: Any, dys: Any) -> Any:
        a, b = node.input(0), node.input(1)
        first, second = dys
        return op.Add(op.Mul(first, node.float("alpha", 0.5)), op.Mul(second, b)), op.Add(first, op.Mul(second, a))

    model = model_of("a = MatMul(x, w) b = Sin(a) p, q = my.ops.Blend<alpha = 0.25>(a, b) y = Mul(p, q)")

    def loss(w: np.ndarray) -> float:
        a = X @ w
        return float(((0.25 * a + np.sin(a)) * a * np.sin(a)).sum())

    got = run(ob.backward(model, wrt=["w"]), x=X, y_grad=np.ones((2, 4)))["w_grad"]
    np.testing.assert_allclose(got, central_differences(loss, W), rtol=1e-5, atol=1e-6)


def test_inputs_and_broadcasting() -> None:
    @ob.register_gradient("my.ops::Blend", broadcasts=True, inputs=[1])
    def blend(op: Any, node: Any, dy: Any) -> Any:
        return None, op.Mul(dy, 2)

    text = '<ir_version: 10, opset_import: ["": 18, "my.ops": 1]> g (double[2, 4] x, double[4] b) => (double[2, 4] y) { y = my.ops.Blend(x, b) }'
    derived = ob.backward(parser.parse_model(text), wrt=["b"])
    dy = RNG.standard_normal((2, 4))
    np.testing.assert_allclose(run(derived, x=dy, b=dy[0], y_grad=dy)["b_grad"], 2 * dy.sum(0))
    with pytest.raises(ob.InvalidArgumentError, match="no gradient flows to that input"):
        ob.backward(parser.parse_model(text), wrt=["x"])


def test_a_gradient_that_is_left_out_is_no_zero() -> None:
    """One value for two inputs: the other has a gradient, and None alone says that it has none."""
    model = model_of("a = MatMul(x, w) b = Sin(a) p, q = my.ops.Blend(a, b) y = Mul(p, p)")
    ob.register_gradient("my.ops::Blend")(lambda op, _node, dy: op.Mul(dy, 0.5))
    with pytest.raises(ob.UnsupportedError, match=r"returned 1 of 2 gradients, and that of input 1 \('b'\) is wanted"):
        ob.backward(model, wrt=["w"], of=["y"])
    for options, rule in (
        ({}, lambda op, _node, dy: (op.Mul(dy, 0.5), None)),
        ({"inputs": [0]}, lambda op, _node, dy: op.Mul(dy, 0.5)),
    ):
        ob.register_gradient("my.ops::Blend", **options)(rule)
        a = X @ W  # through p's first input alone
        expected = X.T @ (2 * (0.5 * a + np.sin(a)) * 0.5)
        got = run(ob.backward(model, wrt=["w"], of=["y"]), x=X, y_grad=np.ones((2, 4)))["w_grad"]
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_without_a_rule_the_refusal_names_it() -> None:
    with pytest.raises(
        ob.UnsupportedOpError, match=r"my.ops::Cube \(not an .*'c'[\s\S]*register_gradient\('domain::Name'"
    ):
        ob.backward(model_of(INSIDE), wrt=["w"])


def test_what_a_rule_does_wrong_is_said() -> None:
    answers = {
        " raised TypeError: .* It emits nodes with op": lambda _op, _node, dy: dy**2,
        " raised KeyError: 'gone'": lambda _op, _node, _dy: {}["gone"],
        " returned array": lambda _op, _node, _dy: np.ones(3),
        " returned \\(": lambda _op, _node, dy: (dy, dy),
        ": 'Sine' is no operator of ONNX. Did you mean 'Sin": lambda op, _node, dy: op.Sine(dy),
        ": Softmax has no attribute 'axes'. Did you mean 'axis'": lambda op, _node, dy: op.Softmax(dy, axes=1),
    }
    for message, function in answers.items():
        ob.register_gradient("my.ops::Cube")(function)
        with pytest.raises(ob.UnsupportedError, match=f"Cube 'c': its gradient rule <lambda>{message}"):
            ob.backward(model_of(INSIDE), wrt=["w"])


@pytest.mark.parametrize(
    "name", ["Cube", "::Cube", "ai.onnx::Relu", "onnx_backprop::ReLUBackward", "com.microsoft::Gelu", "my.ops::", 3]
)
def test_other_domains_are_refused(name: Any) -> None:
    with pytest.raises(ob.InvalidArgumentError, match="operator: "):
        ob.register_gradient(name)


def test_arithmetic_of_values_and_numbers() -> None:
    @ob.register_gradient("my.ops", "Cube")
    def rule(_op: Any, node: Any, dy: Any) -> Any:
        x = node.input(0)
        return (3 * x * x - 1 + 1) * dy / 2 - -dy * (1.5 * x * x)

    dy = RNG.standard_normal((2, 4))
    got = run(ob.backward(model_of("a = MatMul(x, w) y = my.ops.Cube(a)"), wrt=["w"]), x=X, y_grad=dy)["w_grad"]
    np.testing.assert_allclose(got, X.T @ (3 * (X @ W) ** 2 * dy), rtol=1e-6)


def test_arithmetic_is_a_matter_of_the_block_and_of_its_thread() -> None:
    """Two conversions in two threads emit into graphs of their own, and what others have set comes back."""
    started = Barrier(2)
    outside: Any = object()
    before = ir.set_value_magic_handler(outside)

    def emitted(n: int) -> int:
        op, x = Builder(set()), ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT))
        with arithmetic(op):
            started.wait(10)
            for _ in range(100):
                _ = x + n
        return sum(node.op_type == "Add" for node in op.nodes)

    try:
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(emitted, (1, 2))) == [100, 100]
        assert ir.set_value_magic_handler(before) is outside
    finally:
        ir.set_value_magic_handler(before)


def test_versions() -> None:
    @ob.register_gradient("my.ops", "Cube", versions=[1, 3])
    def rule(op: Any, node: Any, dy: Any) -> Any:
        return 3 * node.input(0) * node.input(0) * dy

    for version in (1, 2, 3):
        model = model_of(INSIDE)
        next(o for o in model.opset_import if o.domain == "my.ops").version = version
        if version == 2:
            with pytest.raises(ob.UnsupportedOpError, match="my.ops::Cube"):
                ob.backward(model, wrt=["w"])
        else:
            ob.backward(model, wrt=["w"])
    wrongs: list[Any] = [[], [0], "1", 3]
    for wrong in wrongs:
        with pytest.raises(ob.InvalidArgumentError, match="versions: expected"):
            ob.register_gradient("my.ops", "Cube", versions=wrong)


@pytest.mark.parametrize("route", ["onnx", "native"])
def test_a_rule_comes_before_the_function_that_a_model_holds(route: str) -> None:
    """The function runs forward; the rule is another one here, so as to be seen."""
    cube(elementwise=True)
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18, "my.ops": 1]>
        g (float[N] x) => (float[N] y) { a = Sin(x) y = my.ops.Cube(a) }
        <domain: "my.ops", opset_import: ["": 18]> Cube (x) => (y) { s = Mul(x, x) t = Sign(s) y = Mul(t, s) }""")
    x = np.linspace(-1, 1, 5, dtype=np.float32)
    session = ob.session(ob.backward(model, wrt=["x"]), kernels=route)
    y, grad = map(np.asarray, session.run(["y", "x_grad"], {"x": x, "y_grad": np.ones(5, np.float32)}))
    np.testing.assert_allclose(y, np.sin(x) ** 2, rtol=1e-5)
    np.testing.assert_allclose(grad, 3 * np.sin(x) ** 2 * np.cos(x), rtol=1e-4, atol=1e-6)


def test_the_answer_stands_on_a_node_of_its_domain() -> None:
    @ob.register_gradient("my.ops::Cube", elementwise=True)
    def rule(op: Any, node: Any, dy: Any) -> Any:
        return op.emit("CubeGrad", [node.input(0), dy], {"order": 3}, domain="my.ops")[0]

    derived = ob.backward(model_of(INSIDE), wrt=["w"])
    (node,) = [node for node in derived.graph.node if node.op_type == "CubeGrad"]
    assert (node.domain, helper.get_attribute_value(node.attribute[0])) == ("my.ops", 3)
