"""Checkpoints and logs that cannot be written for a while: the error says so, and the training goes on from memory."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_backprop as ob
from onnx_backprop.training.checkpoint import held, read_checkpoint
from onnx_backprop.training.reports.history import Record, read_log
from tests.onnx_backprop.command.test_train_command import folder as folder
from tests.support.training_models import data, training

EPOCHS = 3


def fitted(trainer: ob.Trainer, checkpoint: Path | None = None, **more: Any) -> list[Record]:
    loader = ob.Batches(data(), 7, seed=3)
    saving = {} if checkpoint is None else {"checkpoint": checkpoint, "every": 1}
    return trainer.fit(loader, EPOCHS, progress=False, **saving, **more)


@pytest.fixture(scope="module")
def undisturbed() -> ob.Trainer:
    trainer = ob.Trainer(training(), seed=4)
    fitted(trainer)
    return trainer


FAULTS = {
    "full": (os, "fsync", errno.ENOSPC, "No space left on device"),
    "read-only": (Path, "open", errno.EROFS, "Read-only file system"),
    "not ours": (Path, "replace", errno.EACCES, "Permission denied"),
}


@pytest.mark.parametrize("last", [False, True], ids=["on the way", "at the last step"])
@pytest.mark.parametrize("fault", FAULTS)
def test_goes_on_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: ob.Trainer, fault: str, last: bool
) -> None:
    owner, name, number, message = FAULTS[fault]
    trainer, failing = ob.Trainer(training(), seed=4), (EPOCHS * 9 - 1 if last else 13)

    def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    def note(_: ob.Trainer, record: Record) -> None:
        if record.step == failing:
            monkeypatch.setattr(owner, name, refused)

    with pytest.raises(ob.InvalidArgumentError, match=f"cannot write the checkpoint .*: {message}"):
        fitted(trainer, tmp_path / "c", callbacks=[note])
    assert trainer.steps == failing + 1
    monkeypatch.undo()
    assert read_checkpoint(tmp_path / "c")[1]["steps"] == failing
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    fitted(trainer, tmp_path / "c")
    assert read_checkpoint(tmp_path / "c")[1]["steps"] == EPOCHS * 9
    for name, value in undisturbed.state().items():
        np.testing.assert_array_equal(trainer.state()[name], value, err_msg=name)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no such device")
def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    trainer = ob.Trainer(training(), seed=4)

    def note(_: ob.Trainer, record: Record) -> None:
        if record.step == 4:
            full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, descriptor(tmp_path / "log.csv"))
            os.close(full)

    with pytest.raises(ob.InvalidArgumentError, match=r"cannot write the log .*log.csv: No space left on device"):
        fitted(trainer, tmp_path / "c", log=tmp_path / "log.csv", callbacks=[note])
    assert [record.step for record in read_log(tmp_path / "log.csv")] == [0, 1, 2, 3, 4]
    trainer.load(tmp_path / "c")
    fitted(trainer, tmp_path / "c", log=tmp_path / "log.csv")
    assert [record.step for record in read_log(tmp_path / "log.csv")] == list(range(EPOCHS * 9))


def descriptor(path: Path) -> int:
    """By which this process has a file open."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.path.samestat(os.stat(f"/proc/self/fd/{name}"), path.stat()):
                return int(name)
        except OSError:
            continue
    raise AssertionError(path)


def test_no_place_to_write(tmp_path: Path) -> None:
    """Told before the first step."""
    trainer = ob.Trainer(training(), seed=4)
    (tmp_path / "file").touch()
    for path in (tmp_path / "missing" / "c", tmp_path / "file" / "c", tmp_path / "nul\0"):
        with pytest.raises(ob.InvalidArgumentError, match="cannot write "):
            fitted(trainer, path)
    assert trainer.steps == 0


def test_one_training_at_a_time(tmp_path: Path) -> None:
    trainer, other = ob.Trainer(training(), seed=4), ob.Trainer(training(), seed=4)

    def second(_: ob.Trainer, record: Record) -> None:
        if record.step == 3:
            other.save(tmp_path / "c")  # whole files are anyone's to write
            import contextvars

            with pytest.raises(
                ob.InvalidArgumentError, match="another training writes the checkpoint .*c. Name another"
            ):
                contextvars.Context().run(fitted, other, tmp_path / "c")

    with held(tmp_path / "c"):  # by this one
        fitted(trainer, tmp_path / "c", callbacks=[second])
    assert other.steps == 0
    fitted(other, tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGTERM")
def test_the_command_is_terminated(folder: Path) -> None:
    """In the middle of a training it leaves a checkpoint, and no part of one and no lock."""
    options = (
        "train model.onnx -o out.onnx --data data.npz --loss softmax_cross_entropy --epochs 100000 --every 1 --quiet"
    )
    code = f"import sys; sys.path[:] = {sys.path}; from onnx_backprop_command import main; sys.exit(main())"
    with subprocess.Popen([sys.executable, "-c", code, *options.split()], cwd=folder) as process:
        deadline = time.monotonic() + 60
        while not (folder / "out.onnx.checkpoint.safetensors").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["data.npz", "model.onnx", "out.onnx.checkpoint.safetensors"]
    assert read_checkpoint(folder / "out.onnx.checkpoint.safetensors")[1]["steps"] > 0
