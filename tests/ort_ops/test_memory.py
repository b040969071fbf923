"""Memory that a native kernel takes besides its tensors: a tenth of them and a fixed scratch, however many threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import pytest

import onnx_backprop as ob
from benchmarks.cases import CONVOLUTIONS, INTERPOLATIONS, Convolution, Interpolation
from onnx_backprop.ort_ops.compiler import machine
from onnx_backprop.ort_ops.convolution import problem
from onnx_backprop.ort_ops.convolution.winograd import plan as winograd_plan
from onnx_backprop.ort_ops.convolution.winograd import tiles as winograd_tiles
from onnx_backprop.ort_ops.convolution.winograd import weights as winograd_weights
from onnx_backprop.ort_ops.layers import max_pool_backward
from onnx_backprop.ort_ops.runtime import bridge
from onnx_backprop.ort_ops.runtime.scratch import block_bytes
from tests.declarations.calls import Call
from tests.declarations.registry import DECLARED, random_call
from tests.ort_ops.planned import (
    CONV_OPS,
    Shapes,
    convolution,
    pool,
    random_convolution,
    random_pool,
    to_data,
    without_matrix_tiles,
)
from tests.support import checks, single_op
from tests.support.batch import calls_together, check_each, switched
from tests.support.checks import assert_rounded, evaluate

FIXED = 9 << 19  # 4.5 MiB per thread and once more for the call: a block of 4 MiB, and tables
PROCESSORS = (1, 2, 8, 32)
DTYPES = ("f32", "f16")


def allowed(tensor_bytes: int, threads: int) -> float:
    return tensor_bytes / 10 + FIXED * (threads + 1)


def require_little(shapes: Shapes, processors: int) -> None:
    """Whatever the element type, with as many threads as processors."""
    for dtype in DTYPES:
        plan, tensors = shapes.plan(dtype), shapes.tensor_bytes(dtype)
        extra = plan.extra_bytes(processors)
        assert extra <= allowed(tensors, processors), (
            f"{shapes} {dtype}, {processors} threads: {extra} bytes beside {tensors}; shared {plan.shared}, "
            f"per thread {plan.per_thread}, tables {plan.words.nbytes}"
        )


@pytest.fixture(autouse=True)
def few_tiles_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small images are faster without, and quicker to test."""
    monkeypatch.setattr(winograd_tiles, "MIN_WORK", 0)
    monkeypatch.setattr(winograd_tiles, "MOST_CHANNELS", 1e9)


ERRORS = {2: 0.0, 4: 5e-6}  # of the largest entry, by the cells of Winograd's tiles


@pytest.fixture(params=ERRORS)
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Whatever Winograd's tiles serve is served by such ones."""
    monkeypatch.setattr(winograd_tiles, "_large_tiles_pay", lambda *_: request.param == 4)
    return request.param


@pytest.fixture(params=PROCESSORS)
def processors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Plans are made for so many."""
    monkeypatch.setattr(machine, "cores", lambda: request.param)
    assert machine.processors() == request.param
    return request.param


def of_table(case: Convolution) -> Iterator[Shapes]:
    """Both gradients and the forward operator, both layouts."""
    axes, x, y = len(case.lengths), case.x_shape, case.y_shape
    source, destination = (y, x) if case.transposed else (x, y)
    ops = [op for op in CONV_OPS if op.startswith("ConvTranspose") == case.transposed]
    for op, data_format in product(ops, ("NCX", "NXC")):
        yield convolution(
            op,
            case.batch,
            (source[1], destination[1]),
            destination[2:],
            (case.kernel,) * axes,
            strides=(case.stride,) * axes,
            pads=(case.pad,) * axes,
            dilations=(case.dilation,) * axes,
            groups=case.groups,
            data_format=data_format,
            lengths=source[2:],
        )


def test_shapes_of_the_benchmarks(processors: int) -> None:
    for case in CONVOLUTIONS:
        for shapes in of_table(case):
            require_little(shapes, processors)


# batch, channels of source and destination, lengths, kernel: weights that outweigh the images
LARGE = [
    (1, (512, 512), (7, 7), (3, 3)),
    (8, (512, 512), (7, 7), (3, 3)),
    (1, (512, 512), (14, 14), (3, 3)),
    (1, (1024, 1024), (1, 1), (3, 3)),
    (1, (4096, 4096), (1, 1), (1, 1)),
    (32, (4096, 4096), (1, 1), (1, 1)),
    (1, (512, 4096), (1, 1), (7, 7)),
    (1, (4096, 1000), (7, 7), (1, 1)),
    (1, (2048, 512), (3, 3), (5, 5)),
    (1, (256, 256), (4, 4, 4), (3, 3, 3)),
    (1, (1024, 1024), (100,), (9,)),
    (1, (64, 64), (1 << 20,), (7,)),
    (1, (1, 1), (1 << 24,), (101,)),
    (1, (64, 64), (1024, 1024), (3, 3)),
    (1, (256, 256), (512, 512), (3, 3)),
    (1, (3, 64), (4096, 4096), (7, 7)),
    (2, (16, 32), (128, 128, 64), (3, 3, 3)),
    (1, (1024, 16), (64, 64), (3, 3)),
    (1, (16, 1024), (64, 64), (3, 3)),
    (1, (256, 64), (8, 64, 64), (3, 3, 3)),
]


@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize("groups", [1, 4, "depthwise"])
def test_large_weights_and_large_images(processors: int, data_format: str, groups: int | str) -> None:
    for (batch, channels, outs, kernel), op in product(LARGE, CONV_OPS):
        cut, both = (groups, channels) if isinstance(groups, int) else (channels[0], (channels[0],) * 2)
        if any(c % cut for c in both):
            continue
        for stride, dilation in ((1, 1), (2, 1), (1, 8)):
            pads = [k // 2 * dilation if out > 1 else 0 for k, out in zip(kernel, outs, strict=True)]
            shapes = convolution(
                op,
                batch,
                both,
                outs,
                kernel,
                strides=(stride,) * len(outs),
                dilations=(dilation,) * len(outs),
                pads=pads,
                groups=cut,
                data_format=data_format,
            )
            require_little(shapes, processors)


def test_random_convolutions(processors: int) -> None:
    """Any geometry, up to two gigabytes."""
    chosen = [random_convolution(np.random.default_rng([7, seed])) for seed in range(300)]
    for shapes in chosen:
        require_little(shapes, processors)


# ----- what is measured is what plans say ------


def measured(calls: Sequence[tuple[Call, str]], threads: int) -> list[int]:
    """Bytes of scratch that a run of each call in its type takes at most; they share a session."""
    models = [single_op.model(call.op, call.attributes, call.inputs, dtype=dtype) for call, dtype in calls]
    session = ob.session(switched(models), kernels="native", session_options=single_op.options(threads))
    fed = {f"{n}/{k}": v for n, (call, _) in enumerate(calls) for k, v in single_op.feeds(call.op, call.inputs).items()}
    taken = {value.name for value in session.get_inputs()}
    fed = {name: array for name, array in fed.items() if name in taken}
    off, peaks = {f"{n}/on": np.array(False) for n in range(len(calls))}, []
    peak = bridge._runtime_word("peak")
    for one in off:
        peak.value = bridge.scratch_in_use()
        session.run(None, fed | off | {one: np.array(True)})
        peaks.append(peak.value)
    return peaks


def compare(calls: Sequence[Call], dtypes: Sequence[str], *, error: float = 0.0) -> None:
    """The native kernels beside the reference, of numbers that are exact in every type, and so are their sums."""

    def run(some: Sequence[Call]) -> list[tuple[list[np.ndarray], ...]]:
        given = [(call.op, call.attributes, call.inputs) for call in some]
        return list(zip(*(calls_together(given, "native", dtype=dtype)() for dtype in dtypes), strict=True))

    def check(call: Call, answers: tuple[list[np.ndarray], ...]) -> None:
        exact = evaluate(call.op, call.attributes, call.inputs)
        for dtype, (got, *_) in zip(dtypes, answers, strict=True):
            assert_rounded(
                got, exact.astype(checks.DTYPES[dtype]).astype(np.float32), dtype, error=error, message=dtype
            )

    check_each(calls, run, check)


def planned(call: Call) -> Shapes:
    return Shapes(call.op, call.attributes, tuple(None if a is None else a.shape for a in call.inputs))


def whole(shapes: Shapes) -> Call:
    """Numbers that are exact in every type, and so are their sums."""
    rng = np.random.default_rng(sum(sum(shape) for shape in shapes.inputs if shape))
    arrays = [None if s is None else rng.integers(-2, 3, s).astype(np.float32) for s in shapes.inputs]
    return Call(shapes.op, dict(shapes.attributes), arrays, 0)


MEASURED = [
    convolution(op, batch, channels, outs, kernel, strides=strides, pads=pads, groups=groups, data_format=data_format)
    for batch, channels, outs, kernel, strides, pads, groups in (
        (1, (512, 256), (7, 7), (3, 3), (1, 1), (1, 1), 1),
        (1, (1536, 1024), (1, 1), (1, 1), (1, 1), (0, 0), 1),
        (2, (64, 64), (28, 28), (3, 3), (2, 2), (1, 1), 1),
        (2, (256, 256), (5, 5), (5, 5), (1, 1), (2, 2), 2),
        (2, (64, 64), (28, 28), (3, 3), (1, 1), (1, 1), 64),
        (1, (2, 2), (1 << 18,), (3,), (1,), (1,), 2),
        (1, (16, 24), (12, 12, 12), (3, 3, 3), (1, 1, 1), (1, 1, 1), 1),
    )
    for op in CONV_OPS[:5]
    for data_format in ("NCX", "NXC")
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_convolutions_take_what_their_plans_say(dtype: str) -> None:
    calls = [(whole(shapes), dtype) for shapes in MEASURED]
    peaks = zip(*(measured(calls, threads) for threads in (1, 2, 8)), strict=True)
    for shapes, (one, *others) in zip(MEASURED, peaks, strict=True):
        plan = shapes.plan(dtype)
        shared, per_thread = block_bytes(plan.shared), block_bytes(plan.per_thread)
        assert one == shared + per_thread, shapes
        for threads, more in zip((2, 8), others, strict=True):
            assert one <= more <= shared + threads * per_thread, (shapes, threads)


def test_random_pools() -> None:
    """A thread's scratch alone; how many there are changes little."""
    for seed in range(400):
        for threads in PROCESSORS:
            require_little(random_pool(np.random.default_rng([9, seed])), threads)


# rows and channels: as many as make a round, and more
@pytest.mark.parametrize(("data_format", "shape"), [("NCX", (2, 1_200_000, 1)), ("NXC", (3, 600_000)), ("NXC", (5, 7))])
def test_the_bias_takes_what_its_plan_says(data_format: str, shape: tuple[int, ...]) -> None:
    shapes = Shapes("BiasAddBackward", {"data_format": data_format}, (shape,))
    call = whole(shapes)
    for threads in (1, 2, 8):
        peaks = measured([(call, dtype) for dtype in DTYPES], threads)
        assert peaks == [block_bytes(shapes.plan(dtype).shared) for dtype in DTYPES], threads
    require_little(shapes, 1)
    compare([call], DTYPES)


def norm(rows: int, channels: int) -> Shapes:
    attributes = {"epsilon": 1e-5, "data_format": "NXC"}
    return Shapes("BatchNormTrainingBackward", attributes, ((rows, channels),) * 2)


def test_norms_over_rows_of_channels() -> None:
    """Sums of few rows, of many, of few channels and of very many."""
    for rows in (1, 3, 127, 128, 200, 256, 1000, 4096, 100_000, 1 << 24):
        for channels in (1, 2, 3, 17, 64, 512, 513, 1000, 2048, 2049, 5000, 20_000, 65_536, 100_000, 1_000_000):
            for threads in PROCESSORS:
                require_little(norm(rows, channels), threads)


# in blocks; in parts; both
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_take_what_their_plans_say(dtype: str) -> None:
    """In blocks; in parts; both."""
    norms = [norm(3, 9000), norm(5000, 63), norm(1200, 2300)]
    calls = [(whole(shapes), dtype) for shapes in norms]
    peaks = zip(*(measured(calls, threads) for threads in (1, 2, 8)), strict=True)
    for shapes, (taken, *others) in zip(norms, peaks, strict=True):
        plan = shapes.plan(dtype)
        one = block_bytes(plan.shared) + block_bytes(plan.per_thread)
        assert taken == one, shapes
        for threads, more in zip((2, 8), others, strict=True):
            assert one <= more <= one + (threads - 1) * block_bytes(plan.per_thread), (shapes, threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_norms_take_what_their_plans_say(dtype: str) -> None:
    """Channels of NCX take nothing, rows a block for every thread."""
    norms = []
    for data_format, shape in (("NCX", (2, 300, 40)), ("NCX", (9, 5000)), ("NXC", (7, 5000)), ("NXC", (900, 3))):
        attributes = {"epsilon": 0.5, "momentum": 0.75, "data_format": data_format}
        channels = shape[1 if data_format == "NCX" else -1]
        norms.append(Shapes("BatchNormForwardTraining", attributes, (shape, (channels,), (channels,))))
    calls = [(whole(shapes), dtype) for shapes in norms]
    for threads in (1, 2):
        for shapes, taken in zip(norms, measured(calls, threads), strict=True):
            per_thread = shapes.plan(dtype).per_thread
            assert (per_thread > 0) == (len(shapes.inputs[0] or ()) == 2)
            one = block_bytes(per_thread) if per_thread else 0
            assert one <= taken <= threads * one, (shapes, threads)


def resize(case: Interpolation) -> Call:
    """Of the benchmark, by the operators of the spec or, cubic, by ONNX's."""
    x, dy = (
        np.zeros(to_data(s, "NXC" if case.channels_last else "NCX"), np.float32) for s in (case.x_shape, case.y_shape)
    )
    if case.mode == "cubic":
        axes = [1, 2] if case.channels_last else [2, 3]
        return Call("ResizeGrad", {"mode": "cubic", "axes": axes}, [dy, x, None, None, np.array(case.outs)], 0)
    attributes = {"mode": case.mode, "sizes": case.outs, "data_format": "NXC" if case.channels_last else "NCX"}
    return Call("InterpolateBackward", attributes, [x, dy], 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_interpolations_of_the_benchmarks(dtype: str) -> None:
    """One thread takes one block, so as many threads take as many; the tables are those of a plan."""
    calls = [(resize(case), dtype) for case in INTERPOLATIONS]
    for case, taken in zip(INTERPOLATIONS, measured(calls, 1), strict=True):
        assert 0 < taken <= block_bytes(1), case
    if dtype == "f32":
        for case, (call, _), taken in zip(INTERPOLATIONS, calls, measured(calls, 2), strict=True):
            assert taken <= 2 * block_bytes(1), case
            assert case.mode == "cubic" or planned(call).plan("f32").words.nbytes < FIXED - block_bytes(1), case


def test_no_kernel_takes_more_than_a_block_for_each_thread_of_a_small_call() -> None:
    """All operators, and that nothing stays in use behind a call."""
    taken = {}
    drawn = [random_call(np.random.default_rng([8, seed]), op) for seed, op in enumerate(sorted(DECLARED) * 5)]
    calls = [(call, DTYPES[seed % 2]) for seed, call in enumerate(drawn)]
    for threads in (1, 2):
        for (call, _), extra in zip(calls, measured(calls, threads), strict=True):
            assert extra <= (threads + 1) * block_bytes(1), (call, threads)
            taken[call.op] = max(taken.get(call.op, 0), extra)
    assert {op: extra > 0 for op, extra in taken.items()} == {op: d.workspace for op, d in DECLARED.items()}
    assert bridge.scratch_in_use() == 0


# ----- what does not fit is done in rounds ------


@pytest.mark.parametrize(("limit", "taps"), [(40, 1 << 16), (1 << 30, 2), (700, 5)])
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
def test_pools_in_small_bands(monkeypatch: pytest.MonkeyPatch, data_format: str, limit: int, taps: int) -> None:
    """However few sums and taps fit: windows over each other and side by side, of the whole image, long rows."""
    monkeypatch.setattr(max_pool_backward, "MAX_HELD", limit)
    monkeypatch.setattr(max_pool_backward, "MAX_LISTED", taps)
    pools = (
        (2, 3, (9000,), (3,), (2,), (1,)),
        (1, 150, (40,), (5,), (1,), (2,)),
        (2, 20, (11, 13), (3, 2), (2, 2), (1, 0)),
        (2, 20, (12, 14), (2, 3), (2, 3), (0, 0)),
        (1, 33, (7, 9), (7, 9), (1, 1), (0, 0)),
        (1, 17, (6, 5, 9), (2, 2, 3), (1, 2, 1), (1, 0, 1)),
        (2, 2, (5, 9001), (2, 2), (1, 1), (0, 1)),
    )
    compare([whole(pool(*given, data_format)) for given in pools], ("f32", "f16", "bf16"))


# batch, channels of source and destination, lengths of the destination, kernel, strides, groups
IN_ROUNDS = [
    (2, (40, 70), (9, 6), (3, 3), (1, 1), 1),
    (1, (96, 60), (5, 21), (3, 3), (1, 1), 3),
    (3, (20, 50), (4, 5), (3, 2), (2, 1), 1),
    (2, (12, 70), (7,), (1,), (1,), 1),
    (2, (70, 3), (7,), (3,), (1,), 1),
    (1, (84, 96), (4, 3, 3), (2, 1, 3), (1, 1, 2), 12),
    (1, (150, 75), (6, 6), (5, 5), (1, 1), 5),
    (2, (64, 100), (6, 5), (3, 3), (1, 1), 1),
    (1, (35, 300), (13, 40), (3, 3), (1, 1), 1),
]


@pytest.mark.parametrize("limit", [1, 20_000, 60_000, 150_000])
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
def test_rounds_change_nothing(monkeypatch: pytest.MonkeyPatch, tiles: int, data_format: str, limit: int) -> None:
    """However little may be shared: some groups at a time, or some channels of one."""
    calls = []
    for batch, channels, outs, kernel, strides, groups in IN_ROUNDS:
        for op in CONV_OPS[:5]:
            given = {"strides": strides, "groups": groups, "data_format": data_format}
            calls.append(convolution(op, batch, channels, outs, kernel, **given))
    before = [shapes.plan("f32").shared for shapes in calls]
    for module in (problem, winograd_plan):
        monkeypatch.setattr(module, "shared_limit", lambda *_: limit)
    after = [shapes.plan("f32").shared for shapes in calls]
    sharing = sum(was > 0 for was in before)
    less = sum(now < was for was, now in zip(before, after, strict=True))
    assert sharing >= len(calls) // 2
    assert less >= sharing // (3 if limit > 100_000 else 2), f"{less} of {sharing} share less"
    compare([whole(shapes) for shapes in calls], ("f32", "bf16"), error=ERRORS[tiles])


# batch, channels of source and destination, lengths, groups, bytes that may be shared
SOURCES_SHARED = [
    (1, (16, 400), (4, 4), 1, 60_000),
    (3, (17, 290), (9, 7), 1, 130_000),
    (2, (48, 300), (5, 6), 3, 60_000),
    (2, (40, 480), (3, 4), 2, 150_000),
    (1, (33, 200), (2, 37), 1, 130_000),
    (1, (33, 200), (2, 260), 1, 300_000),  # more tiles in a row than a stage asks for
]


@pytest.mark.parametrize(("batch", "channels", "lengths", "groups", "limit"), SOURCES_SHARED)
def test_winograd_shares_the_source_where_weights_are_large(
    monkeypatch: pytest.MonkeyPatch, tiles: int, batch: int, channels: tuple[int, int], lengths, groups: int, limit: int
) -> None:
    """All of it, or some channels at a time; several groups."""
    without_matrix_tiles(monkeypatch)
    monkeypatch.setattr(winograd_plan, "shared_limit", lambda *_: limit * (tiles + 2) ** 2 // 16)
    planned_bytes, calls = [], []
    for both in (channels, channels[::-1]):
        shapes = convolution("ConvolutionBackwardWeights", batch, both, lengths, (3, 3), pads=(1, 1), groups=groups)
        plan = shapes.plan("f32")
        assert winograd_weights.MULTIPLY in [stage for stage, _ in plan.stages]
        planned_bytes.append(block_bytes(plan.shared) + block_bytes(plan.per_thread))
        calls.append(whole(shapes))
    compare(calls, ("f32", "f16"), error=ERRORS[tiles])
    for dtype in ("f32", "f16"):
        assert measured([(call, dtype) for call in calls], 1) == planned_bytes, dtype
