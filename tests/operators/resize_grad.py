"""ResizeGrad, the gradient of ONNX's Resize."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.declarations.calls import Call, Draws, values
from tests.declarations.declaration import (
    FLOAT,
    INT,
    INTS,
    STRING,
    Attributes,
    Bad,
    Declaration,
    Example,
    Schema,
    floats,
    longs,
    zeros,
)

OP = "ResizeGrad"
COORDINATES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_crop_and_resize",
)
NEAREST_MODES = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
CROP = {"coordinate_transformation_mode": "tf_crop_and_resize"}


def calls(draws: Draws) -> Call:
    """One or two axes are resized, and three of a large call; cubic and antialias as onnxruntime takes them."""
    while True:
        shape = [draws.length(high, small=7) for high in (3, 40, 70, 70)]
        axes = draws.pick([2, 3], [3, 2], [-1, -2], [3], [-2], *[[1, 2], [2], [0, 2, 3]] * draws.large)
        outs = [draws.length(80, small=7) for _ in axes]
        result = list(shape)
        for axis, out in zip(axes, outs, strict=True):
            result[axis] = out
        if draws.fits(shape, result):
            break
    mode, seed = draws.pick("nearest", "linear", "cubic"), draws.seed()
    attributes: dict[str, Any] = {
        "mode": mode,
        "coordinate_transformation_mode": draws.pick(*COORDINATES),
        "nearest_mode": draws.pick(*NEAREST_MODES),
        "axes": axes,
    }
    if mode != "nearest":
        attributes["antialias"] = draws.integer(0, 1)
    if mode == "cubic":
        attributes["cubic_coeff_a"] = draws.pick(-0.75, -0.5)
        attributes["exclude_outside"] = draws.integer(0, 1)
    roi = None
    if attributes["coordinate_transformation_mode"] == "tf_crop_and_resize":
        start, end = draws.pick((0.25, 1.125), (0.8, 0.125))  # one of them from the end to the start
        roi = floats(*[start] * len(axes), *[end] * len(axes))
        attributes.pop("antialias", None)
    scales, sizes = None, longs(*outs)
    if draws.flag():
        factors = floats(*(out / shape[axis] for out, axis in zip(outs, axes, strict=True)))
        cells = [int(np.float32(shape[axis]) * factor) for factor, axis in zip(factors, axes, strict=True)]
        if 0 not in cells:
            scales, sizes = factors, None
            for cell, axis in zip(cells, axes, strict=True):
                result[axis] = cell
    return Call(OP, attributes, [values(result, seed), values(shape, seed + 1), roi, scales, sizes], seed)


REFUSED = [

    Bad(OP, "expected scales or sizes, got neither", inputs={4: None}),
    Bad(OP, "expected scales or sizes, got neither", inputs={4: longs()}),
    Bad(OP, "expected scales or sizes, got both. Leave one out, or empty", inputs={3: floats(1, 1.75)}),
    Bad(OP, "input sizes: expected 2 entries, one per listed axis, got 1", inputs={4: longs(7)}),
    Bad(OP, "input sizes: expected 1 entries, one per listed axis, got 2", {"axes": [1]}),
    Bad(OP, "input scales: expected 2 entries, one per listed axis, got 3", inputs={3: floats(1, 1, 1), 4: None}),
    *(
        Bad(OP, f"input scales: expected positive numbers, got [1.0, {scale}]", inputs={3: floats(1, scale), 4: None})
        for scale in (0.0, -1.75, float("inf"), float("nan"))
    ),
    Bad(OP, "input sizes: expected values >= 0, got [2, -7]", inputs={4: longs(2, -7)}),
    # dY is not what the forward makes; a scale may be read in two ways
    Bad(OP, "axis 1 of dY: expected length 8, got 7", inputs={4: longs(2, 8)}),
    Bad(OP, "axis 1 of dY: expected length 8, got 7", inputs={3: floats(1, 2), 4: None}),
    Bad(OP, "axis 1 of dY: expected length 6, got 7", {"axes": [-1]}, {3: floats(1.7), 4: None}),
    Bad(OP, "axis 1 of dY: expected length 4 or 5, got 7", inputs={1: (2, 3), 3: floats(1, 5 / 3), 4: None}),
    Bad(OP, "axis 0 of dY: expected length 4, got 2", {"keep_aspect_ratio_policy": "not_larger"}, {4: longs(4, 7)}),
    Bad(
        OP,
        "lengths of axis 0 of X and dY, which is not resized, must agree, got 2 and 3",
        {"axes": [1]},
        {0: (3, 7), 4: longs(7)},
    ),
    Bad(OP, "axis 1 of X: expected a length >= 1 to make 7 of it, got 0", inputs={1: (2, 0)}),
    Bad(OP, "axes: expected values from -2 to 1, got [0, 2]", {"axes": [0, 2]}),
    Bad(OP, "axes: expected values from -2 to 1, got [-3, 1]", {"axes": [-3, 1]}),
    Bad(OP, "axes: expected every axis once, got [1, -1]", {"axes": [1, -1]}),
    Bad(
        OP,
        "keep_aspect_ratio_policy not_smaller: expected sizes, got scales. Scales say the aspect ratio already",
        {"keep_aspect_ratio_policy": "not_smaller"},
        {3: floats(1, 1.75), 4: None},
    ),
    Bad(OP, "input roi: expected 4 entries, starts and ends, got 3", CROP, {2: floats(0, 0, 1)}),
    Bad(OP, "input roi: expected 4 entries, starts and ends, got 0", CROP, {2: floats()}),
    Bad(OP, "input roi: expected finite numbers, got [0.0, nan, 1.0, 1.0]", CROP, {2: floats(0, float("nan"), 1, 1)}),
    Bad(OP, "antialias: expected mode linear or cubic, got nearest", {"mode": "nearest", "antialias": 1}),
    Bad(OP, "attribute antialias: expected 0 or 1, got 2", {"antialias": 2}),
    Bad(OP, "attribute exclude_outside: expected 0 or 1, got -1", {"exclude_outside": -1}),
    *(
        Bad(OP, f"attribute cubic_coeff_a: expected a finite number, got {a}", {"mode": "cubic", "cubic_coeff_a": a})
        for a in (float("inf"), float("nan"))
    ),
    Bad(OP, "dY: expected rank 1 to 32, got 0 with shape ()", inputs={0: ()}),
    Bad(OP, "X: expected rank 1 to 32, got 0 with shape ()", inputs={1: ()}),
    Bad(OP, "dY: expected rank 2, got 3 with shape (1, 2, 7)", inputs={0: (1, 2, 7)}),
]  # fmt: skip


def examples() -> Iterator[Example]:
    """(name, attributes, I, scales or sizes, dy, dx) along the last of two axes, then the rest."""
    half = {"mode": "nearest", "nearest_mode": "round_prefer_floor"}
    crop = {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"}

    def resize(
        name: str,
        attributes: Attributes,
        lengths: tuple[int, int],
        how: dict[str, Any],
        dy: list[float],
        dx: list[float],
    ) -> Example:
        given = (how.get("roi"), how.get("scales"), how.get("sizes"))
        return Example(f"{OP}-{name}", OP, attributes, ([dy], zeros(*lengths), *given), [dx])

    # x = 0.5, 2.5: ties, down by default
    yield resize("nearest-defaults", {}, (1, 4), {"sizes": (1, 2)}, [1, 2], [1, 0, 2, 0])
    for nearest_mode, dx in (
        ("round_prefer_floor", [1, 0, 2, 0]),
        ("round_prefer_ceil", [0, 1, 0, 2]),
        ("floor", [1, 0, 2, 0]),
        ("ceil", [0, 1, 0, 2]),
    ):
        yield resize(nearest_mode, {"nearest_mode": nearest_mode}, (1, 4), {"sizes": (1, 2)}, [1, 2], dx)
    # x = o/2 + 1/4, the last beyond the middle of pixel 2
    tf = half | {"coordinate_transformation_mode": "tf_half_pixel_for_nn"}
    yield resize("tf_half_pixel_for_nn", tf, (1, 3), {"scales": [1, 2]}, [1, 2, 3, 4, 5, 6], [1, 2 + 3, 4 + 5 + 6])
    # x = o/2: 0, 0.5, 1, 1.5, 2, 2.5
    asymmetric = {"mode": "linear", "coordinate_transformation_mode": "asymmetric"}
    dy = [2, 4, 6, 8, 10, 12]
    yield resize("asymmetric", asymmetric, (1, 3), {"scales": [1, 2]}, dy, [2 + 2, 2 + 6 + 4, 4 + 10 + 12])
    # the given scale, not O/I: 3 · 1.5 = 4.5 makes 4 pixels, x = (o + 1/2)/1.5 - 1/2 = -1/6, 1/2, 7/6, 11/6
    yield resize("scale_as_given", half, (1, 3), {"scales": [1, 1.5]}, [1, 2, 3, 4], [1 + 2, 3, 4])
    # x = 0, 1/2, 1, 3/2, 2
    corners = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
    yield resize("align_corners", corners, (1, 3), {"sizes": (1, 5)}, [1, 2, 3, 4, 5], [2, 6, 7])
    # one pixel out: x is 0, not the middle
    for mode, dx in (("pytorch_half_pixel", [8, 0, 0, 0]), ("half_pixel", [0, 4, 4, 0])):
        one = {"mode": "linear", "coordinate_transformation_mode": mode}
        yield resize(f"{mode}-one_pixel", one, (1, 4), {"sizes": (1, 1)}, [8], dx)
    # 5 pixels by 0.5 are 2, and 2/2.5 of the width: half_pixel_symmetric moves x = 0.5, 2.5 to the middle, 1 and 3
    symmetric = {"mode": "nearest", "coordinate_transformation_mode": "half_pixel_symmetric"}
    yield resize("half_pixel_symmetric", symmetric, (1, 5), {"scales": [1, 0.5]}, [1, 2], [0, 1, 0, 2, 0])

    # cubic at x = 1/2 of four pixels: -3/32, 19/32, 19/32, -3/32; a = -1/2: -1/16, 9/16
    middle = {"mode": "cubic"}
    yield resize("cubic", middle, (1, 4), {"sizes": (1, 1)}, [32], [-3, 19, 19, -3])
    half_a = middle | {"cubic_coeff_a": -0.5}
    yield resize("cubic_coeff_a", half_a, (1, 4), {"sizes": (1, 1)}, [16], [-1, 9, 9, -1])
    # two pixels, x = 1/2: the outer taps read the edge, or are dropped and the rest divided by 19/16
    yield resize("cubic-edge", middle, (1, 2), {"sizes": (1, 1)}, [2], [1, 1])
    excluded = middle | {"exclude_outside": 1, "coordinate_transformation_mode": "asymmetric"}
    # asymmetric x = 0, 1/2, 1, 3/2; at 1/2 taps -1 … 2 keep 19/32 and 19/32; at 3/2 taps 0, 1 keep -3/32 and 19/32
    yield resize("exclude_outside", excluded, (1, 2), {"scales": [1, 2]}, [1, 2, 4, 16], [1 + 1 - 3, 1 + 4 + 19])
    # antialias: half the size reaches twice as far. x = 1/2, 5/2; weights 1, 3, 3, 1 over 8, the edge taking its share
    wide = {"mode": "linear", "antialias": 1}
    yield resize("antialias", wide, (1, 4), {"sizes": (1, 2)}, [8, 16], [4, 3 + 2, 1 + 6, 8])
    inside = wide | {"exclude_outside": 1}  # of 1, 3, 3, 1 three taps are inside, over 7
    yield resize("antialias-exclude_outside", inside, (1, 4), {"sizes": (1, 2)}, [7, 14], [3, 3 + 2, 1 + 6, 6])

    # x = 0.5 · 4 + o · 1 · 4/(O-1)
    constant = crop | {"extrapolation_value": 7.0}
    roi: dict[str, Any] = {"roi": [0, 0.5, 1, 1.5], "sizes": (1, 9)}  # x = 2, 2.5, … 6: beyond 4 lies the constant
    dx = [0, 0, 1 + 1, 1 + 3 + 2, 2 + 5]
    yield resize("outside_the_roi", constant, (1, 5), roi, [1, 2, 3, 4, 5, 6, 7, 8, 9], dx)
    same = roi | {"sizes": (1, 5)}  # onnxruntime copies, roi or not
    yield resize("copied_roi", constant, (1, 5), same, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    roi = {"roi": [0, 0.5, 1, 1.5], "sizes": (1, 3)}  # x = 2, 4, 6
    yield resize("tf_crop_and_resize", constant, (1, 5), roi, [1, 2, 3], [0, 0, 1, 0, 2])
    last = {"roi": [0.5, 1.5], "sizes": (3,)}
    yield resize("roi_of_the_listed_axis", constant | {"axes": [-1]}, (1, 5), last, [1, 2, 3], [0, 0, 1, 0, 2])
    whole = {"sizes": (1, 3)}  # no roi: x = 0, 2, 4
    yield resize("without_roi", constant, (1, 5), whole, [1, 2, 3], [1, 0, 2, 0, 3])

    # every length is kept: onnxruntime copies, although a scale of 1.2 would interpolate
    yield resize("copy", {"mode": "linear"}, (1, 3), {"scales": [1, 1.2]}, [1, 2, 3], [1, 2, 3])

    # sizes / lengths are 2 and 3: not_larger takes 2 for both axes, not_smaller 3
    square = [[1, 2], [3, 4]]
    for policy, out in (("not_larger", 4), ("not_smaller", 6)):
        dy = np.ones((out, out)).tolist()
        answer = np.full((2, 2), (out // 2) ** 2).tolist()
        given = (dy, zeros(2, 2), None, None, (4, 6))
        yield Example(f"{OP}-{policy}", OP, {"keep_aspect_ratio_policy": policy}, given, answer)
    # axes in any order, counted from either end; axis 0 is not listed
    dy = [[[1, 2, 3, 4], [5, 6, 7, 8]], [[9, 10, 11, 12], [13, 14, 15, 16]]]
    given = (dy, zeros(2, 1, 2), None, [2, 2], None)
    yield Example(f"{OP}-axes", OP, {"axes": [-1, 1]}, given, [[[14, 22]], [[46, 54]]])
    # rank 1, and an empty list beside the other
    yield Example(f"{OP}-vector", OP, {}, ([1, 2, 3, 4], [0, 0], None, [2], None), [3, 7])
    yield Example(f"{OP}-empty_scales", OP, {}, (square, zeros(2, 1), None, [], (2, 2)), [[3], [7]])


OPERATORS = [
    Declaration(
        op=OP,
        schema=Schema(
            {
                "antialias": (INT, 0),
                "axes": (INTS, None),
                "coordinate_transformation_mode": (
                    STRING,
                    "half_pixel",
                    (
                        "half_pixel",
                        "half_pixel_symmetric",
                        "pytorch_half_pixel",
                        "align_corners",
                        "asymmetric",
                        "tf_half_pixel_for_nn",
                        "tf_crop_and_resize",
                    ),
                ),
                "cubic_coeff_a": (FLOAT, -0.75),
                "exclude_outside": (INT, 0),
                "extrapolation_value": (FLOAT, 0.0),
                "keep_aspect_ratio_policy": (STRING, "stretch", ("stretch", "not_larger", "not_smaller")),
                "mode": (STRING, "nearest", ("nearest", "linear", "cubic")),
                "nearest_mode": (STRING, "round_prefer_floor", NEAREST_MODES),
            },
            {"dY": "T1", "X": "T1", "roi": "T3?", "scales": "T3?", "sizes": "T4?"},
            {"dX": "T1"},
        ),
        gradient_of=("Resize",),
        calls=calls,
        valid=({"mode": "linear"}, [(2, 7), (2, 4), None, None, longs(2, 7)]),
        refused=REFUSED,
        examples=[*examples()],
        # the gradient of ResizeGrad is a Resize, which onnxruntime runs for some axes only
        smooth=lambda call: call.attributes["mode"] == "nearest" or set(call.attributes["axes"]) <= {2, 3},
    )
]
