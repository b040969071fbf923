"""Real photographs, made smaller and cut into patches: the data of the super-resolution demo.

The files lie in the wheel of scikit-image and are read from there; nothing is downloaded. Values are the luma of
ITU-R BT.601, Y = 0.299 R + 0.587 G + 0.114 B, in 0 … 1, as usual in super-resolution: the eye resolves brightness
finer than colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from skimage import transform

Array = NDArray[np.float32]
Enlarge = Callable[[Array, int], Array]

TRAINING = (
    "astronaut.png",
    "brick.png",
    "camera.png",
    "coins.png",
    "grass.png",
    "gravel.png",
    "ihc.png",
    "motorcycle_left.png",
    "rocket.jpg",
)
TESTING = ("chelsea.png", "coffee.png")

LUMA = np.array([0.299, 0.587, 0.114])


@dataclass(frozen=True)
class Photograph:
    """A photograph in two sizes, 8 bits a channel, the larger exactly `scale` times the smaller."""

    name: str
    low: Image.Image
    high: Image.Image

    @property
    def scale(self) -> int:
        """How many pixels of the original lie side by side in one of the smaller image."""
        return self.high.width // self.low.width

    @cached_property
    def low_luma(self) -> Array:
        """Luma of the smaller image, (H, W) in 0 … 1."""
        return luma(self.low)

    @cached_property
    def high_luma(self) -> Array:
        """Luma of the original, (scale·H, scale·W) in 0 … 1."""
        return luma(self.high)


def load(name: str, scale: int) -> Photograph:
    """Read a photograph and make it smaller: each pixel is the mean of a scale × scale block, as on a sensor.

    Rows and columns beyond a multiple of `scale` are cut off. Errors: FileNotFoundError when scikit-image has no
    such file.
    """
    path = files("skimage") / "data" / name
    if not path.is_file():
        raise FileNotFoundError(f"scikit-image {version('scikit-image')} does not bring the photograph {name}: {path}")
    with path.open("rb") as file, Image.open(file) as image:
        pixels = np.asarray(image.convert("RGB"))
    height, width = pixels.shape[0] // scale, pixels.shape[1] // scale
    high = pixels[: height * scale, : width * scale]
    means = high.reshape(height, scale, width, scale, 3).mean(axis=(1, 3))
    low = np.rint(means).astype(np.uint8)  # Pillow's own box filter rounds twice, and upwards
    return Photograph(Path(name).stem, Image.fromarray(low), Image.fromarray(high))


def luma(image: Image.Image) -> Array:
    """Y = 0.299 R + 0.587 G + 0.114 B in 0 … 1, from an image of 8 bits a channel."""
    return (np.asarray(image, np.float64) @ LUMA / 255).astype(np.float32)


def bicubic(image: Array, scale: int) -> Array:
    """Up-sampling by Keys' cubic convolution with a = -1/2, which image programs call bicubic."""
    height, width = image.shape
    return np.asarray(Image.fromarray(image).resize((width * scale, height * scale), Image.Resampling.BICUBIC))


def cubic_spline(image: Array, scale: int) -> Array:
    """Up-sampling by a cubic spline through the pixels, scikit-image's `resize` of order 3; sharper than `bicubic`."""
    shape = tuple(scale * length for length in image.shape)
    return np.asarray(transform.resize(image, shape, order=3, mode="reflect", clip=False), np.float32)


def psnr(image: Array, original: Array, *, border: int = 0) -> float:
    """Peak signal to noise ratio, -10 · log10(mean((image - original)²)) in dB, of values in 0 … 1.

    `image` is clipped to 0 … 1 first, as a display would; `border` pixels are left out on every side. Equal images
    have infinite PSNR. Errors: ValueError for different shapes, or when the border leaves nothing.
    """
    if image.shape != original.shape:
        raise ValueError(f"psnr: expected images of one shape, got {image.shape} and {original.shape}")
    inside = tuple(slice(border, length - border) for length in image.shape)
    difference = np.clip(image, 0, 1)[inside].astype(np.float64) - original[inside]
    if not difference.size:
        raise ValueError(f"psnr: a border of {border} leaves nothing of {image.shape}")
    error = float(np.mean(difference**2))
    return -10 * math.log10(error) if error else math.inf


def bicubic_error(photographs: Sequence[Photograph]) -> float:
    """Mean squared error of `bicubic` over all pixels of some photographs."""
    differences = [bicubic(p.low_luma, p.scale).ravel() - p.high_luma.ravel() for p in photographs]
    return float(np.mean(np.concatenate(differences).astype(np.float64) ** 2))


@dataclass(frozen=True)
class Comparison:
    """One photograph enlarged by several methods (luma), and the PSNR of each in dB."""

    photograph: Photograph
    images: dict[str, Array]
    psnr: dict[str, float]

    @property
    def gain(self) -> float:
        """PSNR of the model less that of the best other method, in dB."""
        return self.psnr["model"] - max(value for name, value in self.psnr.items() if name != "model")


def compare(photograph: Photograph, model: Array) -> Comparison:
    """Measure a model's luma, (scale·H, scale·W), beside two cubic methods.

    PSNR leaves out a border of 2 · scale pixels, where every method has to invent what lies outside.
    """
    low, scale = photograph.low_luma, photograph.scale
    images = {"bicubic": bicubic(low, scale), "cubic spline": cubic_spline(low, scale), "model": model}
    measured = {name: psnr(image, photograph.high_luma, border=2 * scale) for name, image in images.items()}
    return Comparison(photograph, images, measured)


class Patches:
    """An endless supply of random pairs of patches from photographs, the same for the same seed.

    A photograph is drawn in proportion to its pixels, the place uniformly, then one of the eight symmetries of the
    square.
    """

    def __init__(self, photographs: Sequence[Photograph], *, size: int, seed: int) -> None:
        """`size`: side length of the low-resolution patches. ValueError when a photograph is smaller."""
        for photograph in photographs:
            if min(photograph.low.size) < size:
                raise ValueError(f"patches of {size} pixels: {photograph.name} has only {photograph.low.size}")
        self._photographs = photographs
        self._size = size
        self._rng = np.random.default_rng(seed)
        pixels = np.array([photograph.low_luma.size for photograph in photographs], np.float64)
        self._shares = pixels / pixels.sum()

    def batch(self, count: int) -> tuple[Array, Array]:
        """(count, 1, size, size) and (count, 1, scale·size, scale·size)."""
        chosen = self._rng.choice(len(self._photographs), count, p=self._shares)
        pairs = [self._pair(self._photographs[n]) for n in chosen]
        low, high = (np.stack(patches)[:, None] for patches in zip(*pairs, strict=True))
        return low, high

    def _pair(self, photograph: Photograph) -> tuple[Array, Array]:
        low, scale, size = photograph.low_luma, photograph.scale, self._size
        row, column = (int(self._rng.integers(length - size + 1)) for length in low.shape)
        turns, mirrored = divmod(int(self._rng.integers(8)), 2)
        patches = (
            low[row : row + size, column : column + size],
            photograph.high_luma[scale * row : scale * (row + size), scale * column : scale * (column + size)],
        )
        small, large = (np.rot90(patch[:, ::-1] if mirrored else patch, turns) for patch in patches)
        return small, large
