"""The convolution operators against the loops of the route "numba", over random geometries.

All numbers are small integers, so every sum is exact in float32 and answers must be equal, not close.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from onnx_backprop.opset.maths import convolution as correlation
from onnx_backprop.opset.maths.convolution import Geometry
from onnx_backprop.ort_ops.loops import convolution as loops
from tests.declarations.declaration import row
from tests.operators.convolution.examples import GROUPED_ROWS, W, oix
from tests.opset.operators import naive
from tests.support.checks import assert_rounded_once, evaluate

f32 = np.float32
CASES = 120


@dataclass(frozen=True)
class Case:
    """A correlation with its tensors in canonical order (NCX, D first) and the attributes that ask for it."""

    correlation: naive.Correlation
    x: np.ndarray  # the correlation's source
    w: np.ndarray
    dy: np.ndarray  # the correlation's destination
    attributes: dict[str, Any]
    output_padding: list[int]  # what a transposed convolution needs to make x's lengths

    @property
    def geometry(self) -> Geometry:
        c = self.correlation
        return Geometry(c.strides, c.dilations, c.pads_begin, c.groups)

    def products(self, module: ModuleType) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """y, dx and dw, as the functions of a module compute them in float64."""
        c, geo = self.correlation, self.geometry
        x, w, dy = (a.astype(np.float64) for a in (self.x, self.w, self.dy))
        y, dx = module.forward(x, w, c.out, geo), module.backward_data(dy, w, c.source, geo)
        return y, dx, module.backward_weights(x, dy, c.kernel, geo)

    def attributes_in(self, **formats: object) -> dict[str, Any]:
        return self.attributes | formats


def numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-4, 5, shape).astype(f32)


def case(rng: np.random.Generator, padding: str, *, transposed: bool) -> Case:
    """One to three axes, groups, strides, dilations, every kind of padding; lengths that a forward operator makes.

    In a transposed convolution the drawn lengths are those of its input, and its output is the correlation's source.
    """
    axes, groups = int(rng.integers(1, 4)), int(rng.choice([1, 1, 2, 3]))
    kernel, strides, dilations, source, begin, end, extra = ([], [], [], [], [], [], [])
    for _ in range(axes):
        while True:  # a kernel that fits
            k, s, d, length = (int(rng.integers(1, high)) for high in (4, 4, 3, 5 if axes == 3 else 8))
            extent = (k - 1) * d + 1
            spare = int(rng.integers(0, s)) if transposed else 0
            p, e = (int(v) for v in rng.integers(0, 3, 2))
            if padding == "VALID":
                p, e = 0, 0
            elif padding.startswith("SAME"):
                total = max(extent - s, 0) if transposed else max((-(-length // s) - 1) * s + extent - length, 0)
                p, e = (total // 2, total - total // 2) if padding == "SAME_UPPER" else (total - total // 2, total // 2)
            cells = s * (length - 1) + extent - p - e + spare if transposed else length
            if cells >= 1 and cells + p + e >= extent:
                break
        for values, value in zip(
            (kernel, strides, dilations, source, begin, end, extra), (k, s, d, cells, p, e, spare), strict=True
        ):
            values.append(value)
    correlation = naive.Correlation(
        tuple(source), tuple(kernel), tuple(strides), tuple(dilations), tuple(begin), tuple(end), groups
    )
    attributes: dict[str, Any] = {"strides": strides, "dilations": dilations, "groups": groups}
    if padding == "explicit":
        attributes |= {"pads_begin": begin, "pads_end": end}
    else:  # given, required and ignored
        attributes |= {"pads_begin": [9] * axes, "pads_end": [8] * axes, "auto_pad": padding}
    if transposed and rng.random() < 0.5:
        attributes["output_padding"] = extra
    batch, s_channels, d_channels = (
        int(rng.integers(1, 3)),
        groups * int(rng.integers(1, 3)),
        groups * int(rng.integers(1, 3)),
    )
    return Case(
        correlation,
        numbers(rng, batch, s_channels, *correlation.source),
        numbers(rng, d_channels, s_channels // groups, *kernel),
        numbers(rng, batch, d_channels, *correlation.out),
        attributes,
        extra,
    )


each_padding = pytest.mark.parametrize("padding", ["explicit", "VALID", "SAME_UPPER", "SAME_LOWER"])


def stated(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> tuple[dict[str, Any], list[np.ndarray]]:
    """A shape as an attribute, as an input, or as an input that overrules the attribute."""
    as_attribute, as_input = {name: list(shape)}, [np.array(shape, np.int32)]
    wrong = {name: [1] * len(shape)}
    return [(as_attribute, []), ({}, as_input), (wrong, as_input)][rng.integers(3)]


@each_padding
def test_convolution(padding: str, rng: np.random.Generator) -> None:
    for number in range(CASES):
        c = case(rng, padding, transposed=False)
        data, weights = str(rng.choice(["NCX", "NXC"])), str(rng.choice(["OIX", "XIO"]))
        attributes = c.attributes_in(data_format=data, weights_format=weights)
        message = f"case {number}: {c.correlation} {attributes}"
        x, dy = naive.relayout(c.x, "NCX", data), naive.relayout(c.dy, "NCX", data)
        w = naive.relayout(c.w, "OIX", weights)

        bias = [] if rng.random() < 0.5 else [numbers(rng, len(c.w))]
        got = evaluate("Convolution", attributes, [x, w, *bias])
        expected, dx, dw = c.products(loops)
        if bias:
            expected = expected + bias[0].reshape(-1, *[1] * (expected.ndim - 2))
        expected = naive.relayout(expected, "NCX", data)
        np.testing.assert_array_equal(got, expected.astype(f32), strict=True, err_msg=message)

        attribute, shape_input = stated(rng, "dst_shape", x.shape)
        got = evaluate("ConvolutionBackwardData", attributes | attribute, [dy, w, *shape_input])
        expected = naive.relayout(dx, "NCX", data)
        np.testing.assert_array_equal(got, expected.astype(f32), strict=True, err_msg=message)

        attribute, shape_input = stated(rng, "weights_shape", w.shape)
        got = evaluate("ConvolutionBackwardWeights", attributes | attribute, [x, dy, *shape_input])
        expected = naive.relayout(dw, "OIX", weights)
        np.testing.assert_array_equal(got, expected.astype(f32), strict=True, err_msg=message)


@each_padding
def test_conv_transpose(padding: str, rng: np.random.Generator) -> None:
    """The correlation's destination is the ConvTranspose's input, its source the output: D = I, S = O."""
    for number in range(CASES):
        c = case(rng, padding, transposed=True)
        data, weights = str(rng.choice(["NCX", "NXC"])), str(rng.choice(["IOX", "XOI", "OIX", "XIO"]))
        attributes = c.attributes_in(data_format=data)
        message = f"case {number}: {c.correlation} {attributes} {weights}"
        diff_dst, src = naive.relayout(c.x, "NCX", data), naive.relayout(c.dy, "NCX", data)
        w = naive.relayout(c.w, "IOX", weights)

        # without it, SAME takes a length that the forward makes with output_padding only for that of another forward
        extra = {"output_padding": c.output_padding} if padding.startswith("SAME") else {}
        got = evaluate("ConvTransposeBackwardData", attributes | extra | {"weights_format": weights}, [diff_dst, w])
        dx, _, dw = c.products(loops)
        expected = naive.relayout(dx, "NCX", data)
        np.testing.assert_array_equal(got, expected.astype(f32), strict=True, err_msg=message)

        expected = naive.relayout(dw, "IOX", weights).astype(f32)
        for op, shape_name, format_name in (
            ("ConvTransposeBackwardWeights", "weights_shape", "weights_format"),
            ("ConvTransposeBackpropFilters", "filter_shape", "filter_format"),
        ):
            attribute, shape_input = stated(rng, shape_name, w.shape)
            got = evaluate(op, attributes | attribute | {format_name: weights}, [src, diff_dst, *shape_input])
            np.testing.assert_array_equal(got, expected, strict=True, err_msg=message)


@pytest.mark.parametrize("transposed", [False, True])
def test_products_match_the_loops_and_are_adjoint(transposed: bool, rng: np.random.Generator) -> None:
    """<F(x, w), dy> = <x, backward data> = <w, backward weights>, in integers, hence exactly."""
    for number in range(CASES):
        c = case(rng, "explicit", transposed=transposed)
        y, dx, dw = c.products(correlation)
        for got, expected in zip((y, dx, dw), c.products(loops), strict=True):
            np.testing.assert_array_equal(got, expected, strict=True, err_msg=f"case {number}: {c.correlation}")
        assert (y * c.dy).sum() == (c.x * dx).sum() == (c.w * dw).sum()


def geometry(stride: int = 2, pad: int = 1, dilation: int = 1, groups: int = 1) -> Geometry:
    return Geometry((stride,), (dilation,), (pad,), groups)


@pytest.mark.parametrize(
    ("x", "w", "out", "geo", "y"),
    [
        (row(1, 2, 3, 4, 5), W, 3, geometry(), row(210, 432, 54)),
        (row(1, 2, 3, 4, 5), W, 1, geometry(1, 0, 2), row(531)),
        (row(1, 2, 3, 4, 5), row(1, 10, 100, 1000), 3, geometry(2, 1), row(3210, 5432, 54)),
        (row(1, 2, 3, 4, 5), row(1, 10, 100, 1000), 3, geometry(2, 2), row(2100, 4321, 543)),
        (row(0, 1, 2, 3, 4, 5), row(1), 2, geometry(3, 0), row(0, 3)),
        ([GROUPED_ROWS], oix(GROUPED_ROWS), 2, geometry(1, 0, 1, 2), [[[7, 10], [15, 22], [67, 78], [91, 106]]]),
    ],
)
def test_forward_examples(x, w, out: int, geo: Geometry, y) -> None:
    got = correlation.forward(np.array(x, np.float64), np.array(w, np.float64), (out,), geo)
    np.testing.assert_array_equal(got, y)


@pytest.mark.parametrize(
    ("length", "geo", "y"),
    [
        (3, geometry(), [10, 102, 20]),
        (4, geometry(), [10, 102, 20, 200]),  # output_padding 1: the new cell is computed
        (4, geometry(2, 0), [1, 10, 102, 20]),  # SAME_UPPER
        (5, geometry(2, 0), [1, 10, 102, 20, 200]),  # VALID
    ],
)
def test_transposed_forward_examples(length: int, geo: Geometry, y: list[float]) -> None:
    """ConvTranspose of [1, 2] is backward data."""
    got = correlation.backward_data(np.array(row(1, 2), np.float64), np.array(W, np.float64), (length,), geo)
    assert got.ravel().tolist() == y


def test_transposed_forward_example_with_groups() -> None:
    x, w = np.array([GROUPED_ROWS], np.float64), np.array(oix(GROUPED_ROWS), np.float64)
    got = correlation.backward_data(x, w, (2,), geometry(1, 0, 1, 2))
    np.testing.assert_array_equal(got, [[[10, 14], [14, 20], [74, 86], [86, 100]]])


def test_same_padding_of_both_directions_agrees_without_output_padding() -> None:
    """The forward rule of ConvTranspose and the rule of Convolution on its output, for every length it can make."""
    for stride in range(1, 6):
        for extent in range(1, 10):
            for upper in (True, False):
                pads = correlation.conv_transpose_same_pads(extent, stride, upper=upper)
                for length in range(1, 8):
                    out = stride * (length - 1) + extent - sum(pads)
                    if extent >= stride:
                        assert out == length * stride
                        assert correlation.conv_same_pads(out, extent, stride, upper=upper) == pads


def test_same_padding_of_a_transposed_convolutions_gradients() -> None:
    """output_padding asks for the forward rule; else the conv's, unless the input's length fits the forward's only."""
    for stride, extent, upper in product(range(1, 7), range(1, 10), (True, False)):
        check_same_padding(stride, extent, upper=upper)


def check_same_padding(stride: int, extent: int, *, upper: bool) -> None:
    forward = correlation.conv_transpose_same_pads(extent, stride, upper=upper)

    def pads(length: int, short: int | None, *, given: bool = False, infers: bool = False) -> tuple[int, int] | None:
        return correlation.conv_transpose_backward_same_pads(
            length, extent, stride, upper=upper, short=short, output_padding=given, infers_short=infers
        )

    for length in range(1, 16):
        conv = correlation.conv_same_pads(length, extent, stride, upper=upper)
        assert conv is not None
        by_forward, by_conv = (correlation.output_length(length, extent, stride, p) for p in (forward, conv))
        assert pads(length, None, given=True) == pads(length, by_conv, given=True) == forward
        assert pads(length, None, infers=True) == conv
        assert pads(length, by_conv) == conv
        assert pads(length, None) == (conv if conv == forward else None)
        if conv != forward:
            assert by_forward == by_conv - 1, "the input's length tells the rules apart"
            assert pads(length, by_forward) == forward


def test_same_padding_keeps_ceil_of_length_over_stride() -> None:
    for stride, extent, length in np.ndindex(6, 9, 12):
        pads = correlation.conv_same_pads(length + 1, extent + 1, stride + 1, upper=True)
        assert pads is not None
        assert correlation.output_length(length + 1, extent + 1, stride + 1, pads) == -(-(length + 1) // (stride + 1))
        assert 0 <= pads[1] - pads[0] <= 1
        assert correlation.conv_same_pads(length + 1, extent + 1, stride + 1, upper=False) == pads[::-1]


def test_same_padding_of_an_unknown_length() -> None:
    """A kernel of one cell needs none whatever the length is; any other waits for it."""
    assert correlation.conv_same_pads("N", 1, 3, upper=True) == (0, 0)
    assert correlation.conv_same_pads("N", 2, 3, upper=True) is None
    assert correlation.conv_same_pads(None, 3, 1, upper=False) is None


def test_pads_end_never_enters_an_index() -> None:
    """More zeros at the end than the last window needs change nothing."""
    shared = {"strides": [2], "dilations": [1], "pads_begin": [1], "data_format": "NCX", "weights_format": "OIX"}
    dy, w, x = (np.array(a, f32) for a in (row(1, 2, 3), W, row(1, 2, 3, 4, 5)))
    for end in (1, 2):
        attributes = shared | {"pads_end": [end]}
        dx = evaluate("ConvolutionBackwardData", attributes | {"dst_shape": [1, 1, 5]}, [dy, w])
        assert dx.ravel().tolist() == [10, 102, 20, 203, 30]
        dw = evaluate("ConvolutionBackwardWeights", attributes | {"weights_shape": [1, 1, 3]}, [x, dy])
        assert dw.ravel().tolist() == [16, 22, 10]


def test_padding_wider_than_the_kernel() -> None:
    """Destination cells that see zeros only pass nothing back."""
    attributes = {"strides": [1], "dilations": [1], "pads_begin": [3], "pads_end": [3], "data_format": "NCX"}
    dy, w = np.array(row(*range(1, 8)), f32), np.array([[[1]], [[10]]], f32)  # XIO
    dx = evaluate("ConvolutionBackwardData", attributes | {"dst_shape": [1, 1, 2]}, [dy, w])
    assert dx.ravel().tolist() == [34, 45]


EMPTY = {"strides": [1], "dilations": [1], "pads_begin": [0], "pads_end": [0], "data_format": "NCX"}


@pytest.mark.parametrize(
    ("op", "attributes", "shapes", "expected"),
    [
        (
            "ConvolutionBackwardData",
            {"weights_format": "OIX", "dst_shape": [0, 3, 5]},
            [(0, 2, 4), (2, 3, 2)],
            (0, 3, 5),
        ),
        (
            "ConvolutionBackwardData",
            {"weights_format": "OIX", "dst_shape": [1, 3, 5]},
            [(1, 0, 4), (0, 3, 2)],
            (1, 3, 5),
        ),
        (
            "ConvolutionBackwardWeights",
            {"weights_format": "OIX", "weights_shape": [2, 3, 2]},
            [(0, 3, 5), (0, 2, 4)],
            (2, 3, 2),
        ),
        ("ConvTransposeBackwardData", {"weights_format": "IOX"}, [(0, 3, 5), (2, 3, 2)], (0, 2, 4)),
        ("ConvTransposeBackwardData", {"weights_format": "IOX"}, [(1, 0, 5), (2, 0, 2)], (1, 2, 4)),
        (
            "ConvTransposeBackwardWeights",
            {"weights_format": "IOX", "weights_shape": [2, 3, 2]},
            [(0, 2, 4), (0, 3, 5)],
            (2, 3, 2),
        ),
        (
            "ConvTransposeBackpropFilters",
            {"filter_format": "OIX", "filter_shape": [3, 2, 2]},
            [(0, 2, 4), (0, 3, 5)],
            (3, 2, 2),
        ),
        ("Convolution", {"weights_format": "OIX"}, [(0, 3, 5), (2, 3, 2), (2,)], (0, 2, 4)),
        ("Convolution", {"weights_format": "OIX"}, [(1, 0, 5), (2, 0, 2)], (1, 2, 4)),
    ],
)
def test_empty_batches_and_channels_give_zeros(op: str, attributes, shapes, expected: tuple[int, ...]) -> None:
    got = evaluate(op, EMPTY | attributes, [np.ones(s, f32) for s in shapes])
    np.testing.assert_array_equal(got, np.zeros(expected, f32), strict=True)


@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
def test_a_convolution_without_channels_is_its_bias(data_format: str) -> None:
    src = naive.relayout(np.ones((2, 0, 5), f32), "NCX", data_format)
    attributes = EMPTY | {"data_format": data_format, "weights_format": "OIX", "pads_begin": [1]}
    got = evaluate("Convolution", attributes, [src, np.ones((3, 0, 2), f32), np.array([1, 2, 3], f32)])
    expected = np.broadcast_to(f32([[1], [2], [3]]), (2, 3, 5))
    np.testing.assert_array_equal(got, naive.relayout(expected, "NCX", data_format), strict=True)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_sums_are_rounded_once(dtype: str) -> None:
    """600 products of ones in one cell."""
    ones = np.ones((1, 1, 600), f32)
    attributes = EMPTY | {"weights_format": "OIX"}
    one_cell = np.ones((1, 1, 1), f32)
    dw = evaluate("ConvolutionBackwardWeights", attributes | {"weights_shape": [1, 1, 1]}, [ones, ones], dtype)
    assert_rounded_once(dw, [[[600]]], dtype)
    dx = evaluate("ConvTransposeBackwardData", EMPTY | {"weights_format": "IOX"}, [ones, ones], dtype)
    assert_rounded_once(dx, [[[600]]], dtype)
    y = evaluate("Convolution", attributes, [ones, ones, np.full(1, 0.25, f32)], dtype)
    assert_rounded_once(y, [[[600.25]]], dtype)
    attributes = attributes | {"dst_shape": [1, 600, 1]}
    dx = evaluate("ConvolutionBackwardData", attributes, [one_cell, ones.reshape(1, 600, 1)], dtype)
    assert_rounded_once(dx, np.ones((1, 600, 1)), dtype)
    assert_rounded_once(evaluate("BiasAddBackward", {"data_format": "NCX"}, [ones], dtype), [600], dtype)


@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
def test_bias_add_backward(data_format: str, rng: np.random.Generator) -> None:
    """Ranks 2 to 6."""
    for rank in range(2, 7):
        dy = numbers(rng, *(int(v) for v in rng.integers(1, 5, rank)))
        channel = 1 if data_format == "NCX" else rank - 1
        expected = [dy.take(c, axis=channel).sum() for c in range(dy.shape[channel])]
        got = evaluate("BiasAddBackward", {"data_format": data_format}, [dy])
        np.testing.assert_array_equal(got, f32(expected), strict=True)


def test_bias_of_an_empty_batch_is_zero() -> None:
    got = evaluate("BiasAddBackward", {}, [np.ones((0, 4, 2), f32)])
    np.testing.assert_array_equal(got, np.zeros(2, f32), strict=True)
