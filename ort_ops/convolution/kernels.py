"""The operators of convolutions: each from its shapes to the plan of a correlation or of one of its gradients."""

from functools import partial

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
from onnx_backprop.ort_ops.convolution.problem import correlation
from onnx_backprop.ort_ops.convolution.weights.plan import weights_plan
from onnx_backprop.ort_ops.convolution.winograd import plan as winograd
from onnx_backprop.ort_ops.convolution.winograd import tiles
from onnx_backprop.ort_ops.runtime.bridge import NativeKernel, Request
from onnx_backprop.ort_ops.runtime.stages import Plan


def _plan(roles: Roles, request: Request) -> Plan:
    """By which of the correlation's tensors is the result; a third input of one that is its destination is a bias."""
    kind, attributes = request.element_type, request.attributes
    first, second = request.inputs[:2]
    assert first is not None
    assert second is not None
    shapes = dict(zip(roles.names, (first, second, request.output), strict=True))
    order = roles.order(attributes, "weights", len(shapes["weights"]))
    c = correlation(
        attributes, shapes["source"], shapes["destination"], shapes["weights"], order,
        transposed=roles.transposed, infers=roles.result == "destination",
    )  # fmt: skip
    if roles.result == "weights":
        of_weights, names = winograd.weights_plan if winograd.suits_weights(c) else weights_plan, list(roles.names)
        return of_weights(c, kind, (names.index("source"), names.index("destination")))
    adjoint = roles.result == "source"
    bias = 2 if not adjoint and any(shape is not None for shape in request.inputs[2:]) else 0
    plan = winograd.plan if tiles.suits(c, adjoint=adjoint) else gather.plan
    return plan(c, kind, adjoint=adjoint, bias=bias)


KERNELS = tuple(
    NativeKernel(operator.OP, partial(_plan, operator.ROLES))
    for operator in (
        convolution, convolution_backward_data, convolution_backward_weights, conv_transpose_backward_data,
        conv_transpose_backward_weights, conv_transpose_backprop_filters,
    )
)  # fmt: skip
