"""Depthwise convolutions whose kernels slide over planes where they lie: which ones, and that they are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnx_backprop.opset.core.op import Attributes
from onnx_backprop.opset.operators.registry import BY_NAME
from onnx_backprop.ort_ops.compiler.llvm import F16, F32
from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.gather import plan as gather_plan
from onnx_backprop.ort_ops.convolution.problem import correlation
from tests.ort_ops.planned import numbers
from tests.support import single_op
from tests.support.batch import calls_together
from tests.support.checks import evaluate

f32 = np.float32


def attributes(groups: int, **changes: Any) -> dict[str, Any]:
    plain = {"strides": [1, 1], "dilations": [1, 1], "pads_begin": [1, 1], "pads_end": [1, 1]}
    return plain | {"data_format": "NCX", "weights_format": "OIX", "groups": groups} | changes


# batch, channels, lengths, kernel, dilation along rows, pads at the beginning and at the end
CASES = [
    (2, 5, (7, 56), 3, 1, (1, 1), (1, 1)),
    (1, 3, (1, 1), 3, 1, (1, 1), (1, 1)),
    (1, 3, (1, 1), 5, 1, (4, 4), (4, 4)),
    (1, 2, (5, 16), 5, 1, (2, 2), (2, 2)),
    (2, 2, (9, 33), 3, 7, (0, 3), (2, 9)),
    (1, 2, (6, 4), 3, 1, (6, 20), (5, 30)),
    (1, 2, (300, 210), 3, 1, (1, 1), (1, 1)),  # more than a band
    (1, 2, (4, 60000), 5, 2, (2, 4), (2, 4)),  # bands along rows
]


def run_case(case: tuple[Any, ...], dtype: str, rng: np.random.Generator) -> None:
    """Forward and both gradients of small integers, whose sums are exact."""
    batch, channels, lengths, kernel, dilation, begin, end = case
    attrs = attributes(channels, dilations=[1, dilation], pads_begin=list(begin), pads_end=list(end))
    x, w = (
        rng.integers(-3, 4, shape).astype(f32) for shape in ((batch, channels, *lengths), (channels, 1, kernel, kernel))
    )
    bias = rng.integers(-3, 4, channels).astype(f32)
    y = evaluate("Convolution", attrs, [x, w, bias])
    dy = rng.integers(-3, 4, y.shape).astype(f32)
    calls = [
        ("Convolution", attrs, [x, w, bias]),
        ("ConvolutionBackwardData", attrs, [dy, w, np.array(x.shape, np.int32)]),
        ("ConvolutionBackwardWeights", attrs, [x, dy, np.array(w.shape, np.int32)]),
    ]
    for (op, _, inputs), (got,) in zip(calls, calls_together(calls, "native", dtype=dtype)(), strict=True):
        expected = evaluate(op, attrs, inputs, dtype).astype(f32)
        np.testing.assert_array_equal(got, expected, err_msg=f"{op} {case} {dtype}", strict=True)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("case", CASES)
def test_against_the_reference(rng, case, dtype: str) -> None:
    run_case(case, dtype, rng)


def slides(attrs: dict[str, Any], x: tuple[int, ...], w: tuple[int, ...], kind: int = F32) -> int:
    order = tuple(range(len(w)))
    y = evaluate("Convolution", attrs, [np.zeros(x, f32), np.zeros(w, f32)]).shape
    c = correlation(Attributes(BY_NAME["Convolution"], attrs), x, y, w, order, infers=True)
    plans = gather_plan.plan(c, kind), gather_plan.plan(c, kind, adjoint=True)
    words = {numbers(plan, par.Gather).stencil for plan in plans}
    assert len(words) == 1, "forward and data gradient"
    return words.pop()


def test_which_ones() -> None:
    assert slides(attributes(4), (1, 4, 9, 9), (4, 1, 3, 3)) == 3
    assert slides(attributes(4, dilations=[1, 3]), (1, 4, 9, 19), (4, 1, 5, 5), F32) == 5
    assert slides(attributes(4), (1, 4, 9, 9), (4, 1, 3, 3), F16) == 0
    assert slides(attributes(4, dilations=[2, 1]), (1, 4, 9, 9), (4, 1, 3, 3)) == 0
    assert slides(attributes(4, strides=[1, 2]), (1, 4, 9, 9), (4, 1, 3, 3)) == 0
    assert slides(attributes(4), (1, 4, 9, 9), (4, 1, 3, 5)) == 0
    assert slides(attributes(4), (1, 4, 19, 19), (4, 1, 7, 7)) == 0
    assert slides(attributes(4, data_format="NXC"), (1, 9, 9, 4), (4, 1, 3, 3)) == 0
    assert slides(attributes(2), (1, 4, 9, 9), (4, 2, 3, 3)) == 0


def slides_back(length: int, size: int, pad: int, **changes: Any) -> int:
    """The form by which the data gradient with a stride of 2 of 4 channels slides."""
    attrs = attributes(4, strides=[2, 2], pads_begin=[pad, pad], pads_end=[pad, pad], **changes)
    x, w = (1, 4, length, length), (4, 1, size, size)
    y = evaluate("Convolution", attrs, [np.zeros(x, f32), np.zeros(w, f32)]).shape
    c = correlation(Attributes(BY_NAME["Convolution"], attrs), x, y, w, (0, 1, 2, 3), infers=True)
    return numbers(gather_plan.plan(c, F32, adjoint=True), par.Gather).stencil


def test_which_ones_with_a_stride() -> None:
    assert slides_back(14, 3, 0) == 13
    assert slides_back(14, 3, 1) == 23
    assert slides_back(14, 5, 2) == 15
    assert slides_back(14, 5, 1) == 25
    assert slides_back(14, 7, 3) == 0
    assert slides_back(1, 5, 2) == 0
    assert slides_back(24, 3, 1, dilations=[2, 2]) == 0
    assert slides_back(24, 3, 1, dilations=[3, 3]) == 0


STRIDED = [(7, 1), (16, 33), (3, 70), (9, 14), (2, 16), (31, 15), (1, 12), (25, 130), (64, 62)]


@pytest.mark.parametrize(("size", "begin", "end"), [(3, 1, 1), (3, 0, 1), (3, 2, 0), (5, 2, 2), (5, 1, 2), (5, 4, 3)])
def test_data_gradients_with_a_stride(rng, size: int, begin: int, end: int) -> None:
    """Of small integers, whose sums are exact; a cell that is not finite stays with those that it reaches."""
    attrs = attributes(3, strides=[2, 2], pads_begin=[begin, begin], pads_end=[end, end])
    calls = []
    for lengths in STRIDED:
        if min(lengths) + begin + end < size:
            continue
        x, w = np.zeros((2, 3, *lengths), f32), rng.integers(1, 4, (3, 1, size, size)).astype(f32)
        dy = rng.integers(-3, 4, evaluate("Convolution", attrs, [x, w]).shape).astype(f32)
        dy[0, 1, -1, dy.shape[3] // 2] = np.inf
        calls.append(("ConvolutionBackwardData", attrs, [dy, w, np.array(x.shape, np.int32)]))
    for (op, _, inputs), (got,) in zip(calls, calls_together(calls, "native")(), strict=True):
        expected = evaluate(op, attrs, inputs).astype(f32)
        np.testing.assert_array_equal(got, expected, err_msg=f"{inputs[-1]}", strict=True)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_stays_with_the_cells_that_read_it(rng, value) -> None:
    """Channel c has such a value in column c of one row."""
    attrs = attributes(40)
    x, w = rng.standard_normal((1, 40, 6, 40), f32), rng.standard_normal((40, 1, 3, 3), f32)
    places = (0, np.arange(40), 3, np.arange(40))
    x[places] = 0
    touched = np.zeros_like(x)
    touched[places] = 1
    cells = evaluate("Convolution", attrs, [touched, np.ones_like(w)]) != 0
    expected = evaluate("Convolution", attrs, [x, w])
    x[places] = value
    got = single_op.run("Convolution", attrs, [x, w], kernels="native")
    assert not np.isfinite(got[cells]).any()
    np.testing.assert_allclose(got[~cells], expected[~cells], rtol=2e-6, atol=5e-6)
