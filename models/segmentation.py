"""Segmentation: a U-Net learns from a photograph where the coins are, and beats a threshold on coins it has not seen.

    python -m models.segmentation [--steps N] [--seconds S] [--output FOLDER]

The masks are computed from the photograph: watershed on its gradient from sure coin and sure ground. The network sees
it under light that falls off, with noise; trained on the left of the picture, it is measured on the right by the
intersection over union, beside Otsu's threshold on the same picture. Exit code 0: better than that; 1: not. Writes
segmentation.onnx, the trained network.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage
from skimage import filters, segmentation
from tqdm import tqdm

import onnx_backprop as ob
from models import unet_conv_transpose

Array = NDArray[np.float32]
SIZE, BATCH, RATE = 48, 8, 4e-3
SPLIT = 0.66  # share of the width to train on


def photograph() -> Array:
    """The coins of scikit-image, 0 … 1; (H, W) cut to multiples of 4."""
    with (files("skimage") / "data" / "coins.png").open("rb") as file, Image.open(file) as image:
        pixels = (np.asarray(image.convert("L")) / 255).astype(np.float32)
    return pixels[: pixels.shape[0] // 4 * 4, : pixels.shape[1] // 4 * 4]


def mask_of(image: Array) -> Array:
    """1 where a coin is: watershed from what is surely dark and surely bright."""
    markers = np.zeros(image.shape, np.int32)
    markers[image < 30 / 255] = 1
    markers[image > 150 / 255] = 2
    regions = segmentation.watershed(filters.sobel(image), markers)
    return np.asarray(ndimage.binary_fill_holes(regions == 2), np.float32)


def disturbed(image: Array, rng: np.random.Generator) -> Array:
    """Light that falls off along a random direction, and noise."""
    height, width = image.shape
    angle = rng.uniform(0, 2 * math.pi)
    rows, columns = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
    light = 1 + 0.5 * (rows * math.sin(angle) + columns * math.cos(angle)) / math.sqrt(2)
    return (image * light + 0.05 * rng.standard_normal(image.shape)).astype(np.float32)


class Patches:
    """An endless supply of pairs of patches (count, 1, SIZE, SIZE), the same for the same seed."""

    def __init__(self, image: Array, mask: Array, *, seed: int) -> None:
        self._image, self._mask = image, mask
        self._rng = np.random.default_rng(seed)

    def batch(self, count: int) -> tuple[Array, Array]:
        """Disturbed patches and their masks."""
        pairs = [self._pair() for _ in range(count)]
        images, masks = (np.stack(part)[:, None] for part in zip(*pairs, strict=True))
        return images, masks

    def _pair(self) -> tuple[Array, Array]:
        row, column = (int(self._rng.integers(length - SIZE + 1)) for length in self._image.shape)
        cut = np.s_[row : row + SIZE, column : column + SIZE]
        turns = int(self._rng.integers(4))
        return np.rot90(disturbed(self._image[cut], self._rng), turns), np.rot90(self._mask[cut], turns)


def overlap(predicted: NDArray[np.bool_], mask: Array) -> float:
    """Intersection over union."""
    true = mask > 0.5
    return float(np.sum(predicted & true) / np.sum(predicted | true))


def train(patches: Patches, *, steps: int, seconds: float = math.inf, seed: int = 0, quiet: bool = False) -> ob.Trainer:
    """Train the network; ends after `steps` steps or, after one at least, when the time is over."""
    optimizer = ob.optimizers.AdamW(weight_decay=1e-4, clip_norm=1.0)
    graph = ob.training_graph(
        unet_conv_transpose.build(features=8, levels=2, seed=seed), loss="bce_with_logits", optimizer=optimizer
    )
    trainer = ob.Trainer(graph)
    schedule = ob.schedules.Warmup(ob.schedules.Cosine(RATE, steps=steps), steps=min(30, steps))
    start = time.perf_counter()
    for step in tqdm(range(steps), desc="training", unit="step", disable=quiet):
        trainer.learning_rate = schedule(step)
        image, mask = patches.batch(BATCH)
        trainer.step(image=image, target=mask)
        if time.perf_counter() - start > seconds:
            break
    return trainer


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, measure, write; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m models.segmentation", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--steps", type=int, default=600, help="training steps (%(default)s)")
    parser.add_argument("--seconds", type=float, default=120, help="end the training after these (%(default)s)")
    parser.add_argument("--output", default="demo", help="folder for the network (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and patches (%(default)s)")
    given = parser.parse_args(arguments)
    folder = Path(given.output)
    folder.mkdir(parents=True, exist_ok=True)
    image = photograph()
    mask = mask_of(image)
    edge = int(SPLIT * image.shape[1]) // 4 * 4
    trainer = train(
        Patches(image[:, :edge], mask[:, :edge], seed=given.seed),
        steps=given.steps,
        seconds=given.seconds,
        seed=given.seed,
    )
    trainer.export(folder / "segmentation.onnx")
    session = onnxruntime.InferenceSession(folder / "segmentation.onnx", providers=["CPUExecutionProvider"])
    unseen, truth = disturbed(image[:, edge:], np.random.default_rng(given.seed + 1)), mask[:, edge:]
    logits = np.asarray(session.run(None, {"image": unseen[None, None]})[0])[0, 0]
    network, threshold = overlap(logits > 0, truth), overlap(unseen > filters.threshold_otsu(unseen), truth)
    print(f"intersection over union on unseen coins: network {network:.3f}, Otsu's threshold {threshold:.3f}")
    print(f"written: {folder / 'segmentation.onnx'}")
    return 0 if network > threshold else 1


if __name__ == "__main__":
    sys.exit(main())
