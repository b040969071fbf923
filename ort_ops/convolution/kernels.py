"""The operators of convolutions: each from its shapes to the plan of a correlation or of one of its gradients."""

from functools import partial

from onnx_backprop.opset.core.layout import Order, conv_transpose_weights_to_canonical, conv_weights_to_canonical
from onnx_backprop.opset.maths.convolution_roles import Roles
from onnx_backprop.opset.operators import (
    conv_transpose_backprop_filters,
    conv_transpose_backward_data,
    conv_transpose_backward_weights,
    convolution,
    convolution_backward_data,
    convolution_backward_weights,
)
from onnx_backprop.ort_ops.convolution.gather import plan as gather
from onnx_backprop.ort_ops.convolution.problem import Correlation, correlation
from onnx_backprop.ort_ops.convolution.weights.plan import weights_plan
from onnx_backprop.ort_ops.convolution.winograd import plan as winograd
from onnx_backprop.ort_ops.runtime.bridge import Call, NativeKernel, Shape
from onnx_backprop.ort_ops.runtime.stages import Plan


def _given(call: Call) -> tuple[Shape, Shape]:
    """The first two inputs, which all of these operators must have."""
    first, second = call.inputs[:2]
    assert first is not None
    assert second is not None
    return first, second


def _weights_order(call: Call, rank: int) -> Order:
    return conv_weights_to_canonical(call.attributes["weights_format"], rank)


def _forward(c: Correlation, kind: int, bias: int = 0) -> Plan:
    if winograd.suits(c):
        return winograd.plan(c, kind, adjoint=False, bias=bias)
    return gather.forward(c, kind, bias=bias)


def _convolution(call: Call) -> Plan:
    src, weights = _given(call)
    order = _weights_order(call, len(weights))
    c = correlation(call.attributes, src, call.output, weights, order, infers=True)
    return _forward(c, call.element_type, 0 if call.inputs[2] is None else 2)


def _backward_data(call: Call) -> Plan:
    diff_dst, weights = _given(call)
    c = correlation(call.attributes, call.output, diff_dst, weights, _weights_order(call, len(weights)))
    if winograd.suits(c):
        return winograd.plan(c, call.element_type, adjoint=True)
    return gather.data_gradient(c, call.element_type)


def _backward_weights(call: Call) -> Plan:
    src, diff_dst = _given(call)
    c = correlation(call.attributes, src, diff_dst, call.output, _weights_order(call, len(call.output)))
    if winograd.suits_weights(c):
        return winograd.weights_plan(c, call.element_type)
    return weights_plan(c, call.element_type, (0, 1))


def _transpose_backward_data(call: Call) -> Plan:
    diff_dst, weights = _given(call)
    order = conv_transpose_weights_to_canonical(call.attributes["weights_format"], len(weights))
    c = correlation(call.attributes, diff_dst, call.output, weights, order, transposed=True, infers=True)
    return _forward(c, call.element_type)


def _transpose_weights(roles: Roles, call: Call) -> Plan:
    """The ConvTranspose's output is the correlation's source, its input the destination."""
    src, diff_dst = _given(call)
    order = roles.order(call.attributes, "weights", len(call.output))
    c = correlation(call.attributes, diff_dst, src, call.output, order, transposed=True)
    return weights_plan(c, call.element_type, (1, 0))


KERNELS = (
    NativeKernel(convolution.OP, _convolution),
    NativeKernel(convolution_backward_data.OP, _backward_data),
    NativeKernel(convolution_backward_weights.OP, _backward_weights),
    NativeKernel(conv_transpose_backward_data.OP, _transpose_backward_data),
    *(
        NativeKernel(operator.OP, partial(_transpose_weights, operator.ROLES))
        for operator in (conv_transpose_backward_weights, conv_transpose_backprop_filters)
    ),
)
