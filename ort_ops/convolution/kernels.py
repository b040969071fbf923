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
from onnx_backprop.ort_ops.convolution.winograd import tiles
from onnx_backprop.ort_ops.runtime.bridge import NativeKernel, Request, Shape
from onnx_backprop.ort_ops.runtime.stages import Plan


def _given(request: Request) -> tuple[Shape, Shape]:
    """The first two inputs, which all of these operators must have."""
    first, second = request.inputs[:2]
    assert first is not None
    assert second is not None
    return first, second


def _weights_order(request: Request, rank: int) -> Order:
    return conv_weights_to_canonical(request.attributes["weights_format"], rank)


def _forward(c: Correlation, kind: int, bias: int = 0) -> Plan:
    if tiles.suits(c):
        return winograd.plan(c, kind, adjoint=False, bias=bias)
    return gather.forward(c, kind, bias=bias)


def _weights(c: Correlation, kind: int, inputs: tuple[int, int]) -> Plan:
    return (winograd.weights_plan if winograd.suits_weights(c) else weights_plan)(c, kind, inputs)


def _convolution(request: Request) -> Plan:
    src, weights = _given(request)
    order = _weights_order(request, len(weights))
    c = correlation(request.attributes, src, request.output, weights, order, infers=True)
    return _forward(c, request.element_type, 0 if request.inputs[2] is None else 2)


def _backward_data(request: Request) -> Plan:
    diff_dst, weights = _given(request)
    c = correlation(request.attributes, request.output, diff_dst, weights, _weights_order(request, len(weights)))
    if tiles.suits(c):
        return winograd.plan(c, request.element_type, adjoint=True)
    return gather.data_gradient(c, request.element_type)


def _backward_weights(request: Request) -> Plan:
    src, diff_dst = _given(request)
    c = correlation(request.attributes, src, diff_dst, request.output, _weights_order(request, len(request.output)))
    return _weights(c, request.element_type, (0, 1))


def _transpose_backward_data(request: Request) -> Plan:
    diff_dst, weights = _given(request)
    order = conv_transpose_weights_to_canonical(request.attributes["weights_format"], len(weights))
    c = correlation(request.attributes, diff_dst, request.output, weights, order, transposed=True, infers=True)
    return _forward(c, request.element_type)


def _transpose_weights(roles: Roles, request: Request) -> Plan:
    """The ConvTranspose's output is the correlation's source, its input the destination."""
    src, diff_dst = _given(request)
    order = roles.order(request.attributes, "weights", len(request.output))
    c = correlation(request.attributes, diff_dst, src, request.output, order, transposed=True)
    return _weights(c, request.element_type, (1, 0))


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
