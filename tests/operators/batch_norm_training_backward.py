"""BatchNormTrainingBackward."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.declarations.calls import DATA_FORMATS, Call, Draws, to_data, values, without_end
from tests.declarations.declaration import DATA_FORMAT, FLOAT, REQUIRED, Bad, Declaration, Example, Schema

OP = "BatchNormTrainingBackward"


def calls(draws: Draws) -> Call:
    """Variances are not too small, so that float32 is not far from float64."""
    while True:
        shape = [draws.length(3, small=3), draws.length(150), *draws.shape(0, 2)]
        if draws.fits(shape):
            break
    seed, data = draws.seed(), draws.pick(*DATA_FORMATS)
    tensors = [to_data(values(shape, seed + n), data) for n in range(2)]
    mean, variance, gamma = (values(shape[1:2], seed + n) for n in (2, 3, 4))
    parameters = [array if draws.flag() else None for array in (mean, np.abs(variance) + 1, gamma)]
    attributes = {"epsilon": draws.pick(0.5, 0.25), "data_format": data}
    return Call(OP, attributes, without_end([*tensors, *parameters]), seed)


REFUSED = [
    Bad(OP, "lengths of axis 0 of src and diff_dst must agree, got 2 and 1", inputs={1: (1, 3, 4)}),
    Bad(OP, "diff_dst: expected rank 3, got 4 with shape (2, 3, 4, 1)", inputs={1: (2, 3, 4, 1)}),
    Bad(OP, "src: expected rank 2 to 64, got 1 with shape (3)", inputs={0: (3,), 1: (3,)}),
    Bad(OP, "channels of src and mean must agree, got 3 and 4", inputs={2: (4,)}),
    Bad(OP, "channels of src and variance must agree, got 3 and 1", inputs={3: (1,)}),
    Bad(OP, "channels of src and gamma must agree, got 3 and 4", inputs={4: (4,)}),
    Bad(OP, "gamma: expected rank 1, got 2 with shape (3, 1)", inputs={4: (3, 1)}),
    # a forgotten data_format
    Bad(OP, "channels of src and mean must agree, got 4 and 3", {"data_format": None}),
    *(
        Bad(OP, f"attribute epsilon: expected a number >= 0, got {epsilon}", {"epsilon": epsilon})
        for epsilon in (-0.5, float("inf"), float("nan"))
    ),
]


def examples() -> Iterator[Example]:
    """x is 2 ± 1 with a mean of 2 and a variance of 1, and ε = 0: all is exact."""
    attributes = {"epsilon": 0.0, "data_format": "NCX"}
    x, dy = [[[1, 3]], [[1, 3]]], [[[1, 3]], [[2, 6]]]  # Σ dy = 12, Σ dy·z = 6
    dx = [[[-0.5, -1.5]], [[0.5, 1.5]]]
    yield Example("batch_norm", OP, attributes, (x, dy), dx, ([6], [12]))
    yield Example("batch_norm-given", OP, attributes, (x, dy, [2], [1]), dx, ([6], [12]))
    twice = np.multiply(dx, 2).tolist()
    yield Example("batch_norm-gamma", OP, attributes, (x, dy, None, None, [2]), twice, ([6], [12]))
    # a variance of 4 halves the slope and z, so that z·mean(dy·z) is a quarter
    quarter = [[[-1 + 0.1875, -0.1875]], [[-0.5 + 0.1875, 1.5 - 0.1875]]]
    yield Example("batch_norm-variance", OP, attributes, (x, dy, None, [4]), quarter, ([3], [12]))
    # channels last, the default; the second channel gets a gradient that is the same everywhere, so none arrives
    last = [[[1, 1], [3, 3], [1, 3], [3, 1]]]
    given = [[[1, 7], [3, 7], [2, 7], [6, 7]]]
    answer = [[[-0.5, 0], [-1.5, 0], [0.5, 0], [1.5, 0]]]
    yield Example("batch_norm-last", OP, {"epsilon": 0.0}, (last, given), answer, ([6, 0], [12, 28]))


OPERATORS = [
    Declaration(
        op=OP,
        schema=Schema(
            {"epsilon": (FLOAT, REQUIRED), "data_format": DATA_FORMAT},
            {"src": "T1", "diff_dst": "T1", "mean": "T5?", "variance": "T5?", "gamma": "T5?"},
            {"diff_src": "T1", "diff_gamma": "T5", "diff_beta": "T5"},
        ),
        gradient_of=("BatchNormalization",),
        calls=calls,
        valid=({"epsilon": 1e-5, "data_format": "NCX"}, [(2, 3, 4), (2, 3, 4), (3,), (3,), (3,)]),
        refused=REFUSED,
        examples=[*examples()],
        inferred=[
            ({"epsilon": 0.1}, [None, None], [None, [None], [None]]),
            ({"epsilon": 0.1}, [None, ["N", "L", 3]], [["N", "L", 3], [3], [3]]),
        ],
    )
]
