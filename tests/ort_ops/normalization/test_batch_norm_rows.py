"""BatchNormTrainingBackward of rows of channels, compiled: every way to cut them, special numbers, the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest

import onnx_backprop as ob
from onnx_backprop.ort_ops.normalization import batch_norm_rows
from onnx_backprop.ort_ops.normalization.batch_norm_rows import (
    CACHED,
    LINE,
    MAX_CHUNK,
    NARROWEST,
    PART,
    PART_ROWS,
    STAGGER,
    WIDEST,
)
from onnx_backprop.ort_ops.runtime.stages import Plan
from tests.declarations.calls import Call
from tests.ort_ops.guarded import check
from tests.support import single_op
from tests.support.batch import calls_together
from tests.support.checks import evaluate_all

f32 = np.float32
BN = "BatchNormTrainingBackward"
F32 = 1

# rows, channels; parts, blocks and fold that they lead to
CUTS = [
    ((1, 1), (1, 1, 1)),
    ((7, 1), (1, 1, 4)),  # folded rows, and a line of three of them
    ((3 * LINE + 5, 1), (1, 1, LINE)),
    ((66 * LINE + 5, 1), (2, 1, LINE)),  # in parts, the last with less than a line more
    ((40_001, 2), (2, 1, LINE // 2)),
    ((PART + 1, 3), (3, 1, 256)),
    ((17, 65), (1, 1, 8)),
    ((1031, 65), (2, 1, 8)),
    ((300, 257), (2, 1, 2)),
    ((201, 600), (1, 2, 1)),  # too few rows for parts
    ((PART_ROWS - 1, 2100), (1, 8, 1)),
    ((2, WIDEST + 1), (1, 2, 1)),
    ((1, 3 * WIDEST), (1, 3, 1)),
    ((2 * PART_ROWS + 1, 1003), (2, 3, 1)),  # parts of blocks
    ((4 * PART_ROWS + 3, WIDEST + 5), (4, 8, 1)),
]


def words(plan: Plan, *names: str) -> tuple[int, ...]:
    return tuple(getattr(plan.parameters, name) for name in names)


def call(rng: np.random.Generator, shape: tuple[int, int], given: tuple[int, ...] = ()) -> Call:
    """x of another mean and another deviation in every channel; `given` are the places of optional inputs."""
    channels = shape[1]
    x = rng.standard_normal(shape) * (1 + np.arange(channels) % 3) + np.arange(channels) % 5
    dy = rng.standard_normal(shape) + 0.5
    inputs: list[Any] = [x.astype(f32), dy.astype(f32)]
    inputs += [rng.random(channels).astype(f32) + 0.5 if n in given else None for n in (2, 3, 4)]
    while inputs[-1] is None:
        inputs.pop()
    return Call(BN, {"epsilon": 1e-3, "data_format": "NXC"}, inputs, 0)


def session(case: Call, dtype: str = "f32", threads: int = 2) -> onnxruntime.InferenceSession:
    model = single_op.model(BN, case.attributes, case.inputs, dtype=dtype)
    return ob.session(model, kernels="native", session_options=single_op.options(threads))


def require_close(got, want, tolerance: float, message: str) -> None:
    """Of each channel's own size: a channel that is wrong does not hide behind a greater one."""
    for answer, expected in zip(got, want, strict=True):
        answer, expected = np.asarray(answer, np.float64), np.asarray(expected, np.float64)
        size = np.maximum(1, np.abs(expected).max(axis=0, initial=0) if expected.ndim > 1 else np.abs(expected))
        wrong = np.abs(answer - expected) / size
        assert wrong.max(initial=0) < tolerance, (
            f"{message}: {wrong.max()} at {np.unravel_index(wrong.argmax(), wrong.shape)}"
        )


@pytest.mark.parametrize(("shape", "cut"), CUTS, ids=str)
def test_every_cut(rng: np.random.Generator, shape: tuple[int, int], cut: tuple[int, int, int]) -> None:
    assert words(batch_norm_rows.plan(F32, *shape, 1e-3), "parts", "blocks", "fold") == cut
    several = ((), (4,), (2,), (3, 4), (2, 3, 4))
    cases = [call(rng, shape, given) for given in several]
    answers = calls_together([(BN, case.attributes, case.inputs) for case in cases], "native")()
    for given, case, got in zip(several, cases, answers, strict=True):
        require_close(got, evaluate_all(BN, case.attributes, case.inputs), 2e-5, f"{shape} {given}")


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("shape", [(1031, 65), (2 * PART_ROWS + 1, 1003), (7, 5)])
def test_half_types(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> None:
    case = call(rng, shape, (4,))
    got = single_op.run_all(BN, case.attributes, case.inputs, dtype=dtype, kernels="native")
    want = evaluate_all(BN, case.attributes, case.inputs, dtype)
    require_close(got[1:], want[1:], 2e-5, f"{shape} {dtype}")
    require_close(got[:1], want[:1], {"f16": 1e-3, "bf16": 8e-3}[dtype], f"{shape} {dtype}")


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("shape", [(7, 1), (1031, 65), (201, 600), (2 * PART_ROWS + 1, 1003)])
def test_nothing_is_read_beyond_the_tensors(rng: np.random.Generator, shape: tuple[int, int], at_end: bool) -> None:
    assert check(call(rng, shape, (2, 3, 4)), "f32", at_end=at_end) == "answered"
    assert check(call(rng, shape), "f16", at_end=at_end) == "answered"


@pytest.mark.parametrize("shape", [(66 * LINE + 5, 1), (1031, 65), (2 * PART_ROWS + 1, 1003), (PART_ROWS - 1, 2100)])
def test_threads_do_not_change_a_bit(rng: np.random.Generator, shape: tuple[int, int]) -> None:
    case = call(rng, shape)
    answers = set()
    for threads in (1, 2, 3, 3):
        results = session(case, threads=threads).run(None, single_op.feeds(BN, case.inputs))
        answers.add(b"".join(np.asarray(result).tobytes() for result in results))
    assert len(answers) == 1


@pytest.mark.parametrize("shape", [(20_000, 3), (5000, 70), (600, 1003), (100, 2100)])
def test_channels_far_from_zero(rng: np.random.Generator, shape: tuple[int, int]) -> None:
    """A mean of 10⁴ beside a variance of 1, and a level that changes half way: x has but three decimals there."""
    rows = shape[0]
    case = call(rng, shape)
    x = rng.standard_normal(shape) + 1e4
    x[rows // 3 :, 1] += 50
    x[0, 2] = 0  # far away from all others, first of all rows
    case.inputs[0] = x.astype(f32)
    got = single_op.run_all(BN, case.attributes, case.inputs, kernels="native")
    require_close(got, evaluate_all(BN, case.attributes, case.inputs), 2e-5, f"{shape}")


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("shape", [(40, 3), (1031, 65), (2 * PART_ROWS + 1, 1003)])
def test_what_is_not_finite_stays_in_its_channel(
    rng: np.random.Generator, shape: tuple[int, int], value: float, which: int
) -> None:
    """Of dy in all three answers; of x not in diff_beta, which is of dy alone."""
    case = call(rng, shape)
    tensor, channel = case.inputs[which], shape[1] - 2
    assert tensor is not None
    want = evaluate_all(BN, case.attributes, case.inputs)
    tensor[shape[0] // 2, channel] = value
    got = [np.array(a) for a in single_op.run_all(BN, case.attributes, case.inputs, kernels="native")]
    bad = [not np.isfinite(answer[..., channel]).any() for answer in got]
    assert bad == [True, True, which == 1]
    for answer, expected in zip(got, want, strict=True):
        if not np.isfinite(answer[..., channel]).all():
            answer[..., channel] = expected[..., channel]
    require_close(got, want, 2e-5, f"{shape} {value}")


def test_the_cuts_meet_their_limits() -> None:
    """Long lines of few rows at a time, short ones of many; arrays do not lie whole pages apart."""
    for shape, lines in (((10_000, WIDEST), CACHED // WIDEST), ((200, 1), MAX_CHUNK), ((10_000, 64), CACHED // LINE)):
        assert words(batch_norm_rows.plan(F32, *shape, 0.0), "chunk") == (lines,)
    for channels in (1, 64, 512, 1024, WIDEST):
        span = words(batch_norm_rows.plan(F32, 10_000, channels, 0.0), "span")[0]
        assert span % 512 == STAGGER
    width, blocks = words(batch_norm_rows.plan(F32, 1, 100_000, 0.0), "width", "blocks")
    assert NARROWEST <= width <= WIDEST
    assert (blocks - 1) * width < 100_000 <= blocks * width
