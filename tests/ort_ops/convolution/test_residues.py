"""Convolutions whose taps all read the cell itself: kernels of one cell, or as long as their stride."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnx_backprop.ort_ops.convolution.gather.kernel import FALLBACK
from tests.ort_ops.planned import convolution, without_matrix_tiles
from tests.support import single_op
from tests.support.checks import evaluate

f32 = np.float32

# batch, groups, channels and outputs of a group, lengths, kernel, strides, pads at the beginning and at the end
CASES = [
    (2, 1, 5, 7, (56,), (2,), (2,), (0,), (0,)),
    (1, 2, 9, 60, (40, 71), (2, 2), (2, 2), (0, 0), (1, 2)),  # cells that the kernel does not reach
    (2, 1, 8, 13, (24, 66), (2, 3), (2, 3), (0, 0), (0, 0)),
    (1, 3, 6, 8, (10, 9), (1, 1), (1, 1), (2, 1), (0, 3)),  # one cell, and pads
    (1, 1, 6, 25, (9, 200), (1, 1), (2, 3), (0, 0), (0, 0)),  # cells that no output reads
    (1, 1, 5, 24, (5, 30, 65), (2, 3, 2), (2, 3, 2), (0, 0, 0), (1, 0, 1)),
    (1, 1, 5, 24, (3, 7, 64), (2, 2, 2), (2, 2, 2), (1, 0, 0), (1, 0, 0)),
    (1, 1, 3, 12, (300, 230), (1, 1), (1, 1), (0, 0), (0, 0)),  # more than a band
    (1, 1, 64, 12, (70, 64), (2, 2), (2, 2), (0, 0), (0, 0)),
    (1, 1, 64, 20, (70, 64), (2, 2), (2, 2), (2, 0), (2, 0)),  # even and odd cells together, rows of pads
    (1, 1, 6, 20, (7, 44), (1, 2), (2, 2), (0, 2), (0, 2)),
    (1, 1, 6, 20, (8, 40), (2, 1), (2, 2), (0, 0), (0, 0)),  # even cells alone
    (1, 1, 3, 20, (4, 50001), (2, 1), (2, 2), (0, 1), (0, 0)),  # odd cells alone
    (1, 1, 3, 20, (70000,), (2,), (2,), (2,), (0,)),  # bands along rows
    (1, 1, 3, 384, (48, 32), (16, 16), (16, 16), (0, 0), (0, 0)),  # patches
]


@pytest.fixture(autouse=True)
def fused(monkeypatch) -> None:
    without_matrix_tiles(monkeypatch)


def attributes(case: tuple[Any, ...]) -> dict[str, Any]:
    strides, begin, end = (list(values) for values in case[6:])
    plain = {"strides": strides, "dilations": [1] * len(strides), "pads_begin": begin, "pads_end": end}
    return plain | {"data_format": "NCX", "weights_format": "OIX", "groups": case[1]}


def run_case(case: tuple[Any, ...], dtype: str, rng: np.random.Generator) -> None:
    """Forward and data gradient of small integers, whose sums are exact."""
    batch, groups, channels, outs, lengths, kernel = case[:6]
    shapes = (batch, groups * channels, *lengths), (groups * outs, channels, *kernel)
    x, w = (rng.integers(-3, 4, shape).astype(f32) for shape in shapes)
    bias = rng.integers(-3, 4, groups * outs).astype(f32)
    y = evaluate("Convolution", attributes(case), [x, w, bias])
    dy = rng.integers(-3, 4, y.shape).astype(f32)
    for op, inputs in (
        ("Convolution", [x, w, bias]),
        ("ConvolutionBackwardData", [dy, w, np.array(x.shape, np.int32)]),
    ):
        got = single_op.run(op, attributes(case), inputs, kernels="native", dtype=dtype)
        expected = evaluate(op, attributes(case), inputs)
        np.testing.assert_array_equal(got, expected, err_msg=f"{op} {case} {dtype}", strict=True)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("case", CASES)
def test_against_the_reference(rng, case, dtype: str) -> None:
    run_case(case, dtype, rng)


@pytest.mark.parametrize(("outs", "patch", "cells"), [(384, 16, 14), (1024, 14, 16)])
def test_gradients_of_patches_are_products(outs: int, patch: int, cells: int) -> None:
    """The weights of all taps are packed, for three output channels, not for as many as registers hold."""
    plan = convolution("ConvolutionBackwardData", 1, (3, outs), [cells] * 2, [patch] * 2, strides=[patch] * 2).plan(
        "f32"
    )
    assert FALLBACK not in [stage for stage, _ in plan.stages]


@pytest.mark.parametrize(("kernel", "stride", "pad"), [(3, 1, 1), (3, 2, 1)])
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
def test_taps_beyond_a_small_image_are_no_terms(rng, data_format: str, kernel: int, stride: int, pad: int) -> None:
    """A weight that is not finite leaves cells alone that it does not reach: no product with zeros around the image."""
    channels, length = 80, 7
    case = (3, 1, channels, channels, (length, length), (kernel,) * 2, (stride,) * 2, (pad,) * 2, (pad,) * 2)
    attrs = attributes(case) | {"data_format": data_format}
    x, w = (3, channels, length, length), rng.integers(-3, 4, (channels, channels, kernel, kernel)).astype(f32)
    outs = (length + 2 * pad - kernel) // stride + 1
    dy = rng.integers(1, 4, (3, channels, outs, outs)).astype(f32)  # no zeros, where the weight does reach
    w[:, :, 0, 0] = np.inf
    if data_format == "NXC":
        x, dy = (3, length, length, channels), np.ascontiguousarray(np.moveaxis(dy, 1, -1))
    inputs = [dy, w, np.array(x, np.int32)]
    got = single_op.run("ConvolutionBackwardData", attrs, inputs, kernels="native")
    expected = evaluate("ConvolutionBackwardData", attrs, inputs)
    assert np.isfinite(expected).any()
    np.testing.assert_array_equal(got, expected.astype(f32))
