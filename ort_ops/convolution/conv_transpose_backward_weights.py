"""ConvTransposeBackwardWeights and ConvTransposeBackpropFilters, compiled: one kernel under two sets of names."""

from __future__ import annotations

from onnx_backprop.opset.core.op import Op
from onnx_backprop.opset.maths.convolution_roles import Roles
from onnx_backprop.opset.operators import conv_transpose_backprop_filters, conv_transpose_backward_weights
from onnx_backprop.ort_ops.convolution.problem import correlation
from onnx_backprop.ort_ops.convolution.weights import kernel as weights_kernel
from onnx_backprop.ort_ops.convolution.weights.plan import weights_plan
from onnx_backprop.ort_ops.runtime.bridge import Call, NativeKernel, Plan


def _kernel(op: Op, roles: Roles) -> NativeKernel:
    def plan(call: Call) -> Plan:
        """The ConvTranspose's output is the correlation's source, its input the destination."""
        src, diff_dst, _ = call.inputs
        assert src is not None
        assert diff_dst is not None
        order = roles.order(call.attributes, "weights", len(call.output))
        c = correlation(call.attributes, diff_dst, src, call.output, order, transposed=True)
        return weights_plan(c, call.element_type, (1, 0))

    return NativeKernel(op, plan, weights_kernel.functions)


KERNELS = (
    _kernel(conv_transpose_backward_weights.OP, conv_transpose_backward_weights.ROLES),
    _kernel(conv_transpose_backprop_filters.OP, conv_transpose_backprop_filters.ROLES),
)
