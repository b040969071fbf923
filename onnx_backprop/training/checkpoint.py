"""Checkpoints: one safetensors file with every tensor of the state, and JSON in its header for everything else.

The file is written under another name, brought to the disk and renamed, so that a process killed at any moment leaves
the previous checkpoint or the new one, never a part. Any reader of safetensors opens it; the JSON is the entry
"onnx_backprop" of its metadata.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.files import replacing

KEY = "onnx_backprop"
FORMAT = 1
_HEADER = 8  # bytes that hold the length of the header
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "BOOL": np.dtype(np.bool_),
}


def write_checkpoint(path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> None:
    """Write a checkpoint; an existing one is replaced at once, or stays where this fails.

    Errors: InvalidArgumentError when the folder is missing or the system refuses to write.
    """
    arrays = {name: np.ascontiguousarray(value).reshape(np.shape(value)) for name, value in tensors.items()}
    specs = {
        name: safetensors.TensorSpec(
            dtype=array.dtype.name, shape=list(array.shape), data_ptr=array.ctypes.data, data_len=array.nbytes
        )
        for name, array in arrays.items()
    }
    text = json.dumps({"format": FORMAT, **about}, allow_nan=False)
    content = safetensors.serialize(specs, metadata={KEY: text})
    try:
        with replacing(path, mark="checkpoint") as (file,):
            file.write(content)
    except OSError as e:
        raise InvalidArgumentError(f"cannot write the checkpoint {path}: {e.strerror or e}") from e


def read_checkpoint(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors of a checkpoint, and what else it says; InvalidArgumentError for a file that is none."""
    try:
        content = Path(path).read_bytes()
    except OSError as e:
        raise InvalidArgumentError(f"cannot read the checkpoint {path}: {e.strerror or e}") from e
    try:
        parts = safetensors.deserialize(content)
        length = int.from_bytes(content[:_HEADER], "little")
        about = json.loads(json.loads(content[_HEADER : _HEADER + length])["__metadata__"][KEY])
    except (safetensors.SafetensorError, ValueError, KeyError) as e:
        raise InvalidArgumentError(f"{path} is no checkpoint of onnx-backprop: {e}") from e
    if about.pop("format", None) != FORMAT:
        raise InvalidArgumentError(f"{path} was written by a later version of onnx-backprop. Install that one")
    tensors = {
        name: np.frombuffer(bytes(part["data"]), _DTYPES[part["dtype"]]).reshape(part["shape"]).copy()
        for name, part in parts
    }
    return tensors, about
