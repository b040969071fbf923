"""PReLUBackward."""

from __future__ import annotations

from tests.declarations.calls import DATA_FORMATS, Call, Draws, to_data, values
from tests.declarations.declaration import DATA_FORMAT, Bad, Declaration, Example, Schema

OP = "PReLUBackward"


def calls(draws: Draws) -> Call:
    """A slope of one entry, of one per channel, or of the shape of src without its first axis; src with zeros or none."""
    while True:
        shape = [draws.length(3, low=0, small=3), draws.length(150, low=0), *draws.shape(0, 3, low=0)]
        if draws.fits(shape):
            break
    seed, data = draws.seed(), draws.pick(*DATA_FORMATS)
    src, diff_dst = (to_data(values(shape, seed + n), data) for n in (0, 2))
    if draws.flag():
        src[src == 0] = 1
    slope = values(draws.pick((1,), tuple(shape[1:2]), src.shape[1:]), seed + 1)
    return Call(OP, {"data_format": data}, [src, slope, diff_dst], seed)


REFUSED = [
    Bad(OP, "src: expected rank 2 to 64, got 1 with shape (3)", inputs={0: (3,), 2: (3,)}),
    Bad(OP, "lengths of axis 0 of src and diff_dst must agree, got 2 and 1", inputs={2: (1, 3, 4)}),
    Bad(OP, "diff_dst: expected rank 3, got 4 with shape (2, 3, 4, 1)", inputs={2: (2, 3, 4, 1)}),
    Bad(OP, "slope: expected rank 1 to 2, got 0 with shape ()", inputs={1: ()}),
    Bad(OP, "slope: expected rank 1 to 2, got 3 with shape (1, 3, 1)", inputs={1: (1, 3, 1)}),
    Bad(OP, "slope: expected rank 3, got 2 with shape (3, 4)", inputs={0: (2, 3, 4, 1), 1: (3, 4), 2: (2, 3, 4, 1)}),
    Bad(OP, "slope: expected 1 entry or 3, one per channel, got 4", inputs={1: (4,)}),
    Bad(OP, "slope: expected 1 entry or 3, one per channel, got 6", inputs={1: (6,)}),
    Bad(OP, "slope: expected 1 entry or 6, one per channel, got 3", inputs={0: (2, 6, 4), 1: (3,), 2: (2, 6, 4)}),
    Bad(OP, "slope: expected 1 entry or 1, one per channel, got 3", inputs={0: (2, 1, 4), 2: (2, 1, 4)}),
    # a forgotten data_format
    Bad(OP, "slope: expected 1 entry or 4, one per channel, got 3", {"data_format": None}),
    # as ONNX writes a slope per channel
    Bad(OP, "lengths of axis 2 of src and axis 1 of slope must agree, got 4 and 1", inputs={1: (3, 1)}),
]

# columns of dy tell the cells; the slopes are 2 and -1
SRC, DY = [[[1, -1], [-2, 0]], [[-3, 5], [4, -0.5]]], [[[1, 10], [1, 10]], [[100, 1000], [100, 1000]]]
NAN, INF = float("nan"), float("inf")
EXAMPLES = [
    Example(
        OP, OP, {"data_format": "NCX"}, (SRC, [2, -1], DY),
        [[[1, 20], [-1, -10]], [[200, 1000], [100, -1000]]], ([-10 - 300, -2 - 500],),
    ),
    Example(
        f"{OP}-last", OP, {}, (SRC, [2, -1], DY),
        [[[1, -10], [2, -10]], [[200, 1000], [100, -1000]]], ([-2 - 300, -10 - 500],),
    ),
    Example(
        f"{OP}-one", OP, {}, (SRC, [2], DY),
        [[[1, 20], [2, 20]], [[200, 1000], [100, 2000]]], ([-10 - 2 - 300 - 500],),
    ),
    Example(
        f"{OP}-each", OP, {"data_format": "NCX"}, (SRC, [[2, -1], [4, 0.5]], DY),
        [[[1, -10], [4, 5]], [[200, 1000], [100, 500]]], ([[-300, -10], [-2, -500]],),
    ),
    Example(f"{OP}-matrix", OP, {}, ([[1, -2]], [3, 4], [[5, 6]]), [[5, 24]], ([0, -12],)),
    Example(f"{OP}-special", OP, {}, ([[INF], [NAN]], [3], [[-INF], [1]]), [[-INF], [3]], ([NAN],)),
    Example(f"{OP}-zero", OP, {}, ([[0]], [2], [[INF]]), [[INF]], ([NAN],)),
    Example(f"{OP}-infinite", OP, {}, ([[-INF], [1], [0]], [2], [[1], [NAN], [5]]), [[2], [NAN], [10]], ([-INF],)),
]  # fmt: skip

OPERATORS = [
    Declaration(
        op=OP,
        schema=Schema(
            {"data_format": DATA_FORMAT},
            {"src": "T1", "slope": "T1", "diff_dst": "T1"},
            {"diff_src": "T1", "diff_slope": "T1"},
        ),
        gradient_of=("PRelu",),
        calls=calls,
        valid=({"data_format": "NCX"}, [(2, 3, 4), (3,), (2, 3, 4)]),
        refused=REFUSED,
        examples=EXAMPLES,
        inferred=[
            ({}, [None, None, None], [None, None]),
            ({}, [None, ["C"], ["N", "L", 3]], [["N", "L", 3], ["C"]]),
            ({}, [None, [4, "C"], None], [[None, 4, "C"], [4, "C"]]),
            ({}, [["N", "L", 3], [4, None], [2, "M", "K"]], [[2, 4, 3], [4, 3]]),
        ],
        smooth=lambda call: call.inputs[0] is not None and bool(call.inputs[0].all()),
    )
]
