"""What a model says about the training graph that it is: refused in one sentence, or true of the model."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest
from onnx import ModelProto, TensorProto

import onnx_backprop as ob
from onnx_backprop.converters.training.metadata import METADATA
from onnx_backprop.training.inputs import Inputs
from tests.support.damaged import changed
from tests.support.training_models import training

CASES = int(os.environ.get("METADATA", "600"))


@pytest.fixture(scope="module")
def saved() -> ModelProto:
    return training().model


def saying(model: ModelProto, text: str) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(model)
    for entry in copy.metadata_props:
        if entry.key == METADATA:
            entry.value = text
    return copy


def text_of(model: ModelProto) -> str:
    return next(entry.value for entry in model.metadata_props if entry.key == METADATA)


def test_damaged_at_random(saved: ModelProto) -> None:
    seed = int(os.environ.get("SEED", "18"))
    rng, entries, loaded = random.Random(seed), json.loads(text_of(saved)), 0
    declared = {value.name for value in (*saved.graph.input, *saved.graph.output)}
    for case in range(CASES):
        where, about = f"seed {seed}, case {case}", changed(entries, rng)
        try:
            text = json.dumps(about)
            graph = ob.TrainingGraph.load(saying(saved, text.encode("utf-8", "replace").decode()))
            state = graph.initial_state()
            graph.summary()
            Inputs(graph)
        except ob.InvalidModelError as e:
            assert len(str(e)) < 600, where  # noqa: PT017
            continue
        except Exception as e:
            raise AssertionError(where) from e
        loaded += 1
        again = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(graph).items()}
        again |= {"format": about["format"], "state": [vars(slot) for slot in graph.state]}
        about["state"] = [{"start": None, "of": "", **entry} for entry in about["state"]]
        assert {key: again[key] for key in about} == about
        assert {*graph.inputs, *state, *graph.updates.values(), graph.loss} <= declared, where
    assert 0 < loaded < CASES / 3


SLOT = {"name": "w1", "output": "w1_new", "role": "parameter"}
REFUSED: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "it is no JSON"),
    "deep": ("[" * 100_000, "it is no JSON"),
    "no object": ("[1]", r"expected format, loss, inputs, .*, got \[1\]"),
    "no format": ("{}", "expected format, loss, inputs"),
    "later": ({"format": 3}, "written by a later version"),
    "no fields": ('{"format": 1}', "expected format, loss, inputs, target"),
    "half a format": ({"format": 0.5}, "format: expected int, got 0.5"),
    "inputs": ({"inputs": "x"}, r"inputs: expected .*tuple.*, got 'x'"),
    "parameters": ({"parameters": {"w1": 3}}, "parameters: expected .*dict"),
    "loss": ({"loss": "nothing"}, "loss, gradient_norms: expected names of outputs, got 'nothing'"),
    "loss of many numbers": ({"loss": "w1_new"}, "loss: expected an output of one number"),
    "target": ({"target": "w1"}, "target: expected names of inputs, got 'w1'"),
    "state": ({"state": [SLOT | {"name": "w9"}]}, "state: expected names of inputs, got 'w9'"),
    "new value": ({"state": [SLOT | {"output": "w9_new"}]}, "state: expected names of outputs, got 'w9_new'"),
    "mean of nothing": ({"state": [SLOT | {"role": "mean", "of": "w9"}]}, "state: expected names of initializers, got 'w9'"),
    "moment of nothing": ({"state": [SLOT | {"role": "moment", "of": "w9"}]}, "state: expected names of parameters, got 'w9'"),
    "role": ({"state": [SLOT | {"role": "weight"}]}, "state: role: expected one of parameter, .*, got 'weight'"),
    "slot": ({"state": [{"name": "w1"}]}, r"expected name, output, role, start, of, got \['name', 'of', 'start'\]"),
    "slots": ({"state": {"w1": "w1_new"}}, "state: expected .*tuple"),
    "twice": ({"state": [SLOT, SLOT]}, "state: expected each name once"),
    "filled with too much": ({"state": [SLOT | {"start": 1e300}]}, "start: expected .*float"),
    "filled with NaN": ({"state": [SLOT | {"start": float("nan")}]}, "it is no JSON: NaN is no number"),
    "norms": ({"gradient_norms": "loss"}, "gradient_norms: expected a number for each parameter"),
    "accumulate": ({"settings": {"optimizer": {"accumulate": 0}}}, "settings: optimizer: expected accumulate of 1 or more"),
    "settings": ({"settings": {"optimizer": "sgd"}}, "settings: optimizer: expected accumulate"),
    "labels": (
        {"settings": {"loss": {"name": "softmax_cross_entropy", "ignore_index": [1]}}},
        "settings: loss: expected ignore_index of a label or null, got",
    ),
    "learning rate": ({"learning_rate": "w1"}, r"learning_rate: expected an input of one number, got one of shape \["),
    "comparisons": ({"settings": {"compared": [3]}}, "settings: compared: expected records of a prediction and a target"),
    "doubts": ({"settings": {"doubtful": ["w1"]}}, r"settings: doubtful: expected reasons by name, got \['w1'\]"),
    "inputs of the loss": ({"settings": {"loss_inputs": 3}}, "settings: loss_inputs: expected names, got 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(saved: ModelProto, case: str) -> None:
    new, message = REFUSED[case]
    text = new if isinstance(new, str) else json.dumps(json.loads(text_of(saved)) | new)
    with pytest.raises(ob.InvalidModelError, match=message):
        ob.TrainingGraph.load(saying(saved, text))


def test_a_state_of_terabytes(saved: ModelProto) -> None:
    model = saying(saved, text_of(saved))
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith("w1.mean"):
            value.type.tensor_type.shape.dim[0].dim_value = 2**31 - 1
    with pytest.raises(ob.InvalidModelError, match=r"no more of them than of a parameter, 'w1.mean' has \[2147483647"):
        ob.TrainingGraph.load(model)


def test_a_state_that_is_no_tensor(saved: ModelProto) -> None:
    model = saying(saved, text_of(saved))
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith("w1.mean"):
            value.type.sequence_type.elem_type.tensor_type.elem_type = TensorProto.FLOAT
    with pytest.raises(ob.InvalidModelError):
        ob.TrainingGraph.load(model)
