"""Convolution: the operator whose gradients the others are, for weights that change from run to run."""

from __future__ import annotations

from collections.abc import Sequence

from onnx_backprop.opset.bodies import convolution
from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.core.layout import conv_weights_to_canonical
from onnx_backprop.opset.core.op import Arg, Attributes, Float64Array, Input, Op, Output
from onnx_backprop.opset.core.shapes import Dims, merge, permute, require_rank
from onnx_backprop.opset.maths import convolution_attributes as spec
from onnx_backprop.opset.maths.convolution import Resolved, forward, geometry, resolve

DOC = """
y[n,oc,o] = bias[oc] + Σ_{ic in group, k: 0 <= o·S + k·D - P < len(x)} x[n,ic,o·S + k·D - P] · w[oc, ic mod IC/g, k]

x = src, w = weights, y = dst; without bias, bias is 0. onnxruntime arranges weights for its fastest convolution when a
session is created, which it cannot do with weights that are inputs of the graph, as in training; this operator has no
need of it.

Shapes (NCX, OIX): src (N, IC, in…), weights (OC, IC/g, k…), bias (OC,) -> dst (N, OC, out…), with one to three spatial
axes and out = (in + P + E - EK) // S + 1, EK = (K-1)·D + 1.

Units: strides S, dilations D, kernel lengths K and the pads P (begin) and E (end) count cells. g = groups.

Edge cases: the last (in + P + E - EK) mod S cells of src may reach no weight and then do not matter; an empty batch
gives an empty result; without channels of src dst is the bias.

Errors: channels of src other than groups × IC/g of the weights; channels that the groups do not divide; a bias of
another length than OC; a kernel longer than the padded src.
"""


def _resolve(attrs: Attributes, src: Arg | None, weights: Arg | None) -> Resolved | None:
    w = spec.dims_of(weights, attrs, "weights")
    return resolve(
        attrs,
        source=spec.ncx(attrs, spec.dims_of(src, attrs, "src")),
        destination=None,
        weights=None if w is None else permute(w, conv_weights_to_canonical(attrs["weights_format"], len(w))),
        names=("src", "dst", "weights"),
        infers_destination=True,
    )


def shape(attrs: Attributes, args: Sequence[Arg | None]) -> Dims | None:
    src, weights, bias = args
    resolved = _resolve(attrs, src, weights)
    lengths = None
    if bias is not None and bias.dims is not None:
        require_rank(bias.dims, 1, 1, op=attrs.op, what="bias")
        lengths = bias.dims
    if resolved is None:
        return None
    batch, channels, *rest = resolved.destination
    if lengths is not None:
        channels = merge(lengths[0], channels, op=attrs.op, what="lengths of bias and channels of weights")
    return spec.from_ncx(attrs, (batch, channels, *rest))


def reference(
    attrs: Attributes,
    out: tuple[int, ...],
    src: Float64Array,
    weights: Float64Array,
    bias: Float64Array | None,
) -> Float64Array:
    resolved = _resolve(attrs, Arg(src.shape), Arg(weights.shape))
    assert resolved is not None
    w = weights.transpose(conv_weights_to_canonical(attrs["weights_format"], weights.ndim))
    lengths = spec.ncx(attrs, out)
    assert lengths is not None
    lengths = [int(d) for d in lengths[2:] if isinstance(d, int)]
    y = forward(spec.ncx_array(attrs, src), w, lengths, geometry(attrs, resolved))
    if bias is not None:
        y += bias.reshape(-1, *[1] * len(lengths))
    return spec.from_ncx_array(attrs, y)


def body(b: Body, attrs: Attributes, src: Tensor, weights: Tensor, bias: Tensor | None) -> str:
    """Conv, which adds the bias itself."""
    order = conv_weights_to_canonical(attrs["weights_format"], len(attrs["strides"]) + 2)
    w = convolution.transpose(b, convolution.ranked(b, attrs, weights, "weights"), order)
    x = convolution.ncx(b, attrs, convolution.ranked(b, attrs, src, "src"))
    c = convolution.correlation(b, attrs, convolution.shape(b, x), convolution.shape(b, w))
    zero = convolution.conditions(c, convolution.shape(b, w).take([1]), ("src", "dst", "weights"))
    if bias is not None:
        channels = c.destination_channels
        bias = b.checked(bias, channels.name, channels.dims, "expected as many entries of bias as channels of weights")
    return convolution.from_ncx(b, attrs, convolution.forward(c, convolution.guarded(c, x, zero), w, bias))


OP = Op(
    name="Convolution",
    doc=DOC,
    source="oneDNN Graph, Convolution",
    attributes=(
        spec.STRIDES,
        spec.PADS_BEGIN,
        spec.PADS_END,
        spec.DILATIONS,
        spec.CONV_AUTO_PAD,
        spec.GROUPS,
        spec.DATA_FORMAT,
        spec.conv_weights_format("weights_format"),
    ),
    inputs=(
        Input("src", "T1", "What is convolved."),
        Input("weights", "T1", "Weights, in weights_format order."),
        Input("bias", "T1", "Added to every cell of its channel, 1-D.", optional=True),
    ),
    outputs=(Output("dst", "The convolution."),),
    shape=shape,
    reference=reference,
    body=body,
)
