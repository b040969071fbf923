"""BiasAddBackward: the gradient of an added bias."""

from collections.abc import Sequence

from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.bodies.sums import sum_channels
from onnx_backprop.opset.core.layout import data_to_ncx
from onnx_backprop.opset.core.op import Arg, Attributes, Float64Array, Input, Op, Output
from onnx_backprop.opset.core.shapes import Dims, permute, require_rank
from onnx_backprop.opset.maths import convolution_attributes as spec

DOC = """
db[c] = Σ_{n, x} dy[n,c,x]

dy = diff_dst, db = diff_bias: the sum over every axis but the channels.

Shapes: diff_dst (N, C, …) for NCX or (N, …, C) for NXC, rank >= 2 -> diff_bias (C,).

Edge cases: an empty batch or an empty spatial axis gives zeros.

Errors: rank below 2.
"""

MAX_RANK = 64  # numpy's


def _channel_axis(attrs: Attributes, rank: int) -> int:
    return data_to_ncx(attrs["data_format"], rank)[1]


def shape(attrs: Attributes, args: Sequence[Arg | None]) -> Dims | None:
    (diff_dst,) = args
    assert diff_dst is not None
    if diff_dst.dims is None:
        return (None,)
    require_rank(diff_dst.dims, 2, MAX_RANK, op=attrs.op, subject="diff_dst")
    return permute(diff_dst.dims, (_channel_axis(attrs, len(diff_dst.dims)),))


def reference(attrs: Attributes, _out: tuple[int, ...], diff_dst: Float64Array) -> Float64Array:
    channels = _channel_axis(attrs, diff_dst.ndim)
    return diff_dst.sum(axis=tuple(axis for axis in range(diff_dst.ndim) if axis != channels))


def body(b: Body, attrs: Attributes, diff_dst: Tensor) -> str:
    """The sum over all axes but one; an unknown rank is found at run time."""
    return sum_channels(b, diff_dst.name, diff_dst.dims, last=attrs["data_format"] == "NXC")


OP = Op(
    name="BiasAddBackward",
    doc=DOC,
    source="oneDNN Graph, BiasAddBackward (rank 2 upward, where the reference library asks for 4)",
    attributes=(spec.DATA_FORMAT,),
    inputs=(Input("diff_dst", "T1", "Gradient with respect to the sum."),),
    outputs=(Output("diff_bias", "Gradient with respect to the bias, 1-D."),),
    shape=shape,
    reference=reference,
    body=body,
)
