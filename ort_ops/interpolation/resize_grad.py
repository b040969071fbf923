"""ResizeGrad, compiled."""

from __future__ import annotations

from onnx_backprop.opset.maths.interpolation import Taps
from onnx_backprop.opset.maths.resize import resize_taps
from onnx_backprop.opset.operators.resize_grad import OP, resized_axes
from onnx_backprop.ort_ops.interpolation.gather import functions
from onnx_backprop.ort_ops.interpolation.plan import plan
from onnx_backprop.ort_ops.runtime.bridge import Call, NativeKernel, Plan


def _plan(call: Call) -> Plan:
    outs = call.inputs[0]
    assert outs is not None
    roi, scales, sizes = call.numbers[2:]
    whole = None if sizes is None else [int(s) for s in sizes]

    def taps() -> list[Taps | None]:
        axes = resized_axes(call.attributes, call.output, outs, roi=roi, scales=scales, sizes=whole)
        return [None if axis is None else resize_taps(axis) for axis in axes]

    return plan(call, 0, taps)


KERNEL = NativeKernel(OP, _plan, functions)
