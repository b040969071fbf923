"""A derivative that is zero is answered with zeros and one warning; one that does not exist is refused."""

from __future__ import annotations

import re
import warnings

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob

X = np.array([[0.5, -1.5, 2.5], [3, -4, 0]], np.float32)

ZERO = {
    "Sign": "[stop] a = Sign(x) y = Mul(a, w)",
    "Floor": "[stop] a = Floor(x) y = Mul(a, w)",
    "Ceil": "[stop] a = Ceil(x) y = Mul(a, w)",
    "Round": "[stop] a = Round(x) y = Mul(a, w)",
    "Hardmax": "[stop] a = Hardmax(x) y = Mul(a, w)",
    "Greater": "[stop] c = Greater(x, w) a = Cast<to=1>(c) y = Mul(a, w)",
    "ArgMax": "[stop] c = ArgMax(x) a = Cast<to=1>(c) y = Mul(a, w)",
    "Cast": "[stop] c = Cast<to=7>(x) a = Cast<to=1>(c) y = Mul(a, w)",
    "Shape": "[stop] c = Shape(x) d = Cast<to=1>(c) a = ReduceSum(d) y = Mul(a, w)",
}


def model_of(body: str, outputs: str = "float[P, Q] y", kind: str = "float") -> ModelProto:
    outputs, body = (text.replace("float", kind) for text in (outputs, body))
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> g ({kind}[N,3] x) => ({outputs}) {{ {body} }}')
    w = np.array([1, -2, 3], np.float16 if kind == "float16" else np.float32)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    return model


def gradient(model: ModelProto, wrt: list[str], of: list[str] | None = None) -> tuple[list[np.ndarray], list[str]]:
    """The gradients, every seed being ones; and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        converted = ob.backward(model, wrt=wrt, of=of)
    session = onnxruntime.InferenceSession(converted.SerializeToString())
    kind = np.float16 if session.get_inputs()[0].type == "tensor(float16)" else np.float32
    feeds = {"x": X.astype(kind)}
    forward = onnxruntime.InferenceSession(model.SerializeToString())
    for value, output in zip(forward.run(None, feeds), forward.get_outputs(), strict=True):
        feeds[f"{output.name}_grad"] = np.ones_like(value)
    given = {value.name: feeds[value.name] for value in session.get_inputs() if value.name in feeds}
    assert all(w.category is ob.OnnxBackpropWarning for w in caught)
    return [np.asarray(v) for v in session.run([f"{n}_grad" for n in wrt], given)], [str(w.message) for w in caught]


@pytest.mark.parametrize("kind", ["float", "float16"])
@pytest.mark.parametrize("op", ZERO)
def test_zeros_and_one_warning(op: str, kind: str) -> None:
    body = ZERO[op] if kind == "float" else ZERO[op].replace("to=1>", "to=10>")
    (dx, dw), messages = gradient(model_of(body, kind=kind), ["x", "w"])
    assert dx.shape == X.shape
    assert dx.dtype == (np.float32 if kind == "float" else np.float16)
    assert not dx.any()
    assert dw.any() or op == "Hardmax"
    (text,) = messages
    assert re.fullmatch(rf"wrt: the derivative by 'x' is zero: {op} 'stop' stops it \(.+\)", text)


@pytest.mark.parametrize("op", ZERO)
def test_strict(op: str) -> None:
    with pytest.raises(ob.InvalidArgumentError, match=rf"wrt: 'x' does not influence y .*{op} 'stop' stops it"):
        ob.backward(model_of(ZERO[op]), wrt=["x"], strict=True)


def test_nothing_leads_there() -> None:
    model = model_of("y = Mul(w, w) z = Relu(x)", "float[3] y, float[N,3] z")
    (dx, dw), messages = gradient(model, ["x", "w"], ["y"])
    assert not dx.any()
    np.testing.assert_array_equal(dw, [2, -4, 6])
    assert messages == ["wrt: the derivative by 'x' is zero: 'y' does not depend on it"]


def test_a_part_that_is_zero_is_no_matter() -> None:
    (dx,), messages = gradient(model_of("[stop] a = Sign(x) y = Mul(a, x)"), ["x"])
    np.testing.assert_array_equal(dx, np.sign(X))
    assert not messages


def test_an_output_that_does_not_depend_on_it_keeps_its_seed() -> None:
    model = model_of("y = Mul(x, w) [stop] z = Floor(x)", "float[N,3] y, float[N,3] z")
    (dx,), messages = gradient(model, ["x"], ["y", "z"])
    np.testing.assert_array_equal(dx, np.tile([1, -2, 3], (2, 1)))
    assert messages == [f"wrt: the derivative of 'z' is zero: {messages[0].split(': ', 2)[2]}"]
    assert "Floor 'stop'" in messages[0]
    with pytest.raises(ob.InvalidArgumentError, match=r"of: 'z' does not depend differentiably on 'x'"):
        ob.backward(model, wrt=["x"], of=["y", "z"], strict=True)


NONE = {
    "a random choice": "[draw] c = Bernoulli(x) y = Mul(c, w)",
    "bits": "[bits] c = BitCast<to=6>(x) d = Cast<to=1>(c) y = Mul(d, w)",
}


@pytest.mark.parametrize("case", NONE)
def test_a_derivative_that_does_not_exist_is_refused(case: str) -> None:
    model = model_of(NONE[case])
    model.opset_import[0].version = 26 if case == "bits" else 18
    with pytest.raises(ob.InvalidArgumentError, match=r"wrt: 'x' does not influence y .*(draw|bits)' stops it"):
        ob.backward(model, wrt=["x"])


def test_a_way_through_text_is_refused() -> None:
    """Beside another way too: its part of the gradient, as good as x's own, would be missing."""
    model = model_of("a = Mul(x, w) [print] s = Cast<to=8>(a) b = Cast<to=1>(s) y = Add(a, b)")
    with pytest.raises(ob.UnsupportedError, match=r"Cast 'print': .* type STRING.* no gradient is known"):
        ob.backward(model, wrt=["w"])


def test_the_scales_of_a_resize_are_refused() -> None:
    """Their derivative is not zero, and no rule knows it."""
    model = model_of("[up] y = Resize(x, , s)")
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 2], np.float32), "s"))
    with pytest.raises(ob.InvalidArgumentError, match=r"'s' does not influence y .*Resize 'up' stops it"):
        ob.backward(model, wrt=["s"])


def test_in_a_training_graph() -> None:
    model = model_of("[stop] a = Sign(v) b = Mul(x, w) y = Add(a, b)")
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, -2, 3], np.float32), "v"))
    with pytest.warns(
        ob.OnnxBackpropWarning, match=r"^3 of the 6 numbers .*: 'v' \(3, the loss does not depend on it\)"
    ):
        assert list(ob.training_graph(model, loss="mse").parameters) == ["w"]
    with pytest.warns(ob.OnnxBackpropWarning, match=r"trainable: the derivative by 'v' is zero: Sign 'stop'"):
        graph = ob.training_graph(model, loss="mse", trainable=["w", "v"], optimizer="sgd")
    trainer = ob.Trainer(graph, learning_rate=0.1)
    trainer.step(x=X, target=X)
    np.testing.assert_array_equal(trainer.state()["v"], [1, -2, 3])
    with pytest.raises(ob.InvalidArgumentError, match=r"trainable: 'v' does not influence loss"):
        ob.training_graph(model, loss="mse", trainable=["w", "v"], strict=True)


def test_inside_branches() -> None:
    body = (
        "z = Constant<value=bool[1] {0}>() c = Not(z) y = If(c) <then_branch = t () => (float[N,3] a) { [one] s = Sign(x) a = Mul(s, w) },"
        " else_branch = e () => (float[N,3] b) { [two] f = Floor(x) b = Add(f, w) }>"
    )
    (dx, dw), messages = gradient(model_of(body), ["x", "w"])
    assert not dx.any()
    np.testing.assert_array_equal(dw, np.sign(X).sum(0))
    (text,) = messages
    assert "Sign 'one'" in text
    assert "Floor 'two'" in text
    with pytest.raises(ob.InvalidArgumentError, match="Sign 'one' stops it"):
        ob.backward(model_of(body), wrt=["x"], strict=True)
    drawn = body.replace("Sign(x)", "Bernoulli(x)")
    with pytest.raises(ob.InvalidArgumentError, match="Bernoulli 'one' stops it"):
        ob.backward(model_of(drawn), wrt=["x"])
