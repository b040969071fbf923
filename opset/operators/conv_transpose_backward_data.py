"""ConvTransposeBackwardData: the gradient of a transposed convolution with respect to its input."""

from onnx_backprop.opset.bodies.convolution_roles import op_of
from onnx_backprop.opset.core.op import Input, Output
from onnx_backprop.opset.maths import convolution_attributes as spec
from onnx_backprop.opset.maths.convolution_roles import Roles

DOC = """
dx[n,ic,i] = Σ_{oc, k: 0 <= i·S + k·D - P < len(dy)} dy[n, q·OC/g + oc, i·S + k·D - P] · W[ic,oc,k],  q = ic // (IC/g)

The adjoint of ConvTranspose with the same attributes: dy = diff_dst, dx = diff_src. It is the correlation of
diff_dst with the same weights, strides, pads, dilations and groups.

Shapes (NCX, IOX): diff_dst (N, OC, out…), weights (IC, OC/g, k…) -> diff_src (N, IC, in…), with one to three spatial
axes and in = (out + P + E - EK) // S + 1, EK = (K-1)·D + 1.

Units: strides S, dilations D, kernel lengths K and the pads P (begin) and E (end) count pixels. g = groups.

Edge cases: the last (out + P + E - EK) mod S pixels of diff_dst, an output_padding, may reach no weight and then do not
matter; an empty batch gives an empty gradient.

Errors: channels of diff_dst other than groups × O; channels that the groups do not divide; a kernel longer than the
padded diff_dst; an output_padding that does not fit the lengths.
"""

ROLES = Roles({"source": "diff_dst", "weights": "weights", "destination": "diff_src"}, transposed=True)

OP = op_of(
    ROLES,
    name="ConvTransposeBackwardData",
    doc=DOC,
    source="oneDNN Graph, ConvTransposeBackwardData",
    attributes=(
        *spec.geometry_attributes(spec.CONV_TRANSPOSE_AUTO_PAD, output_padding=True),
        spec.conv_transpose_weights_format("weights_format", "XOI"),
    ),
    inputs=(
        Input("diff_dst", "T1", "Gradient with respect to the ConvTranspose's output."),
        Input("weights", "T1", "Weights of the ConvTranspose, in weights_format order."),
    ),
    outputs=(Output("diff_src", "Gradient with respect to the ConvTranspose's input."),),
)
