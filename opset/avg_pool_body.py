"""AvgPoolBackward in standard ONNX operators: shares of windows as one matrix per axis, as interpolation has them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import conv_body, pooling, pooling_body
from .body import FLOAT, Body, Tensor
from .int_vectors import Ints
from .interpolation import Taps
from .interpolation_body import transpose
from .interpolation_body_forms import Axis, Truth
from .interpolation_body_lengths import Length, scalar
from .interpolation_body_rules import destinations, equal, last_index
from .layout import data_to_ncx, inverse
from .op import Attributes


def avg_pool_backward(b: Body, attrs: Attributes, diff_dst: Tensor, src_shape: Tensor | None) -> str:
    """dx, from dy in data_format order and of any knowledge."""
    rank = len(attrs["kernel"]) + 2
    to_ncx = data_to_ncx(attrs["data_format"], rank)
    from_ncx = inverse(to_ncx)
    given = conv_body.ranked(b, attrs, diff_dst, "diff_dst")
    outs = conv_body.shape(b, given)
    source = conv_body.stated(b, attrs, "src_shape", src_shape, to_ncx)
    zero = pooling_body.conditions(b, attrs, source, outs.take(to_ncx))
    source = source + zero
    wanted = source.take(from_ncx)
    begin = pooling_body.pads(b, attrs, source.take(range(2, rank)))[0]
    first = pooling.first_spatial(attrs)
    axes = [
        Axis(
            first + n,
            _length(wanted, first + n),
            ShareRule(kernel, stride, _length(begin, n), attrs["exclude_pad"] == 1),
        )
        for n, (kernel, stride) in enumerate(zip(attrs["kernel"], attrs["strides"], strict=True))
    ]
    return transpose(b, given, [_length(outs, n) for n in range(rank)], axes, wanted.name)


def _length(values: Ints, n: int) -> Length:
    entry = values.entries[n]
    return values.take([n]).name if entry is None else entry


@dataclass(frozen=True)
class ShareRule:
    """`pooling.shares`: where the windows of an average pool lie along an axis."""

    kernel: int
    stride: int
    begin: Length
    exclude_pad: bool

    def taps(self, length: int, out: int) -> Taps:
        assert isinstance(self.begin, int), "it follows from a known length"
        axis = pooling.Axis(length, out, self.kernel, self.stride, 1, self.begin)
        return pooling.shares(axis, exclude_pad=self.exclude_pad)

    def same(self, b: Body, length: Length, out: Length) -> Truth:
        return equal(b, length, out) if self.kernel == self.stride == 1 else False

    def emit(self, b: Body, length: Length, out: Length, along: int) -> tuple[str, str]:
        offsets = np.arange(self.kernel).reshape((1, -1) if along == 0 else (-1, 1))
        starts = b.Sub(b.Mul(destinations(b, out, along), b.int_scalar(self.stride)), scalar(b, self.begin))
        places, last = b.Add(starts, b.constant(offsets)), last_index(b, length)
        indices = b.Min(b.Max(places, b.int_scalar(0)), last)
        inside = b.Cast(b.Equal(indices, places), to=FLOAT)
        if not self.exclude_pad:
            return indices, b.Mul(inside, b.float_scalar(1 / self.kernel))
        count = b.ReduceSum(inside, b.ints([1 - along]), keepdims=1)
        return indices, b.Div(inside, b.Max(count, b.float_scalar(1)))
