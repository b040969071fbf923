"""Shapes and attributes of interpolation, resampling and Resize."""

from __future__ import annotations

from tests.opset.refusals.bad import IB, IBP, RG, RZ, Bad, floats, ints, invalid, longs

INTERPOLATION = [
    Bad(IB, "expected sizes or scales, got both. Remove one", {"sizes": [7], "scales": [1.75]}),
    Bad(IBP, "expected sizes or scales, got both. Remove one", {"sizes": [7], "scales": [1.75]}),
    # sizes is the destination's shape; the source's is the classical mistake
    Bad(IB, "the spatial shape of diff_dst and attribute sizes must agree, got 7 and 4", {"sizes": [4]}),
    Bad(IBP, "the spatial shape of output_delta and attribute sizes must agree, got 7 and 4", {"sizes": [4]}),
    Bad(IB, "the spatial shape of diff_dst and input sizes must agree, got 7 and 4", inputs={2: ints(4)}),
    Bad(
        IB, "the spatial shape of diff_dst and input sizes must agree, got 7 and 8", {"sizes": [7]}, inputs={2: ints(8)}
    ),
    Bad(IB, "attribute sizes: expected 1 entries, got 3 in [1, 2, 7]", {"sizes": [1, 2, 7]}),
    Bad(IB, "input sizes: expected 1 entries, got 3 in [1, 2, 7]", inputs={2: ints(1, 2, 7)}),
    Bad(IB, "attribute sizes: expected values >= 1, got [0]", {"sizes": [0]}, {1: (1, 2, 0)}),
    Bad(IB, "attribute sizes: expected values >= 1, got [-7]", {"sizes": [-7]}),
    Bad(IB, "input sizes: expected values >= 0, got [-7]", inputs={2: ints(-7)}),
    Bad(IB, "attribute scales: expected 1 entries, got 2 in [1.75, 1.75]", {"scales": [1.75, 1.75]}),
    *(
        Bad(IB, f"attribute scales: expected positive numbers, got [{scale}]", {"scales": [scale]})
        for scale in (0.0, -1.75, float("inf"), float("nan"))
    ),
    Bad(IB, "attribute scales, spatial axis 0: 4 × 1.5 expects diff_dst length 6, got 7", {"scales": [1.5]}),
    Bad(IB, "attribute scales, spatial axis 0: 4 × 2.0 expects diff_dst length 8, got 7", {"scales": [2.0]}),
    Bad(IB, "batch sizes of src and diff_dst must agree, got 1 and 3", inputs={1: (3, 2, 7)}),
    Bad(IB, "channels of src and diff_dst must agree, got 2 and 3", inputs={1: (1, 3, 7)}),
    Bad(IBP, "channels of input_forward and output_delta must agree, got 2 and 3", inputs={1: (1, 3, 7)}),
    # a forgotten data_format
    Bad(IB, "channels of src and diff_dst must agree, got 4 and 7", {"data_format": None}),
    Bad(IB, "diff_dst: expected rank 3, got 4 with shape (1, 2, 7, 7)", inputs={1: (1, 2, 7, 7)}),
    Bad(IB, "src: expected rank 3 to 5, got 2 with shape (2, 4)", inputs={0: (2, 4)}),
    Bad(IB, "diff_dst: expected rank 3 to 5, got 6 with shape (1, 2, 1, 1, 1, 7)", inputs={1: (1, 2, 1, 1, 1, 7)}),
    Bad(IB, "src: expected spatial lengths >= 1, got [0]", inputs={0: (1, 2, 0)}),
    Bad(RG, "expected output_sizes as attribute or input, got neither", {"output_sizes": None}),
    Bad(RG, "expected output_sizes as attribute or input, got neither", {"output_sizes": []}),
    Bad(RG, "attribute and input output_sizes must agree, got 3 and 4", inputs={1: ints(2, 4)}),
    Bad(RG, "input output_sizes: expected 2 entries, got 1 in [2]", inputs={1: ints(2)}),
    Bad(RG, "output_sizes (one per axis): expected 2 entries, got 1 in [3]", {"output_sizes": [3]}),
    Bad(RG, "output_sizes: expected values >= 0, got [2, -3]", {"output_sizes": [2, -3]}),
    Bad(RG, "output_sizes: expected values >= 1, got [2, 0]", {"output_sizes": [2, 0]}),
    Bad(RG, "attribute dimension_count: expected 2, got 4", {"dimension_count": 4}),
    *(
        Bad(RG, f"attribute {name} (one per axis): expected 2 entries, got 3 in [1.0, 1.0, 1.0]", {name: [1.0] * 3})
        for name in ("scales", "input_pixel_offsets", "output_pixel_offsets")
    ),
    *(
        Bad(RG, f"attribute scales: expected positive numbers, got [2.0, {scale}]", {"scales": [2.0, scale]})
        for scale in (0.0, -0.5, float("inf"), float("nan"))
    ),
    *(
        Bad(RG, f"attribute {name}: expected finite numbers, got [0.5, {offset}]", {name: [0.5, offset]})
        for name in ("input_pixel_offsets", "output_pixel_offsets")
        for offset in (float("inf"), float("nan"))
    ),
    Bad(RG, "input_gradient: expected rank 1 to 32, got 0 with shape ()", inputs={0: ()}),
]  # fmt: skip

CROP = {"coordinate_transformation_mode": "tf_crop_and_resize"}
RESIZE = [
    Bad(RZ, "expected scales or sizes, got neither", inputs={4: None}),
    Bad(RZ, "expected scales or sizes, got neither", inputs={4: longs()}),
    Bad(RZ, "expected scales or sizes, got both. Leave one out, or empty", inputs={3: floats(1, 1.75)}),
    Bad(RZ, "input sizes: expected 2 entries, one per listed axis, got 1", inputs={4: longs(7)}),
    Bad(RZ, "input sizes: expected 1 entries, one per listed axis, got 2", {"axes": [1]}),
    Bad(RZ, "input scales: expected 2 entries, one per listed axis, got 3", inputs={3: floats(1, 1, 1), 4: None}),
    *(
        Bad(RZ, f"input scales: expected positive numbers, got [1.0, {scale}]", inputs={3: floats(1, scale), 4: None})
        for scale in (0.0, -1.75, float("inf"), float("nan"))
    ),
    Bad(RZ, "input sizes: expected values >= 0, got [2, -7]", inputs={4: longs(2, -7)}),
    # dY is not what the forward makes; a scale may be read in two ways
    Bad(RZ, "axis 1 of dY: expected length 8, got 7", inputs={4: longs(2, 8)}),
    Bad(RZ, "axis 1 of dY: expected length 8, got 7", inputs={3: floats(1, 2), 4: None}),
    Bad(RZ, "axis 1 of dY: expected length 6, got 7", {"axes": [-1]}, {3: floats(1.7), 4: None}),
    Bad(RZ, "axis 1 of dY: expected length 4 or 5, got 7", inputs={1: (2, 3), 3: floats(1, 5 / 3), 4: None}),
    Bad(RZ, "axis 0 of dY: expected length 4, got 2", {"keep_aspect_ratio_policy": "not_larger"}, {4: longs(4, 7)}),
    Bad(
        RZ,
        "lengths of axis 0 of X and dY, which is not resized, must agree, got 2 and 3",
        {"axes": [1]},
        {0: (3, 7), 4: longs(7)},
    ),
    Bad(RZ, "axis 1 of X: expected a length >= 1 to make 7 of it, got 0", inputs={1: (2, 0)}),
    Bad(RZ, "axes: expected values from -2 to 1, got [0, 2]", {"axes": [0, 2]}),
    Bad(RZ, "axes: expected values from -2 to 1, got [-3, 1]", {"axes": [-3, 1]}),
    Bad(RZ, "axes: expected every axis once, got [1, -1]", {"axes": [1, -1]}),
    Bad(
        RZ,
        "keep_aspect_ratio_policy not_smaller: expected sizes, got scales. Scales say the aspect ratio already",
        {"keep_aspect_ratio_policy": "not_smaller"},
        {3: floats(1, 1.75), 4: None},
    ),
    Bad(RZ, "input roi: expected 4 entries, starts and ends, got 3", CROP, {2: floats(0, 0, 1)}),
    Bad(RZ, "input roi: expected 4 entries, starts and ends, got 0", CROP, {2: floats()}),
    Bad(RZ, "input roi: expected finite numbers, got [0.0, nan, 1.0, 1.0]", CROP, {2: floats(0, float("nan"), 1, 1)}),
    Bad(RZ, "antialias: expected mode linear or cubic, got nearest", {"mode": "nearest", "antialias": 1}),
    Bad(RZ, "attribute antialias: expected 0 or 1, got 2", {"antialias": 2}),
    Bad(RZ, "attribute exclude_outside: expected 0 or 1, got -1", {"exclude_outside": -1}),
    *(
        Bad(RZ, f"attribute cubic_coeff_a: expected a finite number, got {a}", {"mode": "cubic", "cubic_coeff_a": a})
        for a in (float("inf"), float("nan"))
    ),
    Bad(RZ, "dY: expected rank 1 to 32, got 0 with shape ()", inputs={0: ()}),
    Bad(RZ, "X: expected rank 1 to 32, got 0 with shape ()", inputs={1: ()}),
    Bad(RZ, "dY: expected rank 2, got 3 with shape (1, 2, 7)", inputs={0: (1, 2, 7)}),
    invalid(RZ, "attribute mode: expected one of nearest, linear, cubic, got 'bilinear'", {"mode": "bilinear"}),
    invalid(
        RZ,
        "attribute keep_aspect_ratio_policy: expected one of stretch, not_larger, not_smaller, got 'NOT_LARGER'",
        {"keep_aspect_ratio_policy": "NOT_LARGER"},
    ),
]  # fmt: skip
