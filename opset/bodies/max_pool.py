"""MaxPoolBackward in standard ONNX operators: MaxPool says who won each window, ScatterElements adds to the winners.

Images and channels are merged before, for onnxruntime's MaxPool refuses a tensor without channels. Its Indices are
positions in the whole tensor, so merging does not change them.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from onnx_backprop.opset.bodies import convolution
from onnx_backprop.opset.bodies import pooling as pooling_body
from onnx_backprop.opset.bodies.builder import BOOL, INT64, Body, Tensor
from onnx_backprop.opset.bodies.expressions import Vector, join
from onnx_backprop.opset.bodies.expressions import shape as shape_of
from onnx_backprop.opset.core.op import Attributes
from onnx_backprop.opset.maths import pooling


def max_pool_backward(b: Body, attrs: Attributes, src: Tensor, diff_dst: Tensor) -> str:
    """dx, from x and dy in data_format order, whatever is known of their shapes."""
    x = convolution.ncx(b, attrs, convolution.ranked(b, attrs, src, "src"))
    dy = convolution.ncx(b, attrs, convolution.ranked(b, attrs, diff_dst, "diff_dst"))
    shape, windows = shape_of(b, x), shape_of(b, dy)
    lengths, outs = shape[2:], windows[2:]
    zero = pooling_body.conditions(b, attrs, shape, windows)
    if 0 in outs.entries:  # no window at all
        return convolution.from_ncx(b, attrs, b.Expand(b.float_scalar(0), (shape + zero).name))
    planes = join(b, shape[:2].product() + zero, Vector(b, [1]))
    image = b.Reshape(x, join(b, planes, lengths).name, allowzero=1)

    def won() -> str:
        return _won(b, attrs, image, dy, shape, join(b, planes, outs))

    if outs.known is None and any(d > 1 for d in pooling.dilations(attrs)):
        # onnxruntime refuses a dilated window that is much longer than the image; then there is none
        summed = b.choose((outs.least() > 0).name, won, lambda: b.ConstantOfShape(shape.product().name))
    else:
        summed = won()
    return convolution.from_ncx(b, attrs, b.Reshape(summed, shape.name, allowzero=1))


def _won(b: Body, attrs: Attributes, image: str, gradient: Tensor | str, shape: Vector, windows: Vector) -> str:
    """What each pixel of an image (planes, 1, in…) has won of the gradient, of windows (planes, 1, out…), 1-D."""
    lengths, outs, spatial = shape[2:], windows[2:], range(2, shape.count)
    if lengths.known is None and _may_crop(attrs):
        winners = _winners_of_padded(b, attrs, image, lengths)
        exact = True
    else:
        attributes, exact = _attributes(attrs, lengths, outs)
        winners = b.emit("MaxPool", [image], attributes, outputs=2)[1]
    if not exact:
        winners = b.Slice(winners, b.ints([0] * len(spatial)), outs.name, b.ints(spatial))
    reached = _reached(b, attrs, lengths, outs)
    if reached:  # elsewhere the index means nothing
        winners = b.Where(reached, winners, b.int_scalar(0))
        gradient = b.Where(reached, b.Reshape(gradient, windows.name, allowzero=1), b.float_scalar(0))
    flat = b.ints([-1])
    zeros = b.ConstantOfShape(shape.product().name)
    return b.ScatterElements(zeros, b.Reshape(winners, flat), b.Reshape(gradient, flat), axis=0, reduction="add")


def _may_crop(attrs: Attributes) -> bool:
    """Whether onnxruntime may cut pixels off instead of padding: it pads SAME by (out - 1)·stride + kernel - in."""
    beyond = any(stride > kernel for stride, kernel in zip(attrs["strides"], attrs["kernel"], strict=True))
    return attrs["auto_pad"].startswith("SAME") and beyond


def _winners_of_padded(b: Body, attrs: Attributes, image: str, lengths: Vector) -> str:
    """The winners of an image that is padded beforehand, as positions in it without its padding.

    A padded pixel, which wins where all others are -inf, stands for the one at the edge beside it.
    """
    begin, end = pooling_body.pads(b, attrs, lengths)
    none = Vector(b, [0, 0])
    pads = join(b, none, begin, none, end).name
    count = b.Reshape(b.Size(image), b.ints([]))
    positions = b.Reshape(b.Range(b.int_scalar(0), count, b.int_scalar(1)), b.Shape(image), allowzero=1)
    positions = b.Reshape(b.Pad(positions, pads, mode="edge"), b.ints([-1]))
    padded = b.Pad(image, pads, b.float_scalar(-np.inf))
    attributes = {"kernel_shape": attrs["kernel"], "strides": attrs["strides"]}
    return b.Gather(positions, b.emit("MaxPool", [padded], attributes, outputs=2)[1])


def _attributes(attrs: Attributes, lengths: Vector, outs: Vector) -> tuple[dict[str, Any], bool]:
    """MaxPool's attributes, and whether it then makes just the windows of diff_dst, or more of them along some axes.

    Where the lengths are known the padding behind is moved to where the last window ends, so that there is nothing to
    be rounded; where they are not, to where every window fits that begins inside, or the windows are rounded up.
    """
    kernel, strides, extents = attrs["kernel"], attrs["strides"], pooling_body.extents(attrs)
    result: dict[str, Any] = {"kernel_shape": kernel, "strides": strides}
    if any(d > 1 for d in pooling.dilations(attrs)):
        result["dilations"] = pooling.dilations(attrs)
    begins: list[int] = []
    ends: list[int] = []
    exact, up = True, False
    for axis, (length, out) in enumerate(zip(lengths.entries, outs.entries, strict=True)):
        pair = pooling.axis_pads(attrs, axis, length)
        if pair is None:
            return result | {"auto_pad": attrs["auto_pad"]}, True
        begin, end = pair
        begins.append(begin)
        fitting = -1
        if length is not None and out is not None:
            fitting = (out - 1) * strides[axis] + extents[axis] - length - begin
        if 0 <= fitting < kernel[axis]:
            ends.append(fitting)
        elif extents[axis] == kernel[axis]:
            ends.append(kernel[axis] - 1)
            exact = False
        else:
            ends.append(end)
            exact, up = False, True
    if any(begins + ends):
        result["pads"] = begins + ends
    return result | ({"ceil_mode": 1} if up else {}), exact


def _reached(b: Body, attrs: Attributes, lengths: Vector, outs: Vector) -> str:
    """Which windows have a pixel inside the source, broadcasting to (planes, 1, out…); '' where all have one."""
    if all(d == 1 for d in pooling.dilations(attrs)):
        return ""
    if lengths.known is not None and outs.known is not None:
        masks = [_inside(axis) for axis in pooling.axes_of(attrs, lengths.known, outs.known)]
        if all(mask.all() for mask in masks):
            return ""
        vectors = [b.Cast(b.constant(mask.astype(np.uint8)), to=BOOL) for mask in masks]
    else:
        begin = pooling_body.pads(b, attrs, lengths)[0].known
        assert begin is not None, "SAME has no dilations"
        vectors = [_reached_along(b, attrs, axis, p, lengths, outs) for axis, p in enumerate(begin)]
    return reduce(b.And, _spread(b, vectors))


def _inside(axis: pooling.Windows) -> np.ndarray:
    taps = np.arange(axis.kernel) * axis.dilation - axis.begin
    places = np.arange(axis.out)[:, None] * axis.stride + taps
    return np.any((places >= 0) & (places < axis.length), axis=1)


def _reached_along(b: Body, attrs: Attributes, axis: int, begin: int, lengths: Vector, outs: Vector) -> str:
    count = b.Reshape(outs[axis].name, b.ints([]), allowzero=1)
    windows = b.Mul(b.Range(b.int_scalar(0), count, b.int_scalar(1)), b.ints([attrs["strides"][axis]]))
    dilation = pooling.dilations(attrs)[axis]
    taps = b.ints([k * dilation - begin for k in range(attrs["kernel"][axis])])
    places = b.Add(b.Unsqueeze(windows, b.ints([1])), taps)
    inside = b.And(b.Greater(places, b.ints([-1])), b.Less(places, lengths[axis].name))
    return b.Cast(b.ReduceMax(b.Cast(inside, to=INT64), b.ints([1]), keepdims=0), to=BOOL)


def _spread(b: Body, vectors: Sequence[str]) -> list[str]:
    """Each vector along its own axis."""
    last = len(vectors) - 1
    return [
        vector if axis == last else b.Unsqueeze(vector, b.ints(range(1, last - axis + 1)))
        for axis, vector in enumerate(vectors)
    ]
