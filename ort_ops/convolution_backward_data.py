"""ConvolutionBackwardData, compiled."""

from __future__ import annotations

from ..opset.convolution_backward_data import OP
from ..opset.layout import conv_weights_to_canonical
from . import conv_gather, conv_winograd_plans
from .conv_gather_plans import data_gradient
from .conv_plans import correlation
from .native_bridge import Call, NativeKernel, Plan


def _plan(call: Call) -> Plan:
    diff_dst, weights, _ = call.inputs
    assert diff_dst is not None
    assert weights is not None
    order = conv_weights_to_canonical(call.attributes["weights_format"], len(weights))
    c = correlation(call.attributes, call.output, diff_dst, weights, order)
    if conv_winograd_plans.suits(c):
        return conv_winograd_plans.plan(c, call.element_type, adjoint=True)
    return data_gradient(c, call.element_type)


KERNEL = NativeKernel(OP, _plan, conv_gather.functions)
