"""The operators that have compiled kernels."""

from __future__ import annotations

from onnx_backprop.ort_ops.convolution import (
    conv_transpose_backward_data,
    conv_transpose_backward_weights,
    convolution,
    convolution_backward_data,
    convolution_backward_weights,
)
from onnx_backprop.ort_ops.interpolation import avg_pool_backward, interpolate_backward, resample_grad, resize_grad
from onnx_backprop.ort_ops.layers import bias_add_backward, max_pool_backward, relu_backward
from onnx_backprop.ort_ops.normalization import batch_norm_training_backward, layer_norm_backward, soft_max_backward
from onnx_backprop.ort_ops.runtime.bridge import register as register_kernels

KERNELS = (
    bias_add_backward.KERNEL,
    convolution.KERNEL,
    convolution_backward_data.KERNEL,
    convolution_backward_weights.KERNEL,
    conv_transpose_backward_data.KERNEL,
    *conv_transpose_backward_weights.KERNELS,
    *interpolate_backward.KERNELS,
    max_pool_backward.KERNEL,
    avg_pool_backward.KERNEL,
    relu_backward.KERNEL,
    soft_max_backward.KERNEL,
    batch_norm_training_backward.KERNEL,
    layer_norm_backward.KERNEL,
    resample_grad.KERNEL,
    resize_grad.KERNEL,
)


def register() -> None:
    """Hand the operators to onnxruntime-extensions; once per process."""
    register_kernels(KERNELS)
