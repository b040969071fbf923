"""Bands: the largest box that is small enough."""

from __future__ import annotations

import math

import numpy as np

from onnx_backprop.ort_ops.convolution.problem import band_of, three


def test_boxes_are_cut_into_as_few_parts_as_are_small_enough(rng: np.random.Generator) -> None:
    """Beside a search that tries one number of parts after the other."""
    cut = 0
    for _ in range(400):
        count, limit = three(rng.integers(1, 70, 3).tolist(), 1), int(10 ** rng.uniform(0, 6))
        least = three([int(rng.integers(1, n + 1)) if rng.random() < 0.3 else 1 for n in count], 1)
        stride, more = rng.integers(1, 4, 3), rng.integers(0, 9, 3)

        def floats(band: list[int], stride: np.ndarray = stride, more: np.ndarray = more) -> int:
            return int(np.prod((np.array(band) - 1) * stride + 1 + more))

        expected = list(count)
        for axis in range(3):
            parts = 1
            while floats(expected) > limit and expected[axis] > least[axis]:
                parts += 1
                expected[axis] = max(least[axis], math.ceil(count[axis] / parts))
        assert band_of(count, floats, limit, least) == (tuple(expected), floats(expected))
        cut += tuple(expected) != count
    assert cut > 100
