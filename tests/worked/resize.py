"""ONNX's Resize."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.worked.example import Attributes, Example, zeros


def resizes() -> Iterator[Example]:
    """(name, attributes, I, scales or sizes, dy, dx) along the last of two axes, then the rest."""
    half = {"mode": "nearest", "nearest_mode": "round_prefer_floor"}
    crop = {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"}
    op = "ResizeGrad"

    def resize(
        name: str,
        attributes: Attributes,
        lengths: tuple[int, int],
        how: dict[str, Any],
        dy: list[float],
        dx: list[float],
    ) -> Example:
        given = (how.get("roi"), how.get("scales"), how.get("sizes"))
        return Example(f"{op}-{name}", op, attributes, ([dy], zeros(*lengths), *given), [dx])

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
        yield Example(f"{op}-{policy}", op, {"keep_aspect_ratio_policy": policy}, given, answer)
    # axes in any order, counted from either end; axis 0 is not listed
    dy = [[[1, 2, 3, 4], [5, 6, 7, 8]], [[9, 10, 11, 12], [13, 14, 15, 16]]]
    given = (dy, zeros(2, 1, 2), None, [2, 2], None)
    yield Example(f"{op}-axes", op, {"axes": [-1, 1]}, given, [[[14, 22]], [[46, 54]]])
    # rank 1, and an empty list beside the other
    yield Example(f"{op}-vector", op, {}, ([1, 2, 3, 4], [0, 0], None, [2], None), [3, 7])
    yield Example(f"{op}-empty_scales", op, {}, (square, zeros(2, 1), None, [], (2, 2)), [[3], [7]])
