"""Fine-tuning with few numbers: a vision transformer learns digits that lie on their side, by low-rank adapters.

    python -m models.adapters [--model FILE.onnx] [--targets PATTERN …] [--rank N] [--output FOLDER]

A transformer is trained on scikit-learn's digits as they are. Then digits turned by 90 degrees are learned twice: by
all weights, and by adapters beside frozen ones. Writes upright.onnx, with the adapters as inputs, turned.onnx_adapter
for it and the merged turned.onnx, and tries both in stock onnxruntime. Exit code 0: the adapters hold less than 2 % of
the numbers that full fine-tuning trains, and their model is right on at most 1 % fewer of the turned test digits; 1:
not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto

import onnx_backprop as ob
from models import transformer
from models.digits import Data, digits, turned


def train(
    model: ModelProto,
    data: Data,
    *,
    epochs: int,
    rate: float,
    trainable: Sequence[str] | None = None,
    untie: bool = False,
) -> ob.Trainer:
    """Train a classifier on images and labels; its loss is all that is told."""
    graph = ob.training_graph(model, loss="softmax_cross_entropy", trainable=trainable, optimizer="adamw", untie=untie)
    loader = ob.Batches(dict(zip(graph.inputs, data, strict=True)), 32, seed=0)
    trainer = ob.Trainer(graph)
    steps = epochs * len(loader)
    records = trainer.fit(loader, epochs, schedule=ob.schedules.OneCycle(rate, steps=steps))
    count = sum(value.size for value in trainer.parameters().values())
    print(f"trained {count:,} numbers for {steps} steps: loss {records[-1].loss:.3f}")
    return trainer


def logits(session: onnxruntime.InferenceSession, data: Data, options: Any = None) -> np.ndarray:
    """What a session makes of the images."""
    return np.asarray(session.run(None, {session.get_inputs()[0].name: data[0]}, options)[0])


def accuracy(scores: np.ndarray, data: Data) -> float:
    """The share of images in the right class."""
    return float(np.mean(scores.argmax(axis=1) == data[1]))


def opened(path: Path) -> onnxruntime.InferenceSession:
    """A stock session; it would warn of every input with a default."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, fine-tune twice, measure; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m models.adapters", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", help="a classifier of (N, 1, 8, 8) into ten digits, untrained or not")
    parser.add_argument("--targets", nargs="+", default=["*.attention.*.weight", "embed.weight"], help="(%(default)s)")
    parser.add_argument("--also", nargs="*", default=["positions"], help="trained whole (%(default)s)")
    parser.add_argument("--rank", type=int, default=1, help="of the adapters (%(default)s)")
    parser.add_argument("--width", type=int, default=64, help="of the transformer, without --model (%(default)s)")
    parser.add_argument("--epochs", type=int, default=20, help="of each training (%(default)s)")
    parser.add_argument(
        "--rates", type=float, nargs=2, default=(3e-3, 3e-2), help="all weights, adapters (%(default)s)"
    )
    parser.add_argument("--output", default="demo", help="folder for the models (%(default)s)")
    given = parser.parse_args(arguments)
    folder = Path(given.output)
    folder.mkdir(parents=True, exist_ok=True)
    (upright, test), (training, sideways) = digits(), map(turned, digits())
    model = (
        onnx.load(given.model)
        if given.model
        else transformer.build(classes=10, width=given.width, heads=4, layers=4, image=8)
    )
    first = train(model, upright, epochs=given.epochs, rate=given.rates[0], untie=True)  # exporters merge fresh biases
    base = first.graph.inference_model(first.parameters())
    full = train(base, training, epochs=given.epochs, rate=given.rates[0])
    full.export(folder / "turned_full.onnx")

    adapted = ob.lora(base, given.targets, given.rank, also=given.also)
    tuned = train(adapted.model, training, epochs=given.epochs, rate=given.rates[1], trainable=adapted.trainable)
    values = tuned.parameters()
    onnx.save(adapted.model, folder / "upright.onnx")
    onnx.save(adapted.merge(values), folder / "turned.onnx")
    ob.save_adapter(values, folder / "turned.onnx_adapter")

    session = opened(folder / "upright.onnx")
    adapter, options = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
    adapter.Load(str(folder / "turned.onnx_adapter"))
    options.add_active_adapter(adapter)
    active, merged = logits(session, sideways, options), logits(opened(folder / "turned.onnx"), sideways)
    share = sum(v.size for v in values.values()) / sum(v.size for v in full.parameters().values())
    before, by_all = accuracy(logits(session, sideways), sideways), opened(folder / "turned_full.onnx")
    reached, whole = accuracy(active, sideways), accuracy(logits(by_all, sideways), sideways)
    seen, apart = accuracy(logits(session, test), test), np.abs(active - merged).max()
    print(
        f"right: upright {seen:.1%}; turned {before:.1%} before, {whole:.1%} by all weights, {reached:.1%} by adapters"
    )
    print(f"adapters: {share:.2%} of the numbers; merged, they differ by {apart:.1e}")
    return 0 if share < 0.02 and reached >= whole - 0.01 and np.allclose(active, merged, atol=1e-3) else 1


if __name__ == "__main__":
    sys.exit(main())
