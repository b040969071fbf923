"""Worked examples of the convolutions.

Unless a comment says otherwise N = C = 1 and the weights are [1, 10, 100], so that the digits of a result tell which
cell of the gradient met which cell of the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.declarations.declaration import Attributes, Example, row

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
