"""Kernels of one cell between unreadable pages: the last of the tiles that a band is copied to is not whole."""

from __future__ import annotations

import numpy as np
import pytest

from onnx_backprop.ort_ops.convolution import parameters as par
from tests.declarations.calls import Call
from tests.ort_ops.guarded import check
from tests.ort_ops.planned import Shapes, numbers, without_matrix_tiles


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


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize(("channels", "outs", "length"), [(37, 150, 5), (150, 37, 5), (100, 260, 12)])
def test_weight_gradient(monkeypatch, channels: int, outs: int, length: int, dtype: str) -> None:
    """Columns that all items share end in a part of a tile, and of a vector."""
    without_matrix_tiles(monkeypatch)
    rng = np.random.default_rng(0)
    x, dy = (rng.integers(-8, 9, (3, n, length, length)).astype(np.float32) / 8 for n in (channels, outs))
    attributes = {
        "strides": [1, 1],
        "dilations": [1, 1],
        "pads_begin": [0, 0],
        "pads_end": [0, 0],
        "groups": 1,
        "data_format": "NCX",
        "weights_format": "OIX",
    }
    shape = [outs, channels, 1, 1]
    request = Shapes("ConvolutionBackwardWeights", attributes | {"weights_shape": shape}, (x.shape, dy.shape))
    head = numbers(request.plan(dtype), par.Cells)
    assert head.turned > 0
    assert head.blocks > 1
    call = Call("ConvolutionBackwardWeights", attributes, [x, dy, np.array(shape, np.int32)], 0)
    assert check(call, dtype, at_end=True) == "answered"
