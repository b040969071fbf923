"""Ifs of constant conditions: the branch that is taken, in their place."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnxruntime
import pytest
from onnx import parser

import onnx_backprop as ob
from onnx_backprop.converters.prepare.load import prepare
from onnx_backprop.opset.graphs.walk import all_graphs, all_nodes

HEAD = '<ir_version: 10, opset_import: ["": 21]> g (double[2] x) => (double[N] y) '
CHOICE = (
    "If (k) <then_branch = t () => (double[2] a) { b = Mul(x, w) a = Exp(b) }, "
    "else_branch = e () => (double[2] a) { b = Mul(x, x) a = Mul(b, w) }>"
)
# names that two Ifs share, in both of their branches
TWICE = f"m = {CHOICE} n = {CHOICE.replace('(x, ', '(m, ').replace('(k)', '(j)')} y = Add(m, n)"
NESTED = (
    f"y = If (j) <then_branch = t () => (double[2] p) {{ p = {CHOICE} }}, "
    "else_branch = e () => (double[2] q) { q = Neg(x) }>"
)
INSIDE = (
    f"y, s = Scan<num_scan_inputs = 1, body = c (double[2] i, double v) => (double[2] o, double r) {{ h = {CHOICE} \
    o = Add(h, i) r = Mul(v, v) }}>(x, x)"
)
SHARED = (
    "m, n = If (k) <then_branch = t () => (double[2] a, double[2] c) { a = Sin(x) c = Identity(a) }, "
    "else_branch = e () => (double[2] d, double[2] a) { a = Mul(x, w) d = Tanh(a) }> y = Mul(m, n)"
)
LOCAL = (
    "y = If (k) <then_branch = t () => (double[2] a) <double[2] u = {1, 2}, int64[1] z = {0}> { b = ReduceSum(x, z) "
    "a = Mul(b, u) }, else_branch = e () => (double[2] a) { z = Constant<value_ints = [0]>() b = ReduceSum(x, z) "
    "a = Mul(b, w) }>"
)


@pytest.mark.parametrize("k", [0, 1])
@pytest.mark.parametrize("stored", ["initializers", "constants"])
@pytest.mark.parametrize("body", [f"y = {CHOICE}", TWICE, NESTED, INSIDE, SHARED, LOCAL])
def test_a_constant_condition_leaves_no_branches(body: str, stored: str, k: int) -> None:
    """The results are the same, names are unique, and so is each gradient, by onnxruntime's forward of the file."""
    if stored == "initializers":
        text = f"{HEAD} <bool k = {{{k}}}, bool[1] j = {{1}}, double[2] w = {{0.5, -2}}> {{ {body} }}"
    else:
        constants = f"k = Constant<value = bool {{{k}}}>() j = Constant<value = bool[1] {{1}}>()"
        text = f"{HEAD} <double[2] w = {{0.5, -2}}> {{ {constants} {body} }}"
    model = parser.parse_model(text)
    prepared = prepare(model)
    assert not [node for node in all_nodes(prepared) if node.op_type == "If"]
    graphs = list(all_graphs(prepared))
    for names in ([n for g in graphs for one in g.node for n in one.output], [one.name for one in all_nodes(prepared)]):
        assert set(Counter(filter(None, names)).values()) <= {1}
    x, h = np.array([0.7, -0.3]), 1e-6
    theirs = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    def forward(at: np.ndarray) -> np.ndarray:
        return np.asarray(theirs.run(["y"], {"x": at})[0])

    graph = ob.backward(model, wrt=["x"], of=["y"])
    stage = ob.derivatives(graph)[-1]
    dy = np.array([1.0, 3.0])
    fed = {"x": x, stage.seeds["y"]: dy}
    y, dx = ob.session(graph).run(["y", stage.results["x"]], fed)
    np.testing.assert_array_equal(np.asarray(y), forward(x))
    each = [dy @ (forward(x + v) - forward(x - v)) / (2 * h) for v in h * np.eye(2)]
    np.testing.assert_allclose(np.asarray(dx), each, atol=1e-8)


def test_a_condition_that_a_caller_may_override_stays() -> None:
    head = HEAD.replace("(double[2] x)", "(double[2] x, bool k)")
    prepared = prepare(parser.parse_model(f"{head} <bool k = {{1}}, double[2] w = {{0.5, -2}}> {{ y = {CHOICE} }}"))
    assert [node.op_type for node in prepared.graph.node if node.op_type == "If"] == ["If"]


def test_a_weight_of_a_branch_that_is_not_taken() -> None:
    """It is not trained, and a caller who asks for its gradient reads that it is zero."""
    text = f"{HEAD} <bool k = {{1}}, double[2] w = {{0.5, -2}}> {{ y = {CHOICE.replace('(b, w)', '(b, u)')} }}"
    model = parser.parse_model(
        text.replace(
            "else_branch = e () => (double[2] a)", "else_branch = e () => (double[2] a) <double[2] u = {1, 2}>"
        )
    )
    assert list(ob.training_graph(model, loss="mse").parameters) == ["w"]
    with pytest.warns(ob.OnnxBackpropWarning, match="derivative by 'u' is zero: 'loss' does not depend on it"):
        ob.training_graph(model, loss="mse", trainable=["u"])
