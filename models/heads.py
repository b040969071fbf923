"""Fine-tuning: a classifier of the digits 0 … 4 learns all ten from 50 images, by another head and rates by layer.

    python -m models.heads [--epochs N] [--output FOLDER]

A small CNN is trained on those of scikit-learn's digits that are 0 … 4. Its head is replaced by one for ten classes,
which is trained alone on 50 images; then all layers are, the earlier ones at lower rates. Beside it the same network
is trained on these images from scratch, for as many steps. Exit code 0: the head alone is better than before, all
layers are better than the head alone, and than from scratch; 1: not. Writes ten_digits.onnx.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import ModelProto

import onnx_backprop as ob
from models.digits import Data, build, digits

SHOWN, RATE = 50, 1e-2  # images of all digits; the learning rate of the head
GROUPS = [ob.optimizers.Group(parameters=[f"Conv_{n}.*"], rate=0.5 ** (4 - n)) for n in (1, 2, 3)]


def train(model: ModelProto, data: Data, epochs: int, **options: object) -> ModelProto:
    """The model, trained; options: of `training_graph`."""
    given = {"optimizer": "adamw", **options}
    graph = ob.training_graph(model, loss="softmax_cross_entropy", **given)
    loader = ob.Batches(dict(zip(graph.inputs, data, strict=True)), 32, seed=0)
    trainer = ob.Trainer(graph)
    trainer.fit(loader, epochs, schedule=ob.schedules.OneCycle(RATE, steps=epochs * len(loader)))
    return trainer.graph.inference_model(trainer.parameters())


def accuracy(model: ModelProto, data: Data) -> float:
    """The share of images in the right class."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    logits = np.asarray(session.run(["logits"], {"image": data[0]})[0])
    return float(np.mean(logits.argmax(axis=1) == data[1]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Train on five digits, go on with ten, measure; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m models.heads", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=30, help="of each training (%(default)s)")
    parser.add_argument("--output", default="demo", help="folder for the model (%(default)s)")
    given = parser.parse_args(arguments)
    (images, labels), test = digits()
    shown = images[:SHOWN], labels[:SHOWN]
    five = images[labels < 5], labels[labels < 5]
    base = train(ob.replace_head(build(), "logits", 5).model, five, given.epochs)
    head = ob.replace_head(base, "logits", 10, seed=1)
    alone = train(head.model, shown, given.epochs, trainable=head.trainable)
    whole = train(alone, shown, given.epochs, optimizer=ob.optimizers.AdamW(groups=GROUPS))
    scratch = train(build(), shown, 2 * given.epochs)
    before, by_head, after, fresh = (accuracy(model, test) for model in (head.model, alone, whole, scratch))
    folder = Path(given.output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ten_digits.onnx").write_bytes(whole.SerializeToString())
    print(f"right: {before:.1%} before, {by_head:.1%} by the head, {after:.1%} by all layers; from scratch {fresh:.1%}")
    return 0 if before < by_head < after and fresh < after else 1


if __name__ == "__main__":
    sys.exit(main())
