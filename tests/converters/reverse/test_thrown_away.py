"""Which nodes lead to a value whose NaN or infinity a Where leaves out: elementwise ones."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnx_backprop.converters.reverse.path import imputed

TESTS = ("IsNaN", "IsInf", "Not IsNaN", "Not IsInf", "Equal")


def nodes_of(op_type: str, test: str) -> list[ir.Node]:
    """An operator, a test of its result, and the Where that leaves out what is no number of it."""
    x, y, zero = (ir.Value(name=name) for name in ("x", "y", "zero"))
    infinity = ir.Value(name="inf", const_value=ir.tensor(np.float32(np.inf)))
    node = ir.Node("", op_type, [x, y] if op_type == "Mean" else [x])
    result = node.outputs[0]
    nodes = [node, ir.Node("", test.split()[-1], [result, infinity] if test == "Equal" else [result])]
    if test.startswith("Not"):
        nodes.append(ir.Node("", "Not", [nodes[-1].outputs[0]]))
    return [*nodes, ir.Node("", "Where", [nodes[-1].outputs[0], zero, result])]


@pytest.mark.parametrize("op_type", ["Exp", "Mean"])
def test_elementwise_operators(op_type: str) -> None:
    for test in TESTS:
        nodes = nodes_of(op_type, test)
        assert imputed(nodes) == {nodes[0]}
        before = ir.Node("", "Exp", [ir.Value(name="w")])
        nodes[0].replace_input_with(0, before.outputs[0])
        assert imputed([before, *nodes]) == {before, nodes[0]}


@pytest.mark.parametrize("op_type", ["MatMul", "ReduceSum", "Softmax", "Conv", "Floor"])
def test_others(op_type: str) -> None:
    assert imputed(nodes_of(op_type, "IsNaN")) == set()


@pytest.mark.parametrize("test", ["Greater", "Not Less", "IsNaN of another"])
def test_other_conditions(test: str) -> None:
    nodes = nodes_of("Exp", test.removesuffix(" of another"))
    if test.endswith("another"):
        nodes[1].replace_input_with(0, ir.Value(name="another"))
    assert imputed(nodes) == set()
