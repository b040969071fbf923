"""The operators that have compiled kernels."""

from onnx_backprop.ort_ops.convolution import kernels as convolution
from onnx_backprop.ort_ops.elementwise import kernel as elementwise
from onnx_backprop.ort_ops.interpolation import kernels as interpolation
from onnx_backprop.ort_ops.layers import bias_add_backward, max_pool_backward, ready, relu_backward
from onnx_backprop.ort_ops.normalization import (
    batch_norm_forward_training,
    batch_norm_training_backward,
    layer_norm_backward,
    soft_max_backward,
)
from onnx_backprop.ort_ops.runtime.bridge import register as register_kernels

KERNELS = (
    *convolution.KERNELS,
    *interpolation.KERNELS,
    bias_add_backward.KERNEL,
    max_pool_backward.KERNEL,
    relu_backward.KERNEL,
    soft_max_backward.KERNEL,
    batch_norm_forward_training.KERNEL,
    batch_norm_training_backward.KERNEL,
    layer_norm_backward.KERNEL,
)


def register() -> None:
    """Hand the operators to onnxruntime-extensions; once per process."""
    updates = elementwise.NAME, elementwise.ELEMENTWISE
    register_kernels(KERNELS, lambda: (*map(elementwise.custom_op, updates), ready.custom_op()))
