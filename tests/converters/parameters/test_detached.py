"""A detach() that torch's exporter left out is put back, or it is said where one is missing."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import onnx_backprop as ob
from tests.support.torch_files import W, X, exported, with_operations


def test_a_detach_that_torch_left_out_stops_again() -> None:
    """y = h · stop(h): the gradient by the weight is that of h with the other factor constant."""
    file = exported("h = MatMul(x, m.weight) y = Mul(h, h)", {"m.weight": W}, "m.weight")
    file = with_operations(file, {"y": "%h, %detach_1", "h": "%x, %p_m_weight"})
    feeds = {"x": X, "y_grad": np.ones((2, 4), np.float32)}
    converted = ob.backward(file)
    named = dict(zip([o.name for o in converted.graph.output], ob.session(converted).run(None, feeds), strict=True))
    np.testing.assert_allclose(np.asarray(named["m.weight_grad"]), X.T @ (X @ W), rtol=1e-5)
    assert list(ob.training_graph(file, loss="mse").parameters) == ["m.weight"]
    report = ob.check_gradients(file, wrt=["m.weight"], feeds={"x": X}, nodes=True)
    assert report.ok, report


@pytest.mark.parametrize(
    ("body", "operations", "expected"),
    [
        ("s = Sigmoid(h) y = Mul(h, s)", {"s": "%detach", "y": "%detach"}, None),  # both nodes of silu(stop(h))
        ("s = Sigmoid(h) y = Mul(h, s)", {"s": "%detach, -1", "y": "%h, %s"}, "sigmoid"),
        ("s = Softplus(h) y = Sub(h, s)", {"y": "%h, %detach_4", "s": "%h"}, "stopped"),
    ],
)
def test_a_detach_in_operations_of_several_nodes(body: str, operations: dict[str, str], expected: str | None) -> None:
    file = exported(f"h = MatMul(x, w) {body}", {"w": W}, "w")
    file = with_operations(file, operations)
    if expected is None:  # one operation: its nodes have one text
        for node in list(file.graph.node)[1:]:
            node.metadata_props[0].value = file.graph.node[2].metadata_props[0].value
        with pytest.warns(ob.OnnxBackpropWarning, match="the derivative by 'w' is zero: .*marked as a stop"):
            ob.backward(file, wrt=["w"])
        return
    converted = ob.backward(file, wrt=["w"])
    feeds = {"x": X, "y_grad": np.ones((2, 4), np.float32)}
    named = dict(zip([o.name for o in converted.graph.output], ob.session(converted).run(None, feeds), strict=True))
    sigmoid = 1 / (1 + np.exp(-(X @ W)))
    dh = sigmoid if expected == "sigmoid" else np.ones_like(sigmoid)
    np.testing.assert_allclose(np.asarray(named["w_grad"]), X.T @ dh, rtol=1e-4, atol=1e-6)


def test_a_node_that_stands_for_two_operations_is_told() -> None:
    """tanh(stop(h)) + tanh(h): the exporter has one node for both, and the reader still names the other."""
    file = exported("h = MatMul(x, w) tanh = Tanh(h) y = Add(tanh, tanh)", {"w": W}, "w")
    file = with_operations(file, {"tanh": "%detach", "y": "%tanh, %tanh_1"})
    with pytest.warns(ob.OnnxBackpropWarning, match=r"left out a detach\(\) in front of 'tanh'"):
        assert ob.backward(file).graph.output[-1].name == "w_grad"


@pytest.mark.parametrize("detaches", [True, False])
def test_a_node_that_may_stand_for_an_operation_of_a_detached_value(detaches: bool) -> None:
    """The exporter keeps the text of tanh(h), not of tanh(stop(h)), if that comes first."""
    file = exported("h = MatMul(x, w) tanh = Tanh(h) u = Exp(h) s = Add(tanh, tanh) y = Add(s, u)", {"w": W}, "w")
    file = with_operations(file, {"tanh": "%h", "s": "%tanh, %tanh_1", "u": "%detach" if detaches else "%h"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ob.OnnxBackpropWarning)
        ob.training_graph(file, loss="mse")
    sentences = [str(w.message) for w in caught if "detach" in str(w.message)]
    assert len(sentences) == detaches
    assert not detaches or sentences[0].startswith("the exporter has left out a detach() in front of 'tanh', or has ")


@pytest.mark.parametrize("arguments", ["%a, %detach", "%detach, %detach_1, %h", "[%a, %detach], 1"])
def test_a_detach_whose_place_is_not_said_is_told(arguments: str) -> None:
    file = with_operations(exported("h = MatMul(x, w) y = Mul(h, h)", {"w": W}, "w"), {"y": arguments})
    with pytest.warns(ob.OnnxBackpropWarning, match=r"left out a detach\(\) in front of 'y'.* stop=\["):
        ob.backward(file)
    with pytest.warns(ob.OnnxBackpropWarning, match=r"left out a detach\(\) in front of 'y'"):
        ob.training_graph(file, loss="mse")


def test_a_detach_that_an_estimator_had_is_not_missed() -> None:
    file = exported("h = MatMul(x, w) r = Round(h) d = Sub(r, h) y = Add(h, d)", {"w": W}, "w")
    with pytest.warns(ob.OnnxBackpropWarning, match="straight-through") as caught:
        ob.training_graph(with_operations(file, {"y": "%a, %detach"}), loss="mse")
    assert not any("left out a detach() in front of" in str(w.message) for w in caught)
