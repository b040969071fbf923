"""BiasAddBackward."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.declarations.calls import DATA_FORMATS, Call, Draws, values
from tests.declarations.declaration import DATA_FORMAT, Bad, Declaration, Example, Schema, invalid, row

OP = "BiasAddBackward"


def calls(draws: Draws) -> Call:
    shape, seed = draws.shape(2, 5), draws.seed()
    return Call(OP, {"data_format": draws.pick(*DATA_FORMATS)}, [values(shape, seed)], seed)


REFUSED = [
    Bad(OP, "diff_dst: expected rank 2 to 64, got 1 with shape (3)", inputs={0: (3,)}),
    invalid(
        OP, "unknown attribute axis, keepdims; it takes data_format", {"keepdims": 0, "axis": 1}, model_shows_it=False
    ),
]


def examples() -> Iterator[Example]:
    yield Example("bias", OP, {"data_format": "NCX"}, (row(1, 2, 3),), [6])
    yield Example("bias-last", OP, {}, ([[[1, 10], [2, 20], [3, 30]]],), [6, 60])
    yield Example("bias-matrix", OP, {}, ([[1, 10], [2, 20]],), [3, 30])
    image = np.arange(16).reshape(2, 2, 2, 2).tolist()
    yield Example("bias-image", OP, {"data_format": "NCX"}, (image,), [6 + 38, 22 + 54])


OPERATORS = [
    Declaration(
        op=OP,
        schema=Schema({"data_format": DATA_FORMAT}, {"diff_dst": "T1"}, {"diff_bias": "T1"}),
        calls=calls,
        valid=({"data_format": "NCX"}, [(1, 2, 3)]),
        refused=REFUSED,
        examples=[*examples()],
        inferred=[
            ({}, [None], [[None]]),
            ({"data_format": "NCX"}, [["N", "C", "P", "Q"]], [["C"]]),
            ({}, [["N", "P", "Q", "C"]], [["C"]]),
        ],
    )
]
