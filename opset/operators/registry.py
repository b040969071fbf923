"""The list of operators; adding one here is all that the rest of the package needs to know of it."""

from onnx_backprop.opset.core.op import Op
from onnx_backprop.opset.operators import (
    avg_pool_backward,
    batch_norm_forward_training,
    batch_norm_training_backward,
    bias_add_backward,
    conv_transpose_backprop_filters,
    conv_transpose_backward_data,
    conv_transpose_backward_weights,
    convolution,
    convolution_backward_data,
    convolution_backward_weights,
    interpolate_backprop,
    interpolate_backward,
    layer_norm_backward,
    max_pool_backward,
    relu_backward,
    resample_grad,
    resize_grad,
    soft_max_backward,
)

OPS: tuple[Op, ...] = (
    interpolate_backward.OP,
    interpolate_backprop.OP,
    resample_grad.OP,
    resize_grad.OP,
    convolution.OP,
    convolution_backward_data.OP,
    convolution_backward_weights.OP,
    conv_transpose_backward_data.OP,
    conv_transpose_backward_weights.OP,
    conv_transpose_backprop_filters.OP,
    bias_add_backward.OP,
    max_pool_backward.OP,
    avg_pool_backward.OP,
    relu_backward.OP,
    soft_max_backward.OP,
    batch_norm_forward_training.OP,
    batch_norm_training_backward.OP,
    layer_norm_backward.OP,
)
BY_NAME = {op.name: op for op in OPS}
