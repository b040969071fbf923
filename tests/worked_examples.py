"""Numbers worked out by hand or published with a specification: one table for references, evaluator and sessions.

In `inputs` a nested list is data and a tuple is the value of an integer input; None is an absent one.
Unless a comment says otherwise a convolution has N = C = 1 and weights [1, 10, 100], so that the digits of a result
tell which cell of the gradient met which cell of the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnx_backprop.opset.op import NUMBER_TYPES
from onnx_backprop.opset.registry import BY_NAME

Attributes = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """One call of one operator and its answer."""

    id: str
    op: str
    attributes: Attributes
    inputs: tuple[list[Any] | tuple[int, ...] | None, ...]
    expected: list[Any]
    more: tuple[list[Any], ...] = ()  # further outputs

    def arrays(self) -> list[np.ndarray | None]:
        """The inputs as float32 and integer arrays, the latter of the type that the operator takes."""
        result: list[np.ndarray | None] = []
        for spec, given in zip(BY_NAME[self.op].inputs, self.inputs, strict=False):
            kind = NUMBER_TYPES[spec.type_name].dtype if isinstance(given, tuple) else np.float32
            result.append(None if given is None else np.array(given, dtype=kind))
        return result


# ----- Interpolation: oneDNN's InterpolateBackward and its older name -----------------------------------------------


def row(*values: float) -> list[Any]:
    """One row of one channel: shape (1, 1, length)."""
    return [[list(values)]]


def zeros(*shape: int) -> list[Any]:
    """A source of which only the shape matters."""
    return np.zeros(shape).tolist()


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
        (
            "4_to_2",
            4,
            [1, 2],
            {nearest: [0, 1, 0, 2], linear: [0.5, 0.5, 1, 1], ("linear", corners): [1, 0, 0, 2]},
        ),
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
        (
            "1_to_3",
            1,
            [1, 2, 3],
            {nearest: [6], linear: [6], ("nearest", corners): [6], ("linear", corners): [6]},
        ),
        (
            "2_to_4",
            2,
            [1, 2, 3, 4],
            {nearest: [3, 7], linear: [3.25, 6.75], ("linear", corners): [10 / 3, 20 / 3]},
        ),
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


# ----- Convolutions ---------------------------------------------------------------------------------------------------

W = row(1, 10, 100)
GROUPED_ROWS = [[1, 2], [3, 4], [5, 6], [7, 8]]


def conv(stride: int = 2, begin: int = 1, end: int = 1, dilation: int = 1, **more: object) -> Attributes:
    """Attributes of one spatial axis in ONNX's data layout."""
    return {
        "strides": [stride],
        "pads_begin": [begin],
        "pads_end": [end],
        "dilations": [dilation],
        "data_format": "NCX",
    } | more


def oix(rows: list[list[int]]) -> list[Any]:
    """(O, I) -> (O, I, 1)."""
    return [[[v] for v in r] for r in rows]


def xio(rows: list[list[int]]) -> list[Any]:
    """(O, I) -> (1, I, O)."""
    return [np.transpose(rows).tolist()]


def convolutions() -> Iterator[Example]:
    data, weights = "ConvolutionBackwardData", "ConvolutionBackwardWeights"
    formats: Attributes = {"weights_format": "OIX"}
    x, dy = row(1, 2, 3, 4, 5), row(1, 2, 3)
    base = conv() | formats
    five, six = row(10, 102, 20, 203, 30), row(10, 102, 20, 203, 30, 300)
    shape_5, shape_6, shape_w = {"dst_shape": [1, 1, 5]}, {"dst_shape": [1, 1, 6]}, {"weights_shape": [1, 1, 3]}
    yield Example("conv-dx-5", data, base | shape_5, (dy, W), five)
    yield Example("conv-dx-6", data, base | shape_6, (dy, W), six)
    yield Example("conv-dx-input", data, base, (dy, W, (1, 1, 5)), five)
    yield Example("conv-dx-input-wins", data, base | shape_6, (dy, W, (1, 1, 5)), five)
    yield Example("conv-dx-output_padding-0", data, base | shape_5 | {"output_padding": [0]}, (dy, W), five)
    yield Example("conv-dx-output_padding-1", data, base | shape_6 | {"output_padding": [1]}, (dy, W), six)
    yield Example("conv-dw", weights, base | shape_w, (x, dy), row(16, 22, 10))
    yield Example("conv-dw-input", weights, base, (x, dy, (1, 1, 3)), row(16, 22, 10))
    yield Example(
        "conv-dw-input-wins", weights, base | {"weights_shape": [1, 1, 2]}, (x, dy, (1, 1, 3)), row(16, 22, 10)
    )

    # the defaults: channels last in data and weights
    defaults = conv()
    del defaults["data_format"]
    x_last, dy_last, w_last = [[[1], [2], [3], [4], [5]]], [[[1], [2], [3]]], [[[1]], [[10]], [[100]]]
    five_last = [[[10], [102], [20], [203], [30]]]
    yield Example("conv-dx-defaults", data, defaults | {"dst_shape": [1, 5, 1]}, (dy_last, w_last), five_last)
    dw_last = [[[16]], [[22]], [[10]]]
    yield Example("conv-dw-defaults", weights, defaults | {"weights_shape": [3, 1, 1]}, (x_last, dy_last), dw_last)

    dilated = conv(1, 0, 0, 2) | formats
    yield Example("conv-dx-dilation", data, dilated | shape_5, (row(7), W), row(7, 0, 70, 0, 700))
    yield Example("conv-dw-dilation", weights, dilated | shape_w, (x, row(7)), row(7, 21, 35))
    # [] pads are zeros
    bare = dilated | {"pads_begin": [], "pads_end": []}
    yield Example("conv-dx-no-pads", data, bare | shape_5, (row(7), W), row(7, 0, 70, 0, 700))

    # auto_pad, an odd total: the extra cell at the end (upper) or the beginning (lower); explicit pads are ignored
    two, dy_4 = row(1, 10), row(1, 2, 3, 4)
    for spelling, dx in {
        "SAME_UPPER": [1, 12, 23, 34],
        "SAME_LOWER": [12, 23, 34, 40],
        "same_upper": [1, 12, 23, 34],
        "same_lower": [12, 23, 34, 40],
    }.items():
        attributes = conv(1, 5, 5, 1, auto_pad=spelling, dst_shape=[1, 1, 4]) | formats
        yield Example(f"conv-dx-{spelling}-K2", data, attributes, (dy_4, two), row(*dx))
    four = row(1, 10, 100, 1000)
    for auto_pad, dx, dw in (
        ("SAME_UPPER", [10, 102, 1020, 203, 2030], [16, 22, 10, 13]),
        ("SAME_LOWER", [102, 1020, 203, 2030, 300], [11, 16, 22, 10]),
    ):
        attributes = conv(2, 0, 0, 1, auto_pad=auto_pad) | formats
        yield Example(f"conv-dx-{auto_pad}-K4-S2", data, attributes | shape_5, (dy, four), row(*dx))
        yield Example(f"conv-dw-{auto_pad}-K4-S2", weights, attributes, (x, dy, (1, 1, 4)), row(*dw))
        # K = 1, S = 3: the total clamps to 0 and positions 0 and 3 are sampled
        attributes = conv(3, 0, 0, 1, auto_pad=auto_pad) | formats
        x_6, dx_6 = row(0, 1, 2, 3, 4, 5), row(1, 0, 0, 2, 0, 0)
        yield Example(f"conv-dx-{auto_pad}-K1-S3", data, attributes | shape_6, (row(1, 2), row(1)), dx_6)
        yield Example(f"conv-dw-{auto_pad}-K1-S3", weights, attributes, (x_6, row(1, 2), (1, 1, 1)), row(6))
    # VALID ignores the pads: y = x0 + 10·x1 + 100·x2 at positions 0 and 2
    valid = conv(2, 1, 1, 1, auto_pad="valid") | formats
    yield Example("conv-dx-valid", data, valid | shape_5, (row(1, 2), W), row(1, 10, 102, 20, 200))
    yield Example("conv-dw-valid", weights, valid | shape_w, (x, row(1, 2)), row(7, 10, 13))
    explicit = conv(2, 1, 1, 1, auto_pad="NOTSET") | formats
    yield Example("conv-dx-notset", data, explicit | shape_5, (dy, W), five)

    # two groups of two channels on either side, K = 1
    grouped = conv(1, 0, 0, 1, groups=2)
    dx, dw = [[10, 14], [14, 20], [74, 86], [86, 100]], [[5, 11], [11, 25], [61, 83], [83, 113]]
    cells = [GROUPED_ROWS]
    shape_g = {"dst_shape": [1, 4, 2]}
    yield Example("conv-dx-groups", data, grouped | formats | shape_g, (cells, oix(GROUPED_ROWS)), [dx])
    yield Example("conv-dx-groups-XIO", data, grouped | shape_g, (cells, xio(GROUPED_ROWS)), [dx])
    yield Example("conv-dw-groups", weights, grouped | formats, (cells, cells, (4, 2, 1)), oix(dw))
    yield Example("conv-dw-groups-XIO", weights, grouped, (cells, cells, (1, 2, 4)), xio(dw))


def forwards() -> Iterator[Example]:
    """The digits of y: which cell of x met which cell of W = [1, 10, 100]."""
    op, x = "Convolution", row(1, 2, 3, 4, 5)
    base = conv(weights_format="OIX")
    yield Example("conv-y", op, base, (x, W), row(210, 432, 54))
    yield Example("conv-y-bias", op, base, (x, W, [1000]), row(1210, 1432, 1054))
    yield Example("conv-y-dilation", op, conv(1, 0, 0, 2, weights_format="OIX"), (x, W), row(531))
    yield Example("conv-y-no-pads", op, base | {"pads_begin": [], "pads_end": []}, (x, W), row(321, 543))
    # the defaults: channels last in data and weights
    defaults = conv()
    del defaults["data_format"]
    x_last, w_last = [[[1], [2], [3], [4], [5]]], [[[1]], [[10]], [[100]]]
    yield Example("conv-y-defaults", op, defaults, (x_last, w_last, [1000]), [[[1210], [1432], [1054]]])
    # auto_pad, an odd total: the extra cell at the end (upper) or the beginning (lower); explicit pads are ignored
    for auto_pad, y in (("SAME_UPPER", [3210, 5432, 54]), ("same_lower", [2100, 4321, 543]), ("VALID", [4321])):
        attributes = conv(2, 5, 5, 1, auto_pad=auto_pad, weights_format="OIX")
        yield Example(f"conv-y-{auto_pad}-K4-S2", op, attributes, (x, row(1, 10, 100, 1000)), row(*y))
    # two groups of two channels on either side, K = 1
    grouped, cells = conv(1, 0, 0, 1, groups=2), [GROUPED_ROWS]
    y = [[7, 10], [15, 22], [67, 78], [91, 106]]
    yield Example("conv-y-groups", op, grouped | {"weights_format": "OIX"}, (cells, oix(GROUPED_ROWS)), [y])
    biased = [[17, 20], [35, 42], [97, 108], [131, 146]]
    yield Example("conv-y-groups-XIO", op, grouped, (cells, xio(GROUPED_ROWS), [10, 20, 30, 40]), [biased])


def transposed() -> Iterator[Example]:
    data, weights, old = "ConvTransposeBackwardData", "ConvTransposeBackwardWeights", "ConvTransposeBackpropFilters"
    iox: Attributes = {"weights_format": "IOX"}
    x = row(1, 2)
    shape_w = {"weights_shape": [1, 1, 3]}

    def both(
        name: str, attributes: Attributes, dy: list[float], dw: list[float], src: list[Any] = x
    ) -> Iterator[Example]:
        """The weights gradient under its new and its old name; with one channel all four layouts hold the same cells."""
        yield Example(f"convt-dw-{name}", weights, attributes | iox | shape_w, (src, row(*dy)), row(*dw))
        filters = {"filter_format": "OIX", "filter_shape": [1, 1, 3]}
        yield Example(f"convt-filters-{name}", old, attributes | filters, (src, row(*dy)), row(*dw))

    yield from both("output_padding-absent", conv(), [1, 2, 3], [4, 7, 2])
    yield from both("output_padding-0", conv(output_padding=[0]), [1, 2, 3], [4, 7, 2])
    yield from both("output_padding-1", conv(output_padding=[1]), [1, 2, 3, 4], [4, 7, 10])
    yield from both("remainder", conv(), [1, 2, 3, 4], [4, 7, 10])
    yield from both("dilation", conv(1, 0, 0, 2), [1, 2, 3, 4, 5, 6], [5, 11, 17])
    yield Example("convt-dx-3", data, conv() | iox, (row(1, 2, 3), W), row(210, 32))
    yield Example("convt-dx-4", data, conv() | iox, (row(1, 2, 3, 4), W), row(210, 432))
    output_padding = conv(output_padding=[1])
    yield Example("convt-dx-output_padding-1", data, output_padding | iox, (row(1, 2, 3, 4), W), row(210, 432))
    dilated = row(1, 2, 3, 4, 5, 6)
    yield Example("convt-dx-dilation", data, conv(1, 0, 0, 2) | iox, (dilated, W), row(531, 642))

    # the shape as an input, which wins over the attribute
    dy, dw = row(1, 2, 3, 4), row(4, 7, 10)
    yield Example("convt-dw-input", weights, conv() | iox, (x, dy, (1, 1, 3)), dw)
    yield Example("convt-dw-input-wins", weights, conv() | iox | {"weights_shape": [1, 1, 2]}, (x, dy, (1, 1, 3)), dw)
    filters = {"filter_format": "OIX", "filter_shape": [1, 1, 2]}
    yield Example("convt-filters-input-wins", old, conv() | filters, (x, dy, (1, 1, 3)), dw)

    # auto_pad by the forward's rule: total = 3 - 2 = 1, VALID none; output_padding does not change the pads
    for auto_pad, cells, dx, dw in (
        ("SAME_UPPER", [1, 2, 3, 4], [321, 43], [7, 10, 3]),
        ("SAME_LOWER", [1, 2, 3, 4], [210, 432], [4, 7, 10]),
        ("VALID", [1, 2, 3, 4, 5], [321, 543], [7, 10, 13]),
        ("SAME_UPPER", [1, 2, 3, 4, 5], [321, 543], [7, 10, 13]),
        ("same_lower", [1, 2, 3, 4], [210, 432], [4, 7, 10]),
    ):
        attributes = conv(2, 5, 5, 1, auto_pad=auto_pad)
        name = f"{auto_pad}-{len(cells)}"
        if (auto_pad, len(cells)) == ("SAME_UPPER", 5):
            attributes["output_padding"] = [1]
        yield from both(name, attributes, cells, dw)
        yield Example(f"convt-dx-{name}", data, attributes | iox, (row(*cells), W), row(*dx))

    # two groups of two channels on either side, K = 1; rows of W are input channels, the columns O per group
    grouped, cells = conv(1, 0, 0, 1, groups=2), [GROUPED_ROWS]
    dx, dw = [[7, 10], [15, 22], [67, 78], [91, 106]], [[5, 11], [11, 25], [61, 83], [83, 113]]
    to_layout = {
        "IOX": oix,
        "XOI": xio,
        "OIX": lambda rows: oix(np.transpose(rows).tolist()),
        "XIO": lambda rows: [rows],
    }
    for layout, arrange in to_layout.items():
        attributes = grouped | {"weights_format": layout}
        yield Example(f"convt-dx-groups-{layout}", data, attributes, (cells, arrange(GROUPED_ROWS)), [dx])
        answer = arrange(dw)
        shape = tuple(np.shape(answer))
        yield Example(f"convt-dw-groups-{layout}", weights, attributes, (cells, cells, shape), answer)
        attributes = grouped | {"filter_format": layout, "filter_shape": list(shape)}
        yield Example(f"convt-filters-groups-{layout}", old, attributes, (cells, cells), answer)
    # the defaults: NXC with XOI under the new names, NXC with XIO under the old one
    defaults = {k: v for k, v in grouped.items() if k != "data_format"}
    last = [np.transpose(GROUPED_ROWS).tolist()]
    dx_last = [np.transpose(dx).tolist()]
    yield Example("convt-dx-defaults", data, defaults, (last, xio(GROUPED_ROWS)), dx_last)
    yield Example("convt-dw-defaults", weights, defaults | {"weights_shape": [1, 2, 4]}, (last, last), xio(dw))
    yield Example("convt-filters-defaults", old, defaults | {"filter_shape": [1, 4, 2]}, (last, last), [dw])


def biases() -> Iterator[Example]:
    op = "BiasAddBackward"
    yield Example("bias", op, {"data_format": "NCX"}, (row(1, 2, 3),), [6])
    yield Example("bias-last", op, {}, ([[[1, 10], [2, 20], [3, 30]]],), [6, 60])
    yield Example("bias-matrix", op, {}, ([[1, 10], [2, 20]],), [3, 30])
    image = np.arange(16).reshape(2, 2, 2, 2).tolist()
    yield Example("bias-image", op, {"data_format": "NCX"}, (image,), [6 + 38, 22 + 54])


# ----- Pools ----------------------------------------------------------------------------------------------------------


def pool(kernel: int, stride: int, begin: int = 0, end: int = 0, **more: object) -> Attributes:
    """Attributes of a pool along one axis, channels first."""
    attributes = {"kernel": [kernel], "strides": [stride], "pads_begin": [begin], "pads_end": [end]}
    return attributes | {"data_format": "NCX"} | more


def max_pools() -> Iterator[Example]:
    """dy is 1, 10, 100 …, so that the digits of a cell tell which windows it won."""
    op = "MaxPoolBackward"

    def example(name: str, attributes: Attributes, x: list[float], dx: list[float], windows: int) -> Example:
        return Example(f"{op}-{name}", op, attributes, (row(*x), row(*(10.0**o for o in range(windows)))), row(*dx))

    yield example("apart", pool(2, 2), [1, 3, 4, 2], [0, 1, 10, 0], 2)
    yield example("overlapping", pool(3, 1), [1, 5, 2, 4, 3], [0, 11, 0, 100, 0], 3)
    yield example("the_first_of_equal_ones", pool(3, 1), [2, 2, 2, 2], [1, 10, 0, 0], 2)
    yield example("padding_is_no_zero", pool(3, 2, 1, 1), [-1, -2, -3, -4], [1, 10, 0, 0], 2)
    yield example("all_minus_infinity", pool(2, 2), [-np.inf, -np.inf, -np.inf, 1], [1, 0, 0, 10], 2)
    # an end that no window reaches, rounded down; the same with a third window, rounded up
    yield example("rounded_down", pool(2, 2), [1, 2, 3, 4, 5], [0, 1, 0, 10, 0], 2)
    yield example("rounded_up", pool(2, 2), [1, 2, 3, 4, 5], [0, 1, 0, 10, 100], 3)
    yield example("dilation", pool(2, 1, dilations=[2]), [3, 9, 1, 8, 2], [1, 10, 0, 0, 100], 3)
    # window 0 is cells -2 and 2, window 1 -1 and 3, of which x has none
    yield example("a_window_beside_x", pool(3, 1, 2, 2, dilations=[4]), [1, 2, 3], [0, 0, 0], 0)
    yield example("stepping_over_x", pool(2, 1, 1, 1, dilations=[4]), [1, 2, 3], [0, 0, 0], 1)
    # windows of 3, 2 apart: SAME pads 4 cells by one, behind them or before
    yield example("SAME_UPPER", pool(3, 2, 9, 9, auto_pad="SAME_UPPER"), [1, 2, 9, 4], [0, 0, 11, 0], 2)
    yield example("SAME_LOWER", pool(3, 2, 9, 9, auto_pad="same_lower"), [1, 2, 9, 4], [0, 1, 10, 0], 2)
    yield example("VALID", pool(2, 2, 9, 9, auto_pad="VALID"), [1, 2, 9, 4, 5], [0, 1, 10, 0, 0], 2)
    # two images, two channels, channels last, all defaults
    last = {"kernel": [2, 2], "strides": [2, 2], "pads_begin": [], "pads_end": []}
    x = [[[[1, 8], [2, 7]], [[3, 6], [4, 5]]], [[[4, 1], [4, 2]], [[0, 3], [0, 4]]]]
    dx = [[[[0, 20], [0, 0]], [[0, 0], [10, 0]]], [[[30, 0], [0, 0]], [[0, 0], [0, 40]]]]
    yield Example(f"{op}-defaults", op, last, (x, [[[[10, 20]]], [[[30, 40]]]]), dx)


def average_pools() -> Iterator[Example]:
    """dy is a multiple of what its window is divided by, so that all is exact."""
    op = "AvgPoolBackward"

    def example(name: str, attributes: Attributes, dy: list[float], length: int, dx: list[float]) -> Example:
        stated = attributes if "src_shape" in attributes else attributes | {"src_shape": [1, 1, length]}
        return Example(f"{op}-{name}", op, stated, (row(*dy),), row(*dx))

    out, within = {"exclude_pad": 1}, {"exclude_pad": 0}
    yield example("apart", pool(2, 2, **out), [2, 20], 4, [1, 1, 10, 10])
    yield example("overlapping", pool(2, 1, **out), [2, 20, 200], 4, [1, 11, 110, 100])
    yield example("cells_between", pool(1, 2, **out), [1, 10], 4, [1, 0, 10, 0])
    # a window's cell of padding: left out, or divided by
    yield example("exclude_pad", pool(2, 2, 1, 1, **out), [4, 8, 16], 4, [4, 4, 4, 16])
    yield example("include_pad", pool(2, 2, 1, 1, **within), [4, 8, 16], 4, [2, 4, 4, 8])
    # an end that no window reaches, rounded down; the same with a third window of one cell, rounded up
    yield example("rounded_down", pool(2, 2, **out), [2, 4], 5, [1, 1, 2, 2, 0])
    yield example("rounded_up", pool(2, 2, **out), [2, 4, 8], 5, [1, 1, 2, 2, 8])
    yield example("rounded_up-include_pad", pool(2, 2, **within), [2, 4, 8], 5, [1, 1, 2, 2, 4])
    # windows of 2, 2 apart: SAME pads 3 cells by one, behind them or before
    yield example("SAME_UPPER", pool(2, 2, 9, 9, auto_pad="SAME_UPPER", **out), [2, 4], 3, [1, 1, 4])
    yield example("SAME_LOWER", pool(2, 2, 9, 9, auto_pad="same_lower", **within), [2, 4], 3, [1, 2, 2])
    yield example("VALID", pool(2, 2, 9, 9, auto_pad="VALID", **out), [2, 4], 5, [1, 1, 2, 2, 0])
    # two axes, channels last, all defaults; of a corner one cell lies inside, of an edge two
    last = {"kernel": [2, 2], "strides": [2, 2], "pads_begin": [1, 1], "pads_end": [1, 1], "exclude_pad": 1}
    dy = [[[[1, 10], [2, 20]], [[4, 40], [8, 80]]]]
    dx = [[[[1, 10], [2, 20]], [[4, 40], [8, 80]]]]
    yield Example(f"{op}-defaults", op, last | {"src_shape": [1, 2, 2, 2]}, (dy,), dx)
    dense: Attributes = last | {"strides": [1, 1], "pads_begin": [0, 0], "pads_end": [0, 0]}
    dx = [[[[1, 10], [3, 30], [2, 20]], [[5, 50], [15, 150], [10, 100]], [[4, 40], [12, 120], [8, 80]]]]
    yield Example(f"{op}-two_axes", op, dense, (np.multiply(dy, 4).tolist(), (1, 3, 3, 2)), dx)


# ----- Normalisations -------------------------------------------------------------------------------------------------


def normalisations() -> Iterator[Example]:
    """x is 2 ± 1 with a mean of 2 and a variance of 1, and ε = 0: all is exact."""
    op, attributes = "BatchNormTrainingBackward", {"epsilon": 0.0, "data_format": "NCX"}
    x, dy = [[[1, 3]], [[1, 3]]], [[[1, 3]], [[2, 6]]]  # Σ dy = 12, Σ dy·z = 6
    dx = [[[-0.5, -1.5]], [[0.5, 1.5]]]
    yield Example("batch_norm", op, attributes, (x, dy), dx, ([6], [12]))
    yield Example("batch_norm-given", op, attributes, (x, dy, [2], [1]), dx, ([6], [12]))
    twice = np.multiply(dx, 2).tolist()
    yield Example("batch_norm-gamma", op, attributes, (x, dy, None, None, [2]), twice, ([6], [12]))
    # a variance of 4 halves the slope and z, so that z·mean(dy·z) is a quarter
    quarter = [[[-1 + 0.1875, -0.1875]], [[-0.5 + 0.1875, 1.5 - 0.1875]]]
    yield Example("batch_norm-variance", op, attributes, (x, dy, None, [4]), quarter, ([3], [12]))
    # channels last, the default; the second channel gets a gradient that is the same everywhere, so none arrives
    last = [[[1, 1], [3, 3], [1, 3], [3, 1]]]
    given = [[[1, 7], [3, 7], [2, 7], [6, 7]]]
    answer = [[[-0.5, 0], [-1.5, 0], [0.5, 0], [1.5, 0]]]
    yield Example("batch_norm-last", op, {"epsilon": 0.0}, (last, given), answer, ([6, 0], [12, 28]))


def layer_norms() -> Iterator[Example]:
    """Rows of 1 and 3, with a mean of 2 and a variance of 1, and ε = 0: all is exact."""
    op, plain = "LayerNormBackward", {"epsilon": 0.0, "use_affine": 0}
    x, dy = [[1, 3, 3, 1], [3, 1, 1, 3]], [[4, 0, 8, 4], [2, 6, 2, 6]]  # mean dy = 4 and 4, mean dy·z = 0 and 0
    whole = [6, 6, 10, 10]
    slant = [[8, 0, 0, 0], [0, 0, 0, 8]]  # mean dy = 2 and 2, mean dy·z = -2 and 2
    flat = [[4, 0, 0, -4], [-4, 0, 0, 4]]  # dy - 2 - z·(mean dy·z)
    yield Example(op, op, plain, (x, dy), np.subtract(dy, 4).tolist(), ([-2, -6, 6, 2], whole))
    yield Example(f"{op}-slant", op, plain, (x, slant), flat, ([-8, 0, 0, 8], [8, 0, 0, 8]))
    given: list[Any] = [x, slant, [2, 2], [1, 1]]
    yield Example(f"{op}-given", op, plain, tuple(given), flat, ([-8, 0, 0, 8], [8, 0, 0, 8]))
    affine = {"epsilon": 0.0}
    twice = np.multiply(flat, 2).tolist()
    gammas = (x, slant, None, None, [2, 2, 2, 2], [7, 8, 9, 10])
    yield Example(f"{op}-gamma", op, affine, gammas, twice, ([-8, 0, 0, 8], [8, 0, 0, 8]))
    # γ·dy = slant in the first row and nothing in the second
    yield Example(
        f"{op}-gammas", op, affine, (x, [[2, 1, 1, 1], [0, 1, 1, 1]], None, None, [4, 0, 0, 0]),
        [flat[0], [0, 0, 0, 0]], ([-2, 0, 0, 0], [2, 2, 2, 2]),
    )  # fmt: skip
    # ε = 3 beside a variance of 1: r = 1/2, z = ±1/2, mean dy·z = ∓1, so z·(mean dy·z) is a quarter of 2
    quarter = [[2.75, -0.75, -0.75, -1.25], [-1.25, -0.75, -0.75, 2.75]]
    yield Example(f"{op}-epsilon", op, plain | {"epsilon": 3.0}, (x, slant), quarter, ([-4, 0, 0, 4], [8, 0, 0, 8]))
    # a mean of 1 and a variance of 4 instead: z = 0, 1, 1, 0 and 1, 0, 0, 1, mean dy·z = 0 and 2
    other = (x, slant, [1, 1], [4, 4])
    yield Example(
        f"{op}-statistics", op, plain, other, [[3, -1, -1, -1], [-2, -1, -1, 2]], ([0, 0, 0, 8], [8, 0, 0, 8])
    )
    # the last two axes, and all of them
    square = [[[1, 3], [3, 1]], [[3, 1], [1, 3]]]
    steep, level = np.reshape(slant, (2, 2, 2)).tolist(), np.reshape(flat, (2, 2, 2)).tolist()
    sums = ([[-8, 0], [0, 8]], [[8, 0], [0, 8]])
    for axis in (1, -2):
        yield Example(f"{op}-axis{axis}", op, plain | {"begin_norm_axis": axis}, (square, steep), level, sums)
    yield Example(
        f"{op}-all", op, plain | {"begin_norm_axis": 0}, (x[0], slant[0], 2, 1), flat[0], ([-8, 0, 0, 0], [8, 0, 0, 0])
    )
    yield Example(f"{op}-one", op, {}, ([[5], [7]], [[3], [4]], None, None, [2]), [[0], [0]], ([0], [7]))


# ----- Activations ----------------------------------------------------------------------------------------------------


def activations() -> Iterator[Example]:
    op = "ReLUBackward"
    yield Example("relu", op, {}, ([[0, 1, -2], [0.5, -0.0, 3]], [[1, 2, 3], [4, 5, 6]]), [[0, 2, 0], [4, 0, 6]])
    op = "SoftMaxBackward"
    y, dy = [[0.25, 0.75], [0.5, 0.5]], [[4, 8], [2, 6]]  # Σ dy·y = 7 and 4 along rows, 2 and 9 along columns
    yield Example("softmax", op, {}, (dy, y), [[-0.75, 0.75], [-1, 1]])
    yield Example("softmax-columns", op, {"axis": -2}, (dy, y), [[0.5, -0.75], [0, -1.5]])
    op = "ReLUBackward"
    nan, inf = float("nan"), float("inf")
    yield Example(
        "relu-of_src", op, {"use_dst": 0}, ([nan, -inf, inf, -1, 1], [1, 2, 3, inf, -inf]), [0, 0, 3, 0, -inf]
    )


# ----- ONNX's Resize --------------------------------------------------------------------------------------------------


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


EXAMPLES = (
    *interpolations(),
    *resamples(),
    *resizes(),
    *forwards(),
    *convolutions(),
    *transposed(),
    *biases(),
    *max_pools(),
    *activations(),
    *average_pools(),
    *normalisations(),
    *layer_norms(),
)
