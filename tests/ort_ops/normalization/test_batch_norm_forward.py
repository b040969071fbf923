"""BatchNormForwardTraining, compiled: statistics that are exact but for their rounding, and the gradient that reads them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import onnx_backprop as ob
from tests.declarations.calls import to_data
from tests.support import single_op

f32 = np.float32
BF, BN = "BatchNormForwardTraining", "BatchNormTrainingBackward"
ROUNDING = 2.0**-24  # of a float32, relative
SHAPES = [(64, 3, 50, 7), (5000, 3), (4, 70, 1000)]  # a channel in pieces, rows, many channels


def statistics(x: np.ndarray, running: float, layout: str, threads: int = 1) -> list[np.ndarray]:
    channels = x.shape[1]
    attributes = {"epsilon": 1e-5, "momentum": 0.75, "data_format": layout}
    inputs = [to_data(x, layout), np.full(channels, running, f32), np.ones(channels, f32)]
    model, options = single_op.model(BF, attributes, inputs), single_op.options(threads)
    answers = ob.session(model, kernels="native", session_options=options).run(None, single_op.feeds(BF, inputs))
    return [np.asarray(value) for value in answers]


def exactly(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """μ and σ², from float64 sums of x - 1000, of which each term is exact."""
    d = x.astype(np.float64) - 1000
    axes = (0, *range(2, x.ndim))
    step = d.mean(axis=axes)
    deviation = d - step.reshape(-1, *[1] * (x.ndim - 2))
    return 1000 + step, (deviation * deviation).mean(axis=axes)


@pytest.mark.parametrize("layout", ["NCX", "NXC"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("running", [0.0, 1000.0, -3e7, 1e30, np.inf, np.nan])
def test_statistics_far_from_zero(rng, running: float, shape: tuple[int, ...], layout: str) -> None:
    """Whatever the running mean is: sums about one of 10³⁰ would know nothing of a variance of 1."""
    x = (1000 + rng.standard_normal(shape)).astype(f32)
    mean, variance = exactly(x)
    got = statistics(x, running, layout)
    np.testing.assert_allclose(got[3], mean, rtol=1.01 * ROUNDING)
    np.testing.assert_allclose(got[4], variance, rtol=1.01 * ROUNDING)
    np.testing.assert_allclose(got[2], 0.75 + 0.25 * variance, rtol=1.01 * ROUNDING)
    if np.isfinite(running):
        np.testing.assert_allclose(got[1], 0.75 * float(f32(running)) + 0.25 * mean, rtol=1.01 * ROUNDING)


@pytest.mark.parametrize("layout", ["NCX", "NXC"])
def test_a_variance_that_is_small_beside_the_mean(layout: str) -> None:
    """One cell of 4096 is a unit in the last place above the others."""
    x = np.full((64, 2, 64), 16777214, f32)
    x[5, 1, 7] += 1
    got = statistics(x, 0.0, layout)
    share = Fraction(1, 4096)
    np.testing.assert_array_equal(got[4], [0, f32(float(share * (1 - share)))])
    np.testing.assert_array_equal(got[3], [16777214, 16777214])


@pytest.mark.parametrize("shape", [(64, 3, 50, 7), (5000, 3)])
def test_parts_of_a_batch_add_up_to_the_same_bits(rng, shape: tuple[int, ...]) -> None:
    """As on ranks: float64 sums about the running mean, of two parts of any size, added up."""
    x = (1000 + rng.standard_normal(shape)).astype(f32)
    whole = statistics(x, 1000.0, "NCX")
    axes, count = (0, *range(2, x.ndim)), x.size // x.shape[1]
    for cut in (1, shape[0] // 3, shape[0] - 2):
        d = [part.astype(np.float64) - 1000 for part in (x[:cut], x[cut:])]
        total = np.add(*(part.sum(axis=axes) for part in d)) / count
        square = np.add(*((part * part).sum(axis=axes) for part in d)) / count
        np.testing.assert_array_equal((1000 + total).astype(f32), whole[3])
        np.testing.assert_array_equal((square - total * total).astype(f32), whole[4])


@pytest.mark.parametrize("layout", ["NCX", "NXC"])
def test_any_number_of_threads_gives_the_same_bits(rng, layout: str) -> None:
    x = (1000 + rng.standard_normal((3, 200, 77))).astype(f32)
    for one, two in zip(statistics(x, 0.0, layout), statistics(x, 0.0, layout, threads=2), strict=True):
        np.testing.assert_array_equal(one, two)


def test_the_gradient_by_given_statistics_adds_up_exactly(rng) -> None:
    """Σ dy and Σ dy·z of terms that cancel: dy is 10⁴ · ±1 and a small rest."""
    x = (1000 + rng.standard_normal((32, 3, 4096))).astype(f32)
    sign = np.where(np.arange(4096) % 2, 1e4, -1e4)
    dy = (sign + rng.standard_normal(x.shape)).astype(f32)
    mean, variance = (value.astype(f32) for value in exactly(x))
    attributes = {"epsilon": 0.0, "data_format": "NCX"}
    answers = single_op.run_all(BN, attributes, [x, dy, mean, variance], kernels="native")
    g, per = dy.astype(np.float64), (3, 1)
    along = (g * (x.astype(np.float64) - mean.reshape(per))).sum(axis=(0, 2))
    assert np.abs(g.sum(axis=(0, 2))).max() < 1e-6 * np.abs(g).sum() / 3
    np.testing.assert_allclose(answers[2], g.sum(axis=(0, 2)), rtol=1.01 * ROUNDING)
    np.testing.assert_allclose(answers[1], along / np.sqrt(variance.astype(np.float64)), rtol=1.01 * ROUNDING)
