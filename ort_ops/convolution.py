"""Convolution, compiled: a correlation, to which the bias is added while a tile is in the first-level cache."""

from __future__ import annotations

from ..opset.convolution import OP
from ..opset.layout import conv_weights_to_canonical
from . import conv_gather, conv_winograd_plans
from .conv_gather_plans import forward
from .conv_plans import correlation
from .native_bridge import Call, NativeKernel, Plan


def _plan(call: Call) -> Plan:
    src, weights, bias = call.inputs
    assert src is not None
    assert weights is not None
    order = conv_weights_to_canonical(call.attributes["weights_format"], len(weights))
    c = correlation(call.attributes, src, call.output, weights, order, infers=True)
    which = 0 if bias is None else 2
    if conv_winograd_plans.suits(c):
        return conv_winograd_plans.plan(c, call.element_type, adjoint=False, bias=which)
    return forward(c, call.element_type, bias=which)


KERNEL = NativeKernel(OP, _plan, conv_gather.functions)
