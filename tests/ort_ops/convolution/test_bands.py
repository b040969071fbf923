"""Bands: the largest box that is small enough; whatever they are, sums have the same bits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from onnx_backprop.ort_ops.convolution.gather import bands
from onnx_backprop.ort_ops.convolution.gather import plan as gather_plan
from onnx_backprop.ort_ops.convolution.problem import three
from onnx_backprop.ort_ops.convolution.weights import plan as weights_plan
from onnx_backprop.ort_ops.convolution.winograd import plan as winograd_plan
from onnx_backprop.ort_ops.runtime.workspace import band_of
from tests.ort_ops.planned import Shapes, convolution, without_matrix_tiles
from tests.support import single_op


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


@pytest.mark.parametrize(
    "call",
    [
        # a tile of cells may be of two rows, which different taps reach
        convolution("Convolution", 1, (32, 16), (64, 290), (5, 5), pads=(2, 2), data_format="NXC"),
        convolution("ConvolutionBackwardWeights", 1, (186, 168), (37, 10), (3, 3), pads=(1, 1)),  # Winograd's tiles
    ],
    ids=["cells of channels", "winograd"],
)
def test_bands_for_other_processors_have_the_same_bits(
    call: Shapes, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_matrix_tiles(monkeypatch)
    inputs = [rng.standard_normal(shape).astype(np.float32) for shape in call.inputs if shape is not None]
    results = []
    for count in (1, 3, 64):
        for module in (bands, gather_plan, weights_plan, winograd_plan):
            monkeypatch.setattr(module, "processors", lambda count=count: count)
        results.append(single_op.run(call.op, call.attributes, inputs, kernels="native"))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
