"""The operators of interpolation and average pooling: each from its attributes to the taps of every axis."""

from onnx_backprop.opset.maths.interpolation import Taps, onednn_taps, resample_taps
from onnx_backprop.opset.maths.resize import resize_taps
from onnx_backprop.opset.operators import (
    avg_pool_backward,
    interpolate_backprop,
    interpolate_backward,
    resample_grad,
    resize_grad,
)
from onnx_backprop.ort_ops.interpolation.plan import plan
from onnx_backprop.ort_ops.runtime.bridge import NativeKernel, Request, Shape
from onnx_backprop.ort_ops.runtime.stages import Plan


def _input(request: Request, n: int) -> Shape:
    """The shape of an input that must be there."""
    shape = request.inputs[n]
    assert shape is not None
    return shape


def _interpolate(request: Request) -> Plan:
    attributes, lengths, outs = request.attributes, request.output, _input(request, 1)
    first = 2 if attributes["data_format"] == "NCX" else 1
    mode = "nearest" if attributes["mode"] == "nearest" else "linear"
    coordinates = attributes["coordinate_transformation_mode"]
    spatial = range(first, first + len(lengths) - 2)

    def taps() -> list[Taps | None]:
        pairs = enumerate(zip(lengths, outs, strict=True))
        return [onednn_taps(mode, coordinates, i, o) if axis in spatial else None for axis, (i, o) in pairs]

    return plan(request, 1, taps)


def _resample(request: Request) -> Plan:
    attributes, outs = request.attributes, _input(request, 0)
    rank = len(outs)
    per_axis = zip(
        request.output,
        outs,
        attributes["scales"] or [None] * rank,
        attributes["input_pixel_offsets"] or [resample_grad.DEFAULT_INPUT_OFFSET] * rank,
        attributes["output_pixel_offsets"] or [resample_grad.DEFAULT_OUTPUT_OFFSET] * rank,
        strict=True,
    )
    return plan(request, 0, lambda: [resample_taps(attributes["interpolation_mode"], *axis) for axis in per_axis])


def _resize(request: Request) -> Plan:
    outs = _input(request, 0)
    roi, scales, sizes = request.numbers[2:]
    whole = None if sizes is None else [int(s) for s in sizes]

    def taps() -> list[Taps | None]:
        axes = resize_grad.resized_axes(request.attributes, request.output, outs, roi=roi, scales=scales, sizes=whole)
        return [None if axis is None else resize_taps(axis) for axis in axes]

    return plan(request, 0, taps)


def _avg_pool(request: Request) -> Plan:
    """Every source cell gathers the shares of the windows that it lies in."""
    windows = _input(request, 0)
    return plan(request, 0, lambda: avg_pool_backward.taps(request.attributes, request.output, windows))


KERNELS = (
    NativeKernel(interpolate_backward.OP, _interpolate),
    NativeKernel(interpolate_backprop.OP, _interpolate),
    NativeKernel(resample_grad.OP, _resample),
    NativeKernel(resize_grad.OP, _resize),
    NativeKernel(avg_pool_backward.OP, _avg_pool),
)
