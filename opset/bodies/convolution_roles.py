"""A convolution operator in standard ONNX operators, from the roles that its tensors have in a correlation."""

from functools import partial
from typing import Any

from onnx_backprop.opset.bodies import convolution
from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.bodies.convolution_weights import backward_weights
from onnx_backprop.opset.bodies.expressions import shape
from onnx_backprop.opset.core.layout import inverse
from onnx_backprop.opset.core.op import Attributes, Op
from onnx_backprop.opset.maths.convolution_roles import Roles


def op_of(roles: Roles, **described: Any) -> Op:
    """An operator whose shape, reference and body follow from the roles of its tensors."""
    return Op(shape=roles.shape, reference=roles.reference, body=partial(body, roles), **described)


def body(roles: Roles, b: Body, attrs: Attributes, first: Tensor, second: Tensor, third: Tensor | None = None) -> str:
    """The result; `third` states its shape, or is the bias of one whose shape follows from the other two."""
    rank, result = len(attrs["strides"]) + 2, roles.result
    orders = {role: roles.order(attrs, role, rank) for role in roles.names}
    x: dict[str, Tensor] = {}
    for role, tensor in zip(roles.names, (first, second), strict=False):
        x[role] = convolution.transpose(b, convolution.ranked(b, attrs, tensor, roles.names[role]), orders[role])
    shapes = {role: shape(b, tensor) for role, tensor in x.items()}
    if result != "destination":
        shapes[result] = convolution.stated(b, attrs, roles.names[result], third, orders[result])
    c = convolution.correlation(
        b,
        attrs,
        shapes["source"],
        shapes["weights"],
        transposed=roles.transposed,
        short=shapes["destination"][2:] if "destination" in shapes else None,
    )
    zero = convolution.conditions(c, shapes["weights"][1], roles.in_messages)
    if result != "destination":
        source, destination, weights = roles.in_messages
        message = f"{destination} does not fit {source}, {weights}, strides, dilations and pads"
        x["destination"] = convolution.checked_destination(c, x["destination"], zero, message)
    proven = "weights" if result == "source" else "source"
    x[proven] = convolution.guarded(c, x[proven], zero)
    if result == "source":
        written = convolution.backward_data(c, x["destination"], x["weights"])
    elif result == "weights":
        written = backward_weights(c, x["source"], x["destination"])
    else:
        if third is not None:
            channels, message = c.destination_channels, "expected as many entries of bias as channels of weights"
            third = b.checked(third, channels, message)
        written = convolution.forward(c, x["source"], x["weights"], third)
    return convolution.transpose(b, Tensor(written), inverse(orders[result])).name
