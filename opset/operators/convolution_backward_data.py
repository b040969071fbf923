"""ConvolutionBackwardData: the gradient of a convolution with respect to its source."""

from __future__ import annotations

from collections.abc import Sequence

from onnx_backprop.opset.bodies import convolution
from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.core.layout import conv_weights_to_canonical, data_to_ncx
from onnx_backprop.opset.core.op import Arg, Attributes, Float64Array, Input, Op, Output
from onnx_backprop.opset.core.shapes import Dims, permute
from onnx_backprop.opset.maths import convolution_attributes as spec
from onnx_backprop.opset.maths.convolution import Resolved, backward_data, geometry, require_output_padding, resolve

DOC = """
dx[n,ic,i] = Σ_{oc in group, k, o: o·S + k·D - P = i} dy[n,oc,o] · w[oc, ic mod IC/g, k]

The adjoint of Convolution with the same attributes: dy = diff_dst, w = weights, dx = diff_src. Source cells that
no window reaches get 0.

Shapes (NCX, OIX): diff_dst (N, OC, out…), weights (OC, IC/g, k…) -> diff_src (N, IC, in…), with one to three
spatial axes and (in + P + E - EK) // S + 1 = out, EK = (K-1)·D + 1. Several lengths `in` fit one `out`, so the shape
of diff_src must be given: dst_shape is the full shape (N, C and spatial, in data_format order) of this operator's
*output*, the convolution's source.

Units: strides S, dilations D, kernel lengths K and the pads P (begin) and E (end) count cells. g = groups.

Edge cases: an empty batch gives an empty gradient.

Errors: no dst_shape; dst_shape of another rank, batch or channels; lengths that the geometry does not join;
channels that the groups do not divide.
"""

WEIGHTS_FORMAT = spec.conv_weights_format("weights_format")
DST_SHAPE_DOC = "Full shape of diff_src, in data_format order."


def _resolve(attrs: Attributes, diff_dst: Arg | None, weights: Arg | None, target: Dims | None) -> Resolved | None:
    w = spec.dims_of(weights, attrs, "weights")
    resolved = resolve(
        attrs,
        source=spec.ncx(attrs, target),
        destination=spec.ncx(attrs, spec.dims_of(diff_dst, attrs, "diff_dst")),
        weights=None if w is None else permute(w, conv_weights_to_canonical(attrs["weights_format"], len(w))),
        names=("dst_shape", "diff_dst", "weights"),
    )
    if resolved is not None and any(attrs["output_padding"] or ()):
        require_output_padding(attrs, resolved.source, resolved.destination, resolved, "dst_shape")
    return resolved


def shape(attrs: Attributes, args: Sequence[Arg | None]) -> Dims | None:
    diff_dst, weights, dst_shape = args
    resolved = _resolve(attrs, diff_dst, weights, spec.wanted_shape(attrs, "dst_shape", dst_shape))
    return None if resolved is None else spec.from_ncx(attrs, resolved.source)


def reference(
    attrs: Attributes,
    out: tuple[int, ...],
    diff_dst: Float64Array,
    weights: Float64Array,
    _dst_shape: tuple[int, ...] | None,
) -> Float64Array:
    resolved = _resolve(attrs, Arg(diff_dst.shape), Arg(weights.shape), out)
    assert resolved is not None
    w = weights.transpose(conv_weights_to_canonical(attrs["weights_format"], weights.ndim))
    source = [int(d) for d in resolved.source[2:] if isinstance(d, int)]
    dx = backward_data(spec.ncx_array(attrs, diff_dst), w, source, geometry(attrs, resolved))
    return spec.from_ncx_array(attrs, dx)


def body(b: Body, attrs: Attributes, diff_dst: Tensor, weights: Tensor, dst_shape: Tensor | None) -> str:
    """A convolution with the kernel turned round, or a transposed convolution, cut to dst_shape."""
    rank = len(attrs["strides"]) + 2
    weights = convolution.ranked(b, attrs, weights, "weights")
    diff_dst = convolution.ranked(b, attrs, diff_dst, "diff_dst")
    w = convolution.transpose(b, weights, conv_weights_to_canonical(attrs["weights_format"], rank))
    target = convolution.stated(b, attrs, "dst_shape", dst_shape, data_to_ncx(attrs["data_format"], rank))
    c = convolution.correlation(b, attrs, target, convolution.shape(b, w))
    zero = convolution.conditions(c, convolution.shape(b, w).take([1]), ("dst_shape", "diff_dst", "weights"))
    message = "diff_dst does not fit dst_shape, weights, strides, dilations and pads"
    dy = convolution.checked_destination(c, convolution.ncx(b, attrs, diff_dst), zero, message)
    return convolution.from_ncx(b, attrs, convolution.backward_data(c, dy, convolution.guarded(c, w, zero)))


OP = Op(
    name="ConvolutionBackwardData",
    doc=DOC,
    source="oneDNN Graph, ConvolutionBackwardData",
    attributes=(
        spec.STRIDES,
        spec.PADS_BEGIN,
        spec.PADS_END,
        spec.DILATIONS,
        spec.CONV_AUTO_PAD,
        spec.OUTPUT_PADDING,
        spec.GROUPS,
        spec.DATA_FORMAT,
        WEIGHTS_FORMAT,
        spec.shape_attribute("dst_shape", DST_SHAPE_DOC),
    ),
    inputs=(
        Input("diff_dst", "T1", "Gradient with respect to the convolution's destination."),
        Input("weights", "T1", "Weights of the convolution, in weights_format order."),
        spec.shape_input("dst_shape", DST_SHAPE_DOC),
    ),
    outputs=(Output("diff_src", "Gradient with respect to the convolution's source, shaped dst_shape."),),
    shape=shape,
    reference=reference,
    body=body,
)
