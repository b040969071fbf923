"""SoftMaxBackward: the gradient of softmax, from its destination."""

from collections.abc import Sequence

from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.bodies.elementwise import MAX_RANK, proven_alike, same_shape
from onnx_backprop.opset.core.errors import ShapeError
from onnx_backprop.opset.core.op import Arg, Attribute, Attributes, Float64Array, Input, Op, Output
from onnx_backprop.opset.core.shapes import Dims

DOC = """
dx = y·(dy - Σ dy·y)

The adjoint of y = e^x / Σ e^x, Σ running along one axis. y = dst, dy = diff_dst, dx = diff_src.

Shapes: diff_dst and dst of one shape, rank >= 1 -> diff_src of the same.

Edge cases: an axis of length 1 gives zeros. The sum is taken in float32 or better.

Errors: shapes that differ; an axis that they do not have.
"""


def shape(attrs: Attributes, args: Sequence[Arg | None]) -> Dims | None:
    dims = same_shape(attrs.op, args, ("diff_dst", "dst"), 1, MAX_RANK)
    if dims is not None and not -len(dims) <= attrs["axis"] < len(dims):
        raise ShapeError(
            f"attribute axis: expected {-len(dims)} to {len(dims) - 1} for rank {len(dims)}, got {attrs['axis']}",
            op_type=attrs.op,
        )
    return dims


def reference(attrs: Attributes, _out: tuple[int, ...], diff_dst: Float64Array, dst: Float64Array) -> Float64Array:
    return dst * (diff_dst - (diff_dst * dst).sum(axis=attrs["axis"], keepdims=True))


def body(b: Body, attrs: Attributes, diff_dst: Tensor, dst: Tensor) -> str:
    """Two products, a sum and a difference."""
    message = "expected diff_dst of the shape of dst"
    terms = b.Mul(diff_dst, dst, name=f"{b.op}: {message}")
    name = f"{b.op}: expected an axis that there is"
    total = b.ReduceSum(terms, b.ints([attrs["axis"]]), keepdims=1, name=name)
    return proven_alike(b, b.Mul(dst, b.Sub(diff_dst, total)), diff_dst, dst, message, attrs["axis"])


OP = Op(
    name="SoftMaxBackward",
    doc=DOC,
    source="oneDNN Graph, SoftMaxBackward",
    attributes=(Attribute("axis", "int", "The normalised axis; negative ones count from the end.", default=1),),
    inputs=(
        Input("diff_dst", "T1", "Gradient with respect to the destination of softmax."),
        Input("dst", "T1", "Destination of softmax."),
    ),
    outputs=(Output("diff_src", "Gradient with respect to the source of softmax."),),
    shape=shape,
    reference=reference,
    body=body,
)
