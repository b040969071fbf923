"""Checkpoints that are damaged, hostile, or somebody else's: refused, the trainer as it was, or loaded as they are."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import onnx_backprop as ob
from onnx_backprop.opset.core.limits import limits
from onnx_backprop.training.buffers import Buffers
from onnx_backprop.training.checkpoint import KEY, write_checkpoint
from onnx_backprop.training.schedules import Cosine, Warmup, described, restored
from tests.support.damaged import ANYTHING, damaged, deep, joined, split
from tests.support.training_models import data, training

BATCH = {name: value[:7] for name, value in data().items()}
CASES = int(os.environ.get("CHECKPOINTS", "2000"))
Snapshot = tuple[dict[str, bytes], list[Any]]


def snapshot(trainer: ob.Trainer) -> Snapshot:
    about = [trainer.steps, trainer.epoch, trainer.batch, trainer.learning_rate, described(trainer.schedule)]
    return {name: value.tobytes() for name, value in trainer.state().items()}, about


@pytest.fixture(scope="module")
def trainers() -> tuple[ob.Trainer, ob.Trainer]:
    graph = training()
    return ob.Trainer(graph), ob.Trainer(graph)


def contents(path: Path, trainer: ob.Trainer) -> Snapshot:
    """What a checkpoint says, read by safetensors and json alone."""
    tensors = safetensors.numpy.load_file(path)
    with safetensors.safe_open(path, "np") as file:
        about = json.loads(file.metadata()[KEY])
    rate = trainer.learning_rate if about["learning_rate"] is None else float(about["learning_rate"])
    values = {name: tensors[name].tobytes() for name in trainer.state()}
    schedule = about["schedule"] and described(restored(about["schedule"]))  # with the defaults that it leaves out
    return values, [about["steps"], about["epoch"], about["batch"], rate, schedule]


def valid(trainer: ob.Trainer, path: Path) -> bytes:
    trainer.schedule = Warmup(Cosine(0.1, steps=50), steps=5)
    for _ in range(3):
        trainer.step(BATCH)
    trainer.save(path)
    return path.read_bytes()


@pytest.mark.filterwarnings("ignore:.*is of another training graph")
def test_damaged_at_random(tmp_path: Path, trainers: tuple[ob.Trainer, ob.Trainer]) -> None:
    """Either CheckpointError and nothing changed, or what the file says, and the next step is a twin's."""
    trainer, twin = trainers
    path, seed = tmp_path / "c", int(os.environ.get("SEED", "18"))
    content, rng = valid(trainer, path), random.Random(seed)
    loaded, before = 0, snapshot(trainer)
    for case in range(CASES):
        where = f"seed {seed}, case {case}"
        path.write_bytes(damaged(content, rng))
        try:
            trainer.load(path)
        except ob.CheckpointError:
            assert snapshot(trainer) == before, where
            continue
        except Exception as e:
            raise AssertionError(where) from e
        loaded += 1
        assert snapshot(trainer) == contents(path, trainer), where
        twin.set_state(trainer.state())
        twin.learning_rate = trainer.learning_rate
        with np.errstate(over="ignore"):
            assert np.array_equal(trainer.step(BATCH), twin.step(BATCH), equal_nan=True), where
        before = snapshot(trainer)
        assert before[0] == snapshot(twin)[0], where
    assert CASES / 20 < loaded < CASES / 2
    path.write_bytes(content)
    trainer.load(path)


REFUSED: dict[str, tuple[Any, str]] = {
    "no object": ([1], "it does not say its format"),
    "no format": ({}, "it does not say its format"),
    "format is true": ({"format": True}, "it does not say its format"),
    "later": ({"format": 2}, "later version"),
    "nothing else": ({"format": 1}, "is no checkpoint of Trainer: steps, epoch, batch, learning_rate, schedule missing"),
    "deep": ('{"format": 1, "schedule": ' + deep(100_000) + "}", "recursion"),
    "deep, but it can be read": (("schedule", json.loads(deep(250))), "schedule: expected one of Constant"),
    "NaN": ('{"format": 1, "steps": NaN}', "NaN is no number"),
    "a count below 0": (("steps", -1), "steps: expected a count, got -1"),
    "half a count": (("batch", 0.5), "batch: expected a count, got 0.5"),
    "a huge count": (("epoch", 2**63), "epoch: expected a count"),
    "yes": (("steps", True), "steps: expected a count, got True"),
    "rate": (("learning_rate", "0.1"), "learning_rate: expected a number, got '0.1'"),
    "huge rate": (("learning_rate", 10**400), "learning_rate: expected a number"),
    "schedule": (("schedule", [1]), "schedule: expected one of Constant"),
    "schedule's name": (("schedule", {"name": ["Constant"]}), "schedule: expected one of Constant"),
    "schedule in its place": (
        ("schedule", {"name": "Cosine", "rate": {"name": "Constant", "rate": 1.0}, "steps": 2}),
        "schedule: expected one of Constant",
    ),
    "no schedule in its place": (("schedule", {"name": "Warmup", "after": 1.0, "steps": 2}), "schedule: expected one of"),
    "schedule without a rate": (("schedule", {"name": "Constant", "rate": None}), "schedule: expected one of"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_says(tmp_path: Path, trainers: tuple[ob.Trainer, ob.Trainer], case: str) -> None:
    trainer, _ = trainers
    header, rest = split(valid(trainer, tmp_path / "c"))
    new, message = REFUSED[case]
    text = header["__metadata__"][KEY]
    about = dict([new], **{}) if isinstance(new, tuple) else new
    if isinstance(new, tuple):
        about = json.loads(text) | about
    header["__metadata__"][KEY] = about if isinstance(about, str) else json.dumps(about)
    (tmp_path / "c").write_bytes(joined(header, rest))
    before = snapshot(trainer)
    with pytest.raises(ob.CheckpointError, match=message):
        trainer.load(tmp_path / "c")
    assert snapshot(trainer) == before


def test_tensors_of_another_type(tmp_path: Path, trainers: tuple[ob.Trainer, ob.Trainer]) -> None:
    """They used to be taken, and the next step failed with the old state gone."""
    trainer, _ = trainers
    state = trainer.state()
    state["w1"] = state["w1"].astype(np.float64)
    about = {"steps": 1, "epoch": 0, "batch": 1, "learning_rate": 0.1, "schedule": None}
    write_checkpoint(tmp_path / "c", state, about)
    with pytest.raises(ob.CheckpointError, match="'w1' has type float64, the graph's has float32"):
        trainer.load(tmp_path / "c")
    trainer.step(BATCH)


def test_lengths_that_lie(tmp_path: Path, trainers: tuple[ob.Trainer, ob.Trainer]) -> None:
    trainer, _ = trainers
    path = tmp_path / "c"
    header, rest = split(valid(trainer, path))
    path.write_bytes(joined(header, rest, 2**40))
    with pytest.raises(ob.CheckpointError, match=r"its header has 1,099,511,627,776 bytes. The limit is 100000000"):
        trainer.load(path)
    path.write_bytes(joined(header, rest))
    with limits(header_bytes=10), pytest.raises(ob.CheckpointError, match=r"The limit is 10; .*header_bytes="):
        trainer.load(path)
    trainer.load(path)


def test_no_file_at_all(tmp_path: Path, trainers: tuple[ob.Trainer, ob.Trainer]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", "pipe", ".", "nul\0", 300 * "x"):
        with pytest.raises(ob.CheckpointError, match="cannot read the checkpoint"):
            trainers[0].load(tmp_path / name)


def test_a_load_that_fails_at_the_last_tensor(
    tmp_path: Path, trainers: tuple[ob.Trainer, ob.Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = trainers
    valid(trainer, tmp_path / "c")
    trainer.step(BATCH)
    before, bound, calls = snapshot(trainer), Buffers._bound, []

    def second(self: Buffers, *sets: Any) -> Any:
        calls.append(sets)
        if len(calls) == 2:
            raise MemoryError
        return bound(self, *sets)

    monkeypatch.setattr(Buffers, "_bound", second)
    with pytest.raises(MemoryError):
        trainer.load(tmp_path / "c")
    monkeypatch.undo()
    assert snapshot(trainer) == before
    trainer.step(BATCH)


@pytest.mark.parametrize("value", [v for v in ANYTHING if isinstance(v, dict)], ids=str)
def test_schedules_that_are_none(value: dict[str, Any]) -> None:
    """`restored` answers a schedule that works, or says what is wrong."""
    try:
        schedule = ob.schedules.restored(value)
    except (ob.InvalidArgumentError, TypeError):
        return
    assert np.isfinite([schedule(t) for t in range(5)]).all()
