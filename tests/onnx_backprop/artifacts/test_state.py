"""Checkpoints of a CheckpointState that are damaged: an ArtifactError, or what they say."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnx_backprop.artifacts import Module, Optimizer
from onnx_backprop.artifacts.state import ArtifactError, CheckpointState
from onnx_backprop.converters.training.names import OPTIMIZER_METADATA
from onnx_backprop.training.checkpoint import KEY
from tests.onnx_backprop.artifacts.test_artifacts import generated
from tests.support.damaged import changed, damaged, joined, split

CASES = int(os.environ.get("CHECKPOINTS", "500"))


def saved(path: Path, *, nominal: bool = False) -> bytes:
    values = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(3, np.float32)}
    state = CheckpointState(values, {"w": True, "b": False})
    state["epoch"] = 3
    if nominal:
        state.save_nominal(path)
    else:
        CheckpointState.save_checkpoint(state, path)
    return path.read_bytes()


@pytest.mark.parametrize("nominal", [False, True])
def test_damaged_at_random(tmp_path: Path, nominal: bool) -> None:
    seed = int(os.environ.get("SEED", "18"))
    path, rng = tmp_path / "c", random.Random(seed)
    content, loaded = saved(path, nominal=nominal), 0
    for case in range(CASES // 2):
        path.write_bytes(damaged(content, rng))
        try:
            state = CheckpointState.load_checkpoint(path)
        except ArtifactError:
            continue
        except Exception as e:
            raise AssertionError(f"seed {seed}, case {case}") from e
        loaded += 1
        about = json.loads(split(path.read_bytes())[0]["__metadata__"][KEY])
        assert (state.trained, state.properties.values) == (about["trained"], about["properties"])
        for name, parameter in state.parameters:
            assert np.size(parameter.data) >= 0, name
    assert loaded


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"trained": ["w"]}, "trained: expected true or false for each parameter, got"),
        ({"trained": {"w": 1, "b": False}}, "trained: expected true or false"),
        ({"trained": {"w": True}}, "parameters: what is said of 'b' has no tensor, or the other way"),
        ({"properties": {"epoch": [3]}}, "properties: expected numbers and texts"),
        ({"properties": None}, "properties: expected numbers and texts"),
        ({"nominal": {"w": ["object", [1]]}}, "nominal: expected a type and a shape of 'w'"),
        ({"nominal": {"w": ["float32", [-1]]}}, "nominal: expected a type and a shape of 'w'"),
        ({"nominal": [1]}, "nominal: expected a type and a shape"),
        (
            {"nominal": {"w": ["float32", [2**40]]}},
            r"parameters of 4,398,046,511,104 bytes are declared. The limit is 1073741824",
        ),
    ],
)
def test_refused(tmp_path: Path, new: dict[str, Any], message: str) -> None:
    header, rest = split(saved(tmp_path / "c"))
    about = json.loads(header["__metadata__"][KEY]) | new
    (tmp_path / "c").write_bytes(joined({**header, "__metadata__": {KEY: json.dumps(about)}}, rest))
    with pytest.raises(ArtifactError, match=message):
        CheckpointState.load_checkpoint(tmp_path / "c")


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot read the checkpoint"):
        CheckpointState.load_checkpoint(tmp_path / "missing")


def test_tensors_of_another_model(tmp_path: Path) -> None:
    module, _ = generated(tmp_path)
    state = module._state
    state.values["fc_bias"] = CheckpointState({"b": np.zeros(7, np.float32)}, {"b": True}).values["b"]
    with pytest.raises(ArtifactError, match=r"'fc_bias' is float32\[7\] in it, float32\[3\] in the model"):
        Module(tmp_path / "training_model.onnx", state)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    state.optimizer["optimizer_step"] = CheckpointState({"b": np.zeros(7)}, {"b": True}).values["b"]
    with pytest.raises(
        ArtifactError, match=r"the checkpoint belongs to another model: 'optimizer_step' is float64\[7\]"
    ):
        Optimizer(tmp_path / "optimizer_model.onnx", module)


def test_damaged_optimizers(tmp_path: Path) -> None:
    module, _ = generated(tmp_path)
    model = onnx.load(tmp_path / "optimizer_model.onnx")
    entry = next(entry for entry in model.metadata_props if entry.key == OPTIMIZER_METADATA)
    good, rng, loaded = json.loads(entry.value), random.Random(18), 0
    for text in ("", "[1]", "{}", "[" * 100_000, *(json.dumps(changed(good, rng)) for _ in range(60))):
        entry.value = text.encode("utf-8", "replace").decode()
        onnx.save(model, tmp_path / "damaged.onnx")
        try:
            Optimizer(tmp_path / "damaged.onnx", module)
            loaded += 1
        except ArtifactError as e:
            assert "is no optimizer model of onnx_backprop" in str(e)  # noqa: PT017
    assert loaded < 20
