"""ConvolutionBackwardWeights, compiled."""

from __future__ import annotations

from onnx_backprop.opset.core.layout import conv_weights_to_canonical
from onnx_backprop.opset.operators.convolution_backward_weights import OP
from onnx_backprop.ort_ops.convolution.problem import correlation
from onnx_backprop.ort_ops.convolution.weights import kernel as weights_kernel
from onnx_backprop.ort_ops.convolution.weights.plan import weights_plan
from onnx_backprop.ort_ops.convolution.winograd import plan as winograd_plan
from onnx_backprop.ort_ops.runtime.bridge import Call, NativeKernel, Plan


def _plan(call: Call) -> Plan:
    src, diff_dst, _ = call.inputs
    assert src is not None
    assert diff_dst is not None
    order = conv_weights_to_canonical(call.attributes["weights_format"], len(call.output))
    c = correlation(call.attributes, src, diff_dst, call.output, order)
    if winograd_plan.suits_weights(c):
        return winograd_plan.weights_plan(c, call.element_type)
    return weights_plan(c, call.element_type, (0, 1))


KERNEL = NativeKernel(OP, _plan, weights_kernel.functions)
