"""Why a classifier decides as it does: Grad-CAM and integrated gradients of an ONNX file, as a picture.

    python -m models.explanations [--model FILE.onnx] [--output FOLDER]

Grad-CAM (Selvaraju et al. 2017): the channels of the last convolution, weighted by the mean gradient of the class by
each, what is negative left out. Integrated gradients (Sundararajan et al. 2017): the pixels times the mean gradient
along the way from a black image; they sum to the difference of the class between both ends, which decides the exit
code: 0 where the sums are right to one percent.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from onnx import ModelProto
from onnx.utils import Extractor

import onnx_backprop as ob
from models import digits
from models.graphs import replacing

Array = NDArray[np.float32]


class Classifier:
    """An image classifier, its gradients by the image, and by the activation that its last convolution leads to."""

    def __init__(self, model: ModelProto) -> None:
        self.image, self.logits = model.graph.input[0].name, model.graph.output[0].name
        self.activation = [node.output[0] for node in model.graph.node if node.op_type in ("Conv", "Relu")][-1]
        inferred = onnx.shape_inference.infer_shapes(model)
        parts = Extractor(inferred)
        self._features = ob.session(parts.extract_model([self.image], [self.activation]))
        head = parts.extract_model([self.activation], [self.logits])
        self._head = ob.session(ob.vjp(head, [self.activation], [self.logits]))
        self._whole = ob.session(ob.vjp(model, [self.image], [self.logits]))

    def scores(self, images: Array) -> Array:
        """The logits (N, classes)."""
        return self.gradients(images, np.zeros(len(images), np.int64))[0]

    def gradients(self, images: Array, classes: NDArray[np.int64]) -> tuple[Array, Array]:
        """The logits, and for each image the gradient of one class by its pixels."""
        return self._run(self._whole, self.image, images, classes)

    def grad_cam(self, images: Array, classes: NDArray[np.int64]) -> Array:
        """(N, H, W), of the size of the last activation, 0 … 1."""
        activation = np.asarray(self._features.run([self.activation], {self.image: images})[0])
        _, gradient = self._run(self._head, self.activation, activation, classes)
        maps = np.maximum((activation * gradient.mean(axis=(2, 3), keepdims=True)).sum(axis=1), 0)
        return maps / np.maximum(maps.max(axis=(1, 2), keepdims=True), 1e-12)

    def integrated_gradients(self, image: Array, label: int, *, steps: int = 256) -> Array:
        """(C, H, W), of one image (C, H, W): all points of the way in one run, at the middle of each step."""
        way = ((np.arange(steps) + 0.5) / steps).astype(np.float32).reshape(-1, 1, 1, 1)
        _, gradient = self.gradients(way * image, np.full(steps, label))
        return image * gradient.mean(axis=0)

    def _run(
        self, session: onnxruntime.InferenceSession, name: str, values: Array, classes: NDArray[np.int64]
    ) -> tuple[Array, Array]:
        count = session.get_outputs()[0].shape[1]
        seed = np.eye(count, dtype=np.float32)[classes]
        feeds = {name: values, f"{self.logits}_grad": seed}
        logits, gradient = (np.asarray(v) for v in session.run([self.logits, f"{name}_grad"], feeds))
        return logits, gradient


def draw(path: Path, images: Array, maps: Array, pixels: Array, titles: Sequence[str]) -> None:
    """A row per image: itself, Grad-CAM on top of it, integrated gradients, red for the class and blue against it."""
    figure = Figure(figsize=(7.5, 2.5 * len(images)), layout="constrained")
    FigureCanvasAgg(figure)
    for row, (image, heat, attribution, title) in enumerate(zip(images, maps, pixels, titles, strict=True)):
        size = (-0.5, image.shape[2] - 0.5, image.shape[1] - 0.5, -0.5)
        limit = float(np.abs(attribution).max())
        for column, name in enumerate((title, "Grad-CAM", "integrated gradients")):
            axes = figure.add_subplot(len(images), 3, 3 * row + column + 1)
            if column < 2:
                axes.imshow(image.mean(axis=0), cmap="gray", extent=size)
            if column == 1:
                axes.imshow(heat, cmap="inferno", alpha=0.6, extent=size, interpolation="bilinear")
            if column == 2:
                axes.imshow(attribution.sum(axis=0), cmap="bwr", vmin=-limit, vmax=limit, extent=size)
            axes.set_title(name, fontsize=10)
            axes.set_axis_off()
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """Explain four digits; returns the exit code."""
    options = argparse.ArgumentParser(prog="python -m models.explanations", description=str(__doc__).partition("\n")[0])
    options.add_argument("--model", help="a classifier of (N, 1, 8, 8) into ten digits (default: one is trained)")
    options.add_argument("--epochs", type=int, default=12, help="of that training (%(default)s)")
    options.add_argument("--output", default="demo", help="folder for the picture (%(default)s)")
    given = options.parse_args(arguments)
    folder = Path(given.output)
    folder.mkdir(parents=True, exist_ok=True)
    training, test = digits.digits()
    source = Path(given.model) if given.model else folder / "digits.onnx"
    if not given.model:
        digits.train(digits.build(), training, epochs=given.epochs, rate=1e-2).export(source)
    classifier = Classifier(onnx.load(source))
    images = test[0][:4]
    scores = classifier.scores(images)
    classes = scores.argmax(axis=1)
    pixels = np.stack([classifier.integrated_gradients(i, int(c)) for i, c in zip(images, classes, strict=True)])
    black = classifier.scores(np.zeros_like(images[:1]))[0]
    wanted = scores[np.arange(len(images)), classes] - black[classes]
    off = float(np.abs(pixels.sum(axis=(1, 2, 3)) / wanted - 1).max())
    picture = folder / "explanations.png"
    titles = [f"a {label}, taken for {c}" for label, c in zip(test[1][:4], classes, strict=True)]
    draw(picture, images, classifier.grad_cam(images, classes), pixels, titles)
    print(f"integrated gradients sum to the class's score to {off:.2%}")
    print(f"written: {picture}")
    return 0 if off < 0.01 else 1


if __name__ == "__main__":
    sys.exit(main())
