"""Convolution, compiled: a correlation, to which the bias is added while a tile is in the first-level cache."""

from __future__ import annotations

from onnx_backprop.opset.core.layout import conv_weights_to_canonical
from onnx_backprop.opset.operators.convolution import OP
from onnx_backprop.ort_ops.convolution.gather import kernel as gather_kernel
from onnx_backprop.ort_ops.convolution.gather.plan import forward
from onnx_backprop.ort_ops.convolution.problem import correlation
from onnx_backprop.ort_ops.convolution.winograd import plan as winograd_plan
from onnx_backprop.ort_ops.runtime.bridge import Call, NativeKernel, Plan


def _plan(call: Call) -> Plan:
    src, weights, bias = call.inputs
    assert src is not None
    assert weights is not None
    order = conv_weights_to_canonical(call.attributes["weights_format"], len(weights))
    c = correlation(call.attributes, src, call.output, weights, order, infers=True)
    which = 0 if bias is None else 2
    if winograd_plan.suits(c):
        return winograd_plan.plan(c, call.element_type, adjoint=False, bias=which)
    return forward(c, call.element_type, bias=which)


KERNEL = NativeKernel(OP, _plan, gather_kernel.functions)
