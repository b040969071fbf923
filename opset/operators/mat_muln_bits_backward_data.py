"""MatMulNBitsBackwardData: the gradient of a product with a packed weight, by what it is multiplied with."""

from collections.abc import Sequence

import numpy as np

from onnx_backprop.opset.bodies.builder import FLOAT, INT64, Body, Tensor
from onnx_backprop.opset.bodies.expressions import Vector
from onnx_backprop.opset.bodies.packed import centred
from onnx_backprop.opset.core.errors import ShapeError
from onnx_backprop.opset.core.op import Arg, Array, Attribute, Attributes, Float64Array, Input, Op, Output
from onnx_backprop.opset.core.shapes import Dims, merge, require_rank
from onnx_backprop.opset.maths.packed import dequantised, lengths_of

DOC = """
dx = dy · W,  W[n, k] = (q[n, k] - z[n, k / block_size]) · scales[n, k / block_size]

The adjoint of y = x · Wᵀ, com.microsoft's MatMulNBits, in x. q are numbers of `bits` bits, packed in bytes along k, the
lowest bits first. dy = diff_dst, dx = diff_src. z is what zero_points holds, packed as q is, or float_zero_points; else
the middle of the range, 2^(bits - 1).

Shapes: with blocks = K / block_size, rounded up: diff_dst (…, N), weight (N, blocks, block_size · bits / 8), scales
(N, blocks), zero_points (N, blocks · bits / 8 rounded up), float_zero_points (N, blocks) -> diff_src (…, K).

Edge cases: numbers of the last block beyond K are not read. No rows give an empty result. Sums are taken in float32 or
better. W is never in memory as a whole, except while the routes of standard operators compute it.

Errors: any other shape; both kinds of zero points; bits that are not 2, 4 or 8; a block_size that is not a power of
two of at least 16.
"""

ROWS_AT_ONCE = 256  # of W, which the reference writes out
_NAMES = ("weight", "scales", "zero_points", "float_zero_points")


def shape(attrs: Attributes, args: Sequence[Arg | None]) -> Dims | None:
    for name in ("N", "K"):
        if attrs[name] < 1:
            raise ShapeError(f"attribute {name}: expected a number >= 1, got {attrs[name]}", op_type=attrs.op)
    if attrs["bits"] not in (2, 4, 8):
        raise ShapeError(f"attribute bits: expected 2, 4 or 8, got {attrs['bits']}", op_type=attrs.op)
    size = attrs["block_size"]
    if size < 16 or size & (size - 1):
        raise ShapeError(f"attribute block_size: expected a power of two >= 16, got {size}", op_type=attrs.op)
    if args[3] is not None and args[4] is not None:
        raise ShapeError("expected zero_points or float_zero_points, got both", op_type=attrs.op)
    for name, arg, expected in zip(_NAMES, args[1:], lengths_of(attrs), strict=True):
        if arg is None or arg.dims is None:
            continue
        require_rank(arg.dims, len(expected), len(expected), op=attrs.op, subject=name)
        for axis, (length, wanted) in enumerate(zip(arg.dims, expected, strict=True)):
            merge(length, wanted, op=attrs.op, subject=f"length of axis {axis} of {name} and the attributes")
    assert args[0] is not None
    dims = args[0].dims
    if dims is None:
        return None
    require_rank(dims, 1, 64, op=attrs.op, subject="diff_dst")
    merge(dims[-1], attrs["N"], op=attrs.op, subject="length of the last axis of diff_dst and the attribute N")
    return (*dims[:-1], attrs["K"])


def reference(
    attrs: Attributes,
    out: tuple[int, ...],
    diff_dst: Float64Array,
    weight: Array,
    scales: Float64Array,
    zero_points: Array | None,
    float_zero_points: Float64Array | None,
) -> Float64Array:
    dx = np.zeros(out)
    for first in range(0, attrs["N"], ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        z = zero_points if zero_points is not None else float_zero_points
        dx += diff_dst[..., rows] @ dequantised(attrs, weight[rows], scales[rows], None if z is None else z[rows])
    return dx


def body(
    b: Body,
    attrs: Attributes,
    diff_dst: Tensor,
    weight: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    float_zero_points: Tensor | None,
) -> str:
    """The shape that the weight is unpacked in waits for dy: onnxruntime would compute W once, and keep it."""
    given = [weight, scales, zero_points, float_zero_points]
    weight, scales, zero_points, float_zero_points = (
        t and b.checked(t, Vector(b, wanted), f"expected {name} of the shape {wanted}")
        for name, t, wanted in zip(_NAMES, given, lengths_of(attrs), strict=True)
    )
    first = b.Slice(b.Reshape(diff_dst, b.ints([-1])), b.ints([0]), b.ints([1]))
    is_nan = b.IsNaN(b.ReduceSum(first, keepdims=1))
    nothing = b.Cast(b.And(is_nan, b.constant(np.array([False]))), to=INT64)
    q = centred(b, attrs, weight, zero_points, float_zero_points, to=FLOAT, nothing=nothing)
    blocks = -(-attrs["K"] // attrs["block_size"])
    w = b.Mul(q, b.Reshape(scales, b.ints([attrs["N"], blocks, 1])))
    w = b.Reshape(w, b.ints([attrs["N"], blocks * attrs["block_size"]]))
    if attrs["K"] % attrs["block_size"]:
        w = b.Slice(w, b.ints([0]), b.ints([attrs["K"]]), b.ints([1]))
    return b.MatMul(diff_dst, w, name=f"{b.op}: expected {attrs['N']} entries along the last axis of diff_dst")


OP = Op(
    name="MatMulNBitsBackwardData",
    doc=DOC,
    source="onnxruntime, MatMulNBits of com.microsoft, whose attributes these are",
    attributes=(
        Attribute("K", "int", "Number of columns of W, >= 1.", required=True),
        Attribute("N", "int", "Number of rows of W, >= 1.", required=True),
        Attribute("block_size", "int", "How many numbers of a row share a scale: a power of two >= 16.", required=True),
        Attribute("bits", "int", "Bits of each number: 2, 4 or 8.", default=4),
    ),
    inputs=(
        Input("diff_dst", "T1", "Gradient with respect to the product."),
        Input("weight", "T6", "The numbers q of W."),
        Input("scales", "T1", "A scale for each block."),
        Input("zero_points", "T6", "The number that stands for 0 in each block.", optional=True),
        Input("float_zero_points", "T1", "The same in floats.", optional=True),
    ),
    outputs=(Output("diff_src", "Gradient with respect to what is multiplied by Wᵀ."),),
    shape=shape,
    reference=reference,
    body=body,
)
