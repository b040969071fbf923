"""Small random changes of images, and of the masks that go with them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnx_backprop.opset.core.errors import InvalidArgumentError

Row = dict[str, np.ndarray]
Transform = Callable[[Row, np.random.Generator], Mapping[str, np.ndarray]]
Sides = tuple[int, int]  # axes, or lengths, of the height and the width
_NAME_THEM = "Name them, as augment(…, images=['x'], masks=['target']); what is not named stays"


@dataclass(frozen=True)
class Augmentation:
    """Random changes of one row, alike for its images and masks.

    flip: left and right, half of the time. crop: shifted by up to an eighth of either side, filled by reflection; where
    images are of several sizes, by whole pixels of the smallest. jitter: contrast and brightness by up to a fifth, of
    images only.
    images, masks: the names of both. By default images have 3 or 1 channels, first or last, and masks are further
    arrays of the same height and width, with any number of channels; without such images all arrays (height, width) of
    one size are masks. Numbers and vectors stay as they are.

    Errors: InvalidArgumentError where the default leaves a doubt: no image or mask, an array of two or more axes that
    is neither, several images to jitter.
    """

    flip: bool = False
    crop: bool = False
    jitter: bool = False
    images: tuple[str, ...] | None = None
    masks: tuple[str, ...] | None = None

    def __call__(self, row: Row, rng: np.random.Generator) -> Row:
        """The row, changed."""
        flips, shifts = rng.random() < 0.5, rng.uniform(-1 / 8, 1 / 8, 2)
        contrast, brightness = rng.uniform(0.8, 1.2), rng.uniform(-0.2, 0.2)
        axes, images = self._named(row) if self.images is not None or self.masks is not None else self._guessed(row)
        shapes = {name: (row[name].shape[y], row[name].shape[x]) for name, (y, x) in axes.items()}
        small = min(shapes.values(), default=(1, 1))
        if self.crop and any(n % k for lengths in shapes.values() for n, k in zip(lengths, small, strict=True)):
            listed = ", ".join(f"{name!r} {y}x{x}" for name, (y, x) in shapes.items())
            raise InvalidArgumentError(f"augment: crop: the sides are no multiples of each other: {listed}")
        result = dict(row)
        for name, sides in axes.items():
            array = row[name]
            if self.flip and flips:
                array = np.flip(array, sides[1])
            if self.crop:
                array = _shifted(array, sides, shifts, small)
            if self.jitter and name in images:
                array = _jittered(array, contrast, brightness)
            result[name] = np.ascontiguousarray(array)
        return result

    def _named(self, row: Row) -> tuple[dict[str, Sides], list[str]]:
        """The axes of images and masks that have been named, and the images."""
        axes: dict[str, Sides] = {}
        for name in (*(self.images or ()), *(self.masks or ())):
            if name not in row:
                raise InvalidArgumentError(f"augment: there is no {name!r}. There are {', '.join(map(repr, row))}")
            shape = row[name].shape
            if len(shape) not in (2, 3):
                raise InvalidArgumentError(f"augment: {name!r}: expected an image or a mask, got the shape {shape}")
            last = any(len(shape) == 3 and sides == (0, 1) for sides in axes.values())  # channels, as those before
            axes[name] = _sides_of_image(shape) or ((0, 1) if last else (len(shape) - 2, len(shape) - 1))
        return axes, list(self.images or ())

    def _guessed(self, row: Row) -> tuple[dict[str, Sides], list[str]]:
        """The axes of what has the shape of an image or a mask, and the images."""
        shapes = {name: array.shape for name, array in row.items() if sum(n > 1 for n in array.shape) > 1}
        images = {name: sides for name, shape in shapes.items() if (sides := _sides_of_image(shape))}
        sizes = {(shapes[name][y], shapes[name][x]) for name, (y, x) in images.items()}
        sizes = sizes or {shape for shape in shapes.values() if len(shape) == 2}
        if not sizes or (not images and len(sizes) > 1):
            listed = ", ".join(f"{name!r} {array.shape}" for name, array in row.items())
            raise InvalidArgumentError(f"augment: which are the images, and which the masks, of {listed}? {_NAME_THEM}")
        if self.jitter and len(images) > 1:
            listed = ", ".join(map(repr, images))
            raise InvalidArgumentError(f"augment: jitter: {listed} have the shapes of images. {_NAME_THEM}")
        last = (0, 1) in images.values()
        axes = {name: images.get(name) or _sides_like(shape, sizes, last=last) for name, shape in shapes.items()}
        for name, sides in axes.items():
            if sides is None:
                listed = ", ".join(f"{y}x{x}" for y, x in sorted(sizes))
                raise InvalidArgumentError(
                    f"augment: {name!r}, of the shape {shapes[name]}, is no image or mask of {listed}. {_NAME_THEM}"
                )
        return {name: sides for name, sides in axes.items() if sides is not None}, list(images)


def augment(*names: str, images: Sequence[str] | None = None, masks: Sequence[str] | None = None) -> Augmentation:
    """Random changes of images for `Batches(transform=…)`, of "flip", "crop", "jitter"; see `Augmentation`."""
    known = ("flip", "crop", "jitter")
    for name in names:
        if name not in known:
            raise InvalidArgumentError(f"augment: expected some of {', '.join(map(repr, known))}, got {name!r}")
    for argument, value in (("images", images), ("masks", masks)):
        if isinstance(value, str):
            raise InvalidArgumentError(f"augment: {argument}: expected a list of names, got {value!r}")
    named = [None if value is None else tuple(value) for value in (images, masks)]
    return Augmentation(**dict.fromkeys(names, True), images=named[0], masks=named[1])


def _sides_of_image(shape: tuple[int, ...]) -> Sides | None:
    """The axes of the height and the width of an image of one channel or three; None for something else."""
    if len(shape) == 3 and shape[0] in (1, 3):
        return 1, 2
    return (0, 1) if len(shape) == 3 and shape[2] in (1, 3) else None


def _sides_like(shape: tuple[int, ...], sizes: Collection[Sides], *, last: bool) -> Sides | None:
    """Where a mask, or what has any number of channels, has one of several sizes. last: channels, of a cube too."""
    either = ((0, 1), (1, 2)) if last else ((1, 2), (0, 1))
    for sides in ((0, 1),) if len(shape) == 2 else either if len(shape) == 3 else ():
        if (shape[sides[0]], shape[sides[1]]) in sizes:
            return sides
    return None


def _shifted(array: np.ndarray, axes: Sides, shares: np.ndarray, small: Sides) -> np.ndarray:
    """By round(share · the smallest length) pixels of the smallest image; edges are repeated by the reflection."""
    for axis, share, least in zip(axes, shares, small, strict=True):
        length = array.shape[axis]
        places = np.arange(length) + round(share * least) * (length // least)
        places = np.where(places < 0, -1 - places, places)
        array = np.take(array, np.where(places < length, places, 2 * length - 1 - places), axis)
    return array


def _jittered(array: np.ndarray, contrast: float, brightness: float) -> np.ndarray:
    """contrast · (a - mean) + mean + brightness · range, within the range of a byte, or unbounded."""
    numbers, whole = array.astype(np.float32), array.dtype == np.uint8
    mean = numbers.mean()
    changed = contrast * (numbers - mean) + mean + brightness * (255 if whole else np.ptp(numbers))
    return changed.clip(0, 255).round().astype(np.uint8) if whole else changed.astype(array.dtype)
