"""Train ONNX models in stock onnxruntime: gradient operators, their kernels, and the converters that use them.

    import onnx_backprop as ob
    graph = ob.training_graph("model.onnx", loss="mse")
    session = ob.session(graph.model)

Importing this needs onnx alone; `session` and `register_ops` load onnxruntime when they are first asked for.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from .converters import TrainingGraph, backward, supported_ops, training_graph
from .opset import (
    DOMAIN,
    OPSET_VERSION,
    InvalidArgumentError,
    InvalidModelError,
    KernelError,
    OnnxBackpropError,
    RegistrationError,
    ShapeError,
    UnsupportedAttributeError,
    UnsupportedError,
    UnsupportedOpError,
    reference_ops,
    use_kernels,
)

if TYPE_CHECKING:
    from .ort_ops import register_ops, session

__all__ = [
    "DOMAIN",
    "OPSET_VERSION",
    "InvalidArgumentError",
    "InvalidModelError",
    "KernelError",
    "OnnxBackpropError",
    "RegistrationError",
    "ShapeError",
    "TrainingGraph",
    "UnsupportedAttributeError",
    "UnsupportedError",
    "UnsupportedOpError",
    "__version__",
    "backward",
    "reference_ops",
    "register_ops",
    "session",
    "supported_ops",
    "training_graph",
    "use_kernels",
]

try:
    __version__ = version("onnx-backprop")
except PackageNotFoundError:  # the source on the path, not installed
    __version__ = "0+unknown"

_RUNTIME_NAMES = ("register_ops", "session")


def __getattr__(name: str) -> Any:
    """The names that need onnxruntime; KernelError, with the missing package, where it cannot be imported."""
    if name not in _RUNTIME_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from . import ort_ops  # not before: conversion works without a runtime
    except ImportError as e:
        raise KernelError(
            f"{__name__}.{name} needs onnxruntime and onnxruntime-extensions, and importing them failed: {e}. "
            "Install them with `pip install onnxruntime onnxruntime-extensions`"
        ) from e
    return getattr(ort_ops, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
