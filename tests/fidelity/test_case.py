"""A case of `make fidelity` with a gradient that is wrong by a hundredth is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

import onnx_backprop as ob

pytest.importorskip("torch")
from tests.fidelity import catalog
from tests.fidelity.case import RIGHT, WRONG, _Case
from tests.fidelity.exporters import OURS
from tests.fidelity.reference import Reference, reference

NAME = "residual_block_perturbed"
training_graph = ob.training_graph


@pytest.fixture(scope="module")
def there() -> Reference:
    return reference(catalog.subject(NAME), "train")


def judged(there: Reference, folder: Path) -> dict[str, Any]:
    return _Case(catalog.subject(NAME), "train", OURS, there, folder).judge()


def scaled(graph: ob.TrainingGraph, parameter: str) -> ob.TrainingGraph:
    """The graph with a gradient of a parameter that is 1.01 times what it was."""
    name = graph.parameters[parameter]
    place, node = next((i, n) for i, n in enumerate(graph.model.graph.node) if name in n.output)
    node.output[list(node.output).index(name)] = f"{name}/right"
    graph.model.graph.initializer.append(numpy_helper.from_array(np.float32(1.01), f"{name}/factor"))
    product = helper.make_node("Mul", [f"{name}/right", f"{name}/factor"], [name])
    graph.model.graph.node.insert(place + 1, product)
    return graph


def test_the_module_itself_is_right(there: Reference, tmp_path: Path) -> None:
    assert judged(there, tmp_path)["verdict"] == RIGHT
    assert max(there.sgd.own, there.adamw.own) < 2e-5


@pytest.mark.parametrize("parameter", ["first.weight", "norm.weight", "last.bias"])
def test_a_gradient_that_is_off_by_a_hundredth(
    there: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameter: str
) -> None:
    monkeypatch.setattr(ob, "training_graph", lambda *a, **k: scaled(training_graph(*a, **k), parameter))
    answer = judged(there, tmp_path)
    assert (answer["verdict"], answer["stage"]) == (WRONG, "gradients")
    assert parameter in answer["sentence"]


def test_a_parameter_that_is_left_out(there: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ob, "training_graph", lambda *a, **k: training_graph(*a, **{**k, "frozen": ["norm.bias"]}))
    answer = judged(there, tmp_path)
    assert (answer["verdict"], answer["stage"]) == (WRONG, "set")
    assert "norm.bias" in answer["sentence"]
