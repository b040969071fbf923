"""`save_adapter`: what was trained of a model as a file of its own, for stock onnxruntime or as safetensors."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from onnx import helper
from onnxruntime import AdapterFormat, OrtValue
from safetensors import numpy as safetensors

from onnx_backprop.converters.prepare.writing.files import check_writable
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.files import named, replacing

SUFFIXES = (".onnx_adapter", ".safetensors")


def save_adapter(values: Mapping[str, np.ndarray], path: str | Path) -> None:
    """Write tensors by name, in the format of the suffix: .onnx_adapter for onnxruntime, or .safetensors.

        ob.save_adapter(trainer.parameters(), "task.onnx_adapter")

    In the runs that an .onnx_adapter is active in, onnxruntime uses its tensors for the inputs of the same names, such
    as those of `lora(…).model`: `LoraAdapter().Load(path)`, `RunOptions().add_active_adapter(adapter)`. One session can
    use several. The file appears complete or not at all.

    Errors: InvalidArgumentError for another suffix, no values, complex ones or texts, a number without axes in an
    .onnx_adapter, or a file that cannot be written.
    """
    suffix = Path(named(path)).suffix
    if suffix not in SUFFIXES:
        raise InvalidArgumentError(f"expected a name that ends in {' or '.join(SUFFIXES)}, got {str(path)!r}")
    if not isinstance(values, Mapping) or not values:
        raise InvalidArgumentError(f"values: expected at least one tensor by its name, got {values!r:.100}")
    check_writable(path)
    arrays = {name: np.ascontiguousarray(value).reshape(np.shape(value)) for name, value in values.items()}
    if wrong := [name for name, array in arrays.items() if array.dtype.kind not in "biufV"]:  # V: as bfloat16
        raise InvalidArgumentError(f"values: expected numbers, {wrong[0]!r} has the type {arrays[wrong[0]].dtype}")
    if suffix == ".onnx_adapter" and (numbers := [name for name, array in arrays.items() if not array.ndim]):
        raise InvalidArgumentError(f"values: {numbers[0]!r} has no axis, which onnxruntime does not read. Give it one")
    content = safetensors.save(arrays) if suffix == ".safetensors" else _adapter(arrays)
    try:
        with replacing(path) as (file,):
            file.write(content)
    except OSError as e:
        raise InvalidArgumentError(f"cannot write {path}: {e.strerror or e}") from e


def _adapter(arrays: Mapping[str, np.ndarray]) -> bytes:
    """What onnxruntime writes, which takes names of files alone."""
    adapter: Any = AdapterFormat()  # whose annotations ask for another type of path than it takes
    adapter.set_adapter_version(1)
    adapter.set_model_version(1)
    adapter.set_parameters({name: _value(array) for name, array in arrays.items()})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "adapter"
        adapter.export_adapter(str(file))
        return file.read_bytes()


def _value(array: np.ndarray) -> OrtValue:
    if array.dtype.kind != "V":
        return OrtValue.ortvalue_from_numpy(array)
    return OrtValue.ortvalue_from_numpy_with_onnx_type(array, helper.np_dtype_to_tensor_dtype(array.dtype))
