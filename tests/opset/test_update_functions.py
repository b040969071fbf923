"""Which inputs and outputs of an update function belong to one tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import FunctionProto, helper

import onnx_backprop as ob
from onnx_backprop.opset.core.op import UPDATE_DOMAIN
from onnx_backprop.opset.functions.update_functions import formal_names, members

FORMAT_1 = Path(__file__).parents[1] / "data" / "format1"


def function(inputs: list[str], outputs: list[str]) -> FunctionProto:
    return helper.make_function(UPDATE_DOMAIN, "F", inputs, outputs, [], [helper.make_opsetid("", 18)])


@pytest.mark.parametrize("kinds", [("X", "G"), ("X", "G", "momentum"), ("X", "G", "m_0", "m_1")], ids=str)
@pytest.mark.parametrize("count", [1, 3, 12])
def test_what_is_written_is_read(kinds: tuple[str, ...], count: int) -> None:
    arguments, outputs = formal_names(kinds, count)
    inputs = ["learning_rate", "step", "beta_1", "beta_2_new", *arguments]
    parsed = members(function(inputs, outputs))
    assert len(parsed) == count
    for n, member in enumerate(parsed):
        assert [inputs[i] for i in member.inputs] == [f"{kind}_{n}" for kind in kinds]
        assert [outputs[i] for i in member.outputs] == [f"{kind}_{n}_new" for kind in kinds if kind != "G"]


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ([], []),
        (["learning_rate"], ["X_0_new"]),
        (["X_0"], ["X_0_new"]),
        (["X_0", "G_0"], []),
        (["X_0", "G_0"], ["x"]),
        (["X_0", "G_0", "X_2", "G_2"], ["X_0_new", "X_2_new"]),
        (["X_0", "G_0", "X_1", "G_1"], ["X_1_new", "X_0_new"]),
        (["X_0", "G_0", "m_0", "X_1", "G_1"], ["X_0_new", "m_0_new", "X_1_new"]),
        (["X_0", "G_0", "m_0"], ["numbers_0", "X_0_new", "m_0_new"]),
        (["X_1", "G_1"], ["X_1_new"]),
    ],
)
def test_other_functions_have_no_members(inputs: list[str], outputs: list[str]) -> None:
    assert members(function(inputs, outputs)) == []


@pytest.mark.parametrize(
    ("name", "state"), [("everything", ["mean", "square", "running_mean"]), ("half", ["momentum"])]
)
def test_files_of_format_1(name: str, state: list[str]) -> None:
    graph = ob.TrainingGraph.load(FORMAT_1 / f"{name}.onnx")
    functions = [f for f in graph.model.functions if f.domain == UPDATE_DOMAIN and f.overload != "older"]
    assert functions
    assert sum(len(members(f)) for f in functions) == len(graph.parameters)
    for f in functions:
        assert [f.input[n].removesuffix("_0") for n in members(f)[0].inputs] == ["X", "G", *state]
