"""Tensors of PyTorch as values of onnxruntime, and back, in the same memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
from onnx import TensorProto, ValueInfoProto, helper

from onnx_backprop.opset.core.errors import KernelError, UnsupportedError

try:
    torch: Any = import_module("torch")
except ImportError as e:
    raise KernelError(
        f"onnx_backprop.torch needs PyTorch, and importing it failed: {e}. Install it with `pip install torch`, or "
        "train with onnx_backprop.Trainer, which does without"
    ) from e
OrtValue = onnxruntime.OrtValue
Tensors = Mapping[str, Any]


def fed(names: Iterable[str], tensors_by_name: Tensors) -> tuple[dict[str, OrtValue], set[int]]:
    """Tensors for a session, in the same memory, and where that begins."""
    taken = {name: tensors_by_name[name].detach().contiguous() for name in names}
    places = {tensor.data_ptr() for tensor in taken.values()}
    return {name: OrtValue.from_dlpack(tensor) for name, tensor in taken.items()}, places


def called(session: onnxruntime.InferenceSession, tensors_by_name: Tensors) -> dict[str, Any]:
    """The outputs of a session on those of the tensors that it reads."""
    feeds, places = fed([v.name for v in session.get_inputs()], tensors_by_name)
    names = [value.name for value in session.get_outputs()]
    return apart(dict(zip(names, session.run_with_ort_values(names, feeds), strict=True)), places)


def apart(values: Mapping[str, OrtValue], places: set[int]) -> dict[str, Any]:
    """Values of onnxruntime as tensors in the same memory, none in that of another or at one of the places."""
    results: dict[str, Any] = {}
    for name, value in values.items():
        result = torch.from_dlpack(value)
        if result.data_ptr() in places and result.numel():  # one tensor under two names, which PyTorch may write into
            result = result.clone()
        places.add(result.data_ptr())
        results[name] = result
    return results


def array_of(tensor: Any) -> np.ndarray:
    """The same memory; of bfloat16, which NumPy has not, as onnx does."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def dtype_of(elements: int) -> Any:
    """PyTorch's name of a type of ONNX; None for a type that it has not."""
    return getattr(torch, helper.tensor_dtype_to_np_dtype(elements).name, None)


def info_of(value: Any) -> ValueInfoProto:
    """What a session says of an output, as of a graph's input."""
    if not value.type.startswith("tensor("):
        raise UnsupportedError(
            f"the backward pass reads {value.name!r}, a {value.type}, which PyTorch cannot hold. Train with "
            "onnx_backprop.Trainer"
        )
    elements = TensorProto.DataType.Value(value.type[len("tensor(") : -1].upper())
    return helper.make_tensor_value_info(value.name, elements, value.shape)
