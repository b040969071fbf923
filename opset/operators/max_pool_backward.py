"""MaxPoolBackward: the gradient of max pooling."""

from collections.abc import Sequence
from itertools import product

import numpy as np

from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.core.op import Arg, Attributes, Float64Array, Input, Op, Output
from onnx_backprop.opset.core.shapes import Dims
from onnx_backprop.opset.maths import convolution_attributes, pooling

DOC = """
dx[n,c,i] = Σ_{o: winner(n,c,o) = i} dy[n,c,o]

winner(n,c,o) is the pixel of x in window o, i = o·S + k·D - P with 0 <= k < K inside x, that is the largest; of several
equal ones the first, k counted in row-major order. x = src, dy = diff_dst, dx = diff_src.

Shapes (NCX): src (N, C, in…), diff_dst (N, C, out…) -> diff_src (N, C, in…), with one to three spatial axes. With
EK = (K-1)·D + 1 and pads P (begin) and E (end), out is (in + P + E - EK) / S + 1 rounded down or up; up only
if no window would begin at or beyond in. The length of diff_dst tells which, so there is no attribute for it.

Units: strides S, dilations D, kernel lengths K and pads count pixels.

Edge cases: a dilated window without a pixel inside x has no gradient. The first pixel of a window stays the winner
unless a later one is greater, so a NaN wins only if it comes first, as in onnxruntime's MaxPool. Windows that overlap
add up, in float32. An empty batch or no channels give an empty result.

Errors: a spatial length of 0; pads as long as the kernel; SAME with dilations; lengths that do not fit the geometry.
"""


def shape(attrs: Attributes, args: Sequence[Arg | None]) -> Dims | None:
    src, diff_dst = (
        convolution_attributes.ncx(attrs, convolution_attributes.dims_of(arg, attrs, name))
        for arg, name in zip(args, ("src", "diff_dst"), strict=True)
    )
    resolved = pooling.resolve(attrs, src, diff_dst)
    return None if resolved is None else convolution_attributes.from_ncx(attrs, resolved)


def reference(attrs: Attributes, _out: tuple[int, ...], src: Float64Array, diff_dst: Float64Array) -> Float64Array:
    x, dy = convolution_attributes.ncx_array(attrs, src), convolution_attributes.ncx_array(attrs, diff_dst)
    axes = pooling.axes_of(attrs, x.shape[2:], dy.shape[2:])
    planes = x.shape[0] * x.shape[1]
    best = np.zeros((planes, *dy.shape[2:]))
    winner = np.zeros(best.shape, np.int64)
    reached = np.zeros(dy.shape[2:], bool)
    pixels = x.reshape(planes, *x.shape[2:])
    for tap in product(*(range(axis.kernel) for axis in axes)):
        places = [np.arange(a.out) * a.stride + k * a.dilation - a.begin for a, k in zip(axes, tap, strict=True)]
        inside = _outer([(p >= 0) & (p < a.length) for a, p in zip(axes, places, strict=True)])
        near = np.ix_(*(np.clip(p, 0, a.length - 1) for a, p in zip(axes, places, strict=True)))
        value = pixels[(slice(None), *near)]
        taken = inside & (~reached | (value > best))
        best = np.where(taken, value, best)
        winner = np.where(taken, np.ravel_multi_index(near, x.shape[2:]), winner)
        reached |= inside
    dx = np.zeros((planes, int(np.prod(x.shape[2:]))))
    rows = np.broadcast_to(np.arange(planes).reshape(-1, *[1] * len(axes)), winner.shape)
    hit = np.broadcast_to(reached, winner.shape)
    np.add.at(dx, (rows[hit], winner[hit]), dy.reshape(winner.shape)[hit])
    return convolution_attributes.from_ncx_array(attrs, dx.reshape(x.shape))


def _outer(masks: list[np.ndarray]) -> np.ndarray:
    """Where all of the masks hold, one per axis."""
    result = np.ones((), bool)
    for mask in masks:
        result = result[..., None] & mask
    return result


def body(b: Body, attrs: Attributes, src: Tensor, diff_dst: Tensor) -> str:
    """MaxPool names the winners, ScatterElements adds to them."""
    from onnx_backprop.opset.bodies.max_pool import max_pool_backward

    return max_pool_backward(b, attrs, src, diff_dst)


OP = Op(
    name="MaxPoolBackward",
    doc=DOC,
    source="oneDNN Graph, MaxPoolBackward",
    attributes=(
        pooling.STRIDES,
        pooling.PADS_BEGIN,
        pooling.PADS_END,
        pooling.KERNEL,
        pooling.AUTO_PAD,
        pooling.DILATIONS,
        convolution_attributes.DATA_FORMAT,
    ),
    inputs=(
        Input("src", "T1", "Source of the pool."),
        Input("diff_dst", "T1", "Gradient with respect to the pool's destination."),
    ),
    outputs=(Output("diff_src", "Gradient with respect to the pool's source, shaped like src."),),
    shape=shape,
    reference=reference,
    body=body,
)
