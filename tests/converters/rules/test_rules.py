"""The table of gradient rules, and gradients of nodes together. Each family of rules has a file of its own."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnx_backprop as ob
from onnx_backprop.converters.reverse import registry
from tests.support import rule_checks as check
from tests.support.adjoint import adjoint_mismatches
from tests.support.loop_checks import float64_model, loop_errors

DRIVER = {
    "square by itself": "g (float[3,4] a) => (float[3,4] y) { y = Mul(a, a) }",
    "used three times": "g (float[3] a) => (float[3] y) { p = Tanh(a)  q = Mul(p, a)  r = Add(q, p)  y = Sub(r, a) }",
    "two outputs": "g (float[3] a) => (float[3] y, float[1] z) { y = Tanh(a)  z = ReduceSum(y) }",
    "two outputs of a node": "g (float[6,2] a) => (float[2,2] y, float[3,2] z) <int64[3] s = {2,1,3}> "
    "{ y, u, z = Split<axis=0>(a, s) }",
    "an unused branch": "g (float[3] a) => (float[3] y, int64[1] s) { s = Shape(a)  t = Exp(a)  y = Tanh(a) }",
    "to float32 and back": "g (float[3] a) => (float[3] y) { h = Cast<to=11>(a)  d = Mul(h, h)  y = Cast<to=11>(d) }",
    "like another": "g (float[3] a, double[1] l) => (float[3] y) { h = CastLike(a, l)  y = Mul(h, h) }",
}


@pytest.mark.parametrize("symbols", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("text", DRIVER.values(), ids=DRIVER)
def test_nodes_together(text: str, symbols: bool) -> None:
    """Values that are read several times or never, and several outputs."""
    model = float64_model(text)
    feeds = {
        v.name: np.random.default_rng(11).standard_normal([d.dim_value for d in v.type.tensor_type.shape.dim])
        for v in model.graph.input
    }
    assert not loop_errors(check.symbolic(model) if symbols else model, feeds, ["a"], seed=5)


def test_negative_pads_cut() -> None:
    model = check.model_of("g (float[3,4] a, float b) => (float[4,3] y) <int64[4] p = {1,-1,0,0}> { y = Pad(a, p, b) }")
    feeds = {"a": np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32), "b": np.float32(0.5)}
    assert not adjoint_mismatches(model, {k: np.asarray(v) for k, v in feeds.items()}, ["a", "b"])


def test_every_rule_serves_all_versions_of_its_operator() -> None:
    """A model of any opset from 18 to 26 finds the rules; versions nobody looked at would be refused."""
    for domain, op_type, _ in list(registry.RULES):
        if domain == "":
            missing = check.default_domain_versions(op_type) - set(registry.served_versions(op_type))
            assert not missing, f"{op_type}: no rule for version {missing}"


def test_every_rule_has_a_case() -> None:
    """A text model `Op (x)` or a node made as "Op", here or in the file of its family."""
    files = Path(__file__).parent.glob("test_*.py")
    sources = "\n".join(file.read_text(encoding="utf-8") for file in files)
    untested = {
        op
        for domain, op, _ in registry.RULES
        if domain != ob.DOMAIN and not re.search(rf"\b{op}(\"| ?[<({{])", sources)
    }
    assert not untested


def test_the_list_without_gradient_names_existing_operators() -> None:
    for domain, op_type in registry.NO_GRADIENT:
        assert onnx.defs.has(op_type, domain), op_type
        assert not registry.served_versions(op_type, domain)


def test_missing_rules_are_reported_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in [key for key in registry.RULES if key[1] in ("Exp", "Tanh")]:
        monkeypatch.delitem(registry.RULES, key)
    model = check.model_of(
        "g (float[3,3] a) => (float[3,3] y) { [first] b = Tanh(a)  [second] c = Exp(b)  [third] d = Tanh(b)  y = Mul(c, d) }"
    )
    with pytest.raises(
        ob.UnsupportedOpError, match="(?s)no gradient rule for 2 operator.*Exp: 'second'.*Tanh: 'first', 'third'"
    ):
        ob.backward(model, wrt=["a"])


def test_operators_off_the_path_need_no_rule() -> None:
    model = check.model_of("g (float[3] a, float[3] b) => (float[3] y) { c = Mish(b)  y = Mul(a, c) }")
    graph = ob.backward(model, wrt=["a"])
    assert [o.name for o in graph.graph.output] == ["y", "a_grad"]


def test_a_value_captured_by_a_subgraph_is_not_overlooked() -> None:
    """The body reads `a` from outside, so the Loop lies on the path although `a` is not among its inputs."""
    model = check.model_of("""g (int64 n, bool k, float[3] s, float[3] a) => (float[3] y) {
        [again] y = Loop (n, k, s) < body = b (int64 i, bool c, float[3] p) => (bool d, float[3] q)
                                   { d = Identity(c)  q = Mul(p, a) } > }""")
    session = ob.session(ob.backward(model, wrt=["a"]))
    s, a = np.float32([1, 2, 3]), np.float32([0.5, 1, 2])
    feeds = {"n": np.array(3), "k": np.array(True), "s": s, "a": a, "y_grad": np.ones(3, np.float32)}
    np.testing.assert_allclose(np.asarray(session.run(["a_grad"], feeds)[0]), 3 * s * a**2)


def test_the_gradient_of_pow_is_finite_where_the_true_one_is() -> None:
    model = check.model_of("g (float[4] a, float[4] b) => (float[4] y) { y = Pow(a, b) }")
    session = ob.session(ob.backward(model, wrt=["a", "b"]))
    feeds = {"a": [0, -2, 0, 3], "b": [2, 3, 0, 0], "y_grad": [1, 1, 1, 1]}
    _, da, db = (np.asarray(x) for x in session.run(None, {k: np.float32(v) for k, v in feeds.items()}))
    np.testing.assert_allclose(da, [0, 12, 0, 0])
    np.testing.assert_allclose(db, [0, np.nan, 0, np.log(3)], rtol=1e-6)  # a negative base has no slope in b


def test_second_rule_is_an_error() -> None:
    with pytest.raises(ob.RegistrationError, match="second gradient rule"):
        registry.gradient("Relu", versions=(14,))(lambda *_: ())
    with pytest.raises(ob.RegistrationError):
        registry.no_gradient("because", "Relu")
