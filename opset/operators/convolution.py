"""Convolution: the operator whose gradients the others are, for weights that change from run to run."""

from collections.abc import Sequence
from functools import partial

from onnx_backprop.opset.bodies.convolution_roles import body
from onnx_backprop.opset.core.layout import data_to_ncx
from onnx_backprop.opset.core.op import Arg, Attributes, Float64Array, Input, Op, Output
from onnx_backprop.opset.core.shapes import Dims, merge, require_rank
from onnx_backprop.opset.maths import convolution_attributes as spec
from onnx_backprop.opset.maths.convolution_roles import PRODUCTS, Products, Roles

DOC = """
y[n,oc,o] = bias[oc] + Σ_{ic in group, k: 0 <= o·S + k·D - P < len(x)} x[n,ic,o·S + k·D - P] · w[oc, ic mod IC/g, k]

x = src, w = weights, y = dst; without bias, bias is 0. onnxruntime's fastest convolution needs weights that are known
when a session is created; in training they are inputs of the graph. This operator does not need that.

Shapes (NCX, OIX): src (N, IC, in…), weights (OC, IC/g, k…), bias (OC,) -> dst (N, OC, out…), with one to three spatial
axes and out = (in + P + E - EK) // S + 1, EK = (K-1)·D + 1.

Units: strides S, dilations D, kernel lengths K and the pads P (begin) and E (end) count pixels. g = groups.

Edge cases: the last (in + P + E - EK) mod S pixels of src may reach no weight and then do not matter; an empty batch
gives an empty result; without channels of src dst is the bias.

Errors: channels of src other than groups × IC/g of the weights; channels that the groups do not divide; a bias of
another length than OC; a kernel longer than the padded src.
"""


ROLES = Roles({"source": "src", "weights": "weights", "destination": "dst"})


def shape(attrs: Attributes, args: Sequence[Arg | None]) -> Dims | None:
    dims, bias = ROLES.shape(attrs, args), args[2]
    if bias is None or bias.dims is None:
        return dims
    require_rank(bias.dims, 1, 1, op=attrs.op, subject="bias")
    if dims is None:
        return None
    channel = data_to_ncx(attrs["data_format"], len(dims))[1]
    merged = merge(bias.dims[0], dims[channel], op=attrs.op, subject="lengths of bias and channels of weights")
    return (*dims[:channel], merged, *dims[channel + 1 :])


def reference(
    attrs: Attributes,
    out: tuple[int, ...],
    src: Float64Array,
    weights: Float64Array,
    bias: Float64Array | None,
    *,
    products: Products = PRODUCTS,
) -> Float64Array:
    y = ROLES.reference(attrs, out, src, weights, products=products)
    if bias is None:
        return y
    return y + (bias if attrs["data_format"] == "NXC" else bias.reshape(-1, *[1] * (y.ndim - 2)))


OP = Op(
    name="Convolution",
    doc=DOC,
    source="oneDNN Graph, Convolution",
    attributes=(*spec.geometry_attributes(spec.CONV_AUTO_PAD, output_padding=False), spec.CONV_WEIGHTS_FORMAT),
    inputs=(
        Input("src", "T1", "What is convolved."),
        Input("weights", "T1", "Weights, in weights_format order."),
        Input("bias", "T1", "Added to every pixel of its channel, 1-D.", optional=True),
    ),
    outputs=(Output("dst", "The convolution."),),
    shape=shape,
    reference=reference,
    body=partial(body, ROLES),
)
