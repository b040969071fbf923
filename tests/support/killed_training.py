"""A training that is meant to be killed.

In every FOLDER, each in a thread of its own, a training that resumes from FOLDER/checkpoint where there is one, saves
one after every step, and writes step and loss, as the bits that they are, into FOLDER/losses as soon as a step is over.
FOLDER/ready.<process> tells that it begins; it ends by writing FOLDER/trained.onnx. The mode:

    fit        waits until no other process has the checkpoint
    save       whatever others do: writes with `Trainer.save` alone
    reference  as save, and writes a hash of every checkpoint into FOLDER/hashes
    full       fit, on a disk that is full every other moment, and goes on then; failures are counted in FOLDER/failures
"""

from __future__ import annotations

import hashlib
import io
import os
import random
import resource
import threading
import time
from pathlib import Path

import onnx_backprop as ob
from onnx_backprop.training.checkpoint import held
from onnx_backprop.training.reports.history import Record
from onnx_backprop.training.schedules import OneCycle
from tests.support.training_models import data, training

FULL = 1_000  # bytes that a file may have on a full disk: fewer than a checkpoint or a model has


def train(folder: Path, epochs: int, mode: str) -> tuple[str, int]:
    """The losses that are not in a file yet, and how often writing has failed."""
    loader = ob.Batches(data(), 7, seed=3)
    trainer = ob.Trainer(training(), seed=4)
    checkpoint = folder / "checkpoint"
    file = io.StringIO() if mode == "full" else (folder / "losses").open("a", buffering=1)
    locks, failures = mode in ("fit", "full"), 0

    def note(_: ob.Trainer, record: Record) -> None:
        file.write(f"{record.step} {record.loss.hex()} {record.learning_rate.hex()}\n")
        if not locks:
            trainer.save(checkpoint)
        if mode == "reference":
            with (folder / "hashes").open("a") as hashes:
                hashes.write(f"{trainer.steps} {hashlib.sha256(checkpoint.read_bytes()).hexdigest()}\n")

    def resumed() -> None:
        if checkpoint.exists() and not failures:  # after a failure it goes on from memory
            trainer.load(checkpoint)
        schedule = OneCycle(0.05, steps=len(loader) * epochs // 2)
        saving = {"checkpoint": checkpoint, "every": 1} if locks else {}
        trainer.fit(loader, epochs, schedule=schedule, callbacks=[note], progress=False, **saving)
        trainer.export(folder / "trained.onnx")

    (folder / f"ready.{os.getpid()}").touch()
    while True:
        try:
            if locks:
                with held(checkpoint):
                    resumed()
            else:
                resumed()
            break
        except ob.InvalidArgumentError as e:
            waits = "another training writes" in str(e)
            if not waits and not (mode == "full" and "cannot write" in str(e)):
                raise
            if not waits:
                failures += 1
                if [path for path in folder.iterdir() if path.name.startswith(".")]:
                    raise AssertionError("a part was left") from e
            time.sleep(0.005)
    with file:
        return file.getvalue() if isinstance(file, io.StringIO) else "", failures


def fill_the_disk(done: threading.Event) -> None:
    """Comes and goes; the end of a training finds room."""
    rng = random.Random(5)
    while not done.wait(rng.uniform(0, 0.02)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL, resource.RLIM_INFINITY))
        time.sleep(rng.uniform(0, 0.02))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def main(mode: str, epochs: int, folders: list[Path]) -> int:
    done, ended = threading.Event(), dict[Path, tuple[str, int]]()

    def run(folder: Path) -> None:
        ended[folder] = train(folder, epochs, mode)

    threads = [threading.Thread(target=run, args=(folder,)) for folder in folders]
    disk = threading.Thread(target=fill_the_disk, args=(done,))
    if mode == "full":
        disk.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if mode == "full":
        done.set()
        disk.join()
        for folder, (losses, failures) in ended.items():
            (folder / "losses").write_text(losses)
            (folder / "failures").write_text(str(failures))
    return len(ended) != len(folders)
