"""Windows of a pool: attributes, lengths, and where each window lies. All arrays here are NCX.

Window o covers the pixels o·S + k·D - P of the source, k < K, along each spatial axis. How many windows there are is
what the forward operator was told to round: down, or up but for windows that begin beyond the source and the padding
before it. A gradient sees it from its diff_dst, so it takes either.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnx_backprop.opset.core.errors import ShapeError
from onnx_backprop.opset.core.op import Attribute, Attributes
from onnx_backprop.opset.core.shapes import Dim, Dims, merge, require_at_least
from onnx_backprop.opset.maths.convolution import (
    MAX_RANK,
    common_rank,
    conv_same_pads,
    extent,
    require_lists,
    stated_pads,
)
from onnx_backprop.opset.maths.convolution_attributes import auto_pad
from onnx_backprop.opset.maths.interpolation import Taps

KERNEL = Attribute("kernel", "ints", "Lengths of the window along each spatial axis, in pixels, >= 1.", required=True)
STRIDES = Attribute(
    "strides", "ints", "Pixels from one window to the next along each spatial axis, >= 1.", required=True
)
PADS_BEGIN, PADS_END = (
    Attribute(
        name,
        "ints",
        f"Pixels of padding {where} pixel of each spatial axis, >= 0 and fewer than the kernel's; ignored unless "
        "auto_pad is None. [] means none.",
        required=True,
    )
    for name, where in (("pads_begin", "before the first"), ("pads_end", "after the last"))
)
DILATIONS = Attribute(
    "dilations", "ints", "Distance between the pixels of a window along each spatial axis, >= 1. Default: all 1."
)
AUTO_PAD = auto_pad(
    "with in the length of the source, total = max((ceil(in / stride) - 1)·stride + kernel - in, 0), so that "
    "out = ceil(in / stride), for dilations of 1 only"
)


@dataclass(frozen=True)
class Windows:
    """The windows along one spatial axis; `begin` is the padding before the source."""

    length: int
    out: int
    kernel: int
    stride: int
    dilation: int
    begin: int

    @property
    def extent(self) -> int:
        """Pixels from the first of a window to its last."""
        return extent(self.kernel, self.dilation)


def first_spatial(attrs: Attributes) -> int:
    """The first spatial axis in data_format order."""
    return 2 if attrs["data_format"] == "NCX" else 1


def pixel_counts(axis: Windows) -> np.ndarray:
    """How many pixels of the source lie in each dense window along an axis."""
    first = np.arange(axis.out) * axis.stride - axis.begin
    return np.minimum(first + axis.kernel, axis.length) - np.maximum(first, 0)


def shares(axis: Windows, *, exclude_pad: bool) -> Taps:
    """The pixels of every dense window of an average pool and what each weighs; padding weighs nothing."""
    places = np.arange(axis.out)[:, None] * axis.stride + np.arange(axis.kernel) - axis.begin
    inside = (places >= 0) & (places < axis.length)
    count = pixel_counts(axis)[:, None] if exclude_pad else axis.kernel
    return Taps(np.clip(places, 0, axis.length - 1), inside / count, axis.length)


def dilations(attrs: Attributes) -> tuple[int, ...]:
    """The dilations, 1 where the node states none."""
    return attrs.get("dilations") or (1,) * len(attrs["kernel"])


def resolve(attrs: Attributes, source: Dims | None, windows: Dims | None) -> Dims | None:
    """The source's dimensions (NCX), completed by those of diff_dst; None while the rank is unknown.

    Raises ShapeError when anything known contradicts anything else.
    """
    op = attrs.op
    rank = common_rank(op, {"diff_dst": windows, "src": source})
    _require_attributes(attrs, rank)
    if rank is None:
        return None
    blank: Dims = (None,) * rank
    source, windows = source or blank, windows or blank
    require_at_least(source[2:], 1, op=op, subject="spatial lengths of src")
    for axis in range(rank - 2):
        _require_windows(attrs, axis, source[axis + 2], windows[axis + 2])
    batch = merge(source[0], windows[0], op=op, subject="batch sizes of src and diff_dst")
    channels = merge(source[1], windows[1], op=op, subject="channels of src and diff_dst")
    return (batch, channels, *source[2:])


def _require_attributes(attrs: Attributes, rank: int | None) -> None:
    op, kernel = attrs.op, attrs["kernel"]
    axes = len(kernel) if rank is None else rank - 2
    if not 1 <= axes <= MAX_RANK - 2:
        raise ShapeError(f"attribute kernel: expected 1 to {MAX_RANK - 2} entries, got {axes}", op_type=op)
    require_lists(attrs, axes)
    if attrs["auto_pad"] == "None":
        for name in ("pads_begin", "pads_end"):
            if any(pad >= k for pad, k in zip(attrs[name], kernel, strict=False)):
                limit = f"the kernel's {list(kernel)}, got {list(attrs[name])}"
                raise ShapeError(f"attribute {name}: expected fewer pixels than {limit}", op_type=op)
    elif attrs["auto_pad"].startswith("SAME") and any(d > 1 for d in dilations(attrs)):
        raise ShapeError(
            f"attribute auto_pad: expected None or VALID beside dilations {list(dilations(attrs))}, "
            f"got {attrs['auto_pad']}; state the pads",
            op_type=op,
        )


def axis_pads(attrs: Attributes, axis: int, length: Dim) -> tuple[int, int] | None:
    """The padding before and behind one axis; None where an unknown length hides it."""
    stated, upper = stated_pads(attrs, axis), attrs["auto_pad"] == "SAME_UPPER"
    return stated or conv_same_pads(length, attrs["kernel"][axis], attrs["strides"][axis], upper=upper)


def window_counts(length: int, extent: int, stride: int, pads: tuple[int, int]) -> tuple[int, int]:
    """How many windows there are, rounded down and rounded up; 0 where not even one fits."""
    room = length + sum(pads) - extent
    down, up = room // stride + 1, -(-room // stride) + 1
    if (up - 1) * stride >= length + pads[0]:
        up -= 1
    return max(down, 0), max(up, 0)


def _require_windows(attrs: Attributes, axis: int, length: Dim, out: Dim) -> None:
    pads = axis_pads(attrs, axis, length)
    if not isinstance(length, int) or not isinstance(out, int) or pads is None:
        return
    kernel, stride, dilation = attrs["kernel"][axis], attrs["strides"][axis], dilations(attrs)[axis]
    down, up = window_counts(length, extent(kernel, dilation), stride, pads)
    if out not in (down, up):
        expected = str(down) if down == up else f"{down} or {up}"
        raise ShapeError(
            f"spatial axis {axis}: src length {length} with kernel {kernel}, stride {stride}, dilation {dilation}, "
            f"pads {pads[0]} and {pads[1]} expects diff_dst length {expected}, got {out}",
            op_type=attrs.op,
        )


def axes_of(attrs: Attributes, source: Sequence[int], windows: Sequence[int]) -> list[Windows]:
    """The windows along every spatial axis, from the spatial lengths of source and diff_dst."""
    result: list[Windows] = []
    for axis, (length, out) in enumerate(zip(source, windows, strict=True)):
        pads = axis_pads(attrs, axis, length)
        assert pads is not None, "pads are known once lengths are"
        kernel, stride, dilation = attrs["kernel"][axis], attrs["strides"][axis], dilations(attrs)[axis]
        result.append(Windows(length, out, kernel, stride, dilation, pads[0]))
    return result
