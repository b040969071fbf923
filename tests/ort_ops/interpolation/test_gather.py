"""The ways in which columns are gathered: each is taken, each gives what the reference gives, for any register."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from onnx_backprop.opset.core.op import Attributes
from onnx_backprop.opset.maths.resize import resize_taps
from onnx_backprop.opset.operators.registry import BY_NAME
from onnx_backprop.opset.operators.resize_grad import resized_axes
from onnx_backprop.ort_ops.compiler.machine import PERMUTES, VECTOR
from onnx_backprop.ort_ops.interpolation import plan as interpolation_plan
from onnx_backprop.ort_ops.interpolation.gather import ACROSS, ALONG, WINDOWS
from onnx_backprop.ort_ops.interpolation.rows import Interpolation
from onnx_backprop.ort_ops.interpolation.windows import windows
from onnx_backprop.ort_ops.vector.permute import WINDOW
from tests.ort_ops.planned import numbers
from tests.support import single_op
from tests.support.batch import calls_together
from tests.support.checks import evaluate

f32 = np.float32
# columns of dx and of dy: whole blocks and parts of them, one chunk and several, few taps and many
COLUMNS = [
    (1, 1), (1, 9), (7, 7), (16, 32), (15, 31), (17, 35), (33, 16), (100, 217), (257, 64), (5, 300), (1500, 3000),
    (700, 90),
]  # fmt: skip


def resize(columns: tuple[int, int], mode: str, rows: int, channels: int, layout: str, rng: np.random.Generator):
    """Attributes and inputs of a ResizeGrad over rows and columns."""
    lengths, outs = (rows, columns[0]), (2 * rows - 1, columns[1])
    x_shape, y_shape = ((2, channels, *n) if layout == "NCX" else (2, *n, channels) for n in (lengths, outs))
    axes = [2, 3] if layout == "NCX" else [1, 2]
    attributes = {"mode": mode, "axes": axes, "coordinate_transformation_mode": "half_pixel"}
    dy = rng.integers(-8, 9, y_shape).astype(f32)
    return attributes, [dy, np.zeros(x_shape, f32), None, None, np.array(outs)]


def column_of(columns: tuple[int, int], mode: str):
    """W transposed of one axis, as the plan has it."""
    attributes = Attributes(BY_NAME["ResizeGrad"], {"mode": mode, "axes": [0]})
    (axis,) = resized_axes(attributes, (columns[0],), (columns[1],), roi=None, scales=None, sizes=[columns[1]])
    return interpolation_plan._by_pixel(resize_taps(axis))


def check(every: int = 1) -> None:
    """Every way, against the reference, in float32 and float16: all cases, or one of every so many."""
    rng = np.random.default_rng(11)
    layouts = (3, 1, "NCX"), (2, 3, "NCX"), (2, 3, "NXC"), (2, VECTOR + 1, "NXC")
    cases = product(COLUMNS, ("nearest", "linear", "cubic"), layouts)
    chosen = [*cases][::every]
    calls = [("ResizeGrad", *resize(columns, mode, *shape, rng)) for columns, mode, shape in chosen]
    exact = [evaluate(*call) for call in calls]
    for dtype, tolerance in (("f32", 2e-6), ("f16", 1e-3)):
        for case, expected, (got,) in zip(chosen, exact, calls_together(calls, "native", dtype=dtype)(), strict=True):
            worst = float(np.abs(got - expected).max()) / max(1.0, float(np.abs(expected).max()))
            assert worst <= tolerance, f"{case} {dtype}: {worst}"


def test_every_way_beside_the_reference() -> None:
    check()


@pytest.mark.skipif(not PERMUTES, reason="this processor's rows are turned round instead")
def test_which_way_is_taken() -> None:
    def way(columns: tuple[int, int], inner: int) -> int:
        axis = interpolation_plan._Axis(*columns, column_of(columns, "linear"))
        return interpolation_plan._method(axis, inner)[0]

    assert way((100, 217), 1) == way((64, 32), 1) == way((100, 200), 3) == WINDOWS
    assert way((20, 400), 1) == ACROSS
    assert way((100, 217), VECTOR) == ALONG


@pytest.mark.parametrize(("columns", "inner"), [((100, 217), 1), ((9, 5), 3), ((33, 70), 2), ((4, 80), 1)])
def test_windows_are_the_transposed_interpolation(columns: tuple[int, int], inner: int) -> None:
    column = column_of(columns, "cubic")
    table = windows(column.starts, column.indices, column.weights, inner)
    length, out = columns[0] * inner, columns[1] * inner
    matrix = np.zeros((len(table.ends) * VECTOR, out + WINDOW))
    last = np.full(len(matrix), -1)
    for block in range(len(table.ends) - 1):
        for entry in range(table.ends[block], table.ends[block + 1]):
            pattern = table.patterns[table.numbers[entry]]
            weights = np.frombuffer(pattern[VECTOR:].tobytes(), f32)
            for lane in np.flatnonzero(weights):
                row, place = block * VECTOR + lane, table.bases[entry] + pattern[lane]
                assert pattern[lane] < WINDOW
                assert place > last[row], "a sum runs in the order of dy's indices"
                matrix[row, place], last[row] = weights[lane], place
    expected = np.zeros((columns[0], columns[1]), f32)
    expected[np.repeat(np.arange(columns[0]), np.diff(column.starts)), column.indices] = column.weights
    np.testing.assert_array_equal(matrix[:length, :out], np.kron(expected, np.eye(inner)))
    assert not matrix[length:].any()
    assert not matrix[:, out:].any()


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("columns", [(50, 108), (40, 80), (80, 37), (4, 90)])
def test_what_is_not_finite_stays_with_the_cells_that_read_it(rng, columns, value) -> None:
    """Channel c has such a value in column c."""
    out = columns[1]
    attributes, inputs = resize(columns, "linear", 3, out, "NCX", rng)
    dy = inputs[0]
    places = (1, np.arange(out), 2, np.arange(out))
    dy[places] = 0
    touched = np.zeros_like(dy)
    touched[places] = 1
    cells = evaluate("ResizeGrad", attributes, [touched, *inputs[1:]]) != 0
    expected = evaluate("ResizeGrad", attributes, inputs)
    dy[places] = value
    got = single_op.run("ResizeGrad", attributes, inputs, kernels="native")
    assert cells.any()
    assert not np.isfinite(got[cells]).any()
    np.testing.assert_allclose(got[~cells], expected[~cells], rtol=2e-6, atol=5e-5)


def test_past_the_caches(monkeypatch) -> None:
    """Tensors that are larger than the caches are stored past them: as if every tensor were, with the same bits."""
    rng = np.random.default_rng(12)
    flags = []
    plan = interpolation_plan.plan

    def run(columns, mode, layout, channels) -> np.ndarray:
        attributes, inputs = resize(columns, mode, 9, channels, layout, np.random.default_rng(13))
        inputs[0] = rng_values[: inputs[0].size].reshape(inputs[0].shape)
        return single_op.run("ResizeGrad", attributes, inputs, kernels="native")

    def noting(*args):
        planned = plan(*args)
        flags.append(int(numbers(planned, Interpolation).streamed))
        return planned

    rng_values = rng.standard_normal(1 << 19, f32)
    monkeypatch.setattr("onnx_backprop.ort_ops.interpolation.kernels.plan", noting)
    cases = [*product([(16, 32), (64, 30), (100, 217), (2048, 1500)], ("nearest", "linear", "cubic"), ("NCX", "NXC"))]
    for columns, mode, layout in cases:
        for channels in (3, 2 * VECTOR, 2 * VECTOR + 1):
            if columns[0] == 2048 and channels > 3:
                continue
            results = []
            for size in (2**40, 0):
                monkeypatch.setattr(interpolation_plan, "last_level_cache", lambda size=size: size)
                results.append(run(columns, mode, layout, channels))
            np.testing.assert_array_equal(*results, err_msg=f"{columns} {mode} {layout} {channels}", strict=True)
    assert len(flags) >= 2 * len(cases)
    assert flags == [0, 1] * (len(flags) // 2)
