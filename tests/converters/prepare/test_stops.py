"""Stops: y = stop(x) is x with dy/dx = 0, whoever marks it, in derivatives of every order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper, parser
from onnxruntime import InferenceSession

import onnx_backprop as ob
from onnx_backprop.converters.prepare.exporters.detached import STOP, is_stop

RNG = np.random.default_rng(3)
X, W = (RNG.standard_normal(shape).astype(np.float32) for shape in ((2, 3), (3, 4)))
DY = RNG.standard_normal((2, 4)).astype(np.float32)


def model_of(
    body: str, *, opset: int = 18, inputs: str = "float[2, 3] x", outputs: str = "float[2, 4] y"
) -> ModelProto:
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["": {opset}]> g ({inputs}) => ({outputs}) {{ {body} }}')
    model.graph.initializer.append(numpy_helper.from_array(W, "w"))
    return model


def outputs(model: ModelProto, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    session = ob.session(model)
    return dict(zip([v.name for v in session.get_outputs()], map(np.asarray, session.run(None, feeds)), strict=True))


def marked(model: ModelProto) -> ModelProto:
    for node in model.graph.node:
        if node.op_type == "Identity":
            node.metadata_props.add(key=STOP, value="")
    return model


def detached(domain: str, op_type: str, opset: int = 18, **attributes: str) -> ModelProto:
    model = model_of("a = MatMul(x, w) d = Identity(a) y = Mul(a, d)", opset=opset)
    model.graph.node[1].CopyFrom(helper.make_node(op_type, ["a"], ["d"], domain=domain, **attributes))
    model.opset_import.append(helper.make_opsetid(domain, 1))
    return model


def in_function() -> ModelProto:
    model = detached("pkg.onnxscript.torch_lib", "aten_detach")
    body = [helper.make_node("Identity", ["self"], ["result"])]
    imports = [helper.make_opsetid("", 18)]
    model.functions.append(
        helper.make_function("pkg.onnxscript.torch_lib", "aten_detach", ["self"], ["result"], body, imports)
    )
    return model


SQUARE = "a = MatMul(x, w) d = Identity(a) y = Mul(a, d)"
FILES: dict[str, Callable[[], ModelProto]] = {
    "chainer": lambda: detached("org.chainer", "detach"),
    "aten": lambda: detached("org.pytorch.aten", "detach"),
    "fallthrough": lambda: detached("aten", "detach"),
    "ATen": lambda: detached("org.pytorch.aten", "ATen", operator="detach", overload_name=""),
    "an old opset": lambda: detached("org.chainer", "detach", 11),
    "a function of an exporter": in_function,
    "the mark": lambda: marked(model_of(SQUARE)),
    "the mark in an old opset": lambda: marked(model_of(SQUARE, opset=13)),
}


@pytest.mark.parametrize("case", FILES)
def test_stops_of_files(case: str) -> None:
    """y = a · stop(a): dy/da = a, not 2a; the result runs in stock onnxruntime."""
    converted = ob.backward(FILES[case](), wrt=["w"])
    assert {node.domain for node in converted.graph.node} <= {"", ob.DOMAIN}
    session = InferenceSession(converted.SerializeToString(), providers=["CPUExecutionProvider"])
    y, dw = map(np.asarray, session.run(["y", "w_grad"], {"x": X, "y_grad": DY}))
    np.testing.assert_allclose(y, (X @ W) ** 2, rtol=1e-5)
    np.testing.assert_allclose(dw, X.T @ (DY * (X @ W)), rtol=1e-4)


@pytest.mark.parametrize("case", ["chainer", "the mark", "the mark in an old opset"])
def test_the_mark_stays_in_what_is_written(case: str) -> None:
    """So that whoever differentiates the result again finds it."""
    graph = ob.training_graph(FILES[case](), loss="mse")
    assert sum(map(is_stop, graph.model.graph.node)) == 1
    assert sum(map(is_stop, graph.inference_model().graph.node)) == 1


# what stop names, and what comes of a · b with a = x·w, b = Sin(a)
NAMED = {
    "a value": (["b"], "stopped"),
    "a node": (["of sin"], "stopped"),
    "a glob": (["of s*"], "stopped"),
    "an expression": (["re:of (sin|cos)"], "stopped"),
    "several": (["b", "of s*"], "stopped"),
    "the last": (["y"], "nothing"),
    "a weight": (["w"], "nothing"),
    "everything": (["*"], "nothing"),
}


@pytest.mark.parametrize("case", NAMED)
@pytest.mark.filterwarnings("ignore:wrt. the derivative by 'w' is zero")
def test_stops_by_name(case: str) -> None:
    stop, what = NAMED[case]
    model = model_of("a = MatMul(x, w) b = Sin(a) y = Mul(a, b)")
    model.graph.node[1].name = "of sin"
    got = outputs(ob.backward(model, wrt=["w"], of=["y"], stop=stop), x=X, y_grad=DY)
    a = X @ W
    np.testing.assert_allclose(got["y"], a * np.sin(a), rtol=1e-5)
    expected = X.T @ (DY * np.sin(a)) if what == "stopped" else np.zeros_like(W)
    np.testing.assert_allclose(got["w_grad"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:wrt. the derivative by 'w' is zero")
def test_a_node_without_a_name_does_not_get_that_of_another() -> None:
    """The product before the stop is named as its result, which another node's name is here."""
    model = model_of("a = MatMul(x, w) b = Sin(a) y = Mul(a, b)")
    model.graph.node[1].name = "a"
    converted = ob.backward(model, wrt=["w"], of=["y"], stop=["a"])
    assert not outputs(converted, x=X, y_grad=DY)["w_grad"].any()


def test_a_stop_at_an_input_and_at_a_weight_stops_those_alone() -> None:
    model = model_of("a = MatMul(x, w) y = Sin(a)")
    both = {"x": X, "y_grad": DY}
    plain = outputs(ob.backward(model, wrt=["x", "w"]), **both)
    for name, other in (("x", "w"), ("w", "x")):
        with pytest.warns(ob.OnnxBackpropWarning, match=f"the derivative by '{name}' is zero: Identity '{name}/stop'"):
            derived = ob.backward(model, wrt=["x", "w"], stop=[name])
        got = outputs(derived, **both)
        assert not got[f"{name}_grad"].any()
        np.testing.assert_array_equal(got[f"{other}_grad"], plain[f"{other}_grad"])


CUBE = "a = MatMul(x, w) d = Mul(a, a) c = Mul(d, a) y = ReduceSum<keepdims = 0>(c)"


def test_derivatives_of_second_order() -> None:
    """y = Σ stop(a²)·a: dy/da = a² held, d²y/da² = 0; y = Σ a²·stop(a): 2a·a held, then 2·a."""
    model = model_of(CUBE.replace("c = Mul(d, a)", "e = Identity(a) c = Mul(d, e)"), outputs="float y")
    a, v = X @ W, RNG.standard_normal(W.shape).astype(np.float32)
    stop = {"stop": ["e"]}
    product = outputs(ob.hvp(model, wrt=["w"], of=["y"], **stop), x=X, w_direction=v)["w_hvp"]
    np.testing.assert_allclose(product, X.T @ (2 * a * (X @ v)), rtol=1e-3)
    full = outputs(ob.hessian(model, wrt=["w"], of=["y"], **stop), x=X)["w_hessian_w"]
    np.testing.assert_allclose(np.einsum("ijkl,kl->ij", full, v), product, rtol=1e-3)
    once = ob.backward(model, wrt=["w"], of=["y"], **stop)
    np.testing.assert_allclose(outputs(once, x=X)["w_grad"], X.T @ (2 * a * a), rtol=1e-4)
    again = ob.backward(once, wrt=["w"], of=["w_grad"])  # which names no stop: the graph says it
    np.testing.assert_allclose(outputs(again, x=X, w_grad_grad=v)["w_grad_2"], product, rtol=1e-3)
    tangent = outputs(ob.jvp(model, wrt=["w"], of=["y"], **stop), x=X, w_tangent=v)["y_tangent"]
    np.testing.assert_allclose(tangent, (2 * a * a * (X @ v)).sum(), rtol=1e-3)
    rows = outputs(ob.jacobian(model, wrt=["w"], of=["c"], **stop), x=X)["c_jacobian_w"]
    np.testing.assert_allclose(np.einsum("ijkl->kl", rows), X.T @ (2 * a * a), rtol=1e-3)


def test_what_is_computed_again_keeps_the_mark() -> None:
    """A budget of memory copies forward nodes; a derivative of the training graph must not pass through the copies."""
    body = "".join(f"a{n} = Sin(s{n}) b{n} = Identity(a{n}) s{n + 1} = Mul(b{n}, s{n}) " for n in range(8))
    model = marked(model_of(f"s0 = MatMul(x, w) {body} y = Tanh(s8)"))
    plain = ob.training_graph(model, loss="mse")
    small = ob.training_graph(model, loss="mse", memory="70%")
    copies = [node for node in small.model.graph.node if node.op_type == "Identity" and "again" in node.name]
    assert len(small.model.graph.node) > len(plain.model.graph.node)
    assert all(map(is_stop, copies))
    feeds = {"x": X, "target": DY, "w_grad_grad": W}
    twice = [outputs(ob.backward(g.model, wrt=["w"], of=["w_grad"]), **feeds)["w_grad_2"] for g in (plain, small)]
    np.testing.assert_allclose(*twice, rtol=1e-4, atol=1e-6)
    assert np.abs(twice[0]).max() > 1e-3


LOOPS = {
    # s ← s·w + stop(s): ds/dw of three steps
    "a state": (
        "float[2] s0, float[2] w2",
        "n = Constant<value = int64 {3}>() go = Constant<value = bool {1}>()"
        "y = Loop(n, go, s0) <body = step (int64 i, bool c, float[2] s) => (bool c2, float[2] s2)"
        "{ c2 = Identity(c) p = Mul(s, w2) held = Abs(s) s2 = Add(p, held) }>",
        ["held"],
    ),
    # c ← stop(c), s ← s + c·w: of three steps the first alone leads to c
    "a state that no step changes": (
        "float[2] s0, float[2] w2",
        "n = Constant<value = int64 {3}>() go = Constant<value = bool {1}>() z = Sub(s0, s0)"
        "last, y = Loop(n, go, s0, z) <body = step (int64 i, bool c, float[2] k, float[2] s) => (bool c2, float[2] k2, float[2] s2)"
        "{ c2 = Identity(c) k2 = Identity(k) p = Mul(k, w2) s2 = Add(s, p) }>",
        ["k2"],
    ),
}


@pytest.mark.parametrize("case", LOOPS)
def test_stops_in_loops(case: str) -> None:
    inputs, body, stop = LOOPS[case]
    text = f'<ir_version: 9, opset_import: ["": 18]> g ({inputs}) => (float[2] y) {{ {body} }}'
    s, w = np.array([1.5, 0.25], np.float32), np.array([0.5, 2.0], np.float32)
    got = outputs(
        ob.backward(parser.parse_model(text), wrt=["s0", "w2"], stop=stop), s0=s, w2=w, y_grad=np.ones(2, np.float32)
    )
    if case == "a state":
        states = [s * (w + 1) ** n for n in range(3)]
        by_w = np.zeros(2)
        for state in states:
            by_w = state + w * by_w
        np.testing.assert_allclose(got["s0_grad"], w**3, rtol=1e-5)
        np.testing.assert_allclose(got["w2_grad"], by_w, rtol=1e-5)
    else:
        np.testing.assert_allclose(got["s0_grad"], w, rtol=1e-5)
        np.testing.assert_allclose(got["w2_grad"], 3 * s, rtol=1e-5)


def test_a_stop_in_one_branch() -> None:
    text = """<ir_version: 9, opset_import: ["": 18]> g (float[2] x, bool c) => (float[2] y)
        { y = If(c) <then_branch = t () => (float[2] p) { q = Sin(x) p = Mul(q, x) },
                     else_branch = e () => (float[2] r) { r = Mul(x, x) }> }"""
    derived = ob.backward(parser.parse_model(text), wrt=["x"], stop=["q"])
    x, one = np.array([0.3, 2.0], np.float32), np.ones(2, np.float32)
    for c, expected in ((True, np.sin(x)), (False, 2 * x)):
        np.testing.assert_allclose(outputs(derived, x=x, c=np.array(c), y_grad=one)["x_grad"], expected, rtol=1e-5)


FUNCTION = """<ir_version: 9, opset_import: ["": 18, "my": 1]> g (float[2] x) => (float[2] y) { a = my.F(x) y = my.F(a) }
    <domain: "my", opset_import: ["": 18]> F (v) => (u) { h = Sin(v) u = Mul(h, v) }"""


@pytest.mark.parametrize("argument", ["stop", "wrt", "of"])
def test_values_inside_functions_are_refused(argument: str) -> None:
    """Each call has its own: to take the first alone would be wrong without a word."""
    model = parser.parse_model(FUNCTION)
    message = rf"{argument}: 'h' is a value inside the function my::F, and each call .*inline_local_functions"
    for function in (ob.backward, ob.vjp):
        with pytest.raises(ob.InvalidArgumentError, match=message):
            function(model, **({"wrt": ["x"]} | {argument: ["h"]}))
    with pytest.raises(ob.InvalidArgumentError, match="stop: 're:h' matches no value or node of the graph"):
        ob.backward(model, wrt=["x"], stop=["re:h"])


def test_a_variable_may_be_stopped() -> None:
    """What lies before it gets nothing, itself what lies behind it gives."""
    x, one = np.array([0.3, 2.0], np.float32), np.ones(2, np.float32)
    with pytest.warns(ob.OnnxBackpropWarning, match="by 'x' is zero: Identity 'a/stop' stops it"):
        derived = ob.backward(parser.parse_model(FUNCTION), wrt=["x", "a"], stop=["a"])
    a, got = x * np.sin(x), outputs(derived, x=x, y_grad=one)
    np.testing.assert_allclose(got["a_grad"], np.sin(a) + a * np.cos(a), rtol=1e-5)
    assert not got["x_grad"].any()


@pytest.mark.parametrize("untie", [False, True])
@pytest.mark.filterwarnings("ignore:trained as one")
def test_a_tensor_that_is_read_through_a_stop_is_not_merged_away(untie: bool) -> None:
    """untie gives places tensors of their own, but not the place behind a stop: that one would be trained."""
    body = (
        "one = Identity(w) a = MatMul(x, one) b = MatMul(x, w) c = MatMul(x, w) s = Sin(c) p = Mul(a, b) y = Add(p, s)"
    )
    model = marked(model_of(body))
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.full((3, 4), 0.5, np.float32), "w"))
    graph = ob.training_graph(model, loss="mse", untie=untie)
    assert list(graph.parameters) == ["w", "w_2"][: 1 + untie]
    b = X @ np.full((3, 4), 0.5)
    got = outputs(graph.model, x=X, target=DY)
    dy = 2 * (b * b + np.sin(b) - DY) / DY.size
    np.testing.assert_allclose(sum(got[g] for g in graph.parameters.values()), X.T @ (dy * (b + np.cos(b))), rtol=1e-4)


def test_training_leaves_what_lies_before_a_stop() -> None:
    model = model_of("h = MatMul(x, w) t = Tanh(h) y = MatMul(t, v)", outputs="float[2, 2] y")
    model.graph.initializer.append(numpy_helper.from_array(RNG.standard_normal((4, 2)).astype(np.float32), "v"))
    assert list(ob.training_graph(model, loss="mse", stop=["t"]).parameters) == ["v"]
    trainer = ob.Trainer(ob.training_graph(model, loss="mse", optimizer="adam", stop=["h*"]))
    trainer.step(x=X, target=DY[:, :2])
    assert list(trainer.parameters()) == ["v"]


def test_check_and_explain() -> None:
    model = model_of("a = MatMul(x, w) b = Sin(a) y = Mul(a, b)")
    for stopped in ({"stop": ["b"]}, {}):
        report = ob.check_gradients(marked(model_of(SQUARE)) if not stopped else model, **stopped, nodes=True)
        assert report.ok, report
    explanation = ob.explain_gradients(model, stop=["b"])
    assert explanation.ok
    (stop,) = [node for node in explanation.nodes if node.status == "stops"]
    assert (stop.node, stop.why) == ("b/stop", "it is marked as a stop")


def test_a_check_sees_a_wrong_gradient_in_spite_of_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnx_backprop.converters.check import check_model

    model = model_of("a = MatMul(x, w) b = Sin(a) y = Mul(a, b)")
    monkeypatch.setattr(check_model, "is_stop", lambda _: False)  # differences that move what is stopped
    assert not ob.check_gradients(model, stop=["b"]).ok


def test_a_check_refuses_what_it_cannot_hold() -> None:
    text = """<ir_version: 9, opset_import: ["": 18]> g (float[2] x) => (float[2] y) <bool n = {0}>
        { c = Not(n) y = If(c) <then_branch = t () => (float[2] p) { q = Sin(x) p = Mul(q, x) },
                     else_branch = e () => (float[2] r) { r = Mul(x, x) }> }"""
    with pytest.raises(ob.InvalidArgumentError, match="stop: If 'y' has a stop inside"):
        ob.check_gradients(parser.parse_model(text), stop=["q"])


def test_unnamed_and_odd_names() -> None:
    model = model_of(SQUARE)
    for node in model.graph.node:
        node.input[:] = ["/a:0" if n == "a" else n for n in node.input]
        node.output[:] = ["/a:0" if n == "a" else n for n in node.output]
    assert not any(node.name for node in model.graph.node)
    with pytest.warns(ob.OnnxBackpropWarning, match="'w' is zero: Identity '/a:0/stop' stops it"):
        got = outputs(ob.backward(model, wrt=["w"], of=["y"], stop=["/a:0"]), x=X, y_grad=DY)
    assert not got["w_grad"].any()
    onnx.checker.check_model(ob.backward(model, wrt=["w"], of=["y"], stop=["d"]))
