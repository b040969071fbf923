"""The operators that have compiled kernels."""

from __future__ import annotations

from . import bias_add_backward
from .native_bridge import register as register_kernels

KERNELS = (bias_add_backward.KERNEL,)


def register() -> None:
    """Hand the operators to onnxruntime-extensions; once per process."""
    register_kernels(KERNELS)
