"""From a channel's sums to the factors of its gradient: dx = dy·slope + (x - mean)·along + level."""

from __future__ import annotations

import numpy as np

from onnx_backprop.ort_ops.runtime.call import CALL_INPUTS, CALL_MORE
from onnx_backprop.ort_ops.runtime.compile import inner
from onnx_backprop.ort_ops.runtime.llvm import load_f32, load_i64, store_f32

MEAN, VARIANCE, GAMMA = (CALL_INPUTS + 2 + n for n in range(3))
DIFF_GAMMA, DIFF_BETA = CALL_MORE, CALL_MORE + 1


@inner  # a variance of zero without epsilon gives what it gives in NumPy
def factors_of(call, channel, count, epsilon, square, whole, along):
    """float64 (slope, along, level) from a channel's sums of (x - mean)², dy and dy·(x - mean) over `count` elements.

    Its entries of diff_gamma and diff_beta are stored.
    """
    given, scales = load_i64(call, VARIANCE), load_i64(call, GAMMA)
    variance = np.float64(load_f32(given, channel)) if given else square / count
    rate = 1.0 / np.sqrt(variance + epsilon)
    dgamma = along * rate
    if load_i64(call, DIFF_GAMMA):
        store_f32(load_i64(call, DIFF_GAMMA), channel, np.float32(dgamma))
    if load_i64(call, DIFF_BETA):
        store_f32(load_i64(call, DIFF_BETA), channel, np.float32(whole))
    slope = rate * np.float64(load_f32(scales, channel)) if scales else rate
    return slope, -slope * rate * dgamma / count, -slope * whole / count
