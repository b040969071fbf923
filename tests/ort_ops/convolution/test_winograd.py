"""Convolutions by 3×3 through Winograd's tiles: which ones, and that they are right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from onnx_backprop.opset.core.op import Attributes
from onnx_backprop.opset.operators.registry import BY_NAME
from onnx_backprop.ort_ops.convolution.problem import correlation
from onnx_backprop.ort_ops.convolution.winograd import tiles as winograd_tiles
from onnx_backprop.ort_ops.convolution.winograd.kernel import TileRows
from onnx_backprop.ort_ops.convolution.winograd.plan import suits_weights
from onnx_backprop.ort_ops.convolution.winograd.tiles import suits
from tests.ort_ops.planned import convolution, without_matrix_tiles
from tests.support import single_op
from tests.support.batch import calls_together
from tests.support.checks import DTYPES, assert_rounded, evaluate

f32 = np.float32
OIX = (0, 1, 2, 3)


@pytest.fixture(autouse=True)
def fused(monkeypatch) -> None:
    without_matrix_tiles(monkeypatch)


def attributes(**changes: Any) -> dict[str, Any]:
    ones = [1] * len(changes.get("pads_begin", [1, 1]))
    plain = {"strides": ones, "dilations": ones, "pads_begin": ones, "pads_end": ones}
    return plain | {"data_format": "NCX", "weights_format": "OIX"} | changes


ERRORS = {2: 0.0, 4: 5e-6}  # of the largest entry, by the cells of a tile; small integers are exact in those of 2×2


@pytest.fixture(params=ERRORS)
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """All calls are made with such tiles."""
    monkeypatch.setattr(winograd_tiles, "_large_tiles_pay", lambda *_: request.param == 4)
    return request.param


def sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The same, one after the other."""
    for size in ERRORS:
        monkeypatch.setattr(winograd_tiles, "_large_tiles_pay", lambda *_, size=size: size == 4)
        yield size


@pytest.fixture(autouse=True)
def few_tiles_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small images are faster without, and quicker to test."""
    monkeypatch.setattr(winograd_tiles, "MIN_WORK", 0)
    monkeypatch.setattr(winograd_tiles, "MOST_CHANNELS", 1e9)


# batch, groups, channels of source and destination per group, lengths, pads
CASES = [
    (3, 1, 40, 150, (20, 6), (1, 1)),
    (1, 1, 16, 16, (2, 2), (1, 1)),
    (2, 1, 17, 30, (9, 13), (1, 1)),
    (3, 1, 64, 40, (8, 8), (1, 1)),
    (2, 1, 20, 33, (33, 70), (0, 0)),
    (1, 1, 16, 16, (1, 1), (1, 1)),
    (1, 1, 16, 16, (1, 3), (3, 4)),
    (2, 2, 16, 29, (5, 40), (2, 0)),
    (2, 3, 19, 16, (6, 7), (0, 5)),
    (5, 1, 130, 25, (7, 4), (1, 2)),
    (1, 1, 16, 24, (3, 300), (1, 1)),
    (8, 1, 16, 24, (6, 70), (1, 1)),  # items that write all of their scratch
]
# and taps along z, if there is such an axis, dilations, pads at the ends
WIDER = [
    (2, 1, 16, 33, (17, 30), (2, 2), 1, (2, 2), (2, 2)),
    (3, 1, 20, 17, (19, 13), (3, 2), 1, (2, 3), (1, 5)),
    (1, 2, 16, 16, (4, 40), (0, 1), 1, (1, 4), (4, 0)),
    (2, 1, 16, 30, (7, 5), (6, 1), 1, (5, 1), (3, 2)),
    (1, 1, 70, 18, (3, 2), (1, 9), 1, (4, 7), (7, 6)),
    (2, 1, 16, 19, (5, 9, 14), (1, 1, 1), 3, (1, 1, 1), (1, 1, 1)),
    (1, 2, 17, 16, (4, 33, 7), (0, 0, 2), 3, (1, 1, 1), (0, 2, 0)),
    (3, 1, 16, 30, (6, 5, 8), (2, 0, 1), 2, (3, 2, 1), (1, 3, 1)),
    (2, 1, 40, 16, (2, 6, 5), (3, 2, 3), 4, (1, 1, 3), (2, 2, 3)),
    (2, 1, 18, 16, (3, 6, 20), (0, 1, 1), 1, (1, 1, 1), (0, 1, 1)),
    (2, 1, 150, 130, (3, 33, 9), (1, 1, 1), 3, (1, 1, 1), (1, 1, 1)),
]


@pytest.mark.parametrize(("batch", "groups", "s", "d", "lengths", "pads"), CASES)
def test_against_the_reference(rng, monkeypatch, batch: int, groups: int, s: int, d: int, lengths, pads) -> None:
    given = {"groups": groups, "pads_begin": pads, "pads_end": pads}
    compare(rng, sizes(monkeypatch), (batch, groups, s, d), lengths, [3, 3], **given)


@pytest.mark.parametrize(("batch", "groups", "s", "d", "lengths", "pads", "taps", "dilations", "pads_end"), WIDER)
def test_slices_and_phases(
    rng, monkeypatch, batch: int, groups: int, s: int, d: int, lengths, pads, taps: int, dilations, pads_end
) -> None:
    """Taps along z; dilated rows and columns, whose phases differ in length and pads."""
    given = {"groups": groups, "pads_begin": pads, "pads_end": pads_end, "dilations": dilations}
    compare(rng, sizes(monkeypatch), (batch, groups, s, d), lengths, [taps, 3, 3][-len(lengths) :], **given)


def compare(rng, sizes: Iterable[int], channels: tuple[int, ...], lengths, kernel: list[int], **changes: Any) -> None:
    """Numbers that are exact in every type, and their sums in float32; the answer is rounded once."""
    batch, groups, s, d = channels
    shapes = (batch, groups * s, *lengths), (groups * d, s, *kernel)
    x, w = (rng.integers(-3, 4, shape).astype(f32) for shape in shapes)
    attrs = attributes(**{name: list(v) if isinstance(v, tuple) else v for name, v in changes.items()})
    y = evaluate("Convolution", attrs, [x, w])
    bound = Attributes(BY_NAME["Convolution"], attrs)
    order = correlation(bound, x.shape, y.shape, w.shape, tuple(range(w.ndim)), infers=True)
    assert suits(order)
    assert suits_weights(order)
    bias = rng.integers(-9, 10, groups * d).astype(f32)
    dy = rng.integers(-3, 4, y.shape).astype(f32)
    transposed = {**attrs, "weights_format": "IOX"}
    calls: list[tuple[str, dict[str, Any], list[np.ndarray | None]]] = [
        ("Convolution", attrs, [x, w]),
        ("Convolution", attrs, [x, w, bias]),
        ("ConvolutionBackwardData", attrs | {"dst_shape": list(x.shape)}, [dy, w]),
        ("ConvTransposeBackwardData", transposed, [x, w]),
        ("ConvolutionBackwardWeights", attrs | {"weights_shape": list(w.shape)}, [x, dy]),
        (
            "ConvolutionBackwardWeights",
            attrs | {"weights_format": "XIO"},
            [x, dy, np.array([*kernel, s, groups * d], np.int32)],
        ),
        ("ConvTransposeBackwardWeights", transposed | {"weights_shape": list(w.shape)}, [dy, x]),
    ]
    exact = [y, *(evaluate(op, given, inputs) for op, given, inputs in calls[1:])]
    assert max(np.abs(answer).max() for answer in exact) < 2**24
    for size in sizes:
        for dtype in DTYPES:
            answers = calls_together(calls, "native", dtype=dtype)()
            for (op, given, _), (got,), expected in zip(calls, answers, exact, strict=True):
                rounded = expected.astype(DTYPES[dtype]).astype(f32)
                assert_rounded(got, rounded, dtype, error=ERRORS[size], message=f"{op} {given} {size} {dtype}")


def test_rounding_errors_stay_those_of_a_sum(rng, size: int) -> None:
    """Against float64: a few units in the last place of the largest entry."""
    allowed = {2: 1e-6, 4: 4e-6}[size]
    x, w = rng.standard_normal((2, 256, 16, 16), f32), rng.standard_normal((64, 256, 3, 3), f32)
    got = single_op.run("Convolution", attributes(), [x, w], kernels="native")
    exact = evaluate("Convolution", attributes(), [x, w])
    assert np.abs(got - exact).max() < allowed * np.abs(exact).max()
    attrs = attributes(weights_shape=[64, 256, 3, 3])
    got = single_op.run("ConvolutionBackwardWeights", attrs, [x, exact], kernels="native")
    exact = evaluate("ConvolutionBackwardWeights", attrs, [x, exact])
    assert np.abs(got - exact).max() < allowed * np.abs(exact).max()


@pytest.mark.parametrize(("batch", "length", "density"), [(4, 4, 0.1), (4, 7, 0.03), (8, 16, 0.005)])
def test_gradients_of_channels_that_never_meet_are_zero(
    rng, size: int, batch: int, length: int, density: float
) -> None:
    """As behind Relu, of images that are zero almost everywhere: AdamW would make whole steps of rounding errors."""
    x, dy = (rng.standard_normal((batch, n, length, length), f32) for n in (40, 50))
    x *= rng.random(x.shape) < density
    dy *= rng.random(dy.shape) < 0.3
    attrs = attributes(weights_shape=[50, 40, 3, 3])
    got = single_op.run("ConvolutionBackwardWeights", attrs, [x, dy], kernels="native")
    exact = evaluate("ConvolutionBackwardWeights", attrs, [x, dy])
    met = evaluate("ConvolutionBackwardWeights", attrs, [np.abs(x), np.abs(dy)]) > 0
    assert 50 < (~met).sum() < met.size - 50
    assert not got[~met].any()
    assert np.abs(got - exact).max() < 4e-6 * np.abs(exact).max()
    assert (got[met] != 0).mean() > 0.999


def test_what_is_not_finite_stays(rng, size: int) -> None:
    """Beside it are no zeros that were not there."""
    x, dy = rng.standard_normal((2, 16, 8, 8), f32), rng.standard_normal((2, 16, 8, 8), f32)
    x[0, 3, 4, 4] = np.inf
    got = single_op.run(
        "ConvolutionBackwardWeights", attributes(weights_shape=[16, 16, 3, 3]), [x, dy], kernels="native"
    )
    assert not np.isfinite(got[:, 3]).all(axis=(1, 2)).any()
    assert (got != 0).all()


def test_threads_change_nothing(rng, size: int) -> None:
    """Parts and bands of several sizes; the same bits on one thread and on two."""
    calls: list[tuple[str, dict[str, Any], list[np.ndarray | None]]] = []
    for batch, s, d, lengths, dilation in (
        (4, 20, 40, (17, 30), 1),
        (2, 200, 150, (12, 9), 1),
        (1, 16, 16, (60, 60), 1),
        (2, 33, 40, (31, 50), 3),
        (2, 20, 24, (7, 30, 20), 1),
    ):
        x, dy = (rng.standard_normal((batch, c, *lengths), f32) for c in (s, d))
        w = rng.standard_normal((d, s, *[3] * len(lengths)), f32)
        same = [dilation] * len(lengths)
        given = attributes(pads_begin=same, pads_end=same, dilations=same)
        calls += [
            ("Convolution", given, [x, w]),
            ("ConvolutionBackwardData", given | {"dst_shape": list(x.shape)}, [dy, w]),
            ("ConvolutionBackwardWeights", given | {"weights_shape": list(w.shape)}, [x, dy]),
        ]
    one, two = (calls_together(calls, "native", threads=threads) for threads in (1, 2))
    for (op, attrs, inputs), *answers in zip(calls, one(), two(), two(), strict=True):
        assert len({got.tobytes() for (got,) in answers}) == 1, (op, attrs, [i.shape for i in inputs if i is not None])


@pytest.mark.parametrize(
    ("changes", "weights"),
    [
        ({"strides": [2, 1]}, (16, 16, 3, 3)),
        ({"strides": [2, 2]}, (16, 16, 4, 4)),
        ({}, (16, 16, 3, 5)),
        ({}, (15, 16, 3, 3)),
        ({}, (16, 15, 3, 3)),
        ({"data_format": "NXC"}, (16, 16, 3, 3)),
        ({"strides": [2, 1, 1], "pads_begin": [0, 1, 1], "pads_end": [0, 1, 1]}, (16, 16, 1, 3, 3)),
    ],
)
def test_others_are_sums_over_taps(rng, changes, weights) -> None:
    attrs = attributes(**changes)
    lengths = (9, 8, 7)[: len(weights) - 2]
    shape = (1, *lengths, weights[1]) if attrs["data_format"] == "NXC" else (1, weights[1], *lengths)
    x, w = rng.integers(-3, 4, shape).astype(f32), rng.integers(-3, 4, weights).astype(f32)
    expected = evaluate("Convolution", attrs, [x, w])
    bound = Attributes(BY_NAME["Convolution"], attrs)
    order = tuple(range(len(weights)))
    assert not suits(correlation(bound, x.shape, expected.shape, w.shape, order, infers=True))
    got = single_op.run("Convolution", attrs, [x, w], kernels="native")
    np.testing.assert_array_equal(got, expected, strict=True)


@pytest.mark.parametrize(
    ("batch", "channels", "length", "expected"),
    [(2, 64, 16, (False, False)), (2, 64, 32, (True, True)), (8, 256, 4, (False, True)), (8, 512, 7, (False, True))],
)
def test_images_of_few_tiles(
    monkeypatch: pytest.MonkeyPatch, batch: int, channels: int, length: int, expected: tuple[bool, bool]
) -> None:
    monkeypatch.undo()
    without_matrix_tiles(monkeypatch)
    x, w = (batch, channels, length, length), (channels, channels, 3, 3)
    order = correlation(Attributes(BY_NAME["Convolution"], attributes()), x, x, w, OIX, infers=True)
    assert (suits(order), suits_weights(order)) == expected


@pytest.mark.parametrize(
    ("length", "expected"),
    [(64, (4, 4)), (16, (4, 4)), (14, (2, 2)), (12, (4, 4)), (8, (2, 4)), (7, (2, 4)), (6, (2, 2))],
)
@pytest.mark.parametrize("batch", [1, 8])
def test_which_tiles(batch: int, length: int, expected: tuple[int, int]) -> None:
    """Large ones for large images without many cells beyond their ends, and not by the batch."""
    x, w = (batch, 32, length, length), (32, 32, 3, 3)
    order = correlation(Attributes(BY_NAME["Convolution"], attributes()), x, x, w, OIX, infers=True)
    assert (winograd_tiles.size_of(order), winograd_tiles.weights_size_of(order)) == expected


def test_phases_without_a_cell_count_for_nothing() -> None:
    """Dilations beyond the image: tiles would be computed of some 60,000 phases, of which 36 have a cell."""
    call = convolution("Convolution", 1, (512, 512), (6, 6), (3, 3), dilations=(250, 250))
    assert not isinstance(call.plan("f32").parameters, TileRows)
    closer = convolution("Convolution", 1, (512, 512), (6, 6), (3, 3), dilations=(6, 6), pads=(6, 6))
    assert isinstance(closer.plan("f32").parameters, TileRows)
