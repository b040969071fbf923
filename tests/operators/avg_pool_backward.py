"""AvgPoolBackward."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.declarations.calls import DATA_FORMATS, Call, Draws, to_data, values
from tests.declarations.declaration import (
    INT,
    INTS,
    REQUIRED,
    Attributes,
    Bad,
    Declaration,
    Example,
    Schema,
    longs,
    row,
)
from tests.operators import pools
from tests.operators.pools import attributes

OP = "AvgPoolBackward"


def calls(draws: Draws) -> Call:
    """The source's shape as an attribute or as an input."""
    given, source, windows = pools.geometry(draws, dilated=False)
    data, seed = draws.pick(*DATA_FORMATS), draws.seed()
    given |= {"data_format": data, "exclude_pad": draws.integer(0, 1)}
    shape = to_data(np.empty(source), data).shape
    inputs: list[np.ndarray | None] = [to_data(values(windows, seed), data)]
    if draws.flag():
        given["src_shape"] = list(shape)
    else:
        inputs.append(np.array(shape, np.int64))
    return Call(OP, given, inputs, seed)


REFUSED = [
    *pools.refused(OP),
    Bad(OP, "attribute exclude_pad: expected 0 or 1, got 2", {"exclude_pad": 2}),
    Bad(OP, "expected src_shape as attribute or input, got neither", {"src_shape": None}),
    Bad(OP, "batch sizes of src and diff_dst must agree, got 2 and 1", {"src_shape": [2, 2, 7]}),
    Bad(OP, "channels of src and diff_dst must agree, got 3 and 2", {"src_shape": [1, 3, 7]}),
    # the input wins
    Bad(OP, "channels of src and diff_dst must agree, got 3 and 2", inputs={1: longs(1, 3, 7)}),
    Bad(OP, "channels of src and diff_dst must agree, got 7 and 4", {"data_format": None}),
    Bad(OP, "spatial lengths of src: expected values >= 1, got [0]", {"src_shape": [1, 2, 0]}),
    Bad(OP, "attribute src_shape: expected values >= 0, got [1, 2, -7]", {"src_shape": [1, 2, -7]}),
    Bad(OP, "attribute src_shape: expected 3 to 5 entries, got 1", {"src_shape": [7]}),
    Bad(OP, "input src_shape: expected 3 to 5 entries, got 6", inputs={1: longs(1, 2, 7, 1, 1, 1)}),
    Bad(OP, "src: expected rank 3, got 4 with shape (1, 2, 7, 7)", {"src_shape": [1, 2, 7, 7]}),
    Bad(OP, "diff_dst: expected rank 3 to 5, got 2 with shape (2, 4)", inputs={0: (2, 4)}),
    Bad(
        OP,
        "spatial axis 0: src length 9 with kernel 3, stride 2, dilation 1, pads 1 and 1 expects diff_dst length 5, got 4",
        {"src_shape": [1, 2, 9]},
    ),
    Bad(
        OP,
        "spatial axis 0: src length 6 with kernel 3, stride 2, dilation 1, pads 1 and 1 expects diff_dst length 3 or 4, "
        "got 5",
        inputs={0: (1, 2, 5), 1: longs(1, 2, 6)},
    ),
]


def examples() -> Iterator[Example]:
    """dy is a multiple of what its window is divided by, so that all is exact."""

    def example(name: str, given: Attributes, dy: list[float], length: int, dx: list[float]) -> Example:
        stated = given if "src_shape" in given else given | {"src_shape": [1, 1, length]}
        return Example(f"{OP}-{name}", OP, stated, (row(*dy),), row(*dx))

    out, within = {"exclude_pad": 1}, {"exclude_pad": 0}
    yield example("apart", attributes(2, 2, **out), [2, 20], 4, [1, 1, 10, 10])
    yield example("overlapping", attributes(2, 1, **out), [2, 20, 200], 4, [1, 11, 110, 100])
    yield example("cells_between", attributes(1, 2, **out), [1, 10], 4, [1, 0, 10, 0])
    # a window's cell of padding: left out, or divided by
    yield example("exclude_pad", attributes(2, 2, 1, 1, **out), [4, 8, 16], 4, [4, 4, 4, 16])
    yield example("include_pad", attributes(2, 2, 1, 1, **within), [4, 8, 16], 4, [2, 4, 4, 8])
    # an end that no window reaches, rounded down; the same with a third window of one cell, rounded up
    yield example("rounded_down", attributes(2, 2, **out), [2, 4], 5, [1, 1, 2, 2, 0])
    yield example("rounded_up", attributes(2, 2, **out), [2, 4, 8], 5, [1, 1, 2, 2, 8])
    yield example("rounded_up-include_pad", attributes(2, 2, **within), [2, 4, 8], 5, [1, 1, 2, 2, 4])
    # windows of 2, 2 apart: SAME pads 3 cells by one, behind them or before
    yield example("SAME_UPPER", attributes(2, 2, 9, 9, auto_pad="SAME_UPPER", **out), [2, 4], 3, [1, 1, 4])
    yield example("SAME_LOWER", attributes(2, 2, 9, 9, auto_pad="same_lower", **within), [2, 4], 3, [1, 2, 2])
    yield example("VALID", attributes(2, 2, 9, 9, auto_pad="VALID", **out), [2, 4], 5, [1, 1, 2, 2, 0])
    # two axes, channels last, all defaults; of a corner one cell lies inside, of an edge two
    last = {"kernel": [2, 2], "strides": [2, 2], "pads_begin": [1, 1], "pads_end": [1, 1], "exclude_pad": 1}
    dy = [[[[1, 10], [2, 20]], [[4, 40], [8, 80]]]]
    dx = [[[[1, 10], [2, 20]], [[4, 40], [8, 80]]]]
    yield Example(f"{OP}-defaults", OP, last | {"src_shape": [1, 2, 2, 2]}, (dy,), dx)
    dense: Attributes = last | {"strides": [1, 1], "pads_begin": [0, 0], "pads_end": [0, 0]}
    dx = [[[[1, 10], [3, 30], [2, 20]], [[5, 50], [15, 150], [10, 100]], [[4, 40], [12, 120], [8, 80]]]]
    yield Example(f"{OP}-two_axes", OP, dense, (np.multiply(dy, 4).tolist(), (1, 3, 3, 2)), dx)


OPERATORS = [
    Declaration(
        op=OP,
        schema=Schema(
            pools.ATTRIBUTES | {"exclude_pad": (INT, REQUIRED), "src_shape": (INTS, None)},
            {"diff_dst": "T1", "src_shape": "T4?"},
            {"diff_src": "T1"},
        ),
        gradient_of=("AveragePool",),
        calls=calls,
        valid=(pools.VALID | {"exclude_pad": 1, "src_shape": [1, 2, 7]}, [(1, 2, 4)]),
        refused=REFUSED,
        examples=[*examples()],
        inferred=[
            (pools.WINDOWS | {"exclude_pad": 1}, [None, ["K"]], [None]),
            (pools.WINDOWS | {"exclude_pad": 1}, [None, [4]], [[None, None, None, None]]),
            (pools.WINDOWS | {"exclude_pad": 1}, [[2, 3, 4, 5], None], [[2, None, None, 5]]),
            (pools.WINDOWS | {"exclude_pad": 0, "src_shape": [2, 6, 8, 5]}, [None], [[2, 6, 8, 5]]),
        ],
    )
]
