"""Calls of the convolutions: all six are those of a correlation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.declarations.calls import DATA_FORMATS, Call, Draws, stated, to_data, values

CONV_FORMATS = ("OIX", "XIO")
CONV_TRANSPOSE_FORMATS = ("IOX", "XOI", "OIX", "XIO")


@dataclass(frozen=True)
class Correlation:
    """A correlation in NCX and (D, S/g, k…) order."""

    attributes: dict[str, Any]
    source: np.ndarray
    destination: np.ndarray
    weights: np.ndarray
    seed: int


def correlation(draws: Draws, *, transposed: bool) -> Correlation:
    """Any geometry; `transposed` finds SAME_* pads by the rule of a transposed convolution, from its input's length."""
    attributes, shapes = _large(draws) if draws.large else _small(draws, transposed=transposed)
    seed = draws.seed()
    source, destination, weights = (values(shape, seed + n) for n, shape in enumerate(shapes))
    return Correlation(attributes, source, destination, weights, seed)


Geometry = tuple[dict[str, Any], tuple[list[int], list[int], list[int]]]  # attributes; source, destination, weights


def _small(draws: Draws, *, transposed: bool) -> Geometry:
    axes = draws.integer(1, 3)
    groups, d, s = draws.integer(1, 3), draws.integer(1, 3), draws.integer(1, 3)
    auto_pad = draws.pick("None", "None", "None", "VALID", "SAME_UPPER", "SAME_LOWER")
    kernel, strides, dilations, begin, end, long, short = ([] for _ in range(7))
    for _ in range(axes):
        k, stride, dilation = draws.integer(1, 4), draws.integer(1, 3), draws.integer(1, 3)
        p, e = draws.integer(0, 3), draws.integer(0, 3)
        extent = (k - 1) * dilation + 1
        if auto_pad.startswith("SAME") and not transposed:
            length = draws.integer(1, 7)
            out = -(-length // stride)
        else:
            out = draws.integer(1, 4)
            total = {"None": p + e, "VALID": 0}.get(auto_pad, max(extent - stride, 0))
            natural = stride * (out - 1) + extent - total
            if natural < 1:  # more padding than cells: without any it fits
                p = e = 0
                natural = stride * (out - 1) + extent
            rest = 0 if auto_pad.startswith("SAME") else draws.integer(0, stride - 1)
            length = natural + rest
        for values_, value in zip(
            (kernel, strides, dilations, begin, end, long, short), (k, stride, dilation, p, e, length, out), strict=True
        ):
            values_.append(value)
    batch = draws.integer(1, 3)
    attributes = _attributes(strides, dilations, begin, end, groups) | {"auto_pad": auto_pad}
    return attributes, ([batch, groups * s, *long], [batch, groups * d, *short], [groups * d, s, *kernel])


def _large(draws: Draws) -> Geometry:
    while True:
        axes = draws.integer(1, 3)
        groups = draws.pick(1, 1, 1, 2, 3, 16, 33)
        cells = draws.length(70), draws.length(70)
        d, s = (1, 1) if groups > 3 and draws.pick(True, True, False) else cells
        batch = draws.integer(1, 3)
        k = [draws.pick(1, 1, 2, 3, 3, 5) for _ in range(axes)]
        strides = [draws.pick(1, 1, 2, 3) for _ in range(axes)]
        dilations = [draws.pick(1, 1, 2) for _ in range(axes)]
        begin, end = ([draws.integer(0, 3) for _ in range(axes)] for _ in range(2))
        if axes == 2 and draws.pick(True, True, False, False, False):  # by Winograd's tiles
            k, strides, dilations, groups = [3, 3], [1, 1], [1, 1], draws.pick(1, 1, 2)
            d, s = draws.integer(15, 39), draws.integer(15, 39)
        if axes == 2 and d == s == 1 and groups > 3 and draws.pick(True, True, True, False, False):  # slid over planes
            k, strides, dilations = [draws.pick(3, 5)] * 2, [1, 1], [1, draws.pick(1, 1, 2, 9)]
        if draws.integer(1, 10) == 1:  # no tap shifts: copied tile by tile
            k = strides = [draws.pick(1, 2, 2, 3) for _ in range(axes)]
            begin, dilations = [n * draws.pick(0, 0, 0, 1) for n in k], [1] * axes
        outs = [draws.length({1: 70, 2: 40, 3: 12}[axes]) for _ in range(axes)]
        longs = []
        for axis, out in enumerate(outs):
            natural = strides[axis] * (out - 1) + (k[axis] - 1) * dilations[axis] + 1
            if natural - begin[axis] - end[axis] < 1:
                begin[axis] = end[axis] = 0
            longs.append(natural - begin[axis] - end[axis] + draws.integer(0, strides[axis] - 1))
        x, y, w = [batch, groups * s, *longs], [batch, groups * d, *outs], [groups * d, s, *k]
        if draws.fits(x, y, w):
            return _attributes(strides, dilations, begin, end, groups), (x, y, w)


def _attributes(
    strides: list[int], dilations: list[int], begin: list[int], end: list[int], groups: int
) -> dict[str, Any]:
    return {"strides": strides, "dilations": dilations, "pads_begin": begin, "pads_end": end, "groups": groups}


def to_weights(w: np.ndarray, order: str) -> np.ndarray:
    """(D, S/g, k…) into a weights format of three letters that say where D, S and the kernel go."""
    d, s, *k = range(w.ndim)
    return np.ascontiguousarray(
        w.transpose([axis for letter in order for axis in {"D": [d], "S": [s], "X": k}[letter]])
    )


def conv_order(weights_format: str) -> str:
    """OIX and XIO of a convolution: O is the destination."""
    return weights_format.replace("O", "D").replace("I", "S")


def conv_transpose_order(weights_format: str) -> str:
    """IOX … of a transposed convolution: its input I is the correlation's destination."""
    return weights_format.replace("I", "D").replace("O", "S")


def calls(op: str, draws: Draws) -> Call:
    """The operator of a correlation, in any layout; the shape that the lengths leave open as attribute or as input."""
    transposed = op.startswith("ConvTranspose")
    c = correlation(draws, transposed=transposed)
    data = draws.pick(*DATA_FORMATS)
    layout = draws.pick(*(CONV_TRANSPOSE_FORMATS if transposed else CONV_FORMATS))
    source, destination = to_data(c.source, data), to_data(c.destination, data)
    weights = to_weights(c.weights, conv_transpose_order(layout) if transposed else conv_order(layout))
    name = "filter" if op == "ConvTransposeBackpropFilters" else "weights"
    attributes, extra = c.attributes | {"data_format": data, f"{name}_format": layout}, []
    if op == "ConvolutionBackwardData":
        shape, extra = stated(draws, source.shape, "dst_shape")
        attributes |= shape
    elif op.endswith(("Weights", "Filters")):
        shape, extra = stated(draws, weights.shape, f"{name}_shape")
        attributes |= shape
    elif op == "Convolution" and draws.flag():
        extra = [values(c.weights.shape[:1], c.seed + 3)]
    tensors = {
        "Convolution": [source, weights],
        "ConvolutionBackwardData": [destination, weights],
        "ConvolutionBackwardWeights": [source, destination],
        "ConvTransposeBackwardData": [source, weights],
    }.get(op, [destination, source])
    return Call(op, attributes, [*tensors, *extra], c.seed)
