"""Fine-tuning: a digit classifier, given as an ONNX file, learns digits that lie on their side.

    python -m models.digits [--model FILE.onnx] [--output FOLDER]

Without a file, a small CNN is trained on scikit-learn's digits as they are and written to digits.onnx: input
`image` (N, 1, 8, 8), output `logits` (N, 10). Then its first two convolutions are frozen and the rest is trained on
digits turned by 90 degrees. Exit code 0: at least nine in ten of the turned test digits are right afterwards; 1: not.
Writes digits_turned.onnx.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto
from sklearn.datasets import load_digits

import onnx_backprop as ob
from models.graphs import Network

Data = tuple[NDArray[np.float32], NDArray[np.int64]]


def digits() -> tuple[Data, Data]:
    """Images (N, 1, 8, 8) in 0 … 1 and labels, to train on and to test on."""
    pixels, target = load_digits(return_X_y=True)
    images = (np.asarray(pixels).reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    labels = np.asarray(target).astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[:1400], order[1400:]
    return (images[train], labels[train]), (images[test], labels[test])


def turned(data: Data) -> Data:
    """The same digits on their side."""
    return np.ascontiguousarray(np.rot90(data[0], axes=(2, 3))), data[1]


def build(*, seed: int = 0) -> ModelProto:
    """Digits: image (N, 1, H, W) -> logits (N, 10). Three 3×3 Conv + Relu, a MaxPool, the mean, a linear layer."""
    net = Network("digits", seed=seed)
    x = net.relu(net.conv(net.input("image", 1), 16, kernel=3))
    x = net.max_pool(net.relu(net.conv(x, 32, kernel=3)))
    x = net.relu(net.conv(x, 64, kernel=3))
    return net.model("logits", net.classify(x, 10), size=())


def train(
    model: ModelProto | Path, data: Data, *, epochs: int, rate: float, frozen: Sequence[str] = (), seed: int = 0
) -> ob.Trainer:
    """Train a classifier on images and labels."""
    graph = ob.training_graph(model, loss="softmax_cross_entropy", frozen=frozen, optimizer="adamw")
    print(graph.summary())
    name, labels = graph.inputs
    loader = ob.Batches({name: data[0], labels: data[1]}, 32, seed=seed)
    trainer = ob.Trainer(graph)
    trainer.fit(loader, epochs, schedule=ob.schedules.OneCycle(rate, steps=epochs * len(loader)))
    return trainer


def accuracy(path: Path, data: Data) -> float:
    """The share of images that a model puts into the right class."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    logits = np.asarray(session.run(None, {session.get_inputs()[0].name: data[0]})[0])
    return float(np.mean(logits.argmax(axis=1) == data[1]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Train where nothing is given, fine-tune, measure; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m models.digits", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", help="a classifier of (N, 1, 8, 8) into ten digits (default: one is trained)")
    parser.add_argument(
        "--frozen", nargs="*", default=["Conv_[12].*"], help="parameters that fine-tuning leaves (%(default)s)"
    )
    parser.add_argument("--epochs", type=int, default=12, help="of each training (%(default)s)")
    parser.add_argument("--output", default="demo", help="folder for the models (%(default)s)")
    given = parser.parse_args(arguments)
    folder = Path(given.output)
    folder.mkdir(parents=True, exist_ok=True)
    training, test = digits()
    source = Path(given.model) if given.model else folder / "digits.onnx"
    if not given.model:
        train(build(), training, epochs=given.epochs, rate=1e-2).export(source)
    target = folder / "digits_turned.onnx"
    train(source, turned(training), epochs=given.epochs, rate=1e-2, frozen=given.frozen).export(target)
    upright, before, after = accuracy(source, test), accuracy(source, turned(test)), accuracy(target, turned(test))
    print(f"right: upright {upright:.1%}; turned {before:.1%} before, {after:.1%} after")
    print(f"written: {source}, {target}")
    return 0 if after >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
