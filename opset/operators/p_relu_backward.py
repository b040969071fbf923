"""PReLUBackward: the gradient of the rectified linear unit with a trained slope."""

from collections.abc import Sequence

import numpy as np

from onnx_backprop.opset.bodies.builder import DOUBLE, FLOAT, INT64, Body, Tensor
from onnx_backprop.opset.bodies.elementwise import MAX_RANK, proof_of_shape, same_shape
from onnx_backprop.opset.bodies.sums import sum_channels
from onnx_backprop.opset.core.errors import ShapeError
from onnx_backprop.opset.core.layout import data_to_ncx
from onnx_backprop.opset.core.op import Arg, Attributes, Float64Array, Input, Op, Output
from onnx_backprop.opset.core.shapes import Dims, merge, product, require_rank
from onnx_backprop.opset.maths import convolution_attributes

DOC = """
dx = dy where x > 0, else a·dy,  da = Σ x·dy where x <= 0

The adjoint of y = x where x > 0, else a·x, in x and a; Σ runs along the axes that a is broadcast along. x = src,
a = slope, dy = diff_dst, dx = diff_src, da = diff_slope.

Shapes: src and diff_dst (N, C, …) for NCX or (N, …, C) for NXC, rank >= 2; slope (C,), one entry per channel, (1,), one
for all, or the shape of src without its first axis -> diff_src as src, diff_slope as slope.

Edge cases: x = 0 and x = NaN count as negative: dx is a·dy, and a NaN of x makes da NaN. Empty axes give sums of 0.
Sums are taken in float32 or better.

Errors: src and diff_dst of different shapes; any other shape of slope.
"""

MESSAGE = "expected slope of one entry, of one per channel, or of the shape of src without its first axis"


def shape(attrs: Attributes, args: Sequence[Arg | None]) -> Sequence[Dims | None]:
    src = same_shape(attrs.op, (args[0], args[2]), ("src", "diff_dst"), 2, MAX_RANK)
    assert args[1] is not None
    slope = args[1].dims
    if slope is None:
        return src, None
    require_rank(slope, 1, len(src) - 1 if src else MAX_RANK - 1, op=attrs.op, subject="slope")
    if len(slope) > 1:
        src = src or (None, *slope)
        require_rank(slope, len(src) - 1, len(src) - 1, op=attrs.op, subject="slope")
        names = [f"lengths of axis {axis + 1} of src and axis {axis} of slope" for axis in range(len(slope))]
        slope = tuple(
            merge(a, b, op=attrs.op, subject=subject) for a, b, subject in zip(src[1:], slope, names, strict=True)
        )
        return (src[0], *slope), slope
    channels = src[data_to_ncx(attrs["data_format"], len(src))[1]] if src else None
    entries = next(iter(slope))
    if isinstance(entries, int) and isinstance(channels, int) and entries not in (1, channels):
        raise ShapeError(f"slope: expected 1 entry or {channels}, one per channel, got {entries}", op_type=attrs.op)
    return src, slope


def reference(
    attrs: Attributes, _out: tuple[tuple[int, ...], ...], src: Float64Array, slope: Float64Array, diff_dst: Float64Array
) -> tuple[Float64Array, Float64Array]:
    first = attrs["data_format"] == "NCX" and slope.ndim == 1
    spread = slope.reshape(-1, *[1] * (src.ndim - 2)) if first else slope
    axes = tuple(range(src.ndim - spread.ndim)) + tuple(
        axis for axis, length in enumerate(spread.shape, src.ndim - spread.ndim) if length == 1
    )
    terms = np.where(src > 0, 0.0, src * diff_dst).sum(axis=axes, keepdims=True)
    return np.where(src > 0, diff_dst, spread * diff_dst), terms.reshape(slope.shape)


def body(b: Body, attrs: Attributes, src: Tensor, slope: Tensor, diff_dst: Tensor) -> Sequence[str]:
    """On (…, channels, …): each entry of a slope of higher rank is a channel, and one entry is spread over all."""
    x, dy, entries, last = src.name, diff_dst.name, slope.name, attrs["data_format"] == "NXC"
    width, dims, of_slope = "", src.dims, b.Shape(slope)
    zero = proof_of_shape(b, diff_dst, b.Shape(src), dims, "expected diff_dst of the shape of src")
    if zero:
        dy = b.Reshape(diff_dst, b.Add(b.Shape(src), zero), allowzero=1)
    if slope.dims is not None and len(slope.dims) > 1:  # (N, all the rest)
        zero = proof_of_shape(b, slope, b.Shape(src, start=1), dims and dims[1:], MESSAGE)
        flat = b.ints([-1])
        flat, of_slope = (b.Add(flat, zero), b.Add(of_slope, zero)) if zero else (flat, of_slope)
        entries, x, dy = b.Reshape(slope, flat), b.Flatten(x, axis=1), b.Flatten(dy, axis=1)
        dims, last = (dims[0] if dims else None, product(slope.dims)), True
    elif slope.dims is not None and dims is not None:
        axis = len(dims) - 1 if last else 1
        if slope.dims != (dims[axis],) or dims[axis] is None:
            width = b.lengths(src, axis, axis + 1)
            if slope.dims != (1,):
                fits = b.Or(b.Equal(of_slope, b.ints([1])), b.Equal(of_slope, width))
                entries = b.Reshape(slope, b.Add(of_slope, b.require(fits, MESSAGE)), allowzero=1)
    else:
        view, entries = _view(b, src, slope, last=last)
        x, dy = b.Reshape(x, view, allowzero=1), b.Reshape(dy, view, allowzero=1)
        width = b.Slice(view, b.ints([1]), b.ints([2]))
        dims, last = (None, None, None), False
    spread = entries if last else b.Reshape(entries, b.ints([-1, *[1] * (len(dims) - 2)]))
    positive, nothing = b.Greater(x, b.float_scalar(0)), b.float_scalar(0)
    dx = b.Where(positive, dy, b.Mul(spread, dy))
    da = sum_channels(b, b.Where(positive, nothing, b.Mul(x, dy)), dims, last=last)
    if width:  # one entry, or one for each channel
        count = b.Shape(entries)
        da = b.Reshape(da, b.Concat(count, b.Div(width, b.Max(count, b.ints([1]))), axis=0), allowzero=1)
        da = b.Cast(b.ReduceSum(b.Cast(da, to=DOUBLE), b.ints([1]), keepdims=0), to=FLOAT)
    if x != src.name:
        dx, da = b.Reshape(dx, b.Shape(src), allowzero=1), b.Reshape(da, of_slope, allowzero=1)
    return dx, da


def _view(b: Body, src: Tensor, slope: Tensor, *, last: bool) -> tuple[str, str]:
    """At run time: the shape of src as (before, channels, behind), and a slope that is proven to fit, 1-D."""
    shape, one = b.Shape(src), b.ints([1])
    second = b.Gather(shape, one, name=f"{b.op}: expected rank 2 or more")
    rank, of_slope = b.Size(shape), b.Size(b.Shape(slope))
    channel = b.Shape(src, start=-1) if last else second
    batch, behind = b.Shape(src, end=1), b.Shape(src, start=1)
    flat = b.Equal(of_slope, b.int_scalar(1))
    # what slope may be: src without its first axis, or the channels, or 1, which stand behind one another in a list
    before = b.Add(b.Sub(rank, b.int_scalar(1)), b.Cast(b.Equal(b.Size(slope), b.int_scalar(1)), to=INT64))
    start = b.Where(flat, before, b.int_scalar(0))
    end = b.Where(flat, b.Add(before, b.int_scalar(1)), b.Sub(rank, b.int_scalar(1)))
    listed = b.Concat(behind, channel, one, axis=0)
    expected = b.Slice(listed, b.Reshape(start, one), b.Reshape(end, one))
    zero = proof_of_shape(b, slope, expected, None, MESSAGE)
    outer = b.ReduceProd(b.Shape(src, end=-1), keepdims=1) if last else batch
    inner = one if last else b.ReduceProd(b.Shape(src, start=2), keepdims=1)
    parts = (outer, batch), (channel, b.ReduceProd(behind, keepdims=1)), (inner, one)
    view = b.Concat(*(b.Where(flat, a, n) for a, n in parts), axis=0)
    return b.Add(view, b.Sub(second, second)), b.Reshape(slope, b.Add(b.ints([-1]), zero))


OP = Op(
    name="PReLUBackward",
    doc=DOC,
    source="oneDNN Graph, PReLUBackward",
    attributes=(convolution_attributes.DATA_FORMAT,),
    inputs=(
        Input("src", "T1", "Source of PReLU."),
        Input("slope", "T1", "Slope where src is not positive."),
        Input("diff_dst", "T1", "Gradient with respect to the destination of PReLU."),
    ),
    outputs=(
        Output("diff_src", "Gradient with respect to src."),
        Output("diff_slope", "Gradient with respect to slope."),
    ),
    shape=shape,
    reference=reference,
    body=body,
)
