"""ConvolutionBackwardWeights: the gradient of a convolution with respect to its weights."""

from __future__ import annotations

from collections.abc import Sequence

from onnx_backprop.opset.bodies import convolution
from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.bodies.convolution_weights import backward_weights as backward_weights_body
from onnx_backprop.opset.core.layout import conv_weights_to_canonical, inverse
from onnx_backprop.opset.core.op import Arg, Attributes, Float64Array, Input, Op, Output
from onnx_backprop.opset.core.shapes import Dims, permute
from onnx_backprop.opset.maths import convolution_attributes as spec
from onnx_backprop.opset.maths.convolution import Resolved, backward_weights, geometry, resolve

DOC = """
dw[oc,ic,k] = Σ_{n, o: 0 <= o·S + k·D - P < in} dy[n,oc,o] · x[n, q·IC/g + ic, o·S + k·D - P],  q = oc // (OC/g)

The adjoint of Convolution with the same attributes: x = src, dy = diff_dst, dw = diff_weights.

Shapes (NCX, OIX): src (N, IC, in…), diff_dst (N, OC, out…) -> diff_weights (OC, IC/g, k…), with one to three spatial
axes and (in + P + E - EK) // S + 1 = out, EK = (K-1)·D + 1. The lengths leave K open, so weights_shape (in
weights_format order) must be given.

Units: strides S, dilations D, kernel lengths K and the pads P (begin) and E (end) count cells. g = groups.

Edge cases: an empty batch gives zeros.

Errors: no weights_shape; weights_shape of another rank or with other channels; lengths that the geometry does not
join; channels that the groups do not divide.
"""

WEIGHTS_SHAPE_DOC = "Full shape of diff_weights, in weights_format order."


def _resolve(attrs: Attributes, src: Arg | None, diff_dst: Arg | None, target: Dims | None) -> Resolved | None:
    order = None if target is None else conv_weights_to_canonical(attrs["weights_format"], len(target))
    return resolve(
        attrs,
        source=spec.ncx(attrs, spec.dims_of(src, attrs, "src")),
        destination=spec.ncx(attrs, spec.dims_of(diff_dst, attrs, "diff_dst")),
        weights=None if target is None or order is None else permute(target, order),
        names=("src", "diff_dst", "weights_shape"),
    )


def shape(attrs: Attributes, args: Sequence[Arg | None]) -> Dims | None:
    src, diff_dst, weights_shape = args
    resolved = _resolve(attrs, src, diff_dst, spec.wanted_shape(attrs, "weights_shape", weights_shape))
    if resolved is None:
        return None
    order = conv_weights_to_canonical(attrs["weights_format"], len(resolved.weights))
    return permute(resolved.weights, inverse(order))


def reference(
    attrs: Attributes,
    out: tuple[int, ...],
    src: Float64Array,
    diff_dst: Float64Array,
    _weights_shape: tuple[int, ...] | None,
) -> Float64Array:
    resolved = _resolve(attrs, Arg(src.shape), Arg(diff_dst.shape), out)
    assert resolved is not None
    order = conv_weights_to_canonical(attrs["weights_format"], len(out))
    kernel = [out[axis] for axis in order[2:]]
    geo = geometry(attrs, resolved)
    dw = backward_weights(spec.ncx_array(attrs, src), spec.ncx_array(attrs, diff_dst), kernel, geo)
    return dw.transpose(inverse(order))


def body(b: Body, attrs: Attributes, src: Tensor, diff_dst: Tensor, weights_shape: Tensor | None) -> str:
    """Matrix products of diff_dst with the source cells that each kernel cell meets."""
    order = conv_weights_to_canonical(attrs["weights_format"], len(attrs["strides"]) + 2)
    target = convolution.stated(b, attrs, "weights_shape", weights_shape, order)
    x = convolution.ncx(b, attrs, convolution.ranked(b, attrs, src, "src"))
    y = convolution.ncx(b, attrs, convolution.ranked(b, attrs, diff_dst, "diff_dst"))
    c = convolution.correlation(b, attrs, convolution.shape(b, x), target)
    zero = convolution.conditions(c, target.take([1]), ("src", "diff_dst", "weights_shape"))
    message = "diff_dst does not fit src, weights_shape, strides, dilations and pads"
    y = convolution.checked_destination(c, y, zero, message)
    dw = backward_weights_body(c, convolution.guarded(c, x, zero), y)
    return convolution.transpose(b, Tensor(dw), inverse(order)).name


OP = Op(
    name="ConvolutionBackwardWeights",
    doc=DOC,
    source="oneDNN Graph, ConvolutionBackwardWeights",
    attributes=(
        spec.STRIDES,
        spec.PADS_BEGIN,
        spec.PADS_END,
        spec.DILATIONS,
        spec.CONV_AUTO_PAD,
        spec.GROUPS,
        spec.DATA_FORMAT,
        spec.conv_weights_format("weights_format"),
        spec.shape_attribute("weights_shape", WEIGHTS_SHAPE_DOC),
    ),
    inputs=(
        Input("src", "T1", "Source of the convolution."),
        Input("diff_dst", "T1", "Gradient with respect to the convolution's destination."),
        spec.shape_input("weights_shape", WEIGHTS_SHAPE_DOC),
    ),
    outputs=(Output("diff_weights", "Gradient with respect to the weights, shaped weights_shape."),),
    shape=shape,
    reference=reference,
    body=body,
)
