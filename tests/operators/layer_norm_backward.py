"""LayerNormBackward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.declarations.calls import Call, Draws, values, without_end
from tests.declarations.declaration import FLOAT, INT, Bad, Declaration, Example, Schema

OP = "LayerNormBackward"


def calls(draws: Draws) -> Call:
    """Variances are not too small, so that float32 is not far from float64."""
    shape, seed = draws.shape(1, 4, high=300), draws.seed()
    axis, affine = draws.integer(-len(shape), len(shape) - 1), draws.flag()
    x, dy = (values(shape, seed + n) for n in range(2))
    gamma, beta = (values(shape[axis:], seed + n) for n in (2, 3))
    mean, variance = values(shape[:axis], seed + 4), np.asarray(np.abs(values(shape[:axis], seed + 5)) + 1)
    statistics = [array if draws.flag() else None for array in (mean, variance)]
    parameters = [gamma, beta if draws.flag() else None] if affine else []
    attributes = {"epsilon": draws.pick(0.5, 0.25), "begin_norm_axis": axis, "use_affine": int(affine)}
    return Call(OP, attributes, without_end([x, dy, *statistics, *parameters]), seed)


REFUSED = [
    Bad(OP, "lengths of axis 2 of src and diff_dst must agree, got 4 and 1", inputs={1: (2, 3, 1)}),
    Bad(OP, "diff_dst: expected rank 3, got 2 with shape (2, 12)", inputs={1: (2, 12)}),
    Bad(OP, "src: expected rank 1 to 64, got 0 with shape ()", inputs={0: (), 1: ()}),
    *(
        Bad(OP, f"attribute begin_norm_axis: expected -3 to 2 for rank 3, got {axis}", {"begin_norm_axis": axis})
        for axis in (3, -4)
    ),
    # statistics that keep the normalised axes, as ONNX's do, and parameters of another begin_norm_axis
    Bad(OP, "mean: expected rank 1, got 3 with shape (2, 1, 1)", inputs={2: (2, 1, 1)}),
    Bad(OP, "variance: expected rank 1, got 2 with shape (2, 3)", inputs={3: (2, 3)}),
    Bad(OP, "lengths of axis 0 before the normalised ones of src and mean must agree, got 2 and 3", inputs={2: (3,)}),
    Bad(OP, "lengths of axis 0 before the normalised ones of src and variance must agree, got 2 and 1", inputs={3: (1,)}),
    Bad(OP, "lengths of normalised axis 1 of src and gamma must agree, got 4 and 1", inputs={4: (3, 1)}),
    Bad(OP, "lengths of normalised axis 0 of src and beta must agree, got 3 and 1", inputs={5: (1, 4)}),
    Bad(OP, "gamma: expected rank 2, got 1 with shape (4)", inputs={4: (4,)}),
    Bad(OP, "beta: expected rank 2, got 1 with shape (12)", inputs={5: (12,)}),
    Bad(OP, "mean: expected rank 2, got 1 with shape (2)", {"begin_norm_axis": None}),
    Bad(OP, "attribute use_affine: expected 0 or 1, got 2", {"use_affine": 2}),
    Bad(OP, "use_affine is 1: expected gamma, got none; set use_affine to 0", inputs={4: None}),
    Bad(OP, "use_affine is 0: expected neither gamma nor beta; set use_affine to 1", {"use_affine": 0}),
    Bad(OP, "use_affine is 0: expected neither gamma nor beta; set use_affine to 1", {"use_affine": 0}, {4: None}),
    *(
        Bad(OP, f"attribute epsilon: expected a number >= 0, got {epsilon}", {"epsilon": epsilon})
        for epsilon in (-0.5, float("inf"), float("nan"))
    ),
]  # fmt: skip


def examples() -> Iterator[Example]:
    """Rows of 1 and 3, with a mean of 2 and a variance of 1, and ε = 0: all is exact."""
    plain = {"epsilon": 0.0, "use_affine": 0}
    x, dy = [[1, 3, 3, 1], [3, 1, 1, 3]], [[4, 0, 8, 4], [2, 6, 2, 6]]  # mean dy = 4 and 4, mean dy·z = 0 and 0
    whole = [6, 6, 10, 10]
    slant = [[8, 0, 0, 0], [0, 0, 0, 8]]  # mean dy = 2 and 2, mean dy·z = -2 and 2
    flat = [[4, 0, 0, -4], [-4, 0, 0, 4]]  # dy - 2 - z·(mean dy·z)
    yield Example(OP, OP, plain, (x, dy), np.subtract(dy, 4).tolist(), ([-2, -6, 6, 2], whole))
    yield Example(f"{OP}-slant", OP, plain, (x, slant), flat, ([-8, 0, 0, 8], [8, 0, 0, 8]))
    given: list[Any] = [x, slant, [2, 2], [1, 1]]
    yield Example(f"{OP}-given", OP, plain, tuple(given), flat, ([-8, 0, 0, 8], [8, 0, 0, 8]))
    affine = {"epsilon": 0.0}
    twice = np.multiply(flat, 2).tolist()
    gammas = (x, slant, None, None, [2, 2, 2, 2], [7, 8, 9, 10])
    yield Example(f"{OP}-gamma", OP, affine, gammas, twice, ([-8, 0, 0, 8], [8, 0, 0, 8]))
    # γ·dy = slant in the first row and nothing in the second
    yield Example(
        f"{OP}-gammas", OP, affine, (x, [[2, 1, 1, 1], [0, 1, 1, 1]], None, None, [4, 0, 0, 0]),
        [flat[0], [0, 0, 0, 0]], ([-2, 0, 0, 0], [2, 2, 2, 2]),
    )  # fmt: skip
    # ε = 3 beside a variance of 1: r = 1/2, z = ±1/2, mean dy·z = ∓1, so z·(mean dy·z) is a quarter of 2
    quarter = [[2.75, -0.75, -0.75, -1.25], [-1.25, -0.75, -0.75, 2.75]]
    yield Example(f"{OP}-epsilon", OP, plain | {"epsilon": 3.0}, (x, slant), quarter, ([-4, 0, 0, 4], [8, 0, 0, 8]))
    # a mean of 1 and a variance of 4 instead: z = 0, 1, 1, 0 and 1, 0, 0, 1, mean dy·z = 0 and 2
    other = (x, slant, [1, 1], [4, 4])
    yield Example(
        f"{OP}-statistics", OP, plain, other, [[3, -1, -1, -1], [-2, -1, -1, 2]], ([0, 0, 0, 8], [8, 0, 0, 8])
    )
    # the last two axes, and all of them
    square = [[[1, 3], [3, 1]], [[3, 1], [1, 3]]]
    steep, level = np.reshape(slant, (2, 2, 2)).tolist(), np.reshape(flat, (2, 2, 2)).tolist()
    sums = ([[-8, 0], [0, 8]], [[8, 0], [0, 8]])
    for axis in (1, -2):
        yield Example(f"{OP}-axis{axis}", OP, plain | {"begin_norm_axis": axis}, (square, steep), level, sums)
    yield Example(
        f"{OP}-all", OP, plain | {"begin_norm_axis": 0}, (x[0], slant[0], 2, 1), flat[0], ([-8, 0, 0, 0], [8, 0, 0, 0])
    )
    yield Example(f"{OP}-one", OP, {}, ([[5], [7]], [[3], [4]], None, None, [2]), [[0], [0]], ([0], [7]))


OPERATORS = [
    Declaration(
        op=OP,
        schema=Schema(
            {"begin_norm_axis": (INT, -1), "use_affine": (INT, 1), "epsilon": (FLOAT, float(np.float32(1e-5)))},
            {"src": "T1", "diff_dst": "T1", "mean": "T5?", "variance": "T5?", "gamma": "T5?", "beta": "T5?"},
            {"diff_src": "T1", "diff_gamma": "T5", "diff_beta": "T5"},
        ),
        gradient_of=("LayerNormalization",),
        calls=calls,
        valid=({"begin_norm_axis": 1}, [(2, 3, 4), (2, 3, 4), (2,), (2,), (3, 4), (3, 4)]),
        refused=REFUSED,
        examples=[*examples()],
        inferred=[
            ({"use_affine": 0}, [None, None], [None, [None], [None]]),
            ({}, [None, None, None, None, [4]], [None, [4], [4]]),
            ({}, [None, None, ["N", 3], None, [None]], [["N", 3, None], [None], [None]]),
            ({"begin_norm_axis": 1}, [None, None, ["N"], [2], [3, 4]], [[2, 3, 4], [3, 4], [3, 4]]),
            ({"begin_norm_axis": 2}, [None, None, None, None, [3]], [[None, None, 3], [3], [3]]),
        ],
    )
]
