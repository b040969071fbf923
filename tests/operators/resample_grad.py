"""DirectML's ResampleGrad."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.declarations.calls import Call, Draws, stated, values
from tests.declarations.declaration import (
    FLOATS,
    INT,
    INTS,
    REQUIRED,
    STRING,
    Attributes,
    Bad,
    Declaration,
    Example,
    Schema,
    ints,
    invalid,
)

OP = "ResampleGrad"


def calls(draws: Draws) -> Call:
    """Lists empty or with an entry for each axis."""
    while True:
        rank = draws.integer(1, 4)
        lengths, outs = ([draws.length(40, small=6) for _ in range(rank)] for _ in range(2))
        if draws.fits(lengths, outs):
            break

    def quarters(low: int, high: int) -> list[float]:
        return [draws.integer(low, high) / 4 for _ in range(rank)] if draws.flag() else []

    attributes: Attributes = {
        "interpolation_mode": draws.pick("NEAREST_NEIGHBOR", "LINEAR"),
        "scales": quarters(1, 12),
        "input_pixel_offsets": quarters(-6, 6),
        "output_pixel_offsets": quarters(-6, 6),
    }
    shape, extra = stated(draws, tuple(lengths), "output_sizes")
    dimension_count = {"dimension_count": rank} if draws.flag() else {}
    seed = draws.seed()
    return Call(OP, attributes | shape | dimension_count, [values(outs, seed), *extra], seed)


REFUSED = [
    Bad(OP, "expected output_sizes as attribute or input, got neither", {"output_sizes": None}),
    Bad(OP, "expected output_sizes as attribute or input, got neither", {"output_sizes": []}),
    Bad(OP, "attribute and input output_sizes must agree, got 3 and 4", inputs={1: ints(2, 4)}),
    Bad(OP, "input output_sizes: expected 2 entries, got 1 in [2]", inputs={1: ints(2)}),
    Bad(OP, "output_sizes (one per axis): expected 2 entries, got 1 in [3]", {"output_sizes": [3]}),
    Bad(OP, "output_sizes: expected values >= 0, got [2, -3]", {"output_sizes": [2, -3]}),
    Bad(OP, "output_sizes: expected values >= 1, got [2, 0]", {"output_sizes": [2, 0]}),
    Bad(OP, "attribute dimension_count: expected 2, got 4", {"dimension_count": 4}),
    *(
        Bad(OP, f"attribute {name} (one per axis): expected 2 entries, got 3 in [1.0, 1.0, 1.0]", {name: [1.0] * 3})
        for name in ("scales", "input_pixel_offsets", "output_pixel_offsets")
    ),
    *(
        Bad(OP, f"attribute scales: expected positive numbers, got [2.0, {scale}]", {"scales": [2.0, scale]})
        for scale in (0.0, -0.5, float("inf"), float("nan"))
    ),
    *(
        Bad(OP, f"attribute {name}: expected finite numbers, got [0.5, {offset}]", {name: [0.5, offset]})
        for name in ("input_pixel_offsets", "output_pixel_offsets")
        for offset in (float("inf"), float("nan"))
    ),
    Bad(OP, "input_gradient: expected rank 1 to 32, got 0 with shape ()", inputs={0: ()}),
    invalid(OP, "attribute dimension_count: expected int, got [2]", {"dimension_count": [2]}),
]  # fmt: skip


def examples() -> Iterator[Example]:
    """The documented example first; ties go down, scales are used as given."""

    def resample(name: str, mode: str, scales: list[float], dy: list[Any], dx: list[Any], /, **more: object) -> Example:
        attributes: Attributes = {
            "interpolation_mode": mode,
            "scales": scales,
            "input_pixel_offsets": [0.5] * len(scales),
            "output_pixel_offsets": [-0.5] * len(scales),
            "output_sizes": list(np.shape(dx)),
        }
        return Example(f"ResampleGrad-{name}", OP, attributes | more, (dy,), dx)

    nearest, linear = "NEAREST_NEIGHBOR", "LINEAR"
    published = [[9, 6], [0, 0]]
    yield resample("documented", nearest, [0.5, 1.5], [[4, 5, 6]], published)
    yield resample(
        "documented_rank_4", nearest, [1.0, 1.0, 0.5, 1.5], [[[[4, 5, 6]]]], [[published]], dimension_count=4
    )
    given = resample("documented_input", nearest, [0.5, 1.5], [[4, 5, 6]], published)
    del given.attributes["output_sizes"]
    yield Example(given.id, given.op, given.attributes, ([[4, 5, 6]], (2, 2)), published)
    yield Example(
        "ResampleGrad-both", given.op, given.attributes | {"output_sizes": [2, 2]}, ([[4, 5, 6]], (2, 2)), published
    )
    empty: Attributes = {"scales": [], "input_pixel_offsets": [], "output_pixel_offsets": []}
    yield resample("documented_defaults", nearest, [0.5, 1.5], [[4, 5, 6]], published, **empty)
    yield resample("linear", linear, [0.5, 1.5], [[4, 5, 6]], [[3.25, 4.25], [3.25, 4.25]])
    yield resample("linear_1d", linear, [1.5], [4, 5, 6], [6.5, 8.5])
    # a scale other than O/I: rows (1, 0), (3/4, 1/4), (1/4, 3/4)
    yield resample("scale_2_linear", linear, [2.0], [1, 2, 3], [3.25, 2.75])
    yield resample("scale_2_nearest", nearest, [2.0], [1, 2, 3], [3, 3])
    yield resample("scale_1_repeats_the_edge", nearest, [1.0], [1, 2, 3, 4], [1, 9])
    # offsets (0, 0): x = 0, 2/3, 4/3 of pixels 0, 1
    asymmetric: Attributes = {"input_pixel_offsets": [0.0], "output_pixel_offsets": [0.0]}
    yield resample("asymmetric_nearest", nearest, [1.5], [4, 5, 6], [4, 11], **asymmetric)
    yield resample("asymmetric_linear", linear, [1.5], [3, 3, 6], [4, 8], **asymmetric)
    # scales [] mean 17/14 as a fraction: o = 8 is an exact tie between pixels 6 and 7
    counts = [1, 1, 2, 1, 1, 1, 2, 1, 1, 1, 1, 2, 1, 1]
    yield resample("tie_of_an_inexact_quotient", nearest, [1.0], [1] * 17, counts, **empty)


VALID: Attributes = {
    "interpolation_mode": "LINEAR",
    "scales": [2.0, 2.0],
    "input_pixel_offsets": [0.5, 0.5],
    "output_pixel_offsets": [-0.5, -0.5],
    "output_sizes": [2, 3],
}
EMPTY: Attributes = VALID | {"scales": [], "input_pixel_offsets": [], "output_pixel_offsets": [], "output_sizes": []}
OPERATORS = [
    Declaration(
        op=OP,
        schema=Schema(
            {
                "interpolation_mode": (STRING, REQUIRED, ("NEAREST_NEIGHBOR", "LINEAR")),
                "scales": (FLOATS, REQUIRED),
                "input_pixel_offsets": (FLOATS, REQUIRED),
                "output_pixel_offsets": (FLOATS, REQUIRED),
                "dimension_count": (INT, None),
                "output_sizes": (INTS, None),
            },
            {"input_gradient": "T1", "output_sizes": "T2?"},
            {"output_gradient": "T1"},
        ),
        calls=calls,
        valid=(VALID, [(4, 6)]),
        refused=REFUSED,
        examples=[*examples()],
        inferred=[
            (EMPTY | {"output_sizes": [4, 5]}, [None], [[4, 5]]),
            (EMPTY, [None, ["K"]], [None]),
            (EMPTY, [None, [3]], [[None, None, None]]),
        ],
    )
]
