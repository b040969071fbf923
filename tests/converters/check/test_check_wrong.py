"""`check_gradients` on wrong gradients: every kind is found and pinned down to a node."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import onnx_backprop as ob
from onnx_backprop.converters.check.differences import FLOAT32, Point, judge
from onnx_backprop.converters.reverse.builder import Builder
from tests.support.broken_rules import SMALL, break_rule, model_of, scaled, verdicts, wide_model


@pytest.mark.parametrize("factor", [1.1, 0.99, -1.0, 0.0])
@pytest.mark.parametrize("op_type", ["Relu", "Mul", "Conv"])
def test_a_wrong_rule_is_found_and_pinned_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, op_type: str, factor: float
) -> None:
    break_rule(monkeypatch, op_type, scaled(factor))
    report = ob.check_gradients(model_of(SMALL))
    assert not report.ok
    assert report.verdict == "wrong"
    assert [n.verdict for n in report.nodes] == ["wrong", "right", "right"], str(report)
    assert report.nodes[0].op_type == op_type
    assert report.nodes[0].worst.answer.directions[0] == 0
    assert report.repro is not None
    assert [node.op_type for node in report.repro.graph.node] == [op_type]
    report.save_repro(tmp_path / "repro.onnx")
    again = ob.check_gradients(tmp_path / "repro.onnx")
    assert again.verdict == "wrong"
    assert again.nodes[0].op_type == op_type


def test_a_wrong_rule_is_found_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    break_rule(monkeypatch, "Conv", scaled(1.1))
    report = ob.check_gradients(wide_model())
    assert (report.forward, report.verdict) == ("float32, onnxruntime", "wrong")
    assert (report.nodes[0].op_type, report.nodes[0].verdict) == ("Conv", "wrong")
    assert {node.verdict for node in report.nodes[1:]} == {"right"}


def test_a_gradient_of_one_input_only(monkeypatch: pytest.MonkeyPatch) -> None:
    break_rule(monkeypatch, "Mul", lambda op, _, grads: [grads[0], op.Neg(grads[1])])
    report = ob.check_gradients(model_of(SMALL))
    assert verdicts(report) == {"x": "right", "weight": "right", "bias": "right", "gain": "wrong"}
    assert report.nodes[0].worst.variables == "gain"


def test_a_wrong_gradient_beside_kinks(monkeypatch: pytest.MonkeyPatch) -> None:
    break_rule(monkeypatch, "Relu", scaled(1.1))
    model = model_of("g (float[3, 4] x) => (float[3, 4] y) { y = Relu(x) }")
    report = ob.check_gradients(model, feeds={"x": np.zeros((3, 4), np.float32)})
    assert report.verdict == "wrong"


@pytest.mark.parametrize("factor", [1.03, 1.1, 1.5])
def test_a_wrong_gradient_of_a_curved_function_is_no_kink(factor: float) -> None:
    """Its slopes to both sides differ by more than the error, too, but less with every shorter step."""
    x = np.random.default_rng(0).standard_normal(8).astype(np.float32)
    point = Point(lambda values: {"y": values["x"] ** 2}, {"x": x}, {"y": np.ones_like(x)}, {"x": 2 * x * factor})
    assert judge(point, ["x"], FLOAT32, np.random.default_rng(1)).verdict == "wrong"


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite(monkeypatch: pytest.MonkeyPatch, number: float) -> None:
    break_rule(monkeypatch, "Relu", scaled(number))
    model = model_of("g (float[3, 4] x) => (float[3, 4] y) { y = Relu(x) }")
    report = ob.check_gradients(model, feeds={"x": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)})
    assert report.verdict == "wrong"


def test_a_gradient_of_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    break_rule(monkeypatch, "Tanh", lambda op, _, grads: [op.Unsqueeze(grads[0], op.ints([0]))])
    report = ob.check_gradients(model_of("g (float[A, B] x) => (float[A, B] y) { y = Tanh(x) }"))
    assert report.verdict == "wrong"


def test_what_no_node_alone_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that two nodes read: each node is right, their sum is not."""
    monkeypatch.setattr(Builder, "accumulate", lambda _, values: values[0])
    model = model_of("""
        g (float[3] x) => (float[3] y)
        { a = Tanh(x)  b = Exp(a)  [left] l = Sin(b)  [right] r = Neg(b)  [join] j = Mul(l, r)  y = Sigmoid(j) }
    """)
    model.graph.node[2].op_type = "Softplus"
    report = ob.check_gradients(model)
    assert report.verdict == "wrong"
    assert {node.verdict for node in report.nodes} == {"right"}
    assert report.repro is not None
    assert {"left", "right"} <= {node.name for node in report.repro.graph.node}
    assert len(report.repro.graph.node) < 6
    assert ob.check_gradients(report.repro).verdict == "wrong"
    monkeypatch.undo()
    assert ob.check_gradients(report.repro).ok


def test_the_smallest_of_several_wrong_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    break_rule(monkeypatch, "Relu", scaled(2.0))
    model = model_of("""
        g (float[2, 8] x) => (float y)
        { [big] a = Relu(x)  s = ReduceSum<keepdims = 0>(a)  t = Exp(s)  [small] y = Relu(t) }
    """)
    report = ob.check_gradients(model, feeds={"x": np.linspace(-0.2, 0.3, 16, dtype=np.float32).reshape(2, 8)})
    assert [n.node for n in report.nodes[:2]] == ["big", "small"] or [n.node for n in report.nodes[:2]] == [
        "small",
        "big",
    ]
    assert report.repro is not None
    assert [node.name for node in report.repro.graph.node] == ["small"]


def test_repro_keeps_what_an_operator_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sub-graphs of an If read values from outside; they become inputs of the cut-out model."""
    break_rule(monkeypatch, "Exp", scaled(3.0))
    model = model_of("""
        g (float[3] x, bool c) => (float[3] y)
        { t = Tanh(x)
          [choice] y = If(c) <then_branch = a () => (float[3] p) { p = Exp(t) },
                              else_branch = b () => (float[3] q) { q = Exp(t) }> }
    """)
    report = ob.check_gradients(model)
    assert (report.nodes[0].op_type, report.nodes[0].verdict) == ("If", "wrong")
    assert report.repro is not None
    assert {value.name for value in report.repro.graph.input} == {"t", "c"}
    assert ob.check_gradients(report.repro).verdict == "wrong"
