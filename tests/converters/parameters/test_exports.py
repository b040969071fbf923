"""Exports of BERT, a ViT and a ResNet by both exporters of PyTorch (tests/data/torch_exports.py): parameters and names."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto

import onnx_backprop as ob

FOLDER = Path(__file__).parents[2] / "data" / "exports"
EXPECTED: dict[str, dict[str, float]] = json.loads((FOLDER / "parameters.json").read_text())
FILES = [f"{name}_{exporter}" for name in EXPECTED for exporter in ("dynamo", "torchscript")]
NAMES = ["as exported", "no node names"]
LAYER = {"bert": "*encoder.layer.1.*", "vit": "*layers.1.*", "resnet": "layer2.*"}
MODULE = {"bert": "classifier", "vit": "classifier", "resnet": "fc"}


@cache
def model_of(file: str, names: str) -> ModelProto:
    model = onnx.load(FOLDER / f"{file}.onnx")
    if names == "no node names":
        for node in model.graph.node:
            node.name = ""
    return model


def expected_of(file: str) -> dict[str, float]:
    return EXPECTED[file.partition("_")[0]]


def module_names(graph: ob.TrainingGraph) -> dict[str, str]:
    """Each trained tensor and its name in the module."""
    return {row.name: row.module or row.name for row in graph.rows() if row.state == "trained"}


def feeds_of(graph: ob.TrainingGraph) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    name = graph.inputs[0]
    x = rng.integers(0, 17, (2, 5)) if name == "input_ids" else rng.standard_normal((2, 3, 4, 4)).astype(np.float32)
    x = rng.standard_normal((2, 3, 16, 16)).astype(np.float32) if name == "x" else x
    return {name: x, str(graph.target): np.array([1, 2])}


def moved(graph: ob.TrainingGraph) -> dict[str, np.ndarray]:
    """By how much one step moves each tensor, under its name in the file."""
    before = graph.initial_state()
    trainer = ob.Trainer(graph, learning_rate=0.1)
    trainer.step(feeds_of(graph))
    after = trainer.state()
    return {name: after[name].astype(np.float64) - value for name, value in before.items() if name in graph.parameters}


@pytest.mark.parametrize("file", FILES)
def test_the_parameters_are_those_of_the_module(file: str) -> None:
    graph = ob.training_graph(model_of(file, "as exported"), loss="softmax_cross_entropy")  # a warning would fail
    names = module_names(graph)
    assert sorted(names.values()) == sorted(expected_of(file))
    for tensor, value in graph.initial_values().items():
        assert value.astype(np.float64).sum() == pytest.approx(expected_of(file)[names[tensor]], rel=1e-5, abs=1e-5)
    text = graph.summary()
    assert all(name in text for name in expected_of(file))


@pytest.mark.parametrize("file", [file for file in FILES if "resnet" not in file])
@pytest.mark.parametrize("names", NAMES)
def test_frozen_by_a_pattern_of_modules(file: str, names: str) -> None:
    model, pattern = model_of(file, names), LAYER[file.partition("_")[0]]
    graph = ob.training_graph(model, loss="softmax_cross_entropy", frozen=[pattern])
    trained = set(module_names(graph).values())
    expected = {name for name in expected_of(file) if not fnmatch(name, pattern)}
    assert trained == expected


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("written", ["in full", "as a pattern"])
def test_a_module_is_trained_alone(file: str, written: str) -> None:
    module = MODULE[file.partition("_")[0]]
    chosen = [module] if written == "in full" else [f"{module[:3]}*"]
    graph = ob.training_graph(model_of(file, "as exported"), loss="softmax_cross_entropy", trainable=chosen)
    assert sorted(module_names(graph).values()) == [f"{module}.bias", f"{module}.weight"]


@pytest.mark.parametrize("file", FILES)
def test_a_learning_rate_for_each_layer(file: str) -> None:
    """The recipe of docs/adapters.md: what a group catches moves by its factor, everything else as without it."""
    model, pattern = model_of(file, "as exported"), LAYER[file.partition("_")[0]]
    groups = (ob.optimizers.Group(parameters=[pattern], rate=0.25),)
    plain, grouped = (
        ob.training_graph(model, loss="softmax_cross_entropy", optimizer=optimizer)
        for optimizer in (ob.optimizers.SGD(), ob.optimizers.SGD(groups=groups))
    )
    names = module_names(plain)
    steps, fewer = moved(plain), moved(grouped)
    caught = {name for name, module in names.items() if fnmatch(module, pattern)}
    assert len(caught) == sum(fnmatch(name, pattern) for name in expected_of(file)) > 2
    for name, step in steps.items():
        np.testing.assert_allclose(fewer[name], step * (0.25 if name in caught else 1), rtol=1e-3, atol=1e-7)
    assert sum(np.abs(steps[name]).max() > 1e-6 for name in caught) > len(caught) / 2


def test_a_name_in_the_module_trains_what_it_names() -> None:
    model = model_of("bert_dynamo", "as exported")
    name = next(name for name in expected_of("bert_dynamo") if name.endswith("query.weight"))
    graph = ob.training_graph(model, loss="softmax_cross_entropy", trainable=[name])
    assert list(module_names(graph).values()) == [name]
    assert list(graph.parameters) != [name]  # the file has it transposed, under a name of its own
    with pytest.raises(ob.InvalidArgumentError, match=r"trainable, frozen: '.*' in both lists"):
        ob.training_graph(model, loss="softmax_cross_entropy", trainable=[name], frozen=list(graph.parameters))
    with pytest.raises(ob.InvalidArgumentError, match=r"trainable: expected the name of an initializer"):
        ob.training_graph(model, loss="softmax_cross_entropy", trainable=[name.replace("query", "quary")])


def test_what_was_trained_is_known_again(tmp_path: Path) -> None:
    """The file that a Trainer exports says of its tensors what the file that came did."""
    model = model_of("bert_dynamo", "as exported")
    graph = ob.training_graph(model, loss="softmax_cross_entropy", optimizer="sgd")
    trainer = ob.Trainer(graph, learning_rate=0.1)
    trainer.step(feeds_of(graph))
    trainer.export(tmp_path / "trained.onnx")
    again = ob.training_graph(tmp_path / "trained.onnx", loss="softmax_cross_entropy")
    assert module_names(again) == module_names(graph)
