"""ConvTransposeBackwardData: the gradient of a transposed convolution with respect to its input."""

from __future__ import annotations

from collections.abc import Sequence

from onnx_backprop.opset.bodies import convolution
from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.core.layout import conv_transpose_weights_to_canonical
from onnx_backprop.opset.core.op import Arg, Attributes, Float64Array, Input, Op, Output
from onnx_backprop.opset.core.shapes import Dims, permute
from onnx_backprop.opset.maths import convolution_attributes as spec
from onnx_backprop.opset.maths.convolution import Resolved, forward, geometry, require_output_padding, resolve

DOC = """
dx[n,ic,i] = Σ_{oc, k: 0 <= i·S + k·D - P < len(dy)} dy[n, q·OC/g + oc, i·S + k·D - P] · W[ic,oc,k],  q = ic // (IC/g)

The adjoint of ConvTranspose with the same attributes: dy = diff_dst, dx = diff_src. It is the correlation of
diff_dst with the same weights, strides, pads, dilations and groups.

Shapes (NCX, IOX): diff_dst (N, OC, out…), weights (IC, OC/g, k…) -> diff_src (N, IC, in…), with one to three spatial
axes and in = (out + P + E - EK) // S + 1, EK = (K-1)·D + 1.

Units: strides S, dilations D, kernel lengths K and the pads P (begin) and E (end) count cells. g = groups.

Edge cases: the last (out + P + E - EK) mod S cells of diff_dst, an output_padding, may reach no weight and then do not
matter; an empty batch gives an empty gradient.

Errors: channels of diff_dst other than groups × O; channels that the groups do not divide; a kernel longer than the
padded diff_dst; an output_padding that does not fit the lengths.
"""


def _resolve(attrs: Attributes, diff_dst: Arg | None, weights: Arg | None) -> Resolved | None:
    w = spec.dims_of(weights, attrs, "weights")
    order = None if w is None else conv_transpose_weights_to_canonical(attrs["weights_format"], len(w))
    resolved = resolve(
        attrs,
        source=spec.ncx(attrs, spec.dims_of(diff_dst, attrs, "diff_dst")),
        destination=None,
        weights=None if w is None or order is None else permute(w, order),
        names=("diff_dst", "diff_src", "weights"),
        transposed=True,
        infers_destination=True,
    )
    if resolved is not None:
        require_output_padding(attrs, resolved.source, resolved.destination, resolved, "diff_dst")
    return resolved


def shape(attrs: Attributes, args: Sequence[Arg | None]) -> Dims | None:
    resolved = _resolve(attrs, *args)
    return None if resolved is None else spec.from_ncx(attrs, resolved.destination)


def reference(attrs: Attributes, out: tuple[int, ...], diff_dst: Float64Array, weights: Float64Array) -> Float64Array:
    resolved = _resolve(attrs, Arg(diff_dst.shape), Arg(weights.shape))
    assert resolved is not None
    w = weights.transpose(conv_transpose_weights_to_canonical(attrs["weights_format"], weights.ndim))
    lengths = spec.ncx(attrs, out)
    assert lengths is not None
    lengths = [int(d) for d in lengths[2:] if isinstance(d, int)]
    dx = forward(spec.ncx_array(attrs, diff_dst), w, lengths, geometry(attrs, resolved))
    return spec.from_ncx_array(attrs, dx)


def body(b: Body, attrs: Attributes, diff_dst: Tensor, weights: Tensor) -> str:
    """A convolution of diff_dst."""
    order = conv_transpose_weights_to_canonical(attrs["weights_format"], len(attrs["strides"]) + 2)
    w = convolution.transpose(b, convolution.ranked(b, attrs, weights, "weights"), order)
    x = convolution.ncx(b, attrs, convolution.ranked(b, attrs, diff_dst, "diff_dst"))
    c = convolution.correlation(b, attrs, convolution.shape(b, x), convolution.shape(b, w), transposed=True)
    zero = convolution.conditions(c, convolution.shape(b, w).take([1]), ("diff_dst", "diff_src", "weights"))
    return convolution.from_ncx(b, attrs, convolution.forward(c, convolution.guarded(c, x, zero), w))


OP = Op(
    name="ConvTransposeBackwardData",
    doc=DOC,
    source="oneDNN Graph, ConvTransposeBackwardData",
    attributes=(
        spec.STRIDES,
        spec.PADS_BEGIN,
        spec.PADS_END,
        spec.DILATIONS,
        spec.CONV_TRANSPOSE_AUTO_PAD,
        spec.OUTPUT_PADDING,
        spec.GROUPS,
        spec.DATA_FORMAT,
        spec.conv_transpose_weights_format("weights_format", "XOI"),
    ),
    inputs=(
        Input("diff_dst", "T1", "Gradient with respect to the ConvTranspose's output."),
        Input("weights", "T1", "Weights of the ConvTranspose, in weights_format order."),
    ),
    outputs=(Output("diff_src", "Gradient with respect to the ConvTranspose's input."),),
    shape=shape,
    reference=reference,
    body=body,
)
