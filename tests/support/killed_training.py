"""A training that is meant to be killed: python -m tests.support.killed_training FOLDER EPOCHS

Resumes from FOLDER/checkpoint where there is one, saves one after every step, and writes step and loss, as the bits
that they are, into FOLDER/losses as soon as a step is over. Ends by writing FOLDER/done.
"""

from __future__ import annotations

import sys
from pathlib import Path

import onnx_backprop as ob
from onnx_backprop.training.history import Record
from onnx_backprop.training.schedules import OneCycle
from tests.support.training_models import data, training


def main(folder: Path, epochs: int) -> None:
    loader = ob.Batches(data(), 7, seed=3)
    trainer = ob.Trainer(training(), seed=4)
    checkpoint = folder / "checkpoint"
    if checkpoint.exists():
        trainer.load(checkpoint)
    with (folder / "losses").open("a", buffering=1) as file:

        def note(_: ob.Trainer, record: Record) -> None:
            file.write(f"{record.step} {record.loss.hex()} {record.learning_rate.hex()}\n")

        schedule = OneCycle(0.05, steps=len(loader) * epochs // 2)
        trainer.fit(loader, epochs, schedule=schedule, checkpoint=checkpoint, every=1, callbacks=[note], progress=False)
    trainer.export(folder / "trained.onnx")
    (folder / "done").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
