"""ConvolutionBackwardData, compiled."""

from __future__ import annotations

from onnx_backprop.opset.core.layout import conv_weights_to_canonical
from onnx_backprop.opset.operators.convolution_backward_data import OP
from onnx_backprop.ort_ops.convolution.gather import kernel as gather_kernel
from onnx_backprop.ort_ops.convolution.gather.plan import data_gradient
from onnx_backprop.ort_ops.convolution.problem import correlation
from onnx_backprop.ort_ops.convolution.winograd import plan as winograd_plan
from onnx_backprop.ort_ops.runtime.bridge import Call, NativeKernel, Plan


def _plan(call: Call) -> Plan:
    diff_dst, weights, _ = call.inputs
    assert diff_dst is not None
    assert weights is not None
    order = conv_weights_to_canonical(call.attributes["weights_format"], len(weights))
    c = correlation(call.attributes, call.output, diff_dst, weights, order)
    if winograd_plan.suits(c):
        return winograd_plan.plan(c, call.element_type, adjoint=True)
    return data_gradient(c, call.element_type)


KERNEL = NativeKernel(OP, _plan, gather_kernel.functions)
