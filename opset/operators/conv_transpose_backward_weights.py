"""ConvTransposeBackwardWeights: the gradient of a transposed convolution with respect to its weights."""

from onnx_backprop.opset.bodies.convolution_roles import op_of
from onnx_backprop.opset.core.op import Attribute, Input, Output
from onnx_backprop.opset.maths import convolution_attributes as spec
from onnx_backprop.opset.maths.convolution_roles import Roles

MATHS = """
dW[ic,oc,k] = Σ_{n, i: 0 <= i·S + k·D - P < len(dy)} x[n,ic,i] · dy[n, q·OC/g + oc, i·S + k·D - P],  q = ic // (IC/g)
"""

DOC = f"""{MATHS}
The adjoint of ConvTranspose with the same attributes: x = src, dy = diff_dst, dW = diff_weights.

Shapes (NCX, IOX): src (N, IC, in…), diff_dst (N, OC, out…) -> diff_weights (IC, OC/g, k…), with one to three spatial
axes and in = (out + P + E - EK) // S + 1, EK = (K-1)·D + 1. The lengths leave K open, so weights_shape (in
weights_format order) must be given.

Units: strides S, dilations D, kernel lengths K and the pads P (begin) and E (end) count pixels. g = groups.

Edge cases: an empty batch gives zeros.

Errors: no weights_shape; weights_shape of another rank or with other channels; lengths that do not fit the
geometry; channels that the groups do not divide; an output_padding that does not fit the lengths.
"""


def attributes(roles: Roles, default_format: str) -> tuple[Attribute, ...]:
    return (
        *spec.geometry_attributes(spec.CONV_TRANSPOSE_AUTO_PAD, output_padding=True),
        spec.conv_transpose_weights_format(roles.weights_format, default_format),
        spec.shape_attribute(roles.names["weights"], _shape_doc(roles)),
    )


def inputs(roles: Roles) -> tuple[Input, ...]:
    return (
        Input(roles.names["destination"], "T1", "Input of the ConvTranspose."),
        Input(roles.names["source"], "T1", "Gradient with respect to the ConvTranspose's output."),
        spec.shape_input(roles.names["weights"], _shape_doc(roles)),
    )


def _shape_doc(roles: Roles) -> str:
    return f"Full shape of the weights, in {roles.weights_format} order."


ROLES = Roles({"destination": "src", "source": "diff_dst", "weights": "weights_shape"}, transposed=True)

OP = op_of(
    ROLES,
    name="ConvTransposeBackwardWeights",
    doc=DOC,
    source="oneDNN Graph, ConvTransposeBackwardWeights",
    attributes=attributes(ROLES, "XOI"),
    inputs=inputs(ROLES),
    outputs=(Output("diff_weights", "Gradient with respect to the weights, shaped weights_shape."),),
)
