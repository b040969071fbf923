"""Interpolation: oneDNN's InterpolateBackward and its older name, DirectML's RESAMPLE_GRAD."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.worked.example import Attributes, Example, row, zeros


def interpolations() -> Iterator[Example]:
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
            for op in ("InterpolateBackward", "InterpolateBackprop"):
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
    for op in ("InterpolateBackward", "InterpolateBackprop"):
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
    op = "InterpolateBackward"
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


# ----- DirectML's RESAMPLE_GRAD ---------------------------------------------------------------------------------------


def resamples() -> Iterator[Example]:
    """The documented example first; ties go down, scales are used as given."""

    def resample(name: str, mode: str, scales: list[float], dy: list[Any], dx: list[Any], /, **more: object) -> Example:
        attributes: Attributes = {
            "interpolation_mode": mode,
            "scales": scales,
            "input_pixel_offsets": [0.5] * len(scales),
            "output_pixel_offsets": [-0.5] * len(scales),
            "output_sizes": list(np.shape(dx)),
        }
        return Example(f"ResampleGrad-{name}", "ResampleGrad", attributes | more, (dy,), dx)

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
