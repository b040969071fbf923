"""SoftMaxBackward."""

from __future__ import annotations

from tests.declarations.calls import Call, Draws, values
from tests.declarations.declaration import INT, Bad, Declaration, Example, Schema

OP = "SoftMaxBackward"


def calls(draws: Draws) -> Call:
    """dst need not add up to 1 for the formula to hold."""
    shape, seed = draws.shape(1, 4), draws.seed()
    attributes = {"axis": draws.integer(-len(shape), len(shape) - 1)}
    return Call(OP, attributes, [values(shape, seed), values(shape, seed + 1)], seed)


REFUSED = [
    Bad(OP, "lengths of axis 1 of diff_dst and dst must agree, got 3 and 4", inputs={1: (2, 4)}),
    Bad(OP, "dst: expected rank 2, got 1 with shape (3)", inputs={1: (3,)}),
    Bad(OP, "diff_dst: expected rank 1 to 64, got 0 with shape ()", inputs={0: (), 1: ()}),
    *(Bad(OP, f"attribute axis: expected -2 to 1 for rank 2, got {axis}", {"axis": axis}) for axis in (2, -3)),
]

Y, DY = [[0.25, 0.75], [0.5, 0.5]], [[4, 8], [2, 6]]  # Σ dy·y = 7 and 4 along rows, 2 and 9 along columns
EXAMPLES = [
    Example("softmax", OP, {}, (DY, Y), [[-0.75, 0.75], [-1, 1]]),
    Example("softmax-columns", OP, {"axis": -2}, (DY, Y), [[0.5, -0.75], [0, -1.5]]),
]

OPERATORS = [
    Declaration(
        op=OP,
        schema=Schema({"axis": (INT, 1)}, {"diff_dst": "T1", "dst": "T1"}, {"diff_src": "T1"}),
        gradient_of=("Attention", "Softmax"),
        calls=calls,
        valid=({}, [(2, 3), (2, 3)]),
        refused=REFUSED,
        examples=EXAMPLES,
        inferred=[({}, [None, None], [None]), ({"axis": -1}, [None, ["N", 3]], [["N", 3]])],
        workspace=False,
    )
]
