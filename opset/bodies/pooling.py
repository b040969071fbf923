"""Windows of a pool inside a body: how they are padded, and the proof that both tensors fit them."""

from __future__ import annotations

from onnx_backprop.opset.bodies.builder import Body
from onnx_backprop.opset.bodies.lengths import Ints
from onnx_backprop.opset.core.op import Attributes
from onnx_backprop.opset.maths import pooling


def conditions(b: Body, attrs: Attributes, shape: Ints, windows: Ints) -> Ints:
    """0, computed by a run in which src and diff_dst (both NCX) fit each other; another run fails."""
    zero = Ints(b, [0])
    spatial = range(2, shape.count)
    for axis, what in ((0, "batch sizes"), (1, "channels")):
        left, right = shape.take([axis]), windows.take([axis])
        if left.known is None or right.known is None:
            same = b.Equal(left.name, right.name)
            zero = zero + Ints(b, [None], b.require(same, f"expected {what} of src and diff_dst that agree"))
    lengths, outs = shape.take(spatial), windows.take(spatial)
    if lengths.known is None:
        zero = zero + Ints(b, [None], b.require(b.Greater(lengths.name, b.ints([0])), "expected lengths of src >= 1"))
    if lengths.known is None or outs.known is None:
        down, up = _window_counts(b, attrs, lengths)
        either = b.Or(b.Equal(outs.name, down.name), b.Equal(outs.name, up.name))
        message = "diff_dst does not fit src, kernel, strides, dilations and pads"
        zero = zero + Ints(b, [None], b.require(either, message))
    return zero


def extents(attrs: Attributes) -> list[int]:
    """From the first to the last cell of a window, along every spatial axis."""
    return [(k - 1) * d + 1 for k, d in zip(attrs["kernel"], pooling.dilations(attrs), strict=True)]


def pads(b: Body, attrs: Attributes, lengths: Ints) -> tuple[Ints, Ints]:
    """The padding before and behind every spatial axis."""
    stated = [pooling.axis_pads(attrs, axis, length) for axis, length in enumerate(lengths.entries)]
    known = [pair for pair in stated if pair is not None]
    if len(known) == len(stated):
        return Ints(b, [begin for begin, _ in known]), Ints(b, [end for _, end in known])
    strides, kernel = Ints(b, attrs["strides"]), Ints(b, attrs["kernel"])
    tail = lengths % strides
    total = (kernel - tail.where_zero(strides, tail)).at_least(0)
    small = total // 2
    return (small, total - small) if attrs["auto_pad"] == "SAME_UPPER" else (total - small, small)


def _window_counts(b: Body, attrs: Attributes, lengths: Ints) -> tuple[Ints, Ints]:
    """`pooling.window_counts` at run time."""
    begin, end = pads(b, attrs, lengths)
    strides = Ints(b, attrs["strides"])
    room = lengths + begin + end - Ints(b, extents(attrs))
    down, up = room // strides + 1, (room + strides - 1) // strides + 1
    beyond = (up - 1) * strides - lengths - begin  # >= 0: the last window begins behind all cells
    one_less = (beyond.at_least(-1) + 1).where_zero(up, up - 1)
    return down.at_least(0), one_less.at_least(0)
