"""InterpolateBackprop: InterpolateBackward under the names of the older specification."""

from onnx_backprop.opset.core.op import Op, Output
from onnx_backprop.opset.operators.interpolate_backward import ATTRIBUTES, InputNames

NAMES = InputNames("input_forward", "output_delta")

OP = Op(
    name="InterpolateBackprop",
    doc=NAMES.doc(),
    source="oneDNN Graph, InterpolateBackprop-1",
    attributes=ATTRIBUTES,
    inputs=NAMES.inputs(),
    outputs=(Output("input_delta", "Gradient with respect to the input, shaped as input_forward."),),
    shape=NAMES.shape,
    reference=NAMES.reference,
    body=NAMES.body,
)
