"""ResampleGrad: dx = W_0ᵀ · W_1ᵀ · … · dy, one matrix W per axis."""

import numpy as np
from numba import njit

from onnx_backprop.opset.core.op import Attributes, Float64Array
from onnx_backprop.opset.operators.resample_grad import DEFAULT_INPUT_OFFSET, DEFAULT_OUTPUT_OFFSET
from onnx_backprop.ort_ops.loops.axis import transposed


@njit(cache=True, nogil=True)
def place(length, out, nearest, numerator, denominator, input_offset, output_offset):
    """The taps of destination index o around x = (o - output_offset) / scale - input_offset.

    1 / scale is numerator / denominator. nearest: x rounded, ties down. linear: both neighbours of x, each with 1 - its
    distance. Beyond the borders the edge pixel repeats.
    """
    last = length - 1
    index, weight = np.zeros((out, 2), np.int64), np.zeros((out, 2))
    for o in range(out):
        x = (o - output_offset) * numerator / denominator - input_offset
        if nearest:
            index[o, :], weight[o, 0] = int(min(max(np.ceil(x - 0.5), 0.0), float(last))), 1.0
        else:
            x = min(max(x, 0.0), float(last))
            left = int(x)
            index[o, 0], weight[o, 0] = left, 1 - (x - left)
            index[o, 1], weight[o, 1] = min(left + 1, last), x - left
    return index, weight


def reference(
    attrs: Attributes, out: tuple[int, ...], gradient: Float64Array, _sizes: tuple[int, ...] | None
) -> Float64Array:
    dx = gradient
    nearest = attrs["interpolation_mode"] == "NEAREST_NEIGHBOR"
    for axis, length in enumerate(out):
        # no scale means O / I, as a fraction: a rounded quotient would move ties
        numerator, denominator = (1.0, attrs["scales"][axis]) if attrs["scales"] else (length, dx.shape[axis])
        input_offset = (attrs["input_pixel_offsets"] or [DEFAULT_INPUT_OFFSET] * dx.ndim)[axis]
        output_offset = (attrs["output_pixel_offsets"] or [DEFAULT_OUTPUT_OFFSET] * dx.ndim)[axis]
        numbers = (float(v) for v in (numerator, denominator, input_offset, output_offset))
        dx = transposed(place(length, dx.shape[axis], nearest, *numbers), dx, axis, length)
    return dx


REFERENCES = {"ResampleGrad": reference}
