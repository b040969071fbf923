"""ConvolutionBackwardWeights, compiled."""

from __future__ import annotations

from ..opset.convolution_backward_weights import OP
from ..opset.layout import conv_weights_to_canonical
from . import conv_weights, conv_winograd_plans
from .conv_plans import correlation
from .conv_weight_plans import weights_plan
from .native_bridge import Call, NativeKernel, Plan


def _plan(call: Call) -> Plan:
    src, diff_dst, _ = call.inputs
    assert src is not None
    assert diff_dst is not None
    order = conv_weights_to_canonical(call.attributes["weights_format"], len(call.output))
    c = correlation(call.attributes, src, diff_dst, call.output, order)
    if conv_winograd_plans.suits_weights(c):
        return conv_winograd_plans.weights_plan(c, call.element_type)
    return weights_plan(c, call.element_type, (0, 1))


KERNEL = NativeKernel(OP, _plan, conv_weights.functions)
