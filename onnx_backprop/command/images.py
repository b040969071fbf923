"""What the options say of images: folders of them, scaling, random changes."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onnx import TensorProto

from onnx_backprop.command.options import read_rows
from onnx_backprop.command.parser import argument
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.reading import load
from onnx_backprop.training.data.augmentation import augment
from onnx_backprop.training.data.datasets import fetched, is_remote
from onnx_backprop.training.data.images import Scale, image_folder

OF_IMAGES = [
    argument("--layout", choices=("arrays", "classes"), default="arrays", help="classes: DATA/CLASS/image.png, …"),
    argument(
        "--size", metavar="HEIGHTxWIDTH", help="resize images of a folder (default: to the size that the model states)"
    ),
    argument("--scale", metavar="NUMBER|imagenet", help="multiply images of bytes by this, as 1/255"),
    argument("--augment", metavar="NAMES", help="random changes of images, with commas: flip, crop, jitter"),
]
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)


def data_and_evaluation(arguments: argparse.Namespace) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """The arrays of --data and of --evaluation, or images of folders, whose classes are those of --data."""
    data = _rows_of(arguments, "data")
    return data, _rows_of(arguments, "evaluation", getattr(data, "classes", None))


def _rows_of(
    arguments: argparse.Namespace, name: str, classes: Sequence[str] | None = None
) -> Mapping[str, Any] | None:
    path, option = getattr(arguments, name), f"--{name}"
    if path is None or arguments.layout == "arrays":
        return read_rows(path, option)
    image, shape = _image_input(arguments.model)
    last = shape[3] == 3 and shape[1] != 3
    folder = fetched(path, option) if is_remote(path) else Path(path)
    try:
        size = _size(arguments.size, shape[1:3] if last else shape[2:])
        return image_folder(folder, size, image=image, channels_last=last, classes=classes)
    except InvalidArgumentError as e:
        raise InvalidArgumentError(f"{option}: {e}") from e


def of_images(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `Batches` takes for training, for --scale and --augment."""
    asked = getattr(arguments, "augment", None)
    names = asked.split(",") if asked else ()
    return scale_of(arguments) | ({"transform": augment(*names)} if names else {})


def scale_of(arguments: argparse.Namespace) -> dict[str, Scale]:
    """What `Batches` takes for --scale."""
    text = getattr(arguments, "scale", None)
    if text is None or text == "imagenet":
        return {} if text is None else {"scale": text}
    top, _, bottom = text.partition("/")
    try:
        return {"scale": float(top) / float(bottom or 1)}
    except (ValueError, ZeroDivisionError) as e:
        raise InvalidArgumentError(f"--scale: expected a number, as 1/255, or imagenet, got {text!r}") from e


def _image_input(path: str) -> tuple[str, tuple[Any, ...]]:
    """The only input of a model that images fit, and its shape."""
    model = load(path, mapped=True)
    weights = {tensor.name for tensor in model.graph.initializer}
    shapes = {
        value.name: tuple(dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim)
        for value in model.graph.input
        if value.name not in weights and value.type.tensor_type.elem_type in _FLOATS
    }
    images = {name: shape for name, shape in shapes.items() if len(shape) == 4}
    if len(images) != 1:
        listed = ", ".join(map(repr, images)) or "none"
        raise InvalidArgumentError(
            f"--layout classes: expected a model with one input of images, of four axes, got {listed}. Give arrays"
        )
    return next(iter(images.items()))


def _size(text: str | None, stated: tuple[Any, ...]) -> tuple[int, int]:
    if text is None:
        if not all(isinstance(length, int) and length > 0 for length in stated):
            raise InvalidArgumentError("the model does not state the size of its images. Give --size, as 224x224")
        return stated[0], stated[1]
    height, _, width = text.partition("x")
    if not (height.isdecimal() and width.isdecimal()):
        raise InvalidArgumentError(f"--size: expected HEIGHTxWIDTH, as 224x224, got {text!r}")
    return int(height), int(width)
