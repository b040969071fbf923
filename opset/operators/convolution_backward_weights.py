"""ConvolutionBackwardWeights: the gradient of a convolution with respect to its weights."""

from onnx_backprop.opset.bodies.convolution_roles import op_of
from onnx_backprop.opset.core.op import Input, Output
from onnx_backprop.opset.maths import convolution_attributes as spec
from onnx_backprop.opset.maths.convolution_roles import Roles

DOC = """
dw[oc,ic,k] = Σ_{n, o: 0 <= o·S + k·D - P < in} dy[n,oc,o] · x[n, q·IC/g + ic, o·S + k·D - P],  q = oc // (OC/g)

The adjoint of Convolution with the same attributes: x = src, dy = diff_dst, dw = diff_weights.

Shapes (NCX, OIX): src (N, IC, in…), diff_dst (N, OC, out…) -> diff_weights (OC, IC/g, k…), with one to three spatial
axes and (in + P + E - EK) // S + 1 = out, EK = (K-1)·D + 1. The lengths leave K open, so weights_shape (in
weights_format order) must be given.

Units: strides S, dilations D, kernel lengths K and the pads P (begin) and E (end) count pixels. g = groups.

Edge cases: an empty batch gives zeros.

Errors: no weights_shape; weights_shape of another rank or with other channels; lengths that do not fit the
geometry; channels that the groups do not divide.
"""

WEIGHTS_SHAPE_DOC = "Full shape of diff_weights, in weights_format order."

ROLES = Roles({"source": "src", "destination": "diff_dst", "weights": "weights_shape"})

OP = op_of(
    ROLES,
    name="ConvolutionBackwardWeights",
    doc=DOC,
    source="oneDNN Graph, ConvolutionBackwardWeights",
    attributes=(
        *spec.geometry_attributes(spec.CONV_AUTO_PAD, output_padding=False),
        spec.CONV_WEIGHTS_FORMAT,
        spec.shape_attribute("weights_shape", WEIGHTS_SHAPE_DOC),
    ),
    inputs=(
        Input("src", "T1", "Source of the convolution."),
        Input("diff_dst", "T1", "Gradient with respect to the convolution's destination."),
        spec.shape_input("weights_shape", WEIGHTS_SHAPE_DOC),
    ),
    outputs=(Output("diff_weights", "Gradient with respect to the weights, shaped weights_shape."),),
)
