"""The picture of the super-resolution demo: four versions of each unseen photograph, and the loss curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from models.graphs import replacing
from models.photographs import Array, Comparison, Photograph

CROP = 80  # side length of the shown part, in pixels of the original
CENTRES = {"chelsea": (0.38, 0.38), "coffee": (0.62, 0.67)}  # of the shown part, as shares of width and height
SMOOTHED = 200  # steps


def draw(path: Path, comparisons: Sequence[Comparison], losses: Sequence[float], bicubic_error: float) -> None:
    """Write the picture: a row per photograph, and the loss below.

    bicubic_error: the mean squared error of bicubic up-sampling on the training photographs, for comparison.
    """
    rows = len(comparisons)
    figure = Figure(figsize=(12, 3.4 * rows + 2.6), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    grid = figure.add_gridspec(rows + 1, 4, height_ratios=[*[3.4] * rows, 2.4])
    for row, comparison in enumerate(comparisons):
        for column, (title, image) in enumerate(_panels(comparison)):
            axes = figure.add_subplot(grid[row, column])
            axes.imshow(image, interpolation="nearest")
            axes.set_title(title, fontsize=10)
            axes.set_axis_off()
    _loss_curve(figure.add_subplot(grid[rows, :]), losses, bicubic_error)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)


def _panels(comparison: Comparison) -> list[tuple[str, NDArray[np.uint8]]]:
    photograph, psnr = comparison.photograph, comparison.psnr
    size = photograph.high.size
    box = _box(photograph)
    low = photograph.low.resize(size, Image.Resampling.NEAREST)
    images = [
        (f"{photograph.name}: low resolution, {photograph.low.width} × {photograph.low.height}", low),
        (f"bicubic, {psnr['bicubic']:.2f} dB", in_colour(photograph, comparison.images["bicubic"])),
        (f"model, {psnr['model']:.2f} dB", in_colour(photograph, comparison.images["model"])),
        (f"original, {size[0]} × {size[1]}", photograph.high),
    ]
    return [(title, np.asarray(image.crop(box))) for title, image in images]


def _box(photograph: Photograph) -> tuple[int, int, int, int]:
    """Left, upper, right and lower edge of the shown part, on the grid of the low-resolution pixels."""
    x, y = CENTRES.get(photograph.name, (0.5, 0.5))
    edges = []
    for centre, length in ((x, photograph.high.width), (y, photograph.high.height)):
        start = round(centre * length - CROP / 2) // photograph.scale * photograph.scale
        edges.append(max(0, min(start, length - CROP)))
    left, upper = edges
    return left, upper, left + CROP, upper + CROP


def in_colour(photograph: Photograph, luma: Array) -> Image.Image:
    """An enlarged luma with the colour of the low-resolution photograph, enlarged bicubically."""
    colours = photograph.low.resize(photograph.high.size, Image.Resampling.BICUBIC).convert("YCbCr")
    _, blue, red = colours.split()
    grey = Image.fromarray(np.round(255 * np.clip(luma, 0, 1)).astype(np.uint8))
    return Image.merge("YCbCr", (grey, blue, red)).convert("RGB")


def _loss_curve(axes: Axes, losses: Sequence[float], bicubic_error: float) -> None:
    """The running mean of the loss: single batches differ more by what they show than by how it is enlarged."""
    steps = np.arange(1, len(losses) + 1)
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    starts = np.maximum(steps - SMOOTHED, 0)
    smooth = (sums[steps] - sums[starts]) / (steps - starts)
    axes.plot(steps, smooth, color="tab:blue", label=f"model, mean of the last {SMOOTHED} batches")
    axes.axhline(bicubic_error, color="tab:red", linestyle="--", label="bicubic, on the training photographs")
    axes.set(xlabel="step", ylabel="mean squared error", xlim=(1, max(2, len(losses))))
    bottom, top = min(smooth.min(), bicubic_error), max(smooth.max(), bicubic_error)
    axes.set_ylim(0.8 * bottom, 1.2 * top)
    axes.legend(loc="upper right", frameon=False)
