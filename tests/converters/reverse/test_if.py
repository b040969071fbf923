"""Gradients through both branches of an If."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, parser

import onnx_backprop as ob
from onnx_backprop.converters.reverse import registry
from tests.support.gradient_checks import SMOOTH, check_gradient, session_run
from tests.support.rule_checks import symbolic

SEED = 7


def model_of(text: str, opset: int = 18) -> ModelProto:
    return parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> g {text}')


def feeds_of(model: ModelProto, **given: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(SEED)
    feeds: dict[str, np.ndarray] = {}
    for value in model.graph.input:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        feeds[value.name] = np.asarray(given.get(value.name, rng.uniform(0.3, 1.2, shape).astype(np.float32)))
    return feeds


# name: the model, and what to differentiate by
MODELS = {
    "outer values, each branch another": (
        """(bool k, float[3] a, float[3] b) => (float[3] y) {
        y = If (k) < then_branch = t () => (float[3] p) { c = Mul(a, b)  p = Tanh(c) },
                     else_branch = e () => (float[3] q) { q = Exp(a) } > }""",
        "a b",
    ),
    "an outer value that is computed": (
        """(bool k, float[3] a, float[3,1] b) => (float[3,3] y) { h = Mul(a, a)
        z = If (k) < then_branch = t () => (float[3,3] p) { p = Add(h, b) },
                     else_branch = e () => (float[3,3] q) { q = Div(b, h) } >
        y = Mul(z, h) }""",
        "a b",
    ),
    "several outputs, one unused": (
        """(bool k, float[2,3] a) => (float[2,3] y) {
        p, q, r = If (k) < then_branch = t () => (float[2,3] p1, float[2,3] q1, float[2,3] r1)
                           { p1 = Exp(a)  q1 = Mul(p1, p1)  r1 = Neg(a) },
                           else_branch = e () => (float[2,3] p2, float[2,3] q2, float[2,3] r2)
                           { p2 = Tanh(a)  q2 = Identity(a)  r2 = Sigmoid(a) } >
        y = Mul(p, q) }""",
        "a",
    ),
    "one branch without a": (
        """(bool k, float[3] a, float[3] b) => (float[3] y) {
        y = If (k) < then_branch = t () => (float[3] p) { p = Mul(a, a) },
                     else_branch = e () => (float[3] q) { q = Mul(b, b) } > }""",
        "a b",
    ),
    "a constant branch with its own initializer": (
        """(bool k, float[3] a) => (float[3] y) {
        y = If (k) < then_branch = t () => (float[3] p) <float[3] w = {1, 2, 3}> { p = Mul(a, w) },
                     else_branch = e () => (float[3] q) { q = Constant<value = float[3] {3, 4, 5}>() } > }""",
        "a",
    ),
    "an If within a branch": (
        """(bool k, float[3] a, float[3] b) => (float[3] y) {
        y = If (k) < then_branch = t () => (float[3] p) { c = Mul(a, b)  h = ReduceSum<keepdims = 0>(c)
                       s = Greater(h, h)
                       p = If (s) < then_branch = tt () => (float[3] v) { v = Exp(c) },
                                    else_branch = te () => (float[3] w) { w = Mul(c, a) } > },
                     else_branch = e () => (float[3] q) { q = Sqrt(a) } > }""",
        "a b",
    ),
    "a function body within a branch": (
        """(bool k, float[3] a) => (float[3] y) {
        y = If (k) < then_branch = t () => (float[3] p) { c = Mul(a, a)  p = Mish(c) },
                     else_branch = e () => (float[3] q) { q = Neg(a) } > }""",
        "a",
    ),
    "branches of different shapes": (
        """(bool k, float[3] a) => (float y) {
        z = If (k) < then_branch = t () => (float[3] p) { p = Exp(a) },
                     else_branch = e () => (float[6] q) { c = Mul(a, a)  q = Concat<axis = 0>(c, a) } >
        y = ReduceSum<keepdims = 0>(z) }""",
        "a",
    ),
    "the branches decide the shape by a symbol": (
        """(bool k, float[3] a, float[1] b) => (float[3] y) {
        y = If (k) < then_branch = t () => (float[3] p) { p = Add(a, b) },
                     else_branch = e () => (float[3] q) { q = Mul(a, b) } > }""",
        "a b",
    ),
}


@pytest.mark.parametrize("k", [True, False])
@pytest.mark.parametrize("form", ["static", "symbolic", "half"])
@pytest.mark.parametrize("name", MODELS)
def test_gradient(name: str, form: str, k: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in [key for key in registry.RULES if key[1] == "Mish"]:
        monkeypatch.delitem(registry.RULES, key)
    text, wrt = MODELS[name]
    model = model_of(text)
    feeds = feeds_of(model, k=k)
    if form == "symbolic":
        model = symbolic(model)
    if form != "half":
        check_gradient(model, feeds, wrt.split(), oracle=SMOOTH, seed=SEED)
        return
    if "initializer" in name or "different shapes" in name:
        return  # float32 constants in the text
    half = model_of(text.replace("float[", "float16[").replace("float y", "float16 y"))
    rounded = {n: v.astype(np.float16) if v.dtype == np.float32 else v for n, v in feeds.items()}
    check_gradient(half, rounded, wrt.split(), oracle=SMOOTH, seed=SEED, forward=model)


def test_a_branch_that_does_not_run_is_not_computed() -> None:
    """The gradient of the other branch is infinite here, and 0 · inf would be NaN."""
    model = model_of(
        """(bool k, float[3] a) => (float[3] y) {
        y = If (k) < then_branch = t () => (float[3] p) { p = Mul(a, a) },
                     else_branch = e () => (float[3] q) { q = Log(a) } > }"""
    )
    training = ob.backward(model, wrt=["a"])
    ones = np.ones(3, np.float32)
    _, da = session_run(training)({"k": np.array(True), "a": 0 * ones, "y_grad": ones})
    np.testing.assert_array_equal(da, 0 * ones)


@pytest.mark.parametrize("op", ["RandomNormalLike", "RandomUniformLike", "Bernoulli"])
def test_random_numbers_in_a_branch_are_not_drawn_twice(op: str) -> None:
    """What the forward pass drew is gone when the gradient needs it."""
    model = model_of(
        f"""(bool k, float[3] a) => (float[3] y) {{
        [branch] y = If (k) < then_branch = t () => (float[3] p) {{ [noise] r = {op}(a)  p = Mul(a, r) }},
                     else_branch = e () => (float[3] q) {{ q = Neg(a) }} > }}"""
    )
    with pytest.raises(ob.UnsupportedError, match=f"If 'branch': .*{op} 'noise' a second time"):
        ob.backward(model, wrt=["a"])


def test_dropout_in_a_branch_does_not_draw_a_second_mask() -> None:
    model = model_of(
        """(bool k, float[3] a) => (float[3] y) <float r = {0.5}, bool on = {1}> {
        [branch] y = If (k) < then_branch = t () => (float[3] p) { [noise] d = Dropout(a, r, on)  p = Mul(a, d) },
                     else_branch = e () => (float[3] q) { q = Neg(a) } > }"""
    )
    with pytest.raises(ob.UnsupportedError, match="Dropout 'noise'"):
        ob.backward(model, wrt=["a"])


@pytest.mark.parametrize(
    "branch",
    [
        "r = RandomNormalLike(a)  p = Add(a, r)",
        "r = RandomNormalLike(a)  s = Add(a, r)  one = Constant <value_floats = [1.0, 1.0, 1.0]> ()  p = Mul(s, one)",
    ],
)
def test_random_numbers_that_the_gradient_does_not_read(branch: str) -> None:
    """The rule of Mul emits the gradient by the other factor too, which nobody asked for and which would read them."""
    model = model_of(
        f"""(bool k, float[3] a) => (float[3] y) {{
        y = If (k) < then_branch = t () => (float[3] p) {{ {branch} }},
                     else_branch = e () => (float[3] q) {{ q = Neg(a) }} > }}"""
    )
    training = ob.backward(model, wrt=["a"])
    a = np.float32([1, 2, 3])
    for k, want in ((True, a), (False, -a)):
        _, da = session_run(training)({"k": np.array(k), "a": a, "y_grad": a})
        np.testing.assert_array_equal(da, want)


def test_missing_rules_in_branches_are_reported_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(
        """(bool k, float[3] a) => (float[3] y) { [outside] b = Exp(a)
        y = If (k) < then_branch = t () => (float[3] p) { [inside] c = Erf(b)  p = Mul(c, a) },
                     else_branch = e () => (float[3] q) { [other] q = Exp(b) } > }"""
    )
    for key in [key for key in registry.RULES if key[1] in ("Exp", "Erf")]:
        monkeypatch.delitem(registry.RULES, key)
    with pytest.raises(ob.UnsupportedOpError, match="(?s)2 operator.*Erf: 'inside'.*Exp: 'outside', 'other'"):
        ob.backward(model, wrt=["a"])


LOOP = """(int64 n, bool k, float[3] a) => (float[3] y) {
    [again] y = Loop (n, k, a) < body = b (int64 i, bool c, float[3] s) => (bool d, float[3] t)
                               { d = Identity(c)  t = Mul(s, a) } > }"""


def test_a_loop_off_the_path_does_not_matter() -> None:
    model = model_of(LOOP.replace("(float[3] y)", "(float[3] y, float[3] z)").replace("[again]", "z = Exp(a) [again]"))
    training = ob.backward(model, wrt=["a"], of=["z"])
    assert [o.name for o in training.graph.output] == ["y", "z", "a_grad"]
