"""Depthwise convolutions of channels-last data: read where they lie, cut into parts and blocks of channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import onnx_backprop as ob
from onnx_backprop.ort_ops.compiler import machine
from onnx_backprop.ort_ops.compiler.machine import VECTOR
from onnx_backprop.ort_ops.convolution import block_sizes, problem
from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.gather import plan as gather_plan
from tests.ort_ops.planned import Shapes, numbers
from tests.support import single_op
from tests.support.batch import calls_together, check_each
from tests.support.checks import DTYPES, evaluate

f32 = np.float32
WEIGHTS = "ConvolutionBackwardWeights"


def attributes(
    channels: int, axes: int, strides=1, dilations=1, begin=1, end=1, weights_format="OIX", data_format="NXC"
) -> dict[str, Any]:
    def each(value: int | tuple[int, ...]) -> list[int]:
        return list(value) if isinstance(value, tuple) else [value] * axes

    plain = {"strides": each(strides), "dilations": each(dilations), "pads_begin": each(begin), "pads_end": each(end)}
    return plain | {"data_format": data_format, "weights_format": weights_format, "groups": channels}


# batch, channels, lengths, kernel, other attributes
CASES = [
    (2, 5, (7, 9), (3, 3), {}),
    (3, 2 * VECTOR, (8, 6), (3, 3), {}),
    (2, 5 * VECTOR + 3, (6, 11), (3, 3), {"weights_format": "XIO"}),
    (1, VECTOR + 1, (1, 1), (3, 3), {}),
    (2, 5, (4, VECTOR + 2), (3, 3), {"begin": 0, "end": 0}),  # whole vectors along rows
    (2, 3, (4, 5), (7, 5), {"begin": (3, 2), "end": (3, 2)}),  # no column that all taps reach
    (2, 7, (5, 4), (3, 3), {"begin": (5, 9), "end": (4, 7)}),  # cells that no tap reaches
    (2, 33, (9, 8), (3, 3), {"strides": 2}),
    (1, 6, (13, 17), (3, 2), {"strides": (3, 2), "dilations": (2, 3), "begin": (0, 4), "end": (2, 0)}),
    (2, 4, (3, 20), (1, 1), {"begin": 0, "end": (0, 2)}),
    (1, 20, (12, 10), (5, 5), {"begin": 2, "end": 2, "dilations": 2}),
    (2, 9, (50,), (4,), {"strides": 3, "begin": 2, "end": 5}),
    (1, 18, (4, 5, 6), (3, 2, 3), {"begin": (1, 0, 1), "end": (1, 1, 2)}),
    (2, 3, (5, 4, 7), (3, 3, 3), {"strides": (1, 2, 2), "dilations": (2, 1, 1), "begin": 2, "end": 1}),
    (1, 5, (8, 6, 9), (2, 3, 2), {"strides": (3, 2, 1), "begin": (1, 0, 0), "end": (2, 1, 0)}),
    (1, 70, (40, 70), (3, 3), {}),  # several bands
    (1, 70 * VECTOR, (3, 4), (3, 3), {}),  # several blocks
    (1, 2, (2, 30000), (1, 5), {"begin": (0, 2), "end": (0, 2)}),  # bands along rows
]


def operands(case: tuple[Any, ...], rng: np.random.Generator) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Attributes, x, w and dy of small integers, whose sums are exact."""
    batch, channels, lengths, kernel, changes = case
    attrs = attributes(channels, len(lengths), **changes)
    shape = (channels, 1, *kernel) if attrs["weights_format"] == "OIX" else (*kernel, 1, channels)
    of_x = (batch, channels, *lengths) if attrs["data_format"] == "NCX" else (batch, *lengths, channels)
    x = rng.integers(-2, 3, of_x).astype(f32)
    w = rng.integers(-2, 3, shape).astype(f32)
    y = evaluate("Convolution", attrs, [x, w])
    return attrs, [x, w, rng.integers(-2, 3, y.shape).astype(f32)]


def calls(case: tuple[Any, ...], rng: np.random.Generator) -> list[tuple[str, dict[str, Any], list[np.ndarray]]]:
    """The operators on such operands."""
    attrs, (x, w, dy) = operands(case, rng)
    bias = rng.integers(-3, 4, case[1]).astype(f32)
    return [
        (WEIGHTS, attrs, [x, dy, np.array(w.shape, np.int32)]),
        ("ConvolutionBackwardData", attrs, [dy, w, np.array(x.shape, np.int32)]),
        ("Convolution", attrs, [x, w]),
        ("Convolution", attrs, [x, w, bias]),
    ]


def run_cases(
    cases: Sequence[tuple[Any, ...]], rng: np.random.Generator, dtypes: Sequence[str] = tuple(DTYPES)
) -> None:
    """All of them in one session for each type."""
    of_case = [calls(case, rng) for case in cases]
    labels = [f"{op} {case}" for case, several in zip(cases, of_case, strict=True) for op, *_ in several]
    given = [call for several in of_case for call in several]
    exact = [evaluate(*call) for call in given]

    def run(some: Sequence[int]) -> list[tuple[np.ndarray, ...]]:
        chosen = [given[n] for n in some]
        together = [calls_together(chosen, "native", dtype=dtype)() for dtype in dtypes]
        return [tuple(answers[0] for answers in of_types) for of_types in zip(*together, strict=True)]

    def check(n: int, answers: tuple[np.ndarray, ...]) -> None:
        for dtype, got in zip(dtypes, answers, strict=True):
            rounded = exact[n].astype(DTYPES[dtype]).astype(f32)
            np.testing.assert_array_equal(got, rounded, err_msg=f"{labels[n]} {dtype}", strict=True)

    check_each(range(len(given)), run, check)


def test_against_the_reference(rng) -> None:
    run_cases(CASES, rng)


def turned(case: tuple[Any, ...]) -> tuple[Any, ...]:
    """The case with NCX data, and channels for most lanes of a vector."""
    batch, channels, lengths, kernel, changes = case
    enough = channels if 4 * channels >= 3 * VECTOR else channels + VECTOR
    return batch, enough, lengths, kernel, changes | {"data_format": "NCX"}


def test_channels_that_are_turned_into_lanes(rng) -> None:
    run_cases([turned(case) for case in CASES], rng)


def few(case: tuple[Any, ...]) -> tuple[Any, ...]:
    """The case with NCX data, and too few channels for that."""
    batch, channels, lengths, kernel, changes = case
    return batch, min(channels, (3 * VECTOR - 1) // 4), lengths, kernel, changes | {"data_format": "NCX"}


def test_channels_too_few_for_lanes(rng) -> None:
    run_cases([few(case) for case in CASES], rng)


def test_which_channels_are_turned_into_lanes(rng) -> None:
    def is_turned(channels: int, lengths: tuple[int, int], **changes: Any) -> bool:
        case = (1, channels, lengths, (3, 3), {"data_format": "NCX"} | changes)
        attrs, (x, w, _) = operands(case, rng)
        return numbers(Shapes("Convolution", attrs, (x.shape, w.shape)).plan("f32"), par.Gather).as_cells

    assert is_turned(VECTOR, (9, VECTOR))
    assert not is_turned(VECTOR, (9, 2 * VECTOR)), "rows are long and dense"
    assert is_turned(VECTOR, (9, 2 * VECTOR), dilations=(2, 1)), "no small square kernel"
    assert is_turned(VECTOR, (9, 4 * VECTOR), strides=2)
    assert not is_turned(VECTOR // 2, (9, 9))


def answers(op: str, attrs: dict[str, Any], inputs: list[np.ndarray], threads: int) -> set[bytes]:
    """What several runs of a session give, as bytes."""
    model = single_op.model(op, attrs, inputs)
    session = ob.session(model, kernels="native", session_options=single_op.options(threads))
    feeds = single_op.feeds(op, inputs)
    return {np.asarray(session.run(None, feeds)[0]).tobytes() for _ in range(5)}


@pytest.mark.parametrize(("channels", "length"), [(16, 60), (200, 21)])
def test_threads_change_no_bit(rng, channels: int, length: int) -> None:
    attrs = attributes(channels, 2)
    x, dy = (rng.standard_normal((3, length, length, channels), f32) for _ in range(2))
    w = rng.standard_normal((channels, 1, 3, 3), f32)
    for op, inputs in (
        (WEIGHTS, [x, dy, np.array(w.shape, np.int32)]),
        ("ConvolutionBackwardData", [dy, w, np.array(x.shape, np.int32)]),
        ("Convolution", [x, w]),
    ):
        assert len(set().union(*(answers(op, attrs, inputs, threads) for threads in (1, 2, 3)))) == 1, op


def weights_plan(channels: int, batch: int = 8, length: int = 32) -> par.Cells:
    shape = (batch, length, length, channels)
    attrs = attributes(channels, 2) | {"weights_shape": (channels, 1, 3, 3)}
    return numbers(Shapes(WEIGHTS, attrs, (shape, shape, None)).plan("f32"), par.Cells)


def test_few_channels_make_work_for_several_threads() -> None:
    for channels in (4, 16, 32, 128):
        assert weights_plan(channels).parts >= 8, channels
    assert weights_plan(64 * VECTOR).columns >= 4 * VECTOR  # pieces of a cell are wide


def test_processors_do_not_decide_what_is_added_up_first(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = []
    for count in (1, 3, 32):
        monkeypatch.setattr(machine, "cores", lambda count=count: count)
        plan = weights_plan(40 * VECTOR)
        sums.append((plan.parts, plan.units, plan.band))
    assert sums[0] == sums[1] == sums[2]


@pytest.mark.parametrize("limit", [1, 3000, 20_000])
def test_rounds_and_small_bands(rng, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """However little may be shared, and whatever the bands."""
    monkeypatch.setattr(problem, "shared_limit", lambda *_: limit)
    monkeypatch.setattr(block_sizes, "CELLS_FLOATS", 8 * limit)
    run_cases((CASES[2], CASES[7], CASES[12], (4, 9 * VECTOR - 5, (19, 23), (3, 3), {})), rng, ("f32", "f16"))


def test_results_past_the_caches(rng, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no cache held anything: whole cells, with and without channels that fill no vector, and one thread more."""
    monkeypatch.setattr(gather_plan, "last_level_cache", lambda: 0)
    attrs, (x, w, _) = operands(CASES[1], rng)
    assert numbers(Shapes("Convolution", attrs, (x.shape, w.shape)).plan("f32"), par.Gather).streamed
    more = ((2, 4 * VECTOR, (5, 3), (3, 3), {}), (3, VECTOR, (4, 40), (5, 5), {}))
    run_cases((*CASES[:4], CASES[6], *more), rng, ("f32", "f16"))


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_meets_no_padding(value: float) -> None:
    """dy is not finite in one corner cell, whose taps at the top and on the left lie outside the image."""
    channels = VECTOR + 2
    attrs = attributes(channels, 2)
    x, dy = np.ones((1, 6, 7, channels), f32), np.ones((1, 6, 7, channels), f32)
    dy[0, 0, 0] = value
    got = single_op.run(WEIGHTS, attrs, [x, dy, np.array((channels, 1, 3, 3), np.int32)], kernels="native")
    inside = np.zeros((3, 3), bool)
    inside[1:, 1:] = True
    assert not np.isfinite(got[:, 0, inside]).any()
    assert np.isfinite(got[:, 0, ~inside]).all()


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_stays_with_the_cells_that_read_it(rng, value: float) -> None:
    channels = 2 * VECTOR + 3
    attrs = attributes(channels, 2)
    w = rng.standard_normal((channels, 1, 3, 3), f32)
    x = rng.standard_normal((2, 8, 9, channels), f32)
    places = (1, np.arange(channels) % 8, np.arange(channels) % 9, np.arange(channels))
    x[places] = 0
    for op, extra in (("Convolution", []), ("ConvolutionBackwardData", [np.array(x.shape, np.int32)])):
        touched = np.zeros_like(x)
        touched[places] = 1
        cells = evaluate(op, attrs, [touched, np.ones_like(w), *extra]) != 0
        expected = evaluate(op, attrs, [x, w, *extra])
        spoilt = x.copy()
        spoilt[places] = value
        got = single_op.run(op, attrs, [spoilt, w, *extra], kernels="native")
        assert not np.isfinite(got[cells]).any(), op
        np.testing.assert_allclose(got[~cells], expected[~cells], rtol=2e-6, atol=5e-6, err_msg=op)
