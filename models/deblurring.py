"""An inverse problem: the *input* of a model is optimised until its output is the blurred photograph that was given.

    python -m models.deblurring [--steps N] [--output FOLDER]

The model blurs: `image` -> `blurred`, and compares: cost = mean (blurred - given)² + λ · mean |differences of
neighbours|. `ob.backward(model, wrt=["image"])` adds d cost / d image, and Adam walks down along it. Exit code 0: the
image found is closer to the original than the blurred one, by PSNR; 1: not. Writes deblurring.png.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper, parser
from PIL import Image
from tqdm import tqdm

import onnx_backprop as ob
from models.graphs import replacing
from models.photographs import load, psnr

Array = NDArray[np.float32]
WIDTH, NOISE, SMOOTHNESS = 9, 0.005, 0.002


def kernel(width: int = WIDTH) -> Array:
    """A Gaussian of `width` × `width` taps that sum to 1."""
    at = np.arange(width) - width // 2
    line = np.exp(-(at**2) / (2 * (width / 5) ** 2))
    return (np.outer(line, line) / line.sum() ** 2).astype(np.float32)


def build() -> ModelProto:
    """(image, given) (1, 1, H, W) -> cost, blurred. Blur, mean squared error and total variation."""
    pad, smooth = WIDTH // 2, SMOOTHNESS
    model = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        deblurring (float[1, 1, H, W] image, float[1, 1, H, W] given) => (float cost, float[1, 1, H, W] blurred)
        {{
            blurred = Conv<pads = [{pad}, {pad}, {pad}, {pad}]>(image, blur)
            error = Sub(blurred, given)
            squares = Mul(error, error)
            fidelity = ReduceMean<keepdims = 0>(squares)
            down = Conv(image, rows)
            right = Conv(image, columns)
            steep_down = Abs(down)
            steep_right = Abs(right)
            mean_down = ReduceMean<keepdims = 0>(steep_down)
            mean_right = ReduceMean<keepdims = 0>(steep_right)
            variation = Add(mean_down, mean_right)
            weight = Constant<value_float = {smooth}>()
            penalty = Mul(weight, variation)
            cost = Add(fidelity, penalty)
        }}
    """)
    filters: dict[str, np.ndarray] = {"blur": kernel(), "rows": np.array([[-1], [1]]), "columns": np.array([[-1, 1]])}
    model.graph.initializer.extend(
        numpy_helper.from_array(taps[None, None].astype(np.float32), name) for name, taps in filters.items()
    )
    return model


def solve(
    model: ModelProto, given: Array, *, steps: int, rate: float = 0.01, quiet: bool = False
) -> tuple[Array, list[float]]:
    """The image that the model blurs into `given`, and the cost of every step: Adam, starting from `given`."""
    session = ob.session(ob.backward(model, wrt=["image"], of=["cost"]))
    image, costs = given.copy(), []
    mean, square = np.zeros_like(image), np.zeros_like(image)
    for step in tqdm(range(1, steps + 1), desc="deblurring", unit="step", disable=quiet):
        cost, gradient = map(np.asarray, session.run(["cost", "image_grad"], {"image": image, "given": given}))
        costs.append(float(cost))
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.99 * square + 0.01 * gradient**2
        direction = mean / (1 - 0.9**step) / (np.sqrt(square / (1 - 0.99**step)) + 1e-12)
        image = np.clip(image - rate * direction / (1 + 4 * step / steps), 0, 1).astype(np.float32)
    return image, costs


def blurred(model: ModelProto, image: Array, seed: int) -> Array:
    """What the model makes of an image, with a little noise."""
    (result,) = ob.session(model).run(["blurred"], {"image": image, "given": image})
    noise = NOISE * np.random.default_rng(seed).standard_normal(image.shape)
    return (np.asarray(result) + noise).astype(np.float32)


def main(arguments: Sequence[str] | None = None) -> int:
    """Blur, deblur, measure; returns the exit code."""
    parser_ = argparse.ArgumentParser(prog="python -m models.deblurring", description=str(__doc__).partition("\n")[0])
    parser_.add_argument("--steps", type=int, default=200, help="(%(default)s)")
    parser_.add_argument("--output", default="demo", help="folder for the picture (%(default)s)")
    parser_.add_argument("--seed", type=int, default=0, help="of the noise (%(default)s)")
    options = parser_.parse_args(arguments)
    original = load("chelsea.png", 2).low_luma[None, None]
    model = build()
    given = blurred(model, original, options.seed)
    image, costs = solve(model, given, steps=options.steps)
    border = WIDTH  # the blur sees zeros beyond the edge
    before, after = (psnr(x[0, 0], original[0, 0], border=border) for x in (given, image))
    print(f"cost {costs[0]:.6f} -> {costs[-1]:.6f}; PSNR {before:.2f} dB blurred, {after:.2f} dB deblurred")
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    row = np.concatenate([x[0, 0] for x in (original, given, image)], axis=1)
    with replacing(folder / "deblurring.png") as temporary:
        Image.fromarray(np.rint(255 * np.clip(row, 0, 1)).astype(np.uint8)).save(temporary, format="png")
    print(f"written: {folder / 'deblurring.png'} (original, blurred, deblurred)")
    return 0 if after > before else 1


if __name__ == "__main__":
    sys.exit(main())
