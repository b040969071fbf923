"""ConvTransposeBackwardData, compiled: a correlation."""

from __future__ import annotations

from onnx_backprop.opset.core.layout import conv_transpose_weights_to_canonical
from onnx_backprop.opset.operators.conv_transpose_backward_data import OP
from onnx_backprop.ort_ops.convolution.gather import kernel as gather_kernel
from onnx_backprop.ort_ops.convolution.gather.plan import forward
from onnx_backprop.ort_ops.convolution.problem import correlation
from onnx_backprop.ort_ops.convolution.winograd import plan as winograd_plan
from onnx_backprop.ort_ops.runtime.bridge import Call, NativeKernel, Plan


def _plan(call: Call) -> Plan:
    diff_dst, weights = call.inputs
    assert diff_dst is not None
    assert weights is not None
    order = conv_transpose_weights_to_canonical(call.attributes["weights_format"], len(weights))
    c = correlation(call.attributes, diff_dst, call.output, weights, order, transposed=True, infers=True)
    if winograd_plan.suits(c):
        return winograd_plan.plan(c, call.element_type, adjoint=False)
    return forward(c, call.element_type)


KERNEL = NativeKernel(OP, _plan, gather_kernel.functions)
