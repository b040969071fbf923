"""ResizeGrad, compiled."""

from __future__ import annotations

from ..opset.interpolation import Taps
from ..opset.onnx_resize import resize_taps
from ..opset.resize_grad import OP, resized_axes
from .interpolation_gather import functions
from .interpolation_plans import plan
from .native_bridge import Call, NativeKernel, Plan


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
