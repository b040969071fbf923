"""Pads of ONNX's ConvTranspose as explicit numbers: integers in, integers out.

Per spatial axis, s stride, EK = (K-1)·dilation + 1 and `extra` the output_padding, the natural output is
s·(in-1) + extra + EK; what is cut from it to reach the wanted length is the total padding. onnxruntime's reading is
followed where texts differ: extra is part of the total, a negative total counts as 0, and the odd cell is at the
beginning unless auto_pad is SAME_UPPER, in every version of the operator.
"""

from collections.abc import Sequence
from typing import NamedTuple


class AxisPads(NamedTuple):
    """The pads of one axis; `beyond`: what they leave of the wanted length, which output_padding has to be.

    onnxruntime refuses an output_shape for which 0 <= beyond < stride does not hold.
    """

    begin: int
    end: int
    beyond: int


def extent(kernel: int, dilation: int) -> int:
    """(K - 1) · dilation + 1, the pixels that a kernel covers."""
    return (kernel - 1) * dilation + 1


def axis_pads(
    extents: Sequence[int],
    strides: Sequence[int],
    extra: Sequence[int],
    *,
    upper: bool,
    lengths: Sequence[int] = (),
    wanted: Sequence[int] = (),
) -> list[AxisPads]:
    """The pads of every axis: those of SAME, out = in · stride wherever the kernel covers the stride, or for outputs
    of `wanted` lengths, from inputs of the given ones.
    """
    result: list[AxisPads] = []
    for axis, (covered, stride, more) in enumerate(zip(extents, strides, extra, strict=True)):
        full = stride * (lengths[axis] - 1) + covered if wanted else covered  # every pixel that a kernel reaches
        out = wanted[axis] if wanted else stride
        total = max(full + more - out, 0)
        begin = total // 2 if upper else total - total // 2
        result.append(AxisPads(begin, total - begin, out - (full - total) if wanted else more))
    return result
