"""ConvTransposeBackwardData, compiled: a correlation."""

from __future__ import annotations

from ..opset.conv_transpose_backward_data import OP
from ..opset.layout import conv_transpose_weights_to_canonical
from . import conv_gather, conv_winograd_plans
from .conv_gather_plans import forward
from .conv_plans import correlation
from .native_bridge import Call, NativeKernel, Plan


def _plan(call: Call) -> Plan:
    diff_dst, weights = call.inputs
    assert diff_dst is not None
    assert weights is not None
    order = conv_transpose_weights_to_canonical(call.attributes["weights_format"], len(weights))
    c = correlation(call.attributes, diff_dst, call.output, weights, order, transposed=True, infers=True)
    if conv_winograd_plans.suits(c):
        return conv_winograd_plans.plan(c, call.element_type, adjoint=False)
    return forward(c, call.element_type)


KERNEL = NativeKernel(OP, _plan, conv_gather.functions)
