"""The smaller backbones of the onnx wheel, all gradients; all nine run under `make conformance`. And long models."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

import onnx_backprop as ob
from tests.conformance import backbones

CHAIN = 2_000
CALLS = 8_000  # of functions for a node of a network, twice what it takes
KINDS = ("Relu", "Tanh", "Mul", "Add", "Sigmoid")


@pytest.mark.parametrize("name", backbones.SMALL)
def test_every_gradient_is_right(name: str) -> None:
    outcome = backbones.examine(name)
    assert outcome.report.verdict == "right", f"{name}, seed {backbones.SEED}:\n{outcome.report}"
    assert {result.verdict for result in outcome.report.results} == {"right"}
    assert outcome.weights >= 50


def test_the_model_with_the_most_nodes_converts_in_time() -> None:
    model = backbones.backbone("densenet121")
    counted, training = calls(model)
    assert counted < CALLS * len(model.graph.node)
    names = {value.name for value in training.graph.output}
    assert {f"{weight}_grad" for weight in backbones.weights(model)} <= names
    assert len(names) > 600


def test_every_network_of_the_wheel_is_examined() -> None:
    shipped = {path.stem.removeprefix("light_") for path in backbones.FOLDER.glob("light_*.onnx")}
    assert shipped == set(backbones.NAMES)


def chain(count: int) -> ModelProto:
    """Nodes one behind the other; every second to third reads the same weight."""
    names = ["x", *(f"v{n}" for n in range(count))]
    nodes = [
        helper.make_node(kind, [names[n], "w"] if kind in ("Mul", "Add") else [names[n]], [names[n + 1]], name=f"n{n}")
        for n, kind in ((n, KINDS[n % len(KINDS)]) for n in range(count))
    ]
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in [("x", ["N", 2]), ("w", [2])]
    ]
    outputs = [helper.make_tensor_value_info(names[-1], TensorProto.FLOAT, ["N", 2])]
    return helper.make_model(
        helper.make_graph(nodes, "chain", inputs, outputs), opset_imports=[helper.make_opsetid("", 18)], ir_version=10
    )


def calls(model: ModelProto, wrt: list[str] | None = None) -> tuple[int, ModelProto]:
    """How many functions a conversion calls, the same on every machine, however busy; and what it makes."""
    counted = 0

    def count_call(_frame: object, event: str, _argument: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(count_call)
    try:
        training = ob.backward(model, wrt=wrt)
    finally:
        sys.setprofile(None)
    return counted, training


def chain_calls(count: int) -> int:
    counted, training = calls(chain(count), ["x", "w"])
    assert sum(node.op_type in {"Where", "Mul"} and "_grad/" in node.name for node in training.graph.node) > count / 5
    return counted


def test_a_long_chain_converts_in_linear_time() -> None:
    """c·n + q·n² calls: the ratio is 4 without a square, 16 for a square alone; what is called once makes it less."""
    chain_calls(10)  # what is read and cached once
    short, long = chain_calls(CHAIN // 4), chain_calls(CHAIN)
    assert long < 4.02 * short, f"{CHAIN} nodes: {long} calls, a quarter of them: {short}"


def test_the_gradient_of_a_chain_is_right() -> None:
    model = chain(40)
    report = ob.check_gradients(model, feeds={"x": np.float32([[0.3, -0.2], [0.9, 0.4]])}, wrt=["w"])
    assert report.verdict == "right", str(report)
