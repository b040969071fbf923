"""Pads of ONNX's ConvTranspose as explicit numbers: integers in, integers out.

Per spatial axis, s stride, EK = (K-1)·dilation + 1 and `extra` the output_padding, the natural output is
s·(in-1) + extra + EK; what is cut from it to reach the wanted length is the total padding. onnxruntime's reading is
followed where texts differ: extra is part of the total, a negative total counts as 0, and the odd cell is at the
beginning unless auto_pad is SAME_UPPER, in every version of the operator.
"""

from __future__ import annotations


def extent(kernel: int, dilation: int) -> int:
    """(K - 1) · dilation + 1, the cells that a kernel covers."""
    return (kernel - 1) * dilation + 1


def same_pads(extent: int, stride: int, extra: int, *, upper: bool) -> tuple[int, int]:
    """auto_pad SAME without output_shape: out = in · stride wherever the kernel covers the stride."""
    return _split(max(extent + extra - stride, 0), begin_small=upper)


def output_shape_pads(length: int, out: int, extent: int, stride: int, extra: int, *, upper: bool) -> tuple[int, int]:
    """Pads that lead to a given output length; the odd cell is at the beginning unless auto_pad is SAME_UPPER."""
    return _split(max(full_length(length, extent, stride) + extra - out, 0), begin_small=upper)


def full_length(length: int, extent: int, stride: int) -> int:
    """s·(in-1) + EK: every cell that a kernel cell reaches."""
    return stride * (length - 1) + extent


def _split(total: int, *, begin_small: bool) -> tuple[int, int]:
    half = total // 2
    return (half, total - half) if begin_small else (total - half, half)
