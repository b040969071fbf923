"""Windows of a pool inside a body: how they are padded, and the proof that both tensors fit them."""

from onnx_backprop.opset.bodies import convolution
from onnx_backprop.opset.bodies.builder import Body
from onnx_backprop.opset.bodies.expressions import Vector
from onnx_backprop.opset.core.op import Attributes
from onnx_backprop.opset.maths import pooling
from onnx_backprop.opset.maths.convolution import extent


def conditions(b: Body, attrs: Attributes, shape: Vector, windows: Vector) -> Vector:
    """0, computed by a run in which src and diff_dst (both NCX) fit each other; another run fails."""
    zero = Vector(b, [0])
    for axis, subject in ((0, "batch sizes"), (1, "channels")):
        zero += shape[axis].equal(windows[axis]).require(f"expected {subject} of src and diff_dst that agree")
    lengths, outs = shape[2:], windows[2:]
    zero += (lengths > 0).require("expected lengths of src >= 1")
    down, up = _window_counts(b, attrs, lengths)
    either = outs.equal(down) | outs.equal(up)
    return zero + either.require("diff_dst does not fit src, kernel, strides, dilations and pads")


def extents(attrs: Attributes) -> list[int]:
    """From the first to the last pixel of a window, along every spatial axis."""
    return [extent(k, d) for k, d in zip(attrs["kernel"], pooling.dilations(attrs), strict=True)]


def pads(b: Body, attrs: Attributes, lengths: Vector) -> tuple[Vector, Vector]:
    """The padding before and behind every spatial axis."""
    stated = [pooling.axis_pads(attrs, axis, length) for axis, length in enumerate(lengths.entries)]
    known = [pair for pair in stated if pair is not None]
    if len(known) == len(stated):
        return Vector(b, [begin for begin, _ in known]), Vector(b, [end for _, end in known])
    return convolution.conv_pads(b, attrs, lengths, Vector(b, attrs["kernel"]))


def _window_counts(b: Body, attrs: Attributes, lengths: Vector) -> tuple[Vector, Vector]:
    """`pooling.window_counts` at run time."""
    begin, end = pads(b, attrs, lengths)
    strides = Vector(b, attrs["strides"])
    room = lengths + begin + end - Vector(b, extents(attrs))
    down, up = room // strides + 1, (room + strides - 1) // strides + 1
    beyond = (up - 1) * strides >= lengths + begin  # the last window begins behind all pixels
    return down.at_least(0), beyond.where(up - 1, up).at_least(0)
