"""Pools, normalisations and activations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.worked.example import Attributes, Example, row


def pool(kernel: int, stride: int, begin: int = 0, end: int = 0, **more: object) -> Attributes:
    """Attributes of a pool along one axis, channels first."""
    attributes = {"kernel": [kernel], "strides": [stride], "pads_begin": [begin], "pads_end": [end]}
    return attributes | {"data_format": "NCX"} | more


def max_pools() -> Iterator[Example]:
    """dy is 1, 10, 100 …, so that the digits of a cell tell which windows it won."""
    op = "MaxPoolBackward"

    def example(name: str, attributes: Attributes, x: list[float], dx: list[float], windows: int) -> Example:
        return Example(f"{op}-{name}", op, attributes, (row(*x), row(*(10.0**o for o in range(windows)))), row(*dx))

    yield example("apart", pool(2, 2), [1, 3, 4, 2], [0, 1, 10, 0], 2)
    yield example("overlapping", pool(3, 1), [1, 5, 2, 4, 3], [0, 11, 0, 100, 0], 3)
    yield example("the_first_of_equal_ones", pool(3, 1), [2, 2, 2, 2], [1, 10, 0, 0], 2)
    yield example("padding_is_no_zero", pool(3, 2, 1, 1), [-1, -2, -3, -4], [1, 10, 0, 0], 2)
    yield example("all_minus_infinity", pool(2, 2), [-np.inf, -np.inf, -np.inf, 1], [1, 0, 0, 10], 2)
    # an end that no window reaches, rounded down; the same with a third window, rounded up
    yield example("rounded_down", pool(2, 2), [1, 2, 3, 4, 5], [0, 1, 0, 10, 0], 2)
    yield example("rounded_up", pool(2, 2), [1, 2, 3, 4, 5], [0, 1, 0, 10, 100], 3)
    yield example("dilation", pool(2, 1, dilations=[2]), [3, 9, 1, 8, 2], [1, 10, 0, 0, 100], 3)
    # window 0 is cells -2 and 2, window 1 -1 and 3, of which x has none
    yield example("a_window_beside_x", pool(3, 1, 2, 2, dilations=[4]), [1, 2, 3], [0, 0, 0], 0)
    yield example("stepping_over_x", pool(2, 1, 1, 1, dilations=[4]), [1, 2, 3], [0, 0, 0], 1)
    # windows of 3, 2 apart: SAME pads 4 cells by one, behind them or before
    yield example("SAME_UPPER", pool(3, 2, 9, 9, auto_pad="SAME_UPPER"), [1, 2, 9, 4], [0, 0, 11, 0], 2)
    yield example("SAME_LOWER", pool(3, 2, 9, 9, auto_pad="same_lower"), [1, 2, 9, 4], [0, 1, 10, 0], 2)
    yield example("VALID", pool(2, 2, 9, 9, auto_pad="VALID"), [1, 2, 9, 4, 5], [0, 1, 10, 0, 0], 2)
    # two images, two channels, channels last, all defaults
    last = {"kernel": [2, 2], "strides": [2, 2], "pads_begin": [], "pads_end": []}
    x = [[[[1, 8], [2, 7]], [[3, 6], [4, 5]]], [[[4, 1], [4, 2]], [[0, 3], [0, 4]]]]
    dx = [[[[0, 20], [0, 0]], [[0, 0], [10, 0]]], [[[30, 0], [0, 0]], [[0, 0], [0, 40]]]]
    yield Example(f"{op}-defaults", op, last, (x, [[[[10, 20]]], [[[30, 40]]]]), dx)


def average_pools() -> Iterator[Example]:
    """dy is a multiple of what its window is divided by, so that all is exact."""
    op = "AvgPoolBackward"

    def example(name: str, attributes: Attributes, dy: list[float], length: int, dx: list[float]) -> Example:
        stated = attributes if "src_shape" in attributes else attributes | {"src_shape": [1, 1, length]}
        return Example(f"{op}-{name}", op, stated, (row(*dy),), row(*dx))

    out, within = {"exclude_pad": 1}, {"exclude_pad": 0}
    yield example("apart", pool(2, 2, **out), [2, 20], 4, [1, 1, 10, 10])
    yield example("overlapping", pool(2, 1, **out), [2, 20, 200], 4, [1, 11, 110, 100])
    yield example("cells_between", pool(1, 2, **out), [1, 10], 4, [1, 0, 10, 0])
    # a window's cell of padding: left out, or divided by
    yield example("exclude_pad", pool(2, 2, 1, 1, **out), [4, 8, 16], 4, [4, 4, 4, 16])
    yield example("include_pad", pool(2, 2, 1, 1, **within), [4, 8, 16], 4, [2, 4, 4, 8])
    # an end that no window reaches, rounded down; the same with a third window of one cell, rounded up
    yield example("rounded_down", pool(2, 2, **out), [2, 4], 5, [1, 1, 2, 2, 0])
    yield example("rounded_up", pool(2, 2, **out), [2, 4, 8], 5, [1, 1, 2, 2, 8])
    yield example("rounded_up-include_pad", pool(2, 2, **within), [2, 4, 8], 5, [1, 1, 2, 2, 4])
    # windows of 2, 2 apart: SAME pads 3 cells by one, behind them or before
    yield example("SAME_UPPER", pool(2, 2, 9, 9, auto_pad="SAME_UPPER", **out), [2, 4], 3, [1, 1, 4])
    yield example("SAME_LOWER", pool(2, 2, 9, 9, auto_pad="same_lower", **within), [2, 4], 3, [1, 2, 2])
    yield example("VALID", pool(2, 2, 9, 9, auto_pad="VALID", **out), [2, 4], 5, [1, 1, 2, 2, 0])
    # two axes, channels last, all defaults; of a corner one cell lies inside, of an edge two
    last = {"kernel": [2, 2], "strides": [2, 2], "pads_begin": [1, 1], "pads_end": [1, 1], "exclude_pad": 1}
    dy = [[[[1, 10], [2, 20]], [[4, 40], [8, 80]]]]
    dx = [[[[1, 10], [2, 20]], [[4, 40], [8, 80]]]]
    yield Example(f"{op}-defaults", op, last | {"src_shape": [1, 2, 2, 2]}, (dy,), dx)
    dense: Attributes = last | {"strides": [1, 1], "pads_begin": [0, 0], "pads_end": [0, 0]}
    dx = [[[[1, 10], [3, 30], [2, 20]], [[5, 50], [15, 150], [10, 100]], [[4, 40], [12, 120], [8, 80]]]]
    yield Example(f"{op}-two_axes", op, dense, (np.multiply(dy, 4).tolist(), (1, 3, 3, 2)), dx)


# ----- Normalisations -------------------------------------------------------------------------------------------------


def normalisations() -> Iterator[Example]:
    """x is 2 ± 1 with a mean of 2 and a variance of 1, and ε = 0: all is exact."""
    op, attributes = "BatchNormTrainingBackward", {"epsilon": 0.0, "data_format": "NCX"}
    x, dy = [[[1, 3]], [[1, 3]]], [[[1, 3]], [[2, 6]]]  # Σ dy = 12, Σ dy·z = 6
    dx = [[[-0.5, -1.5]], [[0.5, 1.5]]]
    yield Example("batch_norm", op, attributes, (x, dy), dx, ([6], [12]))
    yield Example("batch_norm-given", op, attributes, (x, dy, [2], [1]), dx, ([6], [12]))
    twice = np.multiply(dx, 2).tolist()
    yield Example("batch_norm-gamma", op, attributes, (x, dy, None, None, [2]), twice, ([6], [12]))
    # a variance of 4 halves the slope and z, so that z·mean(dy·z) is a quarter
    quarter = [[[-1 + 0.1875, -0.1875]], [[-0.5 + 0.1875, 1.5 - 0.1875]]]
    yield Example("batch_norm-variance", op, attributes, (x, dy, None, [4]), quarter, ([3], [12]))
    # channels last, the default; the second channel gets a gradient that is the same everywhere, so none arrives
    last = [[[1, 1], [3, 3], [1, 3], [3, 1]]]
    given = [[[1, 7], [3, 7], [2, 7], [6, 7]]]
    answer = [[[-0.5, 0], [-1.5, 0], [0.5, 0], [1.5, 0]]]
    yield Example("batch_norm-last", op, {"epsilon": 0.0}, (last, given), answer, ([6, 0], [12, 28]))


def batch_norms_forward() -> Iterator[Example]:
    """x is 2 ± 1 with a mean of 2 and a variance of 1, and ε = 0: all is exact."""
    op, attributes = "BatchNormForwardTraining", {"epsilon": 0.0, "momentum": 0.75, "data_format": "NCX"}
    x, running = [[[1, 3]], [[1, 3]]], ([6], [5])
    found = ([5], [4], [2], [1])  # ¾·6 + ¼·2, ¾·5 + ¼·1
    unit = [[[-1, 1]], [[-1, 1]]]
    yield Example(op, op, attributes, (x, *running), unit, found)
    yield Example(f"{op}-gamma", op, attributes, (x, *running, [3]), np.multiply(unit, 3).tolist(), found)
    yield Example(f"{op}-beta", op, attributes, (x, *running, None, [7]), np.add(unit, 7).tolist(), found)
    both = [[[4, 10]], [[4, 10]]]
    yield Example(f"{op}-both", op, attributes, (x, *running, [3], [7]), both, found)
    halves = np.multiply(unit, 0.5).tolist()
    yield Example(f"{op}-epsilon", op, attributes | {"epsilon": 3.0}, (x, *running), halves, found)
    kept = attributes | {"momentum": 1.0}
    yield Example(f"{op}-kept", op, kept, (x, *running), unit, (*running, [2], [1]))
    # channels last, the default: 1, 3, 1, 3 and 0, 4, 8, 4, whose variance is 8 = 4 · 2, so that ε = 8 halves a half
    last = [[[1, 0], [3, 4], [1, 8], [3, 4]]]
    numbers = {"epsilon": 8.0, "momentum": 0.75}
    answer = [[[-1, -2], [1, 1], [-1, 4], [1, 1]]]
    found = ([5, 1], [4, 2], [2, 4], [1, 8])
    yield Example(f"{op}-last", op, numbers, (last, [6, 0], [5, 0], [3, 3], [0, 1]), answer, found)


def layer_norms() -> Iterator[Example]:
    """Rows of 1 and 3, with a mean of 2 and a variance of 1, and ε = 0: all is exact."""
    op, plain = "LayerNormBackward", {"epsilon": 0.0, "use_affine": 0}
    x, dy = [[1, 3, 3, 1], [3, 1, 1, 3]], [[4, 0, 8, 4], [2, 6, 2, 6]]  # mean dy = 4 and 4, mean dy·z = 0 and 0
    whole = [6, 6, 10, 10]
    slant = [[8, 0, 0, 0], [0, 0, 0, 8]]  # mean dy = 2 and 2, mean dy·z = -2 and 2
    flat = [[4, 0, 0, -4], [-4, 0, 0, 4]]  # dy - 2 - z·(mean dy·z)
    yield Example(op, op, plain, (x, dy), np.subtract(dy, 4).tolist(), ([-2, -6, 6, 2], whole))
    yield Example(f"{op}-slant", op, plain, (x, slant), flat, ([-8, 0, 0, 8], [8, 0, 0, 8]))
    given: list[Any] = [x, slant, [2, 2], [1, 1]]
    yield Example(f"{op}-given", op, plain, tuple(given), flat, ([-8, 0, 0, 8], [8, 0, 0, 8]))
    affine = {"epsilon": 0.0}
    twice = np.multiply(flat, 2).tolist()
    gammas = (x, slant, None, None, [2, 2, 2, 2], [7, 8, 9, 10])
    yield Example(f"{op}-gamma", op, affine, gammas, twice, ([-8, 0, 0, 8], [8, 0, 0, 8]))
    # γ·dy = slant in the first row and nothing in the second
    yield Example(
        f"{op}-gammas", op, affine, (x, [[2, 1, 1, 1], [0, 1, 1, 1]], None, None, [4, 0, 0, 0]),
        [flat[0], [0, 0, 0, 0]], ([-2, 0, 0, 0], [2, 2, 2, 2]),
    )  # fmt: skip
    # ε = 3 beside a variance of 1: r = 1/2, z = ±1/2, mean dy·z = ∓1, so z·(mean dy·z) is a quarter of 2
    quarter = [[2.75, -0.75, -0.75, -1.25], [-1.25, -0.75, -0.75, 2.75]]
    yield Example(f"{op}-epsilon", op, plain | {"epsilon": 3.0}, (x, slant), quarter, ([-4, 0, 0, 4], [8, 0, 0, 8]))
    # a mean of 1 and a variance of 4 instead: z = 0, 1, 1, 0 and 1, 0, 0, 1, mean dy·z = 0 and 2
    other = (x, slant, [1, 1], [4, 4])
    yield Example(
        f"{op}-statistics", op, plain, other, [[3, -1, -1, -1], [-2, -1, -1, 2]], ([0, 0, 0, 8], [8, 0, 0, 8])
    )
    # the last two axes, and all of them
    square = [[[1, 3], [3, 1]], [[3, 1], [1, 3]]]
    steep, level = np.reshape(slant, (2, 2, 2)).tolist(), np.reshape(flat, (2, 2, 2)).tolist()
    sums = ([[-8, 0], [0, 8]], [[8, 0], [0, 8]])
    for axis in (1, -2):
        yield Example(f"{op}-axis{axis}", op, plain | {"begin_norm_axis": axis}, (square, steep), level, sums)
    yield Example(
        f"{op}-all", op, plain | {"begin_norm_axis": 0}, (x[0], slant[0], 2, 1), flat[0], ([-8, 0, 0, 0], [8, 0, 0, 0])
    )
    yield Example(f"{op}-one", op, {}, ([[5], [7]], [[3], [4]], None, None, [2]), [[0], [0]], ([0], [7]))


# ----- Activations ----------------------------------------------------------------------------------------------------


def activations() -> Iterator[Example]:
    op = "ReLUBackward"
    yield Example("relu", op, {}, ([[0, 1, -2], [0.5, -0.0, 3]], [[1, 2, 3], [4, 5, 6]]), [[0, 2, 0], [4, 0, 6]])
    op = "SoftMaxBackward"
    y, dy = [[0.25, 0.75], [0.5, 0.5]], [[4, 8], [2, 6]]  # Σ dy·y = 7 and 4 along rows, 2 and 9 along columns
    yield Example("softmax", op, {}, (dy, y), [[-0.75, 0.75], [-1, 1]])
    yield Example("softmax-columns", op, {"axis": -2}, (dy, y), [[0.5, -0.75], [0, -1.5]])
    op = "ReLUBackward"
    nan, inf = float("nan"), float("inf")
    yield Example(
        "relu-of_src", op, {"use_dst": 0}, ([nan, -inf, inf, -1, 1], [1, 2, 3, inf, -inf]), [0, 0, 3, 0, -inf]
    )
