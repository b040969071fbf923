"""The operators that have compiled kernels.

A family of several operators has a module `kernels`; of the other families, each module that is named after an
operator has its `KERNEL`.
"""

from importlib import import_module
from pkgutil import iter_modules

from onnx_backprop.opset.functions.declared import OPERATORS, PLANS
from onnx_backprop.opset.functions.native import NATIVE_PREFIX
from onnx_backprop.opset.operators.registry import BY_STEM
from onnx_backprop.ort_ops import attention, layers, normalization
from onnx_backprop.ort_ops.convolution import kernels as convolution
from onnx_backprop.ort_ops.elementwise import kernel as elementwise
from onnx_backprop.ort_ops.interpolation import kernels as interpolation
from onnx_backprop.ort_ops.layers import ready
from onnx_backprop.ort_ops.products import matrix_product
from onnx_backprop.ort_ops.runtime.bridge import NativeKernel
from onnx_backprop.ort_ops.runtime.bridge import register as register_kernels

_OURS: tuple[NativeKernel, ...] = (
    *convolution.KERNELS,
    *interpolation.KERNELS,
    *(
        import_module(f"{family.__name__}.{module.name}").KERNEL
        for family in (attention, layers, normalization)
        for module in iter_modules(family.__path__)
        if module.name in BY_STEM
    ),
    matrix_product.KERNEL,  # which a graph has where `matrix_tiles` says so
)
KERNELS: dict[str, NativeKernel] = {NATIVE_PREFIX + kernel.op.key: kernel for kernel in _OURS}
"""By the name of the custom operator; `add_declared` adds those of other domains."""


def add_declared() -> None:
    """Kernels of operators of other domains."""
    for op in OPERATORS.values():
        if op.key in PLANS:
            KERNELS.setdefault(NATIVE_PREFIX + op.key, NativeKernel(op, PLANS[op.key]))


def register() -> None:
    """Hand the operators to onnxruntime-extensions, each once per process; those that were declared since, too."""
    add_declared()
    updates = elementwise.NAME, elementwise.ELEMENTWISE
    register_kernels(KERNELS.values(), lambda: (*map(elementwise.custom_op, updates), ready.custom_op()))
