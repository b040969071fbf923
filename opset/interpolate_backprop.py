"""InterpolateBackprop: InterpolateBackward under the names of the older specification."""

from __future__ import annotations

from .interpolate_backward import ATTRIBUTES, Names
from .op import Op

NAMES = Names("input_forward", "output_delta")

OP = Op(
    name="InterpolateBackprop",
    doc=NAMES.doc(),
    source="oneDNN Graph, InterpolateBackprop-1",
    attributes=ATTRIBUTES,
    inputs=NAMES.inputs(),
    output="input_delta",
    output_doc="Gradient with respect to the input, shaped as input_forward.",
    shape=NAMES.shape,
    reference=NAMES.reference,
    body=NAMES.body,
)
