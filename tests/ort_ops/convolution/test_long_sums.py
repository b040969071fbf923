"""Sums of products begin anew every CHUNK steps: rounding grows with the root of a chunk, not of all that is summed."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import single_op
from tests.support.checks import evaluate

PLAIN = {"strides": [1, 1], "dilations": [1, 1], "data_format": "NCX", "weights_format": "OIX"}
NO_PADS = PLAIN | {"pads_begin": [0, 0], "pads_end": [0, 0]}


def distance(got: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("channels", [(3, 8), (8, 3)])  # columns of the product: of dy, of x
def test_weight_gradients_of_large_images(rng, channels: tuple[int, int]) -> None:
    """Sums over 2·64·64 cells of x ≥ 0 and of a dy whose mean is 0, as behind a normalisation; 1.9e-6 and more in one sum."""
    s, d = channels
    x, dy = rng.random((2, s, 64, 64), np.float32), rng.standard_normal((2, d, 64, 64), np.float32)
    dy -= dy.mean(axis=(0, 2, 3), keepdims=True)
    attributes = PLAIN | {"pads_begin": [1, 1], "pads_end": [1, 1], "weights_shape": [d, s, 3, 3]}
    got = single_op.run("ConvolutionBackwardWeights", attributes, [x, dy], kernels="native")
    exact = evaluate("ConvolutionBackwardWeights", attributes, [x, dy])
    assert distance(got, exact) < 8e-7


@pytest.mark.parametrize("cells", [1, 11])  # channels alone; kernels too large for Winograd's tiles
def test_sums_over_many_channels_and_cells(rng, cells: int) -> None:
    """Forward and data gradient, 2048 terms and more."""
    channels, lengths = (2048, 12) if cells == 1 else (20, 24)
    x = rng.standard_normal((2, channels, lengths, lengths), np.float32)
    w = rng.standard_normal((channels, channels if cells > 1 else 16, cells, cells), np.float32)
    forward = single_op.run("Convolution", NO_PADS, [x, np.swapaxes(w, 0, 1)], kernels="native")
    assert distance(forward, evaluate("Convolution", NO_PADS, [x, np.swapaxes(w, 0, 1)])) < 3e-7
    back = NO_PADS | {"dst_shape": [2, w.shape[1], lengths + cells - 1, lengths + cells - 1]}
    data = single_op.run("ConvolutionBackwardData", back, [x, w], kernels="native")
    assert distance(data, evaluate("ConvolutionBackwardData", back, [x, w])) < 3e-7
