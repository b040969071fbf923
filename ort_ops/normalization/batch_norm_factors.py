"""From a channel's sums to the factors of its gradient: dx = dy·slope + (x - mean)·along + level."""

import numpy as np

from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import load_f32, store_f32

MEAN, VARIANCE, GAMMA = 2, 3, 4  # inputs
DIFF_GAMMA, DIFF_BETA = 0, 1  # further outputs


@inner  # a variance of zero without epsilon gives what it gives in NumPy
def slope_of(gamma, channel, variance, epsilon):
    """float64 γ·r."""
    rate = 1.0 / np.sqrt(variance + epsilon)
    return rate * np.float64(load_f32(gamma, channel)) if gamma else rate


@inner
def factors_of(call, channel, count, epsilon, square, whole, along):
    """float64 (slope, along, level) from a channel's sums of (x - mean)², dy and dy·(x - mean) over `count` elements.

    Its entries of diff_gamma and diff_beta are stored.
    """
    given = call.inputs[VARIANCE]
    variance = np.float64(load_f32(given, channel)) if given else square / count
    rate = 1.0 / np.sqrt(variance + epsilon)
    dgamma = along * rate
    if call.more[DIFF_GAMMA]:
        store_f32(call.more[DIFF_GAMMA], channel, np.float32(dgamma))
    if call.more[DIFF_BETA]:
        store_f32(call.more[DIFF_BETA], channel, np.float32(whole))
    slope = slope_of(call.inputs[GAMMA], channel, variance, epsilon)
    return slope, -slope * rate * dgamma / count, -slope * whole / count
