"""InterpolateBackward and InterpolateBackprop: dx = W_Dᵀ · W_Hᵀ · W_Wᵀ · dy, one matrix W per spatial axis."""

import numpy as np
from numba import njit

from onnx_backprop.opset.core.op import Attributes, Float64Array
from onnx_backprop.ort_ops.loops.axis import transposed


@njit(cache=True, nogil=True)
def place(length, out, nearest, half_pixel):
    """The taps of destination index o around x = (o + 1/2)·I/O - 1/2, or o·(I-1)/(O-1) with aligned corners.

    nearest: x rounded, ties up. linear: the two neighbours of x clamped to [0, I-1], each with 1 - its distance.
    """
    last = length - 1
    index, weight = np.zeros((out, 2), np.int64), np.zeros((out, 2))
    for o in range(out):
        # x is a fraction of whole numbers, so ties and borders are exact
        numerator, denominator = o * last, max(out - 1, 1)
        if half_pixel:
            numerator, denominator = (2 * o + 1) * length - out, 2 * out
        if nearest:
            rounded = (2 * numerator + denominator) // (2 * denominator)
            index[o, :], weight[o, 0] = min(max(rounded, 0), last), 1.0
        else:
            inside = min(max(numerator, 0), last * denominator)
            left = inside // denominator
            beyond = inside % denominator / denominator
            index[o, 0], weight[o, 0] = left, 1 - beyond
            index[o, 1], weight[o, 1] = min(left + 1, last), beyond
    return index, weight


def reference(
    attrs: Attributes,
    out: tuple[int, ...],
    _src: tuple[int, ...],
    diff_dst: Float64Array,
    _sizes: tuple[int, ...] | None,
) -> Float64Array:
    dx = diff_dst
    first = 2 if attrs["data_format"] == "NCX" else 1
    nearest, half_pixel = attrs["mode"] == "nearest", attrs["coordinate_transformation_mode"] == "half_pixel"
    for axis in range(first, first + dx.ndim - 2):
        dx = transposed(place(out[axis], dx.shape[axis], nearest, half_pixel), dx, axis, out[axis])
    return dx


REFERENCES = {"InterpolateBackward": reference, "InterpolateBackprop": reference}
