"""BatchNormForwardTraining."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.declarations.calls import DATA_FORMATS, Call, Draws, to_data, values, without_end
from tests.declarations.declaration import DATA_FORMAT, FLOAT, REQUIRED, Bad, Declaration, Example, Schema

OP = "BatchNormForwardTraining"


def calls(draws: Draws) -> Call:
    """With ε, so that a small variance in float32 is not far from that in float64."""
    while True:
        shape = [draws.length(3, low=0, small=3), draws.length(150, low=0), *draws.shape(0, 2, low=0)]
        if draws.fits(shape):
            break
    seed, data = draws.seed(), draws.pick(*DATA_FORMATS)
    parameters = [values(shape[1:2], seed + n) for n in range(1, 5)]
    affine = [array if draws.flag() else None for array in parameters[2:]]
    attributes = {"epsilon": draws.pick(0.5, 0.25), "momentum": draws.pick(0.0, 0.75, 0.875, 1.0), "data_format": data}
    inputs = [to_data(values(shape, seed), data), *parameters[:2], *affine]
    return Call(OP, attributes, without_end(inputs), seed)


REFUSED = [
    Bad(OP, "src: expected rank 2 to 64, got 1 with shape (3)", inputs={0: (3,)}),
    Bad(OP, "channels of src and mean must agree, got 3 and 4", inputs={1: (4,)}),
    Bad(OP, "channels of src and variance must agree, got 3 and 1", inputs={2: (1,)}),
    Bad(OP, "channels of src and gamma must agree, got 3 and 4", inputs={3: (4,)}),
    Bad(OP, "channels of src and beta must agree, got 3 and 2", inputs={4: (2,)}),
    Bad(OP, "variance: expected rank 1, got 2 with shape (3, 1)", inputs={2: (3, 1)}),
    Bad(OP, "channels of src and mean must agree, got 4 and 3", {"data_format": None}),
    *(
        Bad(OP, f"attribute epsilon: expected a number >= 0, got {epsilon}", {"epsilon": epsilon})
        for epsilon in (-0.5, float("inf"), float("nan"))
    ),
    *(
        Bad(OP, f"attribute momentum: expected a finite number, got {momentum}", {"momentum": momentum})
        for momentum in (float("-inf"), float("nan"))
    ),
]


def examples() -> Iterator[Example]:
    """x is 2 ± 1 with a mean of 2 and a variance of 1, and ε = 0: all is exact."""
    attributes = {"epsilon": 0.0, "momentum": 0.75, "data_format": "NCX"}
    x, running = [[[1, 3]], [[1, 3]]], ([6], [5])
    statistics = ([5], [4], [2], [1])  # ¾·6 + ¼·2, ¾·5 + ¼·1
    unit = [[[-1, 1]], [[-1, 1]]]
    yield Example(OP, OP, attributes, (x, *running), unit, statistics)
    yield Example(f"{OP}-gamma", OP, attributes, (x, *running, [3]), np.multiply(unit, 3).tolist(), statistics)
    yield Example(f"{OP}-beta", OP, attributes, (x, *running, None, [7]), np.add(unit, 7).tolist(), statistics)
    both = [[[4, 10]], [[4, 10]]]
    yield Example(f"{OP}-both", OP, attributes, (x, *running, [3], [7]), both, statistics)
    halves = np.multiply(unit, 0.5).tolist()
    yield Example(f"{OP}-epsilon", OP, attributes | {"epsilon": 3.0}, (x, *running), halves, statistics)
    kept = attributes | {"momentum": 1.0}
    yield Example(f"{OP}-kept", OP, kept, (x, *running), unit, (*running, [2], [1]))
    # channels last, the default: 1, 3, 1, 3 and 0, 4, 8, 4, whose variance is 8 = 4 · 2, so that ε = 8 halves a half
    last = [[[1, 0], [3, 4], [1, 8], [3, 4]]]
    numbers = {"epsilon": 8.0, "momentum": 0.75}
    answer = [[[-1, -2], [1, 1], [-1, 4], [1, 1]]]
    statistics = ([5, 1], [4, 2], [2, 4], [1, 8])
    yield Example(f"{OP}-last", OP, numbers, (last, [6, 0], [5, 0], [3, 3], [0, 1]), answer, statistics)


OPERATORS = [
    Declaration(
        op=OP,
        schema=Schema(
            {"epsilon": (FLOAT, REQUIRED), "momentum": (FLOAT, REQUIRED), "data_format": DATA_FORMAT},
            {"src": "T1", "mean": "T5", "variance": "T5", "gamma": "T5?", "beta": "T5?"},
            {"dst": "T1", "running_mean": "T5", "running_variance": "T5", "batch_mean": "T5", "batch_variance": "T5"},
        ),
        calls=calls,
        valid=({"epsilon": 1e-5, "momentum": 0.9, "data_format": "NCX"}, [(2, 3, 4), (3,), (3,), (3,), (3,)]),
        refused=REFUSED,
        examples=[*examples()],
        inferred=[
            ({"epsilon": 0.1, "momentum": 0.5}, [None, None, [3]], [None, [3], [3], [3], [3]]),
            ({"epsilon": 0.1, "momentum": 0.5}, [["N", "L", None], None, [3]], [["N", "L", 3], [3], [3], [3], [3]]),
        ],
        linear=("mean", "variance", "beta"),
    )
]
