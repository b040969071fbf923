"""ConvTransposeBackwardWeights and ConvTransposeBackpropFilters, compiled: one kernel under two sets of names."""

from __future__ import annotations

from ..opset import conv_transpose_backprop_filters, conv_transpose_backward_weights
from ..opset.conv_transpose_backward_weights import Names
from ..opset.op import Op
from . import conv_weights
from .conv_plans import correlation
from .conv_weight_plans import weights_plan
from .native_bridge import Call, NativeKernel, Plan


def _kernel(op: Op, names: Names) -> NativeKernel:
    def plan(call: Call) -> Plan:
        """The ConvTranspose's output is the correlation's source, its input the destination."""
        src, diff_dst, _ = call.inputs
        assert src is not None
        assert diff_dst is not None
        order = names.order(call.attributes, len(call.output))
        c = correlation(call.attributes, diff_dst, src, call.output, order, transposed=True)
        return weights_plan(c, call.element_type, (1, 0))

    return NativeKernel(op, plan, conv_weights.functions)


KERNELS = (
    _kernel(conv_transpose_backward_weights.OP, conv_transpose_backward_weights.NAMES),
    _kernel(conv_transpose_backprop_filters.OP, conv_transpose_backprop_filters.NAMES),
)
