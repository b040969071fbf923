"""ReLUBackward: the gradient of the rectified linear unit."""

from collections.abc import Sequence

import numpy as np

from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.bodies.elementwise import MAX_RANK, proven_alike, same_shape
from onnx_backprop.opset.core.op import Arg, Attribute, Attributes, Float64Array, Input, Op, Output
from onnx_backprop.opset.core.shapes import Dims

DOC = """
dx[i] = dy[i] where x[i] > 0, else 0

x = src, dy = diff_dst, dx = diff_src. Since y = max(x, 0) is positive where x is, src may be either (use_dst says
which it is meant to be, and changes nothing).

Shapes: src and diff_dst of one shape, any rank -> diff_src of the same.

Edge cases: 0 at x = 0 and where x is NaN, whatever dy is there, an infinity or NaN too.

Errors: shapes that differ; use_dst other than 0 and 1.
"""


def shape(attrs: Attributes, args: Sequence[Arg | None]) -> Dims | None:
    attrs.require_flags("use_dst")
    return same_shape(attrs.op, args, ("src", "diff_dst"), 0, MAX_RANK)


def reference(_attrs: Attributes, _out: tuple[int, ...], src: Float64Array, diff_dst: Float64Array) -> Float64Array:
    return np.where(src > 0, diff_dst, 0.0)


def body(b: Body, _attrs: Attributes, src: Tensor, diff_dst: Tensor) -> str:
    """Greater and Where."""
    message = "expected diff_dst of the shape of src"
    zero = b.float_scalar(0)
    picked = b.Where(b.Greater(src, zero), diff_dst, zero, name=f"{b.op}: {message}")
    return proven_alike(b, picked, src, diff_dst, message)


OP = Op(
    name="ReLUBackward",
    doc=DOC,
    source="oneDNN Graph, ReLUBackward",
    attributes=(Attribute("use_dst", "int", "1: src is the destination of ReLU; 0: its source.", default=1),),
    inputs=(
        Input("src", "T1", "Destination or source of ReLU."),
        Input("diff_dst", "T1", "Gradient with respect to the destination of ReLU."),
    ),
    outputs=(Output("diff_src", "Gradient with respect to the source of ReLU."),),
    shape=shape,
    reference=reference,
    body=body,
)
