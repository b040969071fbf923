"""Images in folders, one for each class, and their scaling."""

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.training.data.rows import StoredRows

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
Scale = float | str
_OF_16_BITS = ("PNG", "PPM")  # formats whose grey numbers Pillow may call 32 bits, though they end at 65535
# Of the red, green and blue of ImageNet's images as numbers from 0 to 1, as torchvision's documentation has them.
MEANS, DEVIATIONS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ImageRows(StoredRows):
    """Images of files as bytes (N, 3, height, width), or with channels last; decoded when their rows are read."""

    def __init__(self, paths: Sequence[Path], size: tuple[int, int], *, channels_last: bool) -> None:
        self.paths, self._size, self._last = list(paths), size, channels_last
        self.dtype = np.dtype(np.uint8)
        self.shape = (len(paths), *size, 3) if channels_last else (len(paths), 3, *size)

    def _read(self, rows: np.ndarray, into: np.ndarray) -> None:
        for n, row in enumerate(rows):
            path = self.paths[row]
            try:
                pixels = decoded(path, self._size)
            except InvalidArgumentError as e:
                raise InvalidArgumentError(f"{path}: {e}") from e
            except (OSError, ValueError, SyntaxError) as e:  # each of Pillow's formats raises its own
                raise InvalidArgumentError(f"{path} is no image that Pillow reads: {e}") from e
            into[n] = pixels.transpose(1, 2, 0) if self._last else pixels


def image_folder(
    folder: str | os.PathLike[str],
    size: tuple[int, int],
    *,
    image: str = "x",
    labels: str = "labels",
    channels_last: bool = False,
    classes: Sequence[str] | None = None,
) -> "ImageFolder":
    """Images FOLDER/CLASS/… as arrays for `Batches`: bytes (N, 3, height, width), and the number of each image's class.

        data = ob.image_folder("flowers", (224, 224), image="input")
        batches = ob.Batches(data, 32, scale="imagenet", transform=ob.augment("flip", "crop"))

    Classes are the folders sorted by name, `data.classes`; `classes=data.classes` gives other images, as those of an
    evaluation, the numbers of these, of which some may be missing. Images are read and resized when a batch needs them.
    Grey numbers of 16 bits become round(number / 257); alpha is left out; EXIF data turn the image. Needs Pillow.

    Errors: InvalidArgumentError for a folder without classes, or with one that `classes` lacks, a class without images,
    a file that is no image, or one of 32 bits.
    """
    root = Path(folder)
    if not root.is_dir():
        raise InvalidArgumentError(f"there is no folder {root}")
    if len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
        raise InvalidArgumentError(f"size: expected (height, width), got {size!r}")
    names = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not names:
        raise InvalidArgumentError(f"{root} holds no folders. Expected one for each class, with its images")
    known = names if classes is None else list(classes)
    if unknown := [name for name in names if name not in known]:
        raise InvalidArgumentError(
            f"{root / unknown[0]} is none of the classes, {', '.join(map(repr, known[:8]))}{', …' * (len(known) > 8)}"
        )
    paths: list[Path] = []
    numbers: list[int] = []
    for name in names:
        files = sorted(path for path in (root / name).rglob("*") if path.suffix.lower() in SUFFIXES)
        if not files:
            raise InvalidArgumentError(f"{root / name} holds no images ({', '.join(SUFFIXES)})")
        paths += files
        numbers += [known.index(name)] * len(files)
    _pillow()
    return ImageFolder(
        {image: ImageRows(paths, size, channels_last=channels_last), labels: np.array(numbers, np.int64)}, known
    )


class ImageFolder(dict[str, Any]):
    """Arrays by name, and the names of the classes."""

    def __init__(self, arrays: Mapping[str, Any], classes: Sequence[str]) -> None:
        super().__init__(arrays)
        self.classes = list(classes)


def decoded(file: Path | BinaryIO, size: tuple[int, int] | None = None) -> np.ndarray:
    """An image as bytes (3, height, width), upright as its EXIF data say, and brought to a size if one is given.

    Errors: InvalidArgumentError for numbers of more than 16 bits, whose range the file does not state.
    """
    module = _pillow()
    with module.open(file) as opened:
        image = import_module("PIL.ImageOps").exif_transpose(opened)
        if image.mode.startswith("I;16") or (image.mode == "I" and opened.format in _OF_16_BITS):
            image = module.fromarray(((np.asarray(image).astype(np.int64) + 128) // 257).astype(np.uint8))
        elif image.mode in ("I", "F"):
            kind = "integers" if image.mode == "I" else "floats"
            raise InvalidArgumentError(
                f"expected 8 or 16 bits, got {kind} of 32. Scale it, and save it in one of these"
            )
        image = image.convert("RGB")
        image = image if size is None else image.resize((size[1], size[0]), module.Resampling.BILINEAR)
    return np.asarray(image).transpose(2, 0, 1)


def _pillow() -> Any:
    try:
        return import_module("PIL.Image")
    except ImportError as e:
        raise InvalidArgumentError(f"images are read by Pillow: {e}. Run pip install pillow") from e


def scaled(array: np.ndarray, scale: Scale) -> np.ndarray:
    """scale · array in float32; for "imagenet" (array / 255 - mean) / deviation of each of three channels."""
    numbers = array.astype(np.float32)
    if scale != "imagenet":
        return numbers * np.float32(scale)
    axis = channel_axis(array.shape)
    shape = [3 if n == axis else 1 for n in range(array.ndim)]
    means, deviations = (np.array(values, np.float32).reshape(shape) for values in (MEANS, DEVIATIONS))
    return (numbers / np.float32(255) - means) / deviations


def channel_axis(shape: Sequence[int]) -> int:
    """The axis of three channels of a batch of images; InvalidArgumentError where there is none."""
    for axis in (1, len(shape) - 1):
        if len(shape) == 4 and shape[axis] == 3:
            return axis
    raise InvalidArgumentError(f"scale: 'imagenet' is for batches of images of three channels, got the shape {shape}")


def check_scale(scale: Any, arrays: Mapping[str, Any]) -> dict[str, Scale]:
    """The scale of each array; a single one is that of the only images of bytes. Errors: InvalidArgumentError."""
    if scale is None:
        return {}
    if not isinstance(scale, Mapping):
        images = [name for name, array in arrays.items() if array.dtype == np.uint8 and array.ndim == 4]
        if len(images) != 1:
            names = ", ".join(map(repr, images)) or "none"
            raise InvalidArgumentError(
                f"scale: which of the arrays? Images of bytes are: {names}. Name it, as scale={{'x': {scale!r}}}"
            )
        scale = {images[0]: scale}
    for name, value in scale.items():
        if name not in arrays:
            raise InvalidArgumentError(f"scale: there is no array {name!r}. There are {', '.join(map(repr, arrays))}")
        if value == "imagenet":
            channel_axis(arrays[name].shape)
        elif isinstance(value, bool | str) or not isinstance(value, int | float) or not np.isfinite(value):
            raise InvalidArgumentError(f"scale: {name!r}: expected a number or 'imagenet', got {value!r}")
    return dict(scale)
