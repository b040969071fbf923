"""AvgPoolBackward in standard ONNX operators: shares of dy through the adjoint of a convolution with a kernel of ones.

A share that all windows have stands in the kernel instead. Images and channels are merged before.
"""

from functools import reduce
from math import prod

import numpy as np

from onnx_backprop.opset.bodies import convolution
from onnx_backprop.opset.bodies import pooling as pooling_body
from onnx_backprop.opset.bodies.builder import FLOAT, Body, Tensor
from onnx_backprop.opset.bodies.expressions import Vector, join
from onnx_backprop.opset.bodies.expressions import shape as shape_of
from onnx_backprop.opset.core.errors import UnsupportedError
from onnx_backprop.opset.core.layout import data_to_ncx
from onnx_backprop.opset.core.op import Attributes, Op
from onnx_backprop.opset.maths import pooling

LARGEST_KERNEL = 1 << 24  # pixels: 64 MiB of float32


def avg_pool_backward(b: Body, attrs: Attributes, diff_dst: Tensor, src_shape: Tensor | None, adjoint: Op) -> str:
    """dx, from dy in data_format order, whatever is known of its shape; `adjoint` adds up the shares."""
    rank = len(attrs["kernel"]) + 2
    dy = convolution.ncx(b, attrs, convolution.ranked(b, attrs, diff_dst, "diff_dst"))
    windows = shape_of(b, dy)
    shape = convolution.stated(b, attrs, "src_shape", src_shape, data_to_ncx(attrs["data_format"], rank))
    shape = shape + pooling_body.conditions(b, attrs, shape, windows)
    outs = windows[2:]

    def spread() -> str:
        return _spread(b, attrs, dy, shape, outs, adjoint)

    def zeros() -> str:
        return b.Expand(b.float_scalar(0), shape.name)

    if outs.known is None:
        dx = b.choose((outs.least() > 0).name, spread, zeros)
    else:
        dx = zeros() if 0 in outs.known else spread()
    return convolution.from_ncx(b, attrs, dx)


def _spread(b: Body, attrs: Attributes, dy: Tensor, shape: Vector, outs: Vector, adjoint: Op) -> str:
    """dx (N, C, in…) of at least one window along each axis."""
    kernel, strides, lengths = attrs["kernel"], attrs["strides"], shape[2:]
    begin = pooling_body.pads(b, attrs, lengths)[0]
    value, shares = _shares(b, attrs, lengths, outs, begin)
    planes = join(b, shape[:2].product(), Vector(b, [1]))
    g = Tensor(b.Reshape(dy, join(b, planes, outs).name, allowzero=1), (*planes.dims, *outs.dims))
    if shares:
        g = Tensor(b.Mul(g, shares), g.dims)
    if _one_window(attrs, lengths, outs, begin):
        return b.Reshape(
            b.Expand(b.Mul(g, b.float_scalar(value)), join(b, planes, lengths).name), shape.name, allowzero=1
        )
    if prod(kernel) > LARGEST_KERNEL:
        raise UnsupportedError(
            f"a kernel of {'×'.join(map(str, kernel))} pixels, expected at most {LARGEST_KERNEL} in all where "
            'the file holds a weight for each. Use kernels "native", or ReduceMean over what it covers',
            op_type="AvgPoolBackward",
        )
    weights = Tensor(b.constant(np.full((1, 1, *kernel), value, np.float32)), (1, 1, *kernel))
    # padding behind, or pixels left out there, so that just these windows fit
    end = (outs - 1) * Vector(b, strides) + Vector(b, kernel) - lengths - begin
    ones, source = Vector(b, [1, 1]), join(b, planes, lengths)
    dense = {"dilations": [1] * len(kernel), "pads_begin": [], "pads_end": [], "data_format": "NCX"}
    geometry = Attributes(adjoint, {"strides": strides, **dense})
    c = convolution.correlation(b, geometry, source, join(b, ones, Vector(b, kernel)), pads=(begin, end))
    return b.Reshape(convolution.transposed_convolution(c, g, weights), shape.name, allowzero=1)


def _one_window(attrs: Attributes, lengths: Vector, outs: Vector, begin: Vector) -> bool:
    """Whether there is one window, known to lie over all pixels."""
    if lengths.known is None or outs.known is None or begin.known is None or max(outs.known) > 1:
        return False
    return all(k - p >= length for k, p, length in zip(attrs["kernel"], begin.known, lengths.known, strict=True))


def _shares(b: Body, attrs: Attributes, lengths: Vector, outs: Vector, begin: Vector) -> tuple[float, str]:
    """A share that all windows have, and a factor for each (out…); '' where it is 1 for all."""
    value, factors, last = 1.0, [], len(attrs["kernel"]) - 1
    for axis, (kernel, stride) in enumerate(zip(attrs["kernel"], attrs["strides"], strict=True)):
        if not attrs["exclude_pad"]:
            value /= kernel
            continue
        length, out, pad = (lengths[axis], outs[axis], begin[axis])
        if length.known is not None and out.known is not None and pad.known is not None:
            along = pooling.Windows(length.known[0], out.known[0], kernel, stride, 1, pad.known[0])
            counts = pooling.pixel_counts(along)
            if (counts == counts[0]).all():
                value /= int(counts[0])
                continue
            factor = b.constant((1 / counts).astype(np.float32))
        else:
            factor = _shares_at_run_time(b, kernel, stride, length, out, pad)
        factors.append(factor if axis == last else b.Unsqueeze(factor, b.ints(range(1, last - axis + 1))))
    return value, reduce(b.Mul, factors) if factors else ""


def _shares_at_run_time(b: Body, kernel: int, stride: int, length: Vector, out: Vector, begin: Vector) -> str:
    """1 / `pooling.pixel_counts` along an axis."""
    windows = b.Range(b.int_scalar(0), b.Squeeze(out.name), b.int_scalar(1))
    first = b.Sub(b.Mul(windows, b.ints([stride])), begin.name)
    inside = b.Sub(b.Min(b.Add(first, b.ints([kernel])), length.name), b.Max(first, b.ints([0])))
    return b.Reciprocal(b.Cast(inside, to=FLOAT))
