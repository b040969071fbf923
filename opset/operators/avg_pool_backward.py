"""AvgPoolBackward: the gradient of average pooling."""

from collections.abc import Sequence

import numpy as np

from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.core.op import Arg, Attribute, Attributes, Float64Array, Input, Op, Output
from onnx_backprop.opset.core.shapes import Dims
from onnx_backprop.opset.maths import convolution_attributes, pooling
from onnx_backprop.opset.maths.interpolation import Taps, apply_transpose
from onnx_backprop.opset.operators import convolution_backward_data

DOC = """
dx[n,c,i] = Σ_{o, k: o·S + k - P = i} dy[n,c,o] / |o|,  0 <= k < K

The adjoint of averages over windows: |o| is the number of pixels that window o is divided by, those of it inside x with
exclude_pad = 1, all of the window's, K per axis, with 0. dy = diff_dst, dx = diff_src; x is the pool's src, of which
only the shape is needed, src_shape.

Shapes (NCX): diff_dst (N, C, out…), src_shape (N, C, in…) -> diff_src (N, C, in…), with one to three spatial axes. With
pads P (begin) and E (end), out is (in + P + E - K) / S + 1 rounded down or up; up only if no window would begin at or
beyond in. The length of diff_dst tells which, so there is no attribute for it. src_shape is in data_format order.

Edge cases: pixels that no window reaches get 0. Windows that overlap add up, in float32. With exclude_pad = 0 a last
window that reaches beyond the padding is divided by K too. An empty batch or no channels give an empty result.

Errors: no src_shape; a spatial length of 0; pads as long as the kernel; lengths that do not fit the geometry.
"""

SRC_SHAPE_DOC = "Full shape of diff_src, in data_format order."


def shape(attrs: Attributes, args: Sequence[Arg | None]) -> Dims | None:
    diff_dst, src_shape = args
    attrs.require_flags("exclude_pad")
    source = convolution_attributes.ncx(attrs, convolution_attributes.wanted_shape(attrs, "src_shape", src_shape))
    windows = convolution_attributes.ncx(attrs, convolution_attributes.dims_of(diff_dst, attrs, "diff_dst"))
    resolved = pooling.resolve(attrs, source, windows)
    return None if resolved is None else convolution_attributes.from_ncx(attrs, resolved)


def taps(attrs: Attributes, source: Sequence[int], windows: Sequence[int]) -> list[Taps | None]:
    """The pixels and shares of every window, per axis of data in data_format order; None for batch and channels."""
    first = pooling.first_spatial(attrs)
    spatial = slice(first, first + len(attrs["kernel"]))
    axes = pooling.axes_of(attrs, source[spatial], windows[spatial])
    result: list[Taps | None] = [None] * len(source)
    result[spatial] = [pooling.shares(axis, exclude_pad=attrs["exclude_pad"] == 1) for axis in axes]
    return result


def reference(
    attrs: Attributes, out: tuple[int, ...], diff_dst: Float64Array, _src_shape: tuple[int, ...] | None
) -> Float64Array:
    if 0 in diff_dst.shape:
        return np.zeros(out)
    dx = diff_dst
    for axis, of_axis in enumerate(taps(attrs, out, diff_dst.shape)):
        dx = dx if of_axis is None else apply_transpose(of_axis, dx, axis)
    return dx


def body(b: Body, attrs: Attributes, diff_dst: Tensor, src_shape: Tensor | None) -> str:
    """The adjoint of a convolution."""
    from onnx_backprop.opset.bodies.avg_pool import avg_pool_backward

    return avg_pool_backward(b, attrs, diff_dst, src_shape, convolution_backward_data.OP)


OP = Op(
    name="AvgPoolBackward",
    doc=DOC,
    source="oneDNN Graph, AvgPoolBackward (src_shape as an attribute is a list of integers)",
    attributes=(
        pooling.STRIDES,
        pooling.PADS_BEGIN,
        pooling.PADS_END,
        pooling.KERNEL,
        Attribute("exclude_pad", "int", "1: padding is no part of an average; 0: it counts as zeros.", required=True),
        pooling.AUTO_PAD,
        convolution_attributes.DATA_FORMAT,
        convolution_attributes.shape_attribute("src_shape", SRC_SHAPE_DOC),
    ),
    inputs=(
        Input("diff_dst", "T1", "Gradient with respect to the pool's destination."),
        Input("src_shape", "T4", SRC_SHAPE_DOC, optional=True),
    ),
    outputs=(Output("diff_src", "Gradient with respect to the pool's source, shaped src_shape."),),
    shape=shape,
    reference=reference,
    body=body,
)
