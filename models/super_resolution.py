"""The demo: a super-resolution network learns from photographs in stock onnxruntime and beats bicubic up-sampling.

    python -m models.super_resolution [--steps N] [--seconds S] [--output FOLDER]

1. Build the forward network as plain ONNX.   2. Convert it with `training_graph(model, loss="mse", optimizer=Adam)`.
3. Train it with a `Trainer` on patches of photographs.   4. Take the trained network out of the training graph and
compare it, in an onnxruntime session without any extension, with cubic up-sampling on two photographs it has not
seen. Exit code 0: it is better on both; 1: it is not; 2: bad arguments.

Into the folder go super_resolution.png, training.onnx (forward, loss, gradients, update) and model.onnx (the trained
network).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import onnxruntime
from onnx import ModelProto
from tqdm import tqdm

import onnx_backprop as ob
from models.graphs import Network, save
from models.photographs import TESTING, TRAINING, Array, Comparison, Patches, bicubic_error, compare, load
from models.pictures import draw

SCALE = 2
PATCH = 20  # pixels at low resolution
BATCH = 8
RATE = 4e-3  # of Adam at its highest
RISE = 100  # steps; Adam's first ones are as long as the rate allows, however small the gradients
Parameters = dict[str, Array]


def build(*, scale: int = SCALE, features: int = 20, layers: int = 3, seed: int = 0) -> ModelProto:
    """Super-resolution of luma: low (N, 1, H, W) -> high (N, 1, scale·H, scale·W).

    Features at low resolution: 5×5 Conv + PRelu, then `layers` times 3×3 Conv + PRelu. Two branches bring them to
    high resolution: a ConvTranspose, and a 1×1 Conv, Resize linear, 3×3 Conv. Their sum corrects the image itself,
    enlarged by Resize linear. Both branches start at zero, so that training starts from linear interpolation.
    """
    net = Network("super_resolution", seed=seed)
    low = net.input("low", 1)
    x = net.prelu(net.conv(low, features, kernel=5))
    for _ in range(layers):
        x = net.prelu(net.conv(x, features, kernel=3))
    learned = net.conv_transpose(x, 1, kernel=scale + 2, scale=scale, pad=1, zero=True)
    smooth = net.resize(net.conv(x, 4, kernel=1), scale, mode="linear", coordinate_transformation_mode="half_pixel")
    correction = net.add(learned, net.conv(smooth, 1, kernel=3, zero=True))
    skip = net.resize(low, scale, mode="linear", coordinate_transformation_mode="half_pixel")
    return net.model("high", net.add(skip, correction), size=("H_up", "W_up"))


@dataclass(frozen=True)
class Training:
    """What a training has come to: the parameters, the loss of every step, and the time taken."""

    parameters: Parameters
    losses: list[float]
    seconds: float


def training_graph(model: ModelProto) -> ob.TrainingGraph:
    """Mean squared error and Adam, in one graph with the network."""
    return ob.training_graph(model, loss="mse", optimizer=ob.optimizers.Adam(beta2=0.99))


def train(
    graph: ob.TrainingGraph, patches: Patches, *, steps: int, seconds: float = math.inf, quiet: bool = False
) -> Training:
    """Minimise the loss; the learning rate rises over some steps and falls along half a cosine to 0.

    Ends after `steps` steps, or earlier, after one at least, when `seconds` are over. The cosine runs over whichever
    is further on, so that a slow machine ends with a small learning rate too; where time is no limit, the same
    patches give the same parameters. Errors: FloatingPointError when the loss is no longer a finite number.
    """
    trainer = ob.Trainer(graph)
    low_name, target_name = graph.inputs
    losses: list[float] = []
    start = time.perf_counter()
    pause = 0.2 if sys.stderr.isatty() else 15  # a log file wants few lines
    with tqdm(total=steps, desc="training", unit="step", mininterval=pause, disable=quiet) as bar:
        while len(losses) < steps:
            progress = max(len(losses) / steps, (time.perf_counter() - start) / seconds)
            if losses and progress >= 1:
                break
            low, high = patches.batch(BATCH)
            warm = min(1, (len(losses) + 1) / RISE)
            trainer.learning_rate = RATE * warm * (1 + math.cos(math.pi * min(progress, 1))) / 2
            loss = trainer.step({low_name: low, target_name: high})
            losses.append(loss)
            bar.set_postfix_str(f"loss {np.mean(losses[-100:]):.6f}", refresh=False)
            bar.update()
    return Training(trainer.parameters(), losses, time.perf_counter() - start)


def enlarge(model: onnxruntime.InferenceSession, low: Array) -> Array:
    """The model's answer to one luma image (H, W), as (scale·H, scale·W)."""
    (high,) = cast("list[Array]", model.run(None, {"low": low[None, None]}))
    return high[0, 0]


def table(comparisons: Sequence[Comparison]) -> str:
    """PSNR of each method on each photograph; the gain is over the better of the others."""
    methods = list(comparisons[0].psnr)
    lines = [f"{'PSNR of luma in dB':20}" + "".join(f"{name:>14}" for name in [*methods, "gain"])]
    for c in comparisons:
        values = "".join(f"{c.psnr[name]:14.2f}" for name in methods)
        lines.append(f"{c.photograph.name:20}{values}{c.gain:+14.2f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    given = _arguments(arguments)
    folder = Path(given.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        training_photographs = [load(name, SCALE) for name in TRAINING]
        unseen = [load(name, SCALE) for name in TESTING]
    except OSError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    model = build(seed=given.seed)
    graph = training_graph(model)
    graph.save(folder / "training.onnx")
    _describe(graph)
    patches = Patches(training_photographs, size=PATCH, seed=given.seed)
    try:
        training = train(graph, patches, steps=given.steps, seconds=given.seconds)
    except KeyboardInterrupt:
        print("interrupted: no model and no picture written", file=sys.stderr)
        return 130
    except FloatingPointError as e:
        print(f"the training has failed: {e}", file=sys.stderr)
        return 1
    save(graph.inference_model(training.parameters), folder / "model.onnx")
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    comparisons = [compare(photograph, enlarge(session, photograph.low_luma)) for photograph in unseen]
    draw(folder / "super_resolution.png", comparisons, training.losses, bicubic_error(training_photographs))
    _report(training, comparisons, folder)
    worse = [c.photograph.name for c in comparisons if c.gain <= 0]
    if worse:
        print(f"the model does not beat cubic up-sampling on {', '.join(worse)}; train it longer", file=sys.stderr)
    return 1 if worse else 0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m models.super_resolution",
        description="Train a super-resolution network in stock onnxruntime and compare it with bicubic up-sampling.",
    )
    parser.add_argument("--steps", type=int, default=10000, help="training steps (%(default)s)")
    parser.add_argument("--seconds", type=float, default=150, help="end the training after these (%(default)s)")
    parser.add_argument("--output", default="demo", help="folder for the picture and the models (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the patches (%(default)s)")
    given = parser.parse_args(arguments)
    if given.steps < 1:
        parser.error(f"--steps: expected at least 1, got {given.steps}")
    if not given.seconds > 0:
        parser.error(f"--seconds: expected more than 0, got {given.seconds}")
    if given.seed < 0:
        parser.error(f"--seed: expected at least 0, got {given.seed}")
    return given


def _describe(graph: ob.TrainingGraph) -> None:
    operators = Counter(node.op_type for node in graph.model.graph.node if node.domain == ob.DOMAIN)
    weights = sum(value.size for value in graph.initial_values().values())
    print(f"network: {weights} weights in {len(graph.parameters)} parameters, up-sampling ×{SCALE}")
    print("gradient operators: " + ", ".join(f"{name} × {count}" for name, count in sorted(operators.items())))


def _report(training: Training, comparisons: Sequence[Comparison], folder: Path) -> None:
    losses, count = training.losses, len(training.losses)
    ends = min(100, count)
    print(
        f"{count} steps in {training.seconds:.0f} s, {1000 * training.seconds / count:.1f} ms each; loss (mean of "
        f"{ends} steps) {np.mean(losses[:ends]):.6f} -> {np.mean(losses[-ends:]):.6f}\n"
    )
    print(table(comparisons))
    names = ("super_resolution.png", "training.onnx", "model.onnx")
    print("\nwritten: " + ", ".join(str(folder / name) for name in names))


if __name__ == "__main__":
    sys.exit(main())
