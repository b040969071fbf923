"""ConvolutionBackwardData: the gradient of a convolution with respect to its source."""

from onnx_backprop.opset.bodies.convolution_roles import op_of
from onnx_backprop.opset.core.op import Input, Output
from onnx_backprop.opset.maths import convolution_attributes as spec
from onnx_backprop.opset.maths.convolution_roles import Roles

DOC = """
dx[n,ic,i] = Σ_{oc in group, k, o: o·S + k·D - P = i} dy[n,oc,o] · w[oc, ic mod IC/g, k]

The adjoint of Convolution with the same attributes: dy = diff_dst, w = weights, dx = diff_src. Source pixels that
no window reaches get 0.

Shapes (NCX, OIX): diff_dst (N, OC, out…), weights (OC, IC/g, k…) -> diff_src (N, IC, in…), with one to three
spatial axes and (in + P + E - EK) // S + 1 = out, EK = (K-1)·D + 1. Several lengths `in` fit one `out`, so the shape
of diff_src must be given: dst_shape is the full shape (N, C and spatial, in data_format order) of this operator's
*output*, the convolution's source.

Units: strides S, dilations D, kernel lengths K and the pads P (begin) and E (end) count pixels. g = groups.

Edge cases: an empty batch gives an empty gradient.

Errors: no dst_shape; dst_shape of another rank, batch or channels; lengths that do not fit the geometry;
channels that the groups do not divide.
"""

DST_SHAPE_DOC = "Full shape of diff_src, in data_format order."

ROLES = Roles({"destination": "diff_dst", "weights": "weights", "source": "dst_shape"})

OP = op_of(
    ROLES,
    name="ConvolutionBackwardData",
    doc=DOC,
    source="oneDNN Graph, ConvolutionBackwardData",
    attributes=(
        *spec.geometry_attributes(spec.CONV_AUTO_PAD, output_padding=True),
        spec.CONV_WEIGHTS_FORMAT,
        spec.shape_attribute("dst_shape", DST_SHAPE_DOC),
    ),
    inputs=(
        Input("diff_dst", "T1", "Gradient with respect to the convolution's destination."),
        Input("weights", "T1", "Weights of the convolution, in weights_format order."),
        spec.shape_input("dst_shape", DST_SHAPE_DOC),
    ),
    outputs=(Output("diff_src", "Gradient with respect to the convolution's source, shaped dst_shape."),),
)
