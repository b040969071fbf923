"""The work of `explain_gradients` grows with the number of nodes, not with its square."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper

import onnx_backprop as ob
from onnx_backprop.converters.check import explain


def chain(count: int) -> ModelProto:
    nodes = [helper.make_node("Mul", ["x", "w"], ["v0"])]
    nodes += [helper.make_node("Relu", [f"v{n}"], [f"v{n + 1}"]) for n in range(count)]
    x, y = (helper.make_tensor_value_info(name, 1, [4]) for name in ("x", f"v{count}"))
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(np.ones(4, np.float32), "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def test_a_node_is_tried_with_what_lies_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each node the values that it reads and makes are looked at, however many there are."""
    seen: list[int] = []
    walk = explain.walk_back
    monkeypatch.setattr(explain, "walk_back", lambda path, *rest: seen.append(len(path.active)) or walk(path, *rest))
    explanation = ob.explain_gradients(chain(60))
    assert len(explanation.nodes) == len(seen) == 61
    assert max(seen) <= 3
