"""Tables and banks of filters by their numbers, and that trained and fresh weights are none."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from onnx_backprop.converters.parameters import values

Maker = Callable[[], np.ndarray]
PLACES = np.arange(40)[:, None]
FREQUENCIES = 10000.0 ** -(np.arange(0, 16, 2) / 16)


def sines() -> np.ndarray:
    angles = PLACES * FREQUENCIES
    return np.stack([np.sin(angles), np.cos(angles)], 2).reshape(40, 16)


def grid() -> np.ndarray:
    """Of DETR: the first half of the channels of the row, the second of the column."""
    angles = (np.arange(1, 7) / 6 * 2 * np.pi)[:, None] * FREQUENCIES[:4]
    one = np.stack([np.sin(angles), np.cos(angles)], 2).reshape(6, 8)
    return np.concatenate([np.repeat(one[:, None], 6, 1), np.repeat(one[None], 6, 0)], -1).reshape(1, 36, 16)


def small_grid() -> np.ndarray:
    """Of SimpleViT, for 4 × 4 patches: sines and cosines of the columns, then of the rows."""
    y, x = (n.reshape(-1, 1) * 10000.0 ** -(np.arange(4) / 3) for n in np.mgrid[:4, :4])
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], 1)


def mel() -> np.ndarray:
    centres = np.linspace(2, 60, 12) ** 1.02
    bins = np.arange(80)
    return np.stack([np.clip(1 - np.abs(bins - c) / 6, 0, None) for c in centres])


def fourier(window: np.ndarray) -> np.ndarray:
    n = np.arange(64)
    waves = [f(2 * np.pi * np.arange(33)[:, None] * n / 64) for f in (np.cos, np.sin)]
    return (np.concatenate(waves) * window)[:, None]


def graph() -> np.ndarray:
    """A path of 9 places, each with itself."""
    return (np.abs(np.arange(9)[:, None] - np.arange(9)) < 2).astype(np.float64)


ANGLES: dict[str, Maker] = {
    "sines and cosines in turn": sines,
    "in halves": lambda: np.concatenate([np.sin(PLACES * FREQUENCIES), np.cos(PLACES * FREQUENCIES)], 1),
    "from place 3 on": lambda: np.sin((PLACES + 3) * FREQUENCIES[:4]),
    "a row of zeros for the class": lambda: np.concatenate([np.zeros((1, 16)), sines()]),
    "of a grid": grid,
    "of a grid of few places": small_grid,
    "of a grid behind a class": lambda: np.concatenate([np.zeros((1, 1, 16)), grid()], 1),
}
BANKS: dict[str, tuple[Maker, str]] = {
    "Fourier transform, Hann": (lambda: fourier(np.hanning(64)), values.BANK),
    "Fourier transform, no window": (lambda: fourier(np.ones(64))[:, 0].T, values.ANGLES),
    "inverse of few frequencies": (
        lambda: np.cos(np.arange(5)[:, None] * np.arange(32) * 2 * np.pi / 32),
        values.ANGLES,
    ),
    "mel scale": (mel, values.BANK),
    "mel scale, transposed": (lambda: mel().T, values.BANK),
    "blur for each channel": (lambda: np.tile(np.outer([1, 2, 1], [1, 2, 1]) / 16, (8, 1, 1, 1)), values.REPEATED),
    "Sobel for each channel": (lambda: np.tile([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]], (3, 1, 1, 1)), values.REPEATED),
}
GRAPHS: dict[str, tuple[Maker, str]] = {
    "adjacency": (graph, values.SYMMETRIC),
    "normalised": (lambda: graph() / np.sqrt(np.outer(graph().sum(0), graph().sum(0))), values.SYMMETRIC),
    "of random walks": (lambda: graph() / graph().sum(0), values.AVERAGES),
    "what resizes": (lambda: np.kron(np.eye(4), [[0.75, 0.25]]), values.AVERAGES),
}
RNG = np.random.default_rng(5)
WEIGHTS: dict[str, Maker] = {
    "normal": lambda: RNG.normal(0, 0.02, (33, 64)),
    "uniform": lambda: RNG.uniform(-0.1, 0.1, (64, 16)),
    "orthogonal": lambda: np.linalg.qr(RNG.normal(size=(32, 32)))[0],
    "kernels": lambda: RNG.normal(0, 0.1, (16, 8, 3, 3)),
    "long kernels": lambda: RNG.normal(0, 0.1, (40, 1, 64)),
    "depthwise": lambda: RNG.normal(0, 0.1, (16, 1, 3, 3)),
    "equal numbers": lambda: np.full((8, 16), 0.1),
    "a line": lambda: np.linspace(-1, 1, 64).reshape(8, 8),
    "whole numbers": lambda: np.arange(40.0).reshape(8, 5),
    "identity": lambda: np.eye(16),
    "a permutation": lambda: np.eye(16)[RNG.permutation(16)],
    "shares of all": lambda: RNG.dirichlet(np.ones(9), 12),
    "sparse": lambda: np.where(RNG.uniform(size=(16, 64)) < 0.1, RNG.normal(size=(16, 64)), 0),
    "sparse, of one sign": lambda: np.where(RNG.uniform(size=(16, 64)) < 0.1, RNG.uniform(size=(16, 64)), 0),
    "an embedding with a row of zeros": lambda: np.vstack([np.zeros((1, 12)), RNG.normal(size=(30, 12))]),
    "smooth": lambda: np.cumsum(RNG.normal(0, 0.01, (40, 64)), axis=1),
    "a random walk": lambda: np.cumsum(RNG.normal(0, 0.01, (40, 12)), axis=0),
    "zeros": lambda: np.zeros((8, 9)),
    "one row": lambda: RNG.normal(size=(1, 40)),
}


@pytest.mark.parametrize("case", ANGLES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tables_of_angles(case: str, dtype: type) -> None:
    assert values.holds_angles(ANGLES[case]().astype(dtype))


@pytest.mark.parametrize("case", [*BANKS, *GRAPHS])
def test_banks_and_graphs(case: str) -> None:
    make, what = (BANKS | GRAPHS)[case]
    assert values.in_product(make().astype(np.float32)) == what


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_are_no_tables(case: str) -> None:
    for _ in range(20):
        array = WEIGHTS[case]().astype(np.float32)
        assert not values.holds_angles(array)
        assert values.in_product(array) is None
        assert values.in_product(array.swapaxes(0, -1)) is None


def test_a_table_that_was_trained_is_a_weight() -> None:
    """A position embedding that began with sines, after some steps."""
    table = sines() + np.random.default_rng(0).normal(0, 0.01, (40, 16))
    assert not values.holds_angles(table.astype(np.float32))


@pytest.mark.parametrize("heads", [3, 4, 6, 8, 12, 16])
def test_slopes_of_alibi(heads: int) -> None:
    power = 2 ** int(np.log2(heads))
    slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    assert values.in_arithmetic(np.float32(slopes).reshape(heads, 1, 1)) == values.SLOPES
    assert values.in_arithmetic(np.float32(slopes) * 1.1) is None


def test_hostile_numbers() -> None:
    for number in (np.nan, np.inf, -np.inf, 1e38):
        array = np.full((16, 16), number, np.float32)
        array[0, 0] = 0
        values.holds_angles(array)
        values.in_product(array)
        values.in_arithmetic(array)
    for shape in ((0, 4), (4, 0), (0,), (), (1, 1), (4, 2, 0)):
        array = np.zeros(shape, np.float32)
        assert values.in_product(array) is None
        assert not values.holds_angles(array)
        values.in_arithmetic(array)
        values.is_uniform(array)
        assert not values.are_sine_and_cosine(array, array)
