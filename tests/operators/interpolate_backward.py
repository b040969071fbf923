"""InterpolateBackward and its older name, InterpolateBackprop."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from tests.declarations.calls import DATA_FORMATS, Call, Draws, to_data, values
from tests.declarations.declaration import (
    DATA_FORMAT,
    FLOATS,
    INTS,
    REQUIRED,
    STRING,
    Bad,
    Declaration,
    Example,
    Schema,
    ints,
    invalid,
    row,
    zeros,
)

OP, OLD = "InterpolateBackward", "InterpolateBackprop"


def calls(op: str, draws: Draws) -> Call:
    """The destination's lengths as sizes, as scales, as an input, or nowhere."""
    while True:
        axes = draws.integer(1, 3)
        lengths, outs = ([draws.length(20 if axes == 3 else 80, small=7) for _ in range(axes)] for _ in range(2))
        head = [draws.length(2, small=2), draws.length(40, small=3)]
        if draws.fits([*head, *lengths], [*head, *outs]):
            break
    data, seed = draws.pick(*DATA_FORMATS), draws.seed()
    attributes: dict[str, Any] = {
        "mode": draws.pick("nearest", "linear", "bilinear", "trilinear"),
        "coordinate_transformation_mode": draws.pick("half_pixel", "align_corners"),
        "data_format": data,
    }
    given = draws.pick("", "sizes", "scales")
    if given:
        scales = [float(np.float32(o / i)) for o, i in zip(outs, lengths, strict=True)]  # as a file stores them
        attributes[given] = outs if given == "sizes" else scales
    sizes = [ints(*outs)] if draws.flag() else []
    source, windows = (to_data(values([*head, *ends], seed + n), data) for n, ends in enumerate((lengths, outs)))
    return Call(op, attributes, [source, windows, *sizes], seed)


REFUSED = [

    Bad(OP, "expected sizes or scales, got both. Remove one", {"sizes": [7], "scales": [1.75]}),
    # sizes is the destination's shape; the source's is the classical mistake
    Bad(OP, "the spatial shape of diff_dst and attribute sizes must agree, got 7 and 4", {"sizes": [4]}),
    Bad(OP, "the spatial shape of diff_dst and input sizes must agree, got 7 and 4", inputs={2: ints(4)}),
    Bad(
        OP, "the spatial shape of diff_dst and input sizes must agree, got 7 and 8", {"sizes": [7]}, inputs={2: ints(8)}
    ),
    Bad(OP, "attribute sizes: expected 1 entries, got 3 in [1, 2, 7]", {"sizes": [1, 2, 7]}),
    Bad(OP, "input sizes: expected 1 entries, got 3 in [1, 2, 7]", inputs={2: ints(1, 2, 7)}),
    Bad(OP, "attribute sizes: expected values >= 1, got [0]", {"sizes": [0]}, {1: (1, 2, 0)}),
    Bad(OP, "attribute sizes: expected values >= 1, got [-7]", {"sizes": [-7]}),
    Bad(OP, "input sizes: expected values >= 0, got [-7]", inputs={2: ints(-7)}),
    Bad(OP, "attribute scales: expected 1 entries, got 2 in [1.75, 1.75]", {"scales": [1.75, 1.75]}),
    *(
        Bad(OP, f"attribute scales: expected positive numbers, got [{scale}]", {"scales": [scale]})
        for scale in (0.0, -1.75, float("inf"), float("nan"))
    ),
    Bad(OP, "attribute scales, spatial axis 0: 4 × 1.5 expects diff_dst length 6, got 7", {"scales": [1.5]}),
    Bad(OP, "attribute scales, spatial axis 0: 4 × 2.0 expects diff_dst length 8, got 7", {"scales": [2.0]}),
    Bad(OP, "batch sizes of src and diff_dst must agree, got 1 and 3", inputs={1: (3, 2, 7)}),
    Bad(OP, "channels of src and diff_dst must agree, got 2 and 3", inputs={1: (1, 3, 7)}),
    # a forgotten data_format
    Bad(OP, "channels of src and diff_dst must agree, got 4 and 7", {"data_format": None}),
    Bad(OP, "diff_dst: expected rank 3, got 4 with shape (1, 2, 7, 7)", inputs={1: (1, 2, 7, 7)}),
    Bad(OP, "src: expected rank 3 to 5, got 2 with shape (2, 4)", inputs={0: (2, 4)}),
    Bad(OP, "diff_dst: expected rank 3 to 5, got 6 with shape (1, 2, 1, 1, 1, 7)", inputs={1: (1, 2, 1, 1, 1, 7)}),
    Bad(OP, "src: expected spatial lengths >= 1, got [0]", inputs={0: (1, 2, 0)}),
    invalid(OP, "attribute mode: expected string, got 3", {"mode": 3}),
    invalid(OP, "attribute scales: expected floats, got '1.75'", {"scales": "1.75"}, model_shows_it=False),
    invalid(OP, "attribute scales: expected floats, got ['1.75']", {"scales": ["1.75"]}, model_shows_it=False),
    invalid(
        OP,
        "unknown attribute axes; it takes mode, coordinate_transformation_mode, sizes, scales, data_format",
        {"axes": [2]},
        model_shows_it=False,
    ),
    Bad(OLD, "expected sizes or scales, got both. Remove one", {"sizes": [7], "scales": [1.75]}),
    Bad(OLD, "the spatial shape of output_delta and attribute sizes must agree, got 7 and 4", {"sizes": [4]}),
    Bad(OLD, "channels of input_forward and output_delta must agree, got 2 and 3", inputs={1: (1, 3, 7)}),
]  # fmt: skip


def examples() -> Iterator[Example]:
    """(name, source length, dy, {(mode, coordinates): dx}) along one axis, then the rest."""
    half, corners = "half_pixel", "align_corners"
    nearest, linear = ("nearest", half), ("linear", half)
    axis: list[tuple[str, int, list[float], dict[tuple[str, str], list[float]]]] = [
        (
            "3_to_5",
            3,
            [1, 2, 3, 4, 5],
            {
                nearest: [3, 3, 9],
                linear: [2.2, 5.4, 7.4],
                ("nearest", corners): [1, 5, 9],  # ties at 0.5 and 1.5 go up
                ("linear", corners): [2, 6, 7],
            },
        ),
        ("4_to_2", 4, [1, 2], {nearest: [0, 1, 0, 2], linear: [0.5, 0.5, 1, 1], ("linear", corners): [1, 0, 0, 2]}),
        (
            "4_to_1",
            4,
            [7],
            {
                nearest: [0, 0, 7, 0],
                linear: [0, 3.5, 3.5, 0],
                ("nearest", corners): [7, 0, 0, 0],
                ("linear", corners): [7, 0, 0, 0],
            },
        ),
        ("1_to_3", 1, [1, 2, 3], {nearest: [6], linear: [6], ("nearest", corners): [6], ("linear", corners): [6]}),
        ("2_to_4", 2, [1, 2, 3, 4], {nearest: [3, 7], linear: [3.25, 6.75], ("linear", corners): [10 / 3, 20 / 3]}),
        # exact ties of a large down-scale
        ("28_to_2", 28, [1, 2], {nearest: [1.0 if i == 7 else 2.0 if i == 21 else 0.0 for i in range(28)]}),
    ]
    for name, length, dy, answers in axis:
        for (mode, coordinates), dx in answers.items():
            attributes = {"mode": mode, "coordinate_transformation_mode": coordinates, "data_format": "NCX"}
            for op in (OP, OLD):
                inputs = (zeros(1, 1, length), row(*dy))
                yield Example(f"{op}-{name}-{mode}-{coordinates}", op, attributes, inputs, row(*dx))

    nine = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    square = {
        "nearest-half_pixel": [[0, 3], [9, 24]],  # the middle row and column are ties and go to index 1
        "linear-half_pixel": [[3, 6], [12, 15]],
        "bilinear-half_pixel": [[3, 6], [12, 15]],
        "trilinear-half_pixel": [[3, 6], [12, 15]],
        "linear-align_corners": [[3, 6], [12, 15]],
    }
    for op in (OP, OLD):
        for name, dx in square.items():
            mode, coordinates = name.split("-")
            attributes = {"mode": mode, "coordinate_transformation_mode": coordinates, "data_format": "NCX"}
            yield Example(f"{op}-2x2_to_3x3-{name}", op, attributes, (zeros(1, 1, 2, 2), [[nine]]), [[dx]])
        # every default: half_pixel and channels last
        last = [[[[0], [1], [2]], [[3], [4], [5]], [[6], [7], [8]]]]
        answer = [[[[0], [3]], [[9], [24]]]]
        yield Example(f"{op}-defaults", op, {"mode": "nearest"}, (zeros(1, 2, 2, 1), last), answer)

    ncx = {"mode": "linear", "data_format": "NCX"}
    one, dy, dx = zeros(1, 1, 3), row(1, 2, 3, 4, 5), row(2.2, 5.4, 7.4)
    op = OP
    yield Example("sizes_attribute", op, ncx | {"sizes": [5]}, (one, dy), dx)
    yield Example("sizes_input", op, ncx, (one, dy, (5,)), dx)
    yield Example("sizes_both_agree", op, ncx | {"sizes": [5]}, (one, dy, (5,)), dx)
    # scales never enter the maths: 3 · 1.5 = 4.5 is within one pixel of 5, and the answer is that of 5/3
    yield Example("scales_are_only_checked", op, ncx | {"scales": [1.5]}, (one, dy), dx)
    # a published use whose float32 product truncates to 20; 17 -> 21 is an up-scale, each dy in one pixel
    ones, indices = row(*[1] * 21), [((2 * o + 1) * 17) // 42 for o in range(21)]
    counts = row(*[indices.count(i) for i in range(17)])
    scales = {"mode": "nearest", "data_format": "NCX", "scales": [1.235294]}
    yield Example("scales_17_to_21", op, scales, (zeros(1, 1, 17), ones), counts)


def schema(src: str, diff_dst: str, diff_src: str) -> Schema:
    attributes = {
        "mode": (STRING, REQUIRED, ("nearest", "linear", "bilinear", "trilinear")),
        "coordinate_transformation_mode": (STRING, "half_pixel", ("half_pixel", "align_corners")),
        "sizes": (INTS, None),
        "scales": (FLOATS, None),
        "data_format": DATA_FORMAT,
    }
    return Schema(attributes, {src: "T1", diff_dst: "T1", "sizes": "T2?"}, {diff_src: "T1"})


OPERATORS = [
    Declaration(
        op=op,
        schema=schema(*names),
        calls=partial(calls, op),
        valid=({"mode": mode, "data_format": "NCX"}, [(1, 2, 4), (1, 2, 7)]),
        refused=[bad for bad in REFUSED if bad.op == op],
        examples=[example for example in examples() if example.op == op],
        inferred=[
            ({"mode": "linear"}, [None, ["N", "H", "W", 3]], [None]),
            ({"mode": "linear"}, [["N", "H", "W", 3], None], [["N", "H", "W", 3]]),
        ],
    )
    for op, mode, names in (
        (OP, "linear", ("src", "diff_dst", "diff_src")),
        (OLD, "nearest", ("input_forward", "output_delta", "input_delta")),
    )
]
