"""Versions that came after a rule: they have it where their schema says the same, and are refused where it does not."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, defs, parser
from onnx.reference import ReferenceEvaluator

import onnx_backprop as ob
from onnx_backprop.converters.reverse import registry
from tests.support.renamed import anonymous

ROOT = Path(__file__).parents[3]
A, B = np.float32([[5.5, -7.25], [3.0, -0.5]]), np.float32([[2.0, 3.0], [-2.0, 0.75]])
NODES = {
    "Celu": "y = Celu <alpha = 2.0> (a)",
    "Einsum": 'y = Einsum <equation = "ij,jk->ik"> (a, b)',
    "Mod": "y = Mod <fmod = 1> (a, b)",
    "ReduceLogSumExp": "y = ReduceLogSumExp(a)",
}


def model_of(nodes: str, opset: int) -> ModelProto:
    text = f'<ir_version: 10, opset_import: ["": {opset}]> g (float[2, 2] a, float[2, 2] b) => (float[n, m] y) {{ {nodes} }}'
    model = parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


@pytest.mark.skipif(defs.onnx_opset_version() < 28, reason="an onnx that does not know opset 28")
@pytest.mark.parametrize("op", NODES)
def test_a_version_with_other_types_alone(op: str) -> None:
    """The graph of opset 28 is that of opset 26."""
    assert ("", op, 28) not in registry.RULES or op == "Mod"
    old, new = (ob.backward(model_of(NODES[op], opset), wrt=["a"], of=["y"]) for opset in (26, 28))
    assert anonymous(old) == anonymous(new)


@pytest.mark.skipif(defs.onnx_opset_version() < 28, reason="an onnx that does not know opset 28")
def test_mod_that_rounds_down() -> None:
    """fmod=0 of floats: y = a - b · floor(a / b)."""
    graph = ob.backward(model_of("y = Mod(a, b)", 28), wrt=["a", "b"], of=["y"])
    del graph.graph.output[0]
    da, db = ReferenceEvaluator(graph).run(None, {"a": A, "b": B, "y_grad": np.ones_like(A)})
    np.testing.assert_array_equal(da, np.ones_like(A))
    np.testing.assert_array_equal(db, -np.floor(A / B))


def test_a_version_that_says_something_else() -> None:
    """Softmax-13 is along one axis, where 11 flattened: the schemas differ, and so nothing is taken over."""
    contents = {name: registry._contents(defs.get_schema("Softmax", name, "")) for name in (11, 13)}
    assert contents[11] != contents[13]
    assert registry._rule_of_equal("", "NoSuchOperator", 3) is None
    if defs.onnx_opset_version() >= 28:
        assert registry._rule_of_equal("", "QuantizeLinear", 28) is None
        assert registry._rule_of_equal("", "Einsum", 28) is registry.RULES["", "Einsum", 12]


def test_versions_that_are_served_exist() -> None:
    there = {(s.domain, s.name, s.since_version) for s in defs.get_all_schemas_with_history()}
    served = {key for key in registry.RULES if key[0] == ""}
    assert len(served) > 200
    newest = max(version for _, _, version in there)
    assert {key for key in served if key[2] <= newest} <= there


def test_as_many_operators_have_a_rule_as_the_readme_says() -> None:
    """A rule that goes is noticed, though the operator has a gradient through its function body."""
    match = re.search(r"(\d+) operators of ONNX have a gradient rule", (ROOT / "README.md").read_text("utf-8"))
    assert match is not None
    assert len({op for domain, op, _ in registry.RULES if domain == ""}) == int(match[1])
