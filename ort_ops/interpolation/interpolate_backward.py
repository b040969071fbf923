"""InterpolateBackward and InterpolateBackprop, compiled: one kernel under two sets of names."""

from __future__ import annotations

from onnx_backprop.opset.maths.interpolation import Taps, spec_taps
from onnx_backprop.opset.operators import interpolate_backprop, interpolate_backward
from onnx_backprop.ort_ops.interpolation.gather import functions
from onnx_backprop.ort_ops.interpolation.plan import plan
from onnx_backprop.ort_ops.runtime.bridge import Call, NativeKernel, Plan


def _plan(call: Call) -> Plan:
    attributes, lengths, outs = call.attributes, call.output, call.inputs[1]
    assert outs is not None
    first = 2 if attributes["data_format"] == "NCX" else 1
    mode = "nearest" if attributes["mode"] == "nearest" else "linear"
    coordinates = attributes["coordinate_transformation_mode"]
    spatial = range(first, first + len(lengths) - 2)

    def taps() -> list[Taps | None]:
        pairs = enumerate(zip(lengths, outs, strict=True))
        return [spec_taps(mode, coordinates, i, o) if axis in spatial else None for axis, (i, o) in pairs]

    return plan(call, 1, taps)


KERNELS = tuple(NativeKernel(op, _plan, functions) for op in (interpolate_backward.OP, interpolate_backprop.OP))
