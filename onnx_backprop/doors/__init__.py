"""Doors to other libraries: models for JAX, PyTensor, OpenMDAO, SciPy and Flower, attribution and attacks.

May import `functions`, `training`, `providers`, `converters`, `ort_ops` and opset. A library is imported with its door.
"""

from importlib import import_module
from typing import Any

from onnx_backprop.opset.core.errors import KernelError


def library(name: str, *, package: str) -> Any:
    """A module of another package; KernelError that says how to install it where it cannot be imported."""
    try:
        return import_module(name)
    except ImportError as e:
        raise KernelError(
            f"the door needs {package}, and importing it failed: {e}. Install it with `pip install {package}`"
        ) from e
