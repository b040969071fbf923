"""`register_expansion`: an operator of one's own as the standard ones that it stands for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest

import onnx_backprop as ob
from onnx_backprop.converters.prepare.fused import table
from onnx_backprop.converters.reverse import registry


@pytest.fixture(autouse=True)
def restored_tables() -> Iterator[None]:
    """What a test registers ends with it."""
    before = set(table.REGISTERED)
    yield
    for key in table.REGISTERED - before:
        del table.EXPANSIONS[key]
    table.REGISTERED.intersection_update(before)
    for key in [key for key in registry.RULES if key[0] == "expanded"]:
        del registry.RULES[key]


def model(node: str = "y, z = expanded.Pair <alpha = 3.0> (a, w)", version: int = 1) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18, "expanded": {version}]>
        g (float[N, 2] x) => (float[N, 2] y, float[N, 2] z) <float[2] w = {{1.5, -2}}> {{ a = Sin (x) {node} }}""")


def pair(**options: Any) -> None:
    @ob.register_expansion("expanded", "Pair", **options)
    def expansion(op: Any) -> Any:
        a, w, alpha = op.input(0), op.input(1), op.attribute("alpha", 1.0)
        scaled = op.Mul(op.Mul(a, w), alpha)
        return scaled, op.Add(scaled, 1) if op.wants(1) else None


def test_values_and_gradients() -> None:
    pair(versions=[1])
    x = np.random.default_rng(0).standard_normal((4, 2)).astype(np.float32)
    w = np.float32([1.5, -2])
    y, z = map(np.asarray, ob.session(model()).run(None, {"x": x}))
    np.testing.assert_allclose(y, 3 * np.sin(x) * w, rtol=1e-5)
    np.testing.assert_allclose(z, 3 * np.sin(x) * w + 1, rtol=1e-5)
    backward = ob.backward(model(), wrt=["x", "w"], of=["z"])
    assert {node.domain for node in backward.graph.node} <= {"", "onnx_backprop"}
    assert "expanded" not in {o.domain for o in backward.opset_import}
    feeds = {"x": x, "z_grad": np.ones_like(x)}
    results = [*map(np.asarray, ob.session(backward).run(["x_grad", "w_grad"], feeds))]
    np.testing.assert_allclose(results[0], 3 * np.cos(x) * w, rtol=1e-5)
    np.testing.assert_allclose(results[1], 3 * np.sin(x).sum(0), rtol=1e-5)
    assert ob.check_gradients(model(), of=["z"]).verdict == "right"


def test_what_is_not_written_is_refused_and_named() -> None:
    pair(versions=[1])
    given = [
        (model(version=2), "is for version 1 of its domain, and the model imports version 2"),
        (model("y, z = expanded.Pair <beta = 1> (a, w)"), "the attribute 'beta' is not handled"),
        (model("y, z = expanded.Pair (a, w, a)"), "input 2, 'a', is not handled"),
    ]
    for proto, sentence in given:
        with pytest.raises(ob.OnnxBackpropError, match=sentence):
            ob.backward(proto, wrt=["x"], of=["y"])


def test_what_an_expansion_does_wrong_is_said() -> None:
    answers = {
        "raised KeyError: 'gone'": lambda _op: {}["gone"],
        "returned 3, expected the name": lambda _op: 3,
        "returned 'gone', expected the name": lambda _op: "gone",
        "returned \\['a', 'a', 'a'\\]": lambda _op: ["a", "a", "a"],
        "returned \\[None\\]": lambda _op: [None],
        ": 'Sine' is no operator of ONNX. Did you mean 'Sin": lambda op: op.Sine(op.input(0)),
    }
    for sentence, function in answers.items():
        ob.register_expansion("expanded::Pair")(function)
        with pytest.raises(ob.OnnxBackpropError, match=sentence):
            ob.backward(model(), wrt=["x"], of=["y"])


def test_a_rule_and_an_expansion_exclude_each_other() -> None:
    pair()
    with pytest.raises(ob.InvalidArgumentError, match="expanded::Pair has an expansion"):
        ob.register_gradient("expanded", "Pair")
    ob.register_gradient("expanded", "Other")(lambda _op, _node, dy: dy)
    with pytest.raises(ob.InvalidArgumentError, match="expanded::Other has a gradient rule"):
        ob.register_expansion("expanded", "Other")
    for name in ("com.microsoft::Gelu", "ai.onnx::Relu", "Pair"):
        with pytest.raises(ob.InvalidArgumentError, match="operator: "):
            ob.register_expansion(name)
