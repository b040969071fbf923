"""MaxPoolBackward."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.declarations.calls import DATA_FORMATS, Call, Draws, to_data, values
from tests.declarations.declaration import INTS, Attributes, Bad, Declaration, Example, Schema, row
from tests.operators import pools
from tests.operators.pools import attributes

OP = "MaxPoolBackward"


def calls(draws: Draws) -> Call:
    """Values of few kinds, so that there are ties; one in eight is minus infinity."""
    given, source, windows = pools.geometry(draws, dilated=True)
    data, seed = draws.pick(*DATA_FORMATS), draws.seed()
    x = values(source, seed).round()
    x[np.random.default_rng(seed).random(x.shape) < 1 / 8] = -np.inf
    inputs = [to_data(x, data), to_data(values(windows, seed + 1), data)]
    return Call(OP, given | {"data_format": data}, [*inputs], seed)


REFUSED = [
    *pools.refused(OP),
    Bad(OP, "attribute dilations: expected values >= 1, got [0]", {"dilations": [0]}),
    Bad(
        OP,
        "attribute auto_pad: expected None or VALID beside dilations [2], got SAME_LOWER; state the pads",
        {"auto_pad": "same_lower", "dilations": [2]},
    ),
    Bad(OP, "batch sizes of src and diff_dst must agree, got 1 and 2", inputs={1: (2, 2, 4)}),
    Bad(OP, "channels of src and diff_dst must agree, got 2 and 3", inputs={1: (1, 3, 4)}),
    # a forgotten data_format
    Bad(OP, "channels of src and diff_dst must agree, got 7 and 4", {"data_format": None}),
    Bad(OP, "spatial lengths of src: expected values >= 1, got [0]", inputs={0: (1, 2, 0)}),
    Bad(
        OP,
        "spatial axis 0: src length 7 with kernel 3, stride 2, dilation 1, pads 1 and 1 expects diff_dst length 4, got 3",
        inputs={1: (1, 2, 3)},
    ),
    Bad(
        OP,
        "spatial axis 0: src length 6 with kernel 3, stride 2, dilation 1, pads 1 and 1 expects diff_dst length 3 or 4, "
        "got 5",
        inputs={0: (1, 2, 6), 1: (1, 2, 5)},
    ),
    # rounded up there would be a window that begins behind src
    Bad(
        OP,
        "spatial axis 0: src length 2 with kernel 2, stride 2, dilation 1, pads 0 and 1 expects diff_dst length 1, got 2",
        {"kernel": [2], "pads_begin": [0]},
        inputs={0: (1, 2, 2), 1: (1, 2, 2)},
    ),
    Bad(
        OP,
        "spatial axis 0: src length 7 with kernel 3, stride 2, dilation 1, pads 1 and 1 expects diff_dst length 4, got 5",
        {"auto_pad": "SAME_UPPER"},
        inputs={1: (1, 2, 5)},
    ),
    Bad(OP, "src: expected rank 3 to 5, got 2 with shape (2, 7)", inputs={0: (2, 7)}),
    Bad(OP, "diff_dst: expected rank 3 to 5, got 6 with shape (1, 2, 4, 1, 1, 1)", inputs={1: (1, 2, 4, 1, 1, 1)}),
    Bad(OP, "src: expected rank 4, got 3 with shape (1, 2, 7)", inputs={1: (1, 2, 4, 4)}),
]


def examples() -> Iterator[Example]:
    """dy is 1, 10, 100 …, so that the digits of a cell tell which windows it won."""

    def example(name: str, given: Attributes, x: list[float], dx: list[float], windows: int) -> Example:
        return Example(f"{OP}-{name}", OP, given, (row(*x), row(*(10.0**o for o in range(windows)))), row(*dx))

    yield example("apart", attributes(2, 2), [1, 3, 4, 2], [0, 1, 10, 0], 2)
    yield example("overlapping", attributes(3, 1), [1, 5, 2, 4, 3], [0, 11, 0, 100, 0], 3)
    yield example("the_first_of_equal_ones", attributes(3, 1), [2, 2, 2, 2], [1, 10, 0, 0], 2)
    yield example("padding_is_no_zero", attributes(3, 2, 1, 1), [-1, -2, -3, -4], [1, 10, 0, 0], 2)
    yield example("all_minus_infinity", attributes(2, 2), [-np.inf, -np.inf, -np.inf, 1], [1, 0, 0, 10], 2)
    # an end that no window reaches, rounded down; the same with a third window, rounded up
    yield example("rounded_down", attributes(2, 2), [1, 2, 3, 4, 5], [0, 1, 0, 10, 0], 2)
    yield example("rounded_up", attributes(2, 2), [1, 2, 3, 4, 5], [0, 1, 0, 10, 100], 3)
    yield example("dilation", attributes(2, 1, dilations=[2]), [3, 9, 1, 8, 2], [1, 10, 0, 0, 100], 3)
    # window 0 is cells -2 and 2, window 1 -1 and 3, of which x has none
    yield example("a_window_beside_x", attributes(3, 1, 2, 2, dilations=[4]), [1, 2, 3], [0, 0, 0], 0)
    yield example("stepping_over_x", attributes(2, 1, 1, 1, dilations=[4]), [1, 2, 3], [0, 0, 0], 1)
    # windows of 3, 2 apart: SAME pads 4 cells by one, behind them or before
    yield example("SAME_UPPER", attributes(3, 2, 9, 9, auto_pad="SAME_UPPER"), [1, 2, 9, 4], [0, 0, 11, 0], 2)
    yield example("SAME_LOWER", attributes(3, 2, 9, 9, auto_pad="same_lower"), [1, 2, 9, 4], [0, 1, 10, 0], 2)
    yield example("VALID", attributes(2, 2, 9, 9, auto_pad="VALID"), [1, 2, 9, 4, 5], [0, 1, 10, 0, 0], 2)
    # two images, two channels, channels last, all defaults
    last = {"kernel": [2, 2], "strides": [2, 2], "pads_begin": [], "pads_end": []}
    x = [[[[1, 8], [2, 7]], [[3, 6], [4, 5]]], [[[4, 1], [4, 2]], [[0, 3], [0, 4]]]]
    dx = [[[[0, 20], [0, 0]], [[0, 0], [10, 0]]], [[[30, 0], [0, 0]], [[0, 0], [0, 40]]]]
    yield Example(f"{OP}-defaults", OP, last, (x, [[[[10, 20]]], [[[30, 40]]]]), dx)


OPERATORS = [
    Declaration(
        op=OP,
        schema=Schema(
            pools.ATTRIBUTES | {"dilations": (INTS, None)}, {"src": "T1", "diff_dst": "T1"}, {"diff_src": "T1"}
        ),
        gradient_of=("MaxPool",),
        calls=calls,
        valid=(pools.VALID, [(1, 2, 7), (1, 2, 4)]),
        refused=REFUSED,
        examples=[*examples()],
        inferred=[
            (pools.WINDOWS, [None, None], [None]),
            (pools.WINDOWS, [None, [2, 3, 4, 5]], [[2, None, None, 5]]),
            (pools.WINDOWS, [["N", 6, 8, 5], None], [["N", 6, 8, 5]]),
        ],
        jumps=("src",),
    )
]
