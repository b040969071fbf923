"""ConvTransposeBackpropFilters: ConvTransposeBackwardWeights under the names of the older specification."""

from onnx_backprop.opset.bodies.convolution_roles import op_of
from onnx_backprop.opset.core.op import Output
from onnx_backprop.opset.maths.convolution_roles import Roles
from onnx_backprop.opset.operators.conv_transpose_backward_weights import MATHS, attributes, inputs

DOC = f"""{MATHS}
ConvTransposeBackwardWeights under its older names: x = input_forward, dy = output_delta, dW = filter_delta. The
layouts OIX (OC/g, IC, k…) and XIO (k…, IC, OC/g) are the ones this specification names; they hold the same weights as
IOX and XOI with the two channel axes exchanged.

Shapes (NCX, OIX): input_forward (N, IC, in…), output_delta (N, OC, out…) -> filter_delta (OC/g, IC, k…), with one to
three spatial axes and in = (out + P + E - EK) // S + 1, EK = (K-1)·D + 1. The lengths leave K open, so filter_shape
(in filter_format order) must be given.

Units: strides S, dilations D, kernel lengths K and the pads P (begin) and E (end) count pixels. g = groups.

Edge cases: an empty batch gives zeros.

Errors: no filter_shape; filter_shape of another rank or with other channels; lengths that do not fit the geometry;
channels that the groups do not divide; an output_padding that does not fit the lengths.
"""

ROLES = Roles(
    {"destination": "input_forward", "source": "output_delta", "weights": "filter_shape"},
    transposed=True,
    weights_format="filter_format",
)

OP = op_of(
    ROLES,
    name="ConvTransposeBackpropFilters",
    doc=DOC,
    source="oneDNN Graph, ConvTransposeBackpropFilters-1",
    attributes=attributes(ROLES, "XIO"),
    inputs=inputs(ROLES),
    outputs=(Output("filter_delta", "Gradient with respect to the filter, shaped filter_shape."),),
)
