"""The operators that have compiled kernels.

A family of several operators has a module `kernels`; of the other families, each module that is named after an
operator has its `KERNEL`. Such a module is imported when a call of its operator is first planned: one training needs
few of them. What changes its operator has to be there before.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from pkgutil import iter_modules

from onnx_backprop.opset.core.op import Op
from onnx_backprop.opset.core.signals import Deferred
from onnx_backprop.opset.functions.declared import OPERATORS, PLANS
from onnx_backprop.opset.functions.native import NATIVE_PREFIX
from onnx_backprop.opset.operators.registry import BY_STEM
from onnx_backprop.ort_ops import attention, layers, normalization
from onnx_backprop.ort_ops.elementwise import kernel as elementwise
from onnx_backprop.ort_ops.layers import ready
from onnx_backprop.ort_ops.normalization import batch_norm_forward_training, batch_norm_training_backward
from onnx_backprop.ort_ops.products import matrix_product
from onnx_backprop.ort_ops.runtime.bridge import NativeKernel, Request
from onnx_backprop.ort_ops.runtime.bridge import register as register_kernels
from onnx_backprop.ort_ops.runtime.stages import Plan

_AT_ONCE = (
    batch_norm_forward_training.KERNEL,
    batch_norm_training_backward.KERNEL,
    matrix_product.KERNEL,  # which a graph has where `matrix_tiles` says so
)
_LATER: dict[str, Sequence[str]] = {
    f"{__package__}.convolution.kernels": (
        *("convolution", "convolution_backward_data", "convolution_backward_weights"),
        *("conv_transpose_backward_data", "conv_transpose_backward_weights", "conv_transpose_backprop_filters"),
    ),
    f"{__package__}.interpolation.kernels": (
        *("interpolate_backward", "interpolate_backprop", "resample_grad", "resize_grad", "avg_pool_backward"),
    ),
}
_LATER |= {
    f"{family.__name__}.{module.name}": (module.name,)
    for family in (attention, layers, normalization)
    for module in iter_modules(family.__path__)
    if module.name in BY_STEM and not module.name.startswith("batch_norm")
}


def _of(module: str) -> Sequence[NativeKernel]:
    with Deferred():  # or an interrupt would leave half of it
        imported = vars(import_module(module))
    return imported.get("KERNELS") or (imported["KERNEL"],)


def _plan(module: str, op: Op, request: Request) -> Plan:
    return next(kernel for kernel in _of(module) if kernel.op is op).plan(request)


def _later() -> Iterator[NativeKernel]:
    for module, stems in _LATER.items():
        for stem in stems:
            yield NativeKernel(BY_STEM[stem], partial(_plan, module, BY_STEM[stem]))


KERNELS: dict[str, NativeKernel] = {NATIVE_PREFIX + kernel.op.key: kernel for kernel in (*_AT_ONCE, *_later())}
"""By the name of the custom operator; `add_declared` adds those of other domains."""


def add_declared() -> None:
    """Kernels of operators of other domains."""
    for op in OPERATORS.values():
        if op.key in PLANS:
            KERNELS.setdefault(NATIVE_PREFIX + op.key, NativeKernel(op, PLANS[op.key]))


def load() -> None:
    """Import all modules that have functions."""
    for module in _LATER:
        import_module(module)


def register() -> None:
    """Hand the operators to onnxruntime-extensions, each once per process; those that were declared since, too."""
    add_declared()
    updates = elementwise.NAME, elementwise.ELEMENTWISE
    register_kernels(KERNELS.values(), lambda: (*map(elementwise.custom_op, updates), ready.custom_op()))
