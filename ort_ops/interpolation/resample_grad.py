"""ResampleGrad, compiled."""

from __future__ import annotations

from onnx_backprop.opset.maths.interpolation import resample_taps
from onnx_backprop.opset.operators.resample_grad import DEFAULT_INPUT_OFFSET, DEFAULT_OUTPUT_OFFSET, OP
from onnx_backprop.ort_ops.interpolation.gather import functions
from onnx_backprop.ort_ops.interpolation.plan import plan
from onnx_backprop.ort_ops.runtime.bridge import Call, NativeKernel, Plan


def _plan(call: Call) -> Plan:
    attributes, outs = call.attributes, call.inputs[0]
    assert outs is not None
    rank = len(outs)
    per_axis = zip(
        call.output,
        outs,
        attributes["scales"] or [None] * rank,
        attributes["input_pixel_offsets"] or [DEFAULT_INPUT_OFFSET] * rank,
        attributes["output_pixel_offsets"] or [DEFAULT_OUTPUT_OFFSET] * rank,
        strict=True,
    )
    return plan(call, 0, lambda: [resample_taps(attributes["interpolation_mode"], *axis) for axis in per_axis])


KERNEL = NativeKernel(OP, _plan, functions)
