"""Gradients before a value whose NaN is thrown away: finite, and those of the rows that stay."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, parser

import onnx_backprop as ob
from tests.support.gradient_checks import retyped

X = np.float32([[2.0, -3.0], [-1.5, 0.5], [4.0, 1.0]])
# log(x) · a + x^p, no number where x is negative
BEFORE = "l = Log(x) q = Pow(x, p) m = Mul(l, a) s = Add(m, q)"
TENSORS = "<float[2] a = {0.5, -2.0}, float[2] p = {1.5, 0.25}, float zero = {0.0}>"
FORMS = {
    "Imputer": "y = ai.onnx.ml.Imputer <imputed_value_floats = [0.0], replaced_value_float = NAN> (s)",
    "Where": "n = IsNaN(s) y = Where(n, zero, s)",
    "Where the other way": "n = IsNaN(s) k = Not(n) y = Where(k, s, zero)",
}


def model_of(form: str) -> ModelProto:
    body = FORMS[form].replace("NAN", "0.0")
    opsets = '"": 18, "ai.onnx.ml": 1'
    text = f"<ir_version: 9, opset_import: [{opsets}]> g (float[n, 2] x) => (float[n, 2] y) {TENSORS} {{ {BEFORE} {body} }}"
    model = parser.parse_model(text)
    for attribute in (a for node in model.graph.node for a in node.attribute if a.name == "replaced_value_float"):
        attribute.CopyFrom(helper.make_attribute("replaced_value_float", float("nan")))
    return model


def finite(x: np.ndarray, a: np.ndarray, p: np.ndarray) -> tuple[np.ndarray, ...]:
    """dx, da, dp of Σ y in float64, of the elements that stay."""
    kept = x > 0
    safe = np.where(kept, x, 1.0).astype(np.float64)
    parts = a / safe + p * safe ** (p - 1), np.log(safe), safe**p * np.log(safe)
    dx, da, dp = (np.where(kept, part, 0) for part in parts)
    return dx, da.sum(0), dp.sum(0)


@pytest.mark.parametrize("kernels", ["onnx", "native"])
@pytest.mark.parametrize("form", FORMS)
def test_nothing_flows_where_a_nan_is_thrown_away(form: str, kernels: str) -> None:
    graph = ob.backward(model_of(form), wrt=["x", "a", "p"])
    got = ob.session(graph, kernels=kernels).run(["x_grad", "a_grad", "p_grad"], {"x": X, "y_grad": np.ones_like(X)})
    for value, want in zip(got, finite(X, np.array([0.5, -2.0]), np.array([1.5, 0.25])), strict=True):
        np.testing.assert_allclose(np.asarray(value), want, rtol=1e-5, atol=1e-6)


def test_of_float16() -> None:
    graph = ob.backward(retyped(model_of("Where"), TensorProto.FLOAT16), wrt=["x", "a", "p"])
    x = X.astype(np.float16)
    got = ob.session(graph).run(["x_grad", "a_grad", "p_grad"], {"x": x, "y_grad": np.ones_like(x)})
    for value, want in zip(got, finite(X, np.array([0.5, -2.0]), np.array([1.5, 0.25])), strict=True):
        np.testing.assert_allclose(np.asarray(value, np.float64), want, rtol=4e-3, atol=4e-3)


def test_a_nan_that_stays_is_not_hidden() -> None:
    """Without the Where the gradient is NaN where the value is; and no Where means no more nodes than before."""
    text = f'<ir_version: 9, opset_import: ["": 18]> g (float[n, 2] x) => (float[n, 2] s) {TENSORS} {{ {BEFORE} }}'
    graph = ob.backward(parser.parse_model(text), wrt=["p"])
    (dp,) = ob.session(graph).run(["p_grad"], {"x": X, "s_grad": np.ones_like(X)})
    assert np.isnan(np.asarray(dp)).all()
    assert sum(node.op_type == "Where" for node in graph.graph.node) == 2, "those of Pow's own rule"


def test_a_condition_that_is_a_constant() -> None:
    """Which no node computes from anything."""
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]> g (float[N, 2] x) => (float[N, 2] y)
        { c = Constant <value = bool[2] {1, 0}> () e = Exp(x) y = Where(c, e, x) }""")
    x = np.array([[0.5, 2.0]], np.float32)
    session = onnxruntime.InferenceSession(ob.backward(model, wrt=["x"]).SerializeToString())
    dx = session.run(["x_grad"], {"x": x} | {i.name: np.ones_like(x) for i in session.get_inputs() if i.name != "x"})[0]
    np.testing.assert_allclose(np.asarray(dx), [[np.exp(0.5), 1.0]], rtol=1e-6)
