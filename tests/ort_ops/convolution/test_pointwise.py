"""Kernels of one cell between unreadable pages: the last of the tiles that a band is copied to is not whole."""

from __future__ import annotations

import numpy as np
import pytest

from tests.declarations.calls import Call
from tests.ort_ops.guarded import check


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize(("stride", "pad"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("length", [31, 34, 66])
def test_data_gradient(length: int, stride: int, pad: int, at_end: bool) -> None:
    rng = np.random.default_rng(0)
    channels, out = 70, (length + 2 * pad - 1) // stride + 1
    diff_dst = rng.standard_normal((2, channels, out)).astype(np.float32)
    weights = rng.standard_normal((channels, 5, 1)).astype(np.float32)
    attributes = {
        "strides": [stride],
        "dilations": [1],
        "pads_begin": [pad],
        "pads_end": [pad],
        "groups": 1,
        "data_format": "NCX",
        "weights_format": "OIX",
        "dst_shape": [2, 5, length],
    }
    call = Call("ConvolutionBackwardData", attributes, [diff_dst, weights], 0)
    assert check(call, "f32", at_end=at_end) == "answered"
