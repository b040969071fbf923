"""AvgPoolBackward, compiled: every source cell gathers the shares of the windows that it lies in."""

from __future__ import annotations

from onnx_backprop.opset.operators.avg_pool_backward import OP, taps
from onnx_backprop.ort_ops.interpolation.gather import functions
from onnx_backprop.ort_ops.interpolation.plan import plan
from onnx_backprop.ort_ops.runtime.bridge import Call, NativeKernel, Plan


def _plan(call: Call) -> Plan:
    windows = call.inputs[0]
    assert windows is not None
    return plan(call, 0, lambda: taps(call.attributes, call.output, windows))


KERNEL = NativeKernel(OP, _plan, functions)
