"""Convolutions in registers of whole matrices (AMX): values beside the reference, the same bits on any number of threads.

Here they are chosen wherever they may be, however long they take.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import onnx_backprop as ob
from onnx_backprop.ort_ops import native_kernels_work
from onnx_backprop.ort_ops.compiler.machine import matrix_tiles
from onnx_backprop.ort_ops.convolution.gather import bands
from onnx_backprop.ort_ops.convolution.gather.kernel import COLUMNS_IN_PLACE, MATRICES
from onnx_backprop.ort_ops.convolution.parameters import Gather
from onnx_backprop.ort_ops.convolution.weights import matrices
from onnx_backprop.ort_ops.convolution.weights import plan as weights_plan
from onnx_backprop.ort_ops.convolution.winograd import tiles
from tests.declarations.calls import Call
from tests.ort_ops.convolution.test_mixed_axes import problem
from tests.ort_ops.planned import convolution
from tests.support import single_op
from tests.support.batch import calls_together, check_each
from tests.support.checks import evaluate

pytestmark = pytest.mark.skipif(
    not (native_kernels_work() and matrix_tiles()), reason="this processor has no registers of matrices"
)
WORK = {MATRICES, matrices.WORK}


@pytest.fixture(autouse=True)
def chosen(monkeypatch) -> None:
    monkeypatch.setattr(tiles, "is_served", lambda _: False)
    for module in (bands, weights_plan):
        monkeypatch.setattr(module, "FUSED_CYCLES", 1e9)


@pytest.mark.parametrize(("dtype", "tolerance"), [("f32", 3e-6), ("f16", 2e-3), ("bf16", 1.6e-2)])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_random_problems(axes: int, dtype: str, tolerance: float) -> None:
    rng = np.random.default_rng([axes, 43])
    calls = [
        Call(op, attributes, [rng.standard_normal(shape).astype(np.float32) for shape in shapes], seed=number)
        for number in range(25 if dtype == "f32" else 8)
        for op, attributes, shapes in problem(rng, axes)
    ]

    def run(some: Any) -> list[list[np.ndarray]]:
        if dtype == "f32":
            return calls_together([(call.op, call.attributes, call.inputs) for call in some], "native")()
        return [[single_op.run(c.op, c.attributes, c.inputs, kernels="native", dtype=dtype)] for c in some]

    def check(call: Call, answers: list[np.ndarray]) -> None:
        exact = evaluate(call.op, call.attributes, call.inputs)
        np.testing.assert_allclose(answers[0], exact, atol=tolerance * max(np.abs(exact).max(), 1e-6), rtol=0)

    check_each(calls, run, check)


# batch, groups, channels and outputs of a group, lengths, kernel, strides, pads; those behind, where they are others
LARGE = [
    (2, 1, 1100, 70, (9, 11), (1, 1), (1, 1), (0, 0)),  # more steps than one sum has
    (2, 1, 70, 1100, (7, 7), (1, 1), (1, 1), (0, 0)),  # cells of an odd number, images together
    (3, 1, 64, 96, (40, 37), (3, 3), (1, 1), (1, 1)),  # several bands, an odd number of cells along x
    (2, 2, 33, 65, (34, 41), (4, 4), (2, 2), (1, 1)),
    (2, 1, 48, 40, (27, 300), (3, 3), (2, 2), (1, 1)),
    (1, 1, 40, 32, (12, 20, 19), (3, 3, 3), (1, 1, 1), (0, 1, 1)),
    (1, 1, 32, 64, (5000,), (7,), (1,), (3,)),  # bands along x
    (0, 1, 32, 64, (50,), (3,), (1,), (1,)),
    (1, 1, 64, 64, (5, 24, 24), (3, 1, 1), (2, 1, 1), (1, 0, 0)),  # whole planes, of which the last is padding
    (2, 1, 64, 64, (9, 1000), (1, 1), (2, 1), (0, 0), (3, 0)),  # whole rows, of which the last are padding
    (2, 1, 64, 64, (9, 300), (1, 1), (1, 1), (0, 0), (2, 0)),
    (2, 1, 300, 70, (6, 131), (2, 2), (2, 2), (0, 0)),  # in pairs along x, more steps than one sum has
    (2, 2, 32, 96, (14, 144), (2, 2), (2, 2), (0, 0)),
    (1, 1, 16, 32, (4, 6, 90), (2, 2, 2), (2, 2, 2), (0, 0, 0)),
    (3, 1, 64, 33, (7, 45), (2, 1), (2, 1), (0, 0)),  # in pairs of channels of several taps
    (1, 1, 128, 1300, (9, 150), (1, 1), (1, 1), (0, 0)),  # more weights than are met at a time
    (2, 1, 16, 64, (40, 37), (3, 3), (1, 1), (1, 1)),  # tall tiles of few channels, and more steps than one sum has
    (1, 1, 48, 12, (5, 64), (3, 3), (1, 1), (1, 1)),  # rows that are whole tiles
    (5, 1, 64, 70, (8, 8), (3, 3), (1, 1), (1, 1)),  # two images beside one another, and one alone
    (7, 2, 33, 64, (5, 4), (3, 3), (1, 1), (1, 1)),  # four, of an odd number of rows
    (4, 1, 64, 64, (9, 6), (3, 3), (1, 1), (0, 0), (1, 2)),  # of other lengths than what they read, and are read by
    (5, 1, 40, 64, (6, 4), (3, 9), (1, 1), (1, 4)),  # the farthest taps of such rows
    (5, 1, 40, 64, (6, 4), (3, 13), (1, 1), (1, 6)),
    (2, 1, 20, 40, (21, 64), (3, 3), (1, 1), (1, 1)),  # no zeros between rows, several bands, the last one shorter
    (4, 1, 1092, 64, (5, 4), (3, 3), (1, 1), (1, 1)),  # beside one another in bands of two rows, and of one
    (4, 1, 1092, 64, (4, 4), (3, 5), (1, 1), (1, 2)),  # of one row each
]


def run_large(rng: np.random.Generator, case: tuple[Any, ...], threads: int = 2) -> Any:
    """(operator, attributes, inputs, answer) of the forward and of both gradients."""
    batch, groups, channels, outs, lengths, kernel, strides, pads, *behind = case
    ends = behind[0] if behind else pads
    x = rng.standard_normal((batch, groups * channels, *lengths), np.float32)
    w = rng.standard_normal((groups * outs, channels, *kernel), np.float32)
    along = zip(lengths, pads, ends, kernel, strides, strict=True)
    cells = [(n + begin + end - k) // s + 1 for n, begin, end, k, s in along]
    dy = rng.standard_normal((batch, groups * outs, *cells), np.float32)
    attributes = {
        "strides": list(strides), "pads_begin": list(pads), "pads_end": list(ends), "dilations": [1] * len(kernel),
        "groups": groups, "data_format": "NCX", "weights_format": "OIX",
    }  # fmt: skip
    bias = rng.standard_normal(groups * outs, np.float32)
    for op, more, inputs in (
        ("Convolution", {}, [x, w, bias]),
        ("ConvolutionBackwardData", {"dst_shape": list(x.shape)}, [dy, w]),
        ("ConvolutionBackwardWeights", {"weights_shape": list(w.shape)}, [x, dy]),
    ):
        given = attributes | more
        model = single_op.model(op, given, inputs)
        session = ob.session(model, kernels="native", session_options=single_op.options(threads))
        yield op, given, inputs, np.asarray(session.run(None, single_op.feeds(op, inputs))[0])


@pytest.mark.parametrize("case", LARGE)
def test_large_ones(rng, case: tuple[Any, ...]) -> None:
    for op, attributes, inputs, got in run_large(rng, case):
        exact = evaluate(op, attributes, inputs)
        assert got.shape == exact.shape
        if exact.size:
            assert np.linalg.norm(got - exact) <= 3e-7 * np.linalg.norm(exact), op


@pytest.mark.parametrize("case", [*LARGE[:2], *LARGE[11:16]])
def test_cells_split_where_they_lie_wherever_they_may_be(rng, monkeypatch, case: tuple[Any, ...]) -> None:
    """Where it takes longer, too: several sums, channels and cells that are no whole tiles."""
    choose, in_place = bands.in_matrices, list[bool]()

    def chosen(sums: bands.Sums) -> bands.Sums | None:
        choice = choose(sums)
        in_place.append(choice is not None and choice.in_pairs)
        return choice and replace(choice, columns=in_place[-1])

    monkeypatch.setattr(bands, "in_matrices", chosen)
    test_large_ones(rng, case)
    assert any(in_place)


@pytest.mark.parametrize("case", [LARGE[3], LARGE[12], LARGE[18], LARGE[23]])
def test_threads_change_nothing(case: tuple[Any, ...]) -> None:
    one, several = ([answer for *_, answer in run_large(np.random.default_rng(5), case, threads)] for threads in (1, 4))
    for x, y in zip(one, several, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("stride", [1, 2])
def test_cells_are_split_where_they_lie(stride: int) -> None:
    plan = convolution("Convolution", 2, (64, 96), (56, 64), (stride, stride), strides=(stride, stride)).plan("f32")
    assert COLUMNS_IN_PLACE in {stage for stage, _ in plan.stages}


@pytest.mark.parametrize(
    ("batch", "cells", "expected"), [(8, 8, 2), (2, 8, 2), (1, 8, 1), (8, 4, 4), (8, 5, 1), (8, 16, 1)]
)
@pytest.mark.parametrize("op", ["Convolution", "ConvolutionBackwardData"])
def test_images_lie_beside_one_another(op: str, batch: int, cells: int, expected: int) -> None:
    plan = convolution(op, batch, (64, 96), (cells, cells), (3, 3), pads=(1, 1)).plan("f32")
    assert isinstance(plan.parameters, Gather)
    assert plan.parameters.beside == expected


@pytest.mark.parametrize("op", ["Convolution", "ConvolutionBackwardData", "ConvolutionBackwardWeights"])
def test_they_are_chosen(op: str) -> None:
    plan = convolution(op, 2, (64, 96), (20, 20), (3, 3), pads=(1, 1)).plan("f32")
    assert WORK & {stage for stage, _ in plan.stages}
