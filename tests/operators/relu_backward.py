"""ReLUBackward."""

from __future__ import annotations

from tests.declarations.calls import Call, Draws, values
from tests.declarations.declaration import INT, Bad, Declaration, Example, Schema

OP = "ReLUBackward"
NAN, INF = float("nan"), float("inf")


def calls(draws: Draws) -> Call:
    """Of no axes too, and of axes without elements."""
    shape, seed = draws.shape(0, 5, low=0), draws.seed()
    attributes = {"use_dst": draws.integer(0, 1)} if draws.flag() else {}
    return Call(OP, attributes, [values(shape, seed), values(shape, seed + 1)], seed)


REFUSED = [
    Bad(OP, "lengths of axis 1 of src and diff_dst must agree, got 3 and 4", inputs={1: (2, 4)}),
    Bad(OP, "lengths of axis 0 of src and diff_dst must agree, got 2 and 1", inputs={1: (1, 3)}),
    Bad(OP, "diff_dst: expected rank 2, got 1 with shape (3)", inputs={1: (3,)}),
    Bad(OP, "attribute use_dst: expected 0 or 1, got 2", {"use_dst": 2}),
]

EXAMPLES = [
    Example("relu", OP, {}, ([[0, 1, -2], [0.5, -0.0, 3]], [[1, 2, 3], [4, 5, 6]]), [[0, 2, 0], [4, 0, 6]]),
    Example("relu-of_src", OP, {"use_dst": 0}, ([NAN, -INF, INF, -1, 1], [1, 2, 3, INF, -INF]), [0, 0, 3, 0, -INF]),
]

OPERATORS = [
    Declaration(
        op=OP,
        schema=Schema({"use_dst": (INT, 1)}, {"src": "T1", "diff_dst": "T1"}, {"diff_src": "T1"}),
        gradient_of=("Relu",),
        calls=calls,
        valid=({}, [(2, 3), (2, 3)]),
        refused=REFUSED,
        examples=EXAMPLES,
        inferred=[({}, [None, None], [None]), ({}, [None, ["N", 3]], [["N", 3]]), ({}, [["N", 3], [2, "C"]], [[2, 3]])],
        workspace=False,
        jumps=("src",),
    )
]
