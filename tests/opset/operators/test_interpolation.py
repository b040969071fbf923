"""InterpolateBackward, InterpolateBackprop and ResampleGrad against matrices of fractions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from itertools import product

import ml_dtypes
import numpy as np
import pytest

from onnx_backprop.opset.core.op import Op
from onnx_backprop.opset.maths.interpolation import Taps, apply_transpose, matrix, onednn_taps, resample_taps
from onnx_backprop.opset.operators.registry import BY_NAME
from onnx_backprop.ort_ops.loops import BY_LOOPS, interpolate, resample
from tests.opset.operators import naive
from tests.support.checks import DTYPES, assert_rounded_once, evaluate

f32 = np.float32
LENGTHS = range(1, 13)
SPEC_CASES = list(product(("nearest", "linear"), ("half_pixel", "align_corners")))
HALF = Fraction(1, 2)
each_reference = pytest.mark.parametrize("operators", [BY_NAME, BY_LOOPS], ids=["reference", "numba"])


def apply(taps: Taps, x: np.ndarray, axis: int) -> np.ndarray:
    """y = W·x along one axis."""
    return np.moveaxis(np.tensordot(matrix(taps), x, (1, axis)), 0, axis)


def loops_spec_taps(mode: str, coordinates: str, length: int, out: int) -> Taps:
    return Taps(*interpolate.place(length, out, mode == "nearest", coordinates == "half_pixel"), length)


def loops_resample_taps(mode: str, length: int, out: int, scale: float | None, *offsets: float) -> Taps:
    ratio = (float(length), float(out)) if scale is None else (1.0, scale)
    return Taps(*resample.place(length, out, mode == "NEAREST_NEIGHBOR", *ratio, *offsets), length)


each_spec_taps = pytest.mark.parametrize("place", [onednn_taps, loops_spec_taps])
each_resample_taps = pytest.mark.parametrize("place", [resample_taps, loops_resample_taps])


def assert_same_matrix(got: np.ndarray, expected: np.ndarray, what: object) -> None:
    """Nearest exactly; a linear weight is one division and one subtraction of numbers below 1."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=3e-16, err_msg=str(what), strict=True)


@each_spec_taps
@pytest.mark.parametrize(("mode", "coordinates"), SPEC_CASES)
def test_spec_matrix(mode: str, coordinates: str, place: Callable[..., Taps]) -> None:
    for length, out in product(LENGTHS, LENGTHS):
        expected = naive.as_array(naive.interpolation_matrix(mode, coordinates, length, out), length)
        got = matrix(place(mode, coordinates, length, out))
        assert_same_matrix(got, expected, (length, out))
        np.testing.assert_allclose(got.sum(axis=1), 1, rtol=1e-15)


@each_resample_taps
@pytest.mark.parametrize("mode", ["NEAREST_NEIGHBOR", "LINEAR"])
def test_resample_matrix_of_default_scales(mode: str, place: Callable[..., Taps]) -> None:
    """No scale means the fraction O/I; larger lengths than elsewhere, for a rounded quotient first errs at 14 -> 17."""
    for length, out in product(range(1, 30), range(1, 30)):
        matrix_of_fractions = naive.resample_matrix(mode, length, out, Fraction(out, length), HALF, -HALF)
        expected = naive.as_array(matrix_of_fractions, length)
        # the coordinate itself, up to 29, is rounded once
        atol = 0 if mode == "NEAREST_NEIGHBOR" else 5e-15
        got = matrix(place(mode, length, out, None, 0.5, -0.5))
        np.testing.assert_allclose(got, expected, rtol=0, atol=atol, err_msg=f"{length} -> {out}", strict=True)


@each_resample_taps
@pytest.mark.parametrize("mode", ["NEAREST_NEIGHBOR", "LINEAR"])
def test_resample_matrix_of_given_scales_and_offsets(mode: str, place: Callable[..., Taps]) -> None:
    """The scale is used as given, whatever the lengths are: surplus is cropped, the edge repeats."""
    for scale, offsets, length, out in product(
        (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, float(f32(0.3)), float(f32(5 / 3))),
        ((0.5, -0.5), (0.0, 0.0), (0.0, -0.5), (-0.5, 0.5), (0.25, 1.0), (-3.0, 2.0)),
        (1, 2, 3, 7),
        (1, 2, 4, 9),
    ):
        expected = naive.resample_matrix(mode, length, out, *map(Fraction, (scale, *offsets)))
        atol = 0 if mode == "NEAREST_NEIGHBOR" else 1e-14
        got = matrix(place(mode, length, out, scale, *offsets))
        message = f"scale {scale}, offsets {offsets}, {length} -> {out}"
        np.testing.assert_allclose(
            got, naive.as_array(expected, length), rtol=0, atol=atol, err_msg=message, strict=True
        )


def test_forward_examples() -> None:
    """The forward values published beside the gradients: 2x2 -> 3x3 and some single axes."""
    x = np.array([[-2, -1.5], [-1, -0.5]])
    for mode, expected in {
        "nearest": [[-2, -1.5, -1.5], [-1, -0.5, -0.5], [-1, -0.5, -0.5]],
        "linear": [[-2, -1.75, -1.5], [-1.5, -1.25, -1], [-1, -0.75, -0.5]],
    }.items():
        taps = onednn_taps(mode, "half_pixel", 2, 3)
        np.testing.assert_array_equal(apply(taps, apply(taps, x, 0), 1), expected)
    rows = {
        ("linear", "half_pixel"): [[1, 0, 0], [0.6, 0.4, 0], [0, 1, 0], [0, 0.4, 0.6], [0, 0, 1]],
        ("linear", "align_corners"): [[1, 0, 0], [0.5, 0.5, 0], [0, 1, 0], [0, 0.5, 0.5], [0, 0, 1]],
    }
    for (mode, coordinates), expected in rows.items():
        np.testing.assert_allclose(matrix(onednn_taps(mode, coordinates, 3, 5)), expected, rtol=1e-15)
    # RESAMPLE of the documented example: width 1.5, height 0.5
    width, height = (resample_taps("NEAREST_NEIGHBOR", 2, out, scale, 0.5, -0.5) for out, scale in ((3, 1.5), (1, 0.5)))
    np.testing.assert_array_equal(apply(height, apply(width, np.array([[1.0, 2], [3, 4]]), 1), 0), [[1, 1, 2]])
    scale_2 = matrix(resample_taps("LINEAR", 2, 3, 2.0, 0.5, -0.5))
    np.testing.assert_array_equal(scale_2, [[1, 0], [0.75, 0.25], [0.25, 0.75]])


def test_ties_go_up_in_the_spec_and_down_in_directml() -> None:
    """Every even integer down-scale ties on each pixel: 4 -> 2 sits at 0.5 and 2.5."""
    assert onednn_taps("nearest", "half_pixel", 4, 2).indices.ravel().tolist() == [1, 3]
    assert resample_taps("NEAREST_NEIGHBOR", 4, 2, 0.5, 0.5, -0.5).indices.ravel().tolist() == [0, 2]


def test_apply_and_its_transpose_are_adjoint(rng: np.random.Generator) -> None:
    for (mode, coordinates), (length, out), axis in product(SPEC_CASES, ((5, 8), (8, 3), (1, 4), (4, 1)), (0, 1, 2)):
        taps = onednn_taps(mode, coordinates, length, out)
        shape = [2, 3, 2]
        x = rng.standard_normal([*shape[:axis], length, *shape[axis + 1 :]])
        dy = rng.standard_normal([*shape[:axis], out, *shape[axis + 1 :]])
        np.testing.assert_allclose((apply(taps, x, axis) * dy).sum(), (x * apply_transpose(taps, dy, axis)).sum())


@each_reference
@pytest.mark.parametrize("op", ["InterpolateBackward", "InterpolateBackprop"])
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize(
    ("mode", "coordinates"), [*SPEC_CASES, ("bilinear", "half_pixel"), ("trilinear", "half_pixel")]
)
def test_operator(
    op: str, data_format: str, mode: str, coordinates: str, operators: Mapping[str, Op], rng: np.random.Generator
) -> None:
    """One to three spatial axes, batch and channels; also Σ dx = Σ dy, and the values of the source are never read."""
    attributes = {"mode": mode, "coordinate_transformation_mode": coordinates, "data_format": data_format}
    for axes in (1, 2, 3, 1, 2, 3):
        source, out = (tuple(int(v) for v in rng.integers(1, 6, axes)) for _ in range(2))
        dy = rng.integers(-4, 5, (2, 3, *out)).astype(f32)
        matrices = [
            naive.as_array(naive.interpolation_matrix(mode, coordinates, i, o), i)
            for i, o in zip(source, out, strict=True)
        ]
        expected = np.stack([[naive.transpose_all_axes(matrices, c) for c in batch] for batch in dy])
        src = naive.relayout(np.full((2, 3, *source), np.nan, f32), "NCX", data_format)
        given = naive.relayout(dy, "NCX", data_format)
        evaluated = evaluate(op, attributes, [src, given], operators=operators)
        got = naive.relayout(evaluated, data_format, "NCX")
        assert got.dtype == f32
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6, err_msg=f"{source} -> {out}")
        assert got.shape == expected.shape
        np.testing.assert_allclose(got.sum(dtype=np.float64), dy.sum(), atol=1e-4)
        np.testing.assert_array_equal(evaluate(op, attributes, [src.shape, given], operators=operators), evaluated)


@each_reference
@pytest.mark.parametrize("mode", ["NEAREST_NEIGHBOR", "LINEAR"])
def test_resample_grad_over_all_axes(mode: str, operators: Mapping[str, Op], rng: np.random.Generator) -> None:
    """Ranks 1 to 5, batch and channels resized too, random scales and offsets."""
    for rank in (1, 2, 3, 4, 5, 1, 2, 3, 4, 5):
        source, out = (tuple(int(v) for v in rng.integers(1, 4, rank)) for _ in range(2))
        scales = [float(v) for v in rng.choice([0.5, 0.75, 1, 1.5, 2], rank)]
        offsets = [[float(v) for v in rng.choice([-0.5, 0, 0.25, 0.5], rank)] for _ in range(2)]
        dy = rng.integers(-4, 5, out).astype(f32)
        per_axis = zip(source, out, scales, *offsets, strict=True)
        matrices = [
            naive.as_array(naive.resample_matrix(mode, i, o, *map(Fraction, numbers)), i) for i, o, *numbers in per_axis
        ]
        attributes = {
            "interpolation_mode": mode,
            "scales": scales,
            "input_pixel_offsets": offsets[0],
            "output_pixel_offsets": offsets[1],
            "dimension_count": rank,
        }
        got = evaluate("ResampleGrad", attributes, [dy, np.int32(source)], operators=operators)
        expected = naive.transpose_all_axes(matrices, dy)
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6, err_msg=f"{source} -> {out}: {attributes}")
        assert got.shape == expected.shape
        np.testing.assert_allclose(got.sum(dtype=np.float64), dy.sum(), atol=1e-4)


@each_reference
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_sums_are_rounded_once(mode: str, dtype: str, operators: Mapping[str, Op]) -> None:
    """600 ones into one pixel: an accumulator in bf16 stops at 256."""
    shapes = ((1, 1, 1), (1, 1, 600)), ((1, 1, 1, 1), (1, 1, 20, 30))
    for source, out in shapes:
        dy = np.ones(out, f32)
        attributes = {"mode": mode, "data_format": "NCX"}
        got = evaluate("InterpolateBackward", attributes, [np.zeros(source, f32), dy], dtype, operators)
        assert_rounded_once(got, np.full(source, 600.0), dtype)


def test_sum_of_600_in_bfloat16_channels_last() -> None:
    ones = np.ones((1, 600, 2), ml_dtypes.bfloat16)
    got = evaluate("InterpolateBackprop", {"mode": "linear"}, [ones[:, :1], ones], "bf16")
    assert_rounded_once(got, [[[600, 600]]], "bf16")
    sums = {"interpolation_mode": "LINEAR", "scales": [], "input_pixel_offsets": [], "output_pixel_offsets": []}
    got = evaluate("ResampleGrad", sums | {"output_sizes": [1, 1, 2]}, [ones], "bf16")
    assert_rounded_once(got, [[[600, 600]]], "bf16")


@each_reference
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_pixels_nobody_reads_get_exact_zeros(mode: str, operators: Mapping[str, Op]) -> None:
    dy = np.ones((1, 1, 2), f32)
    got = evaluate("InterpolateBackward", {"mode": mode, "data_format": "NCX"}, [(1, 1, 8), dy], operators=operators)
    expected = [0, 0, 1, 0, 0, 0, 1, 0] if mode == "nearest" else [0, 0.5, 0.5, 0, 0, 0.5, 0.5, 0]
    assert got.ravel().tolist() == expected
    assert not np.signbit(got).any()


@each_reference
def test_empty_tensors_give_zeros(operators: Mapping[str, Op]) -> None:
    ncx = {"mode": "linear", "data_format": "NCX"}
    for source, out in (((0, 3, 4), (0, 3, 7)), ((2, 0, 4), (2, 0, 7)), ((2, 3, 4), (2, 3, 0)), ((2, 3, 0), (2, 3, 0))):
        got = evaluate("InterpolateBackward", ncx, [source, np.ones(out, f32)], operators=operators)
        np.testing.assert_array_equal(got, np.zeros(source, f32), strict=True)
    defaults = {"interpolation_mode": "LINEAR", "scales": [], "input_pixel_offsets": [], "output_pixel_offsets": []}
    got = evaluate("ResampleGrad", defaults | {"output_sizes": [2, 3]}, [np.ones((0, 4), f32)], operators=operators)
    np.testing.assert_array_equal(got, np.zeros((2, 3), f32), strict=True)


def test_overflow_is_infinite_and_silent() -> None:
    """Loss scaling relies on it: two gradients of 60000 in one f16 pixel are inf, not an error."""
    got = evaluate("InterpolateBackward", {"mode": "nearest"}, [(1, 1, 1), np.full((1, 2, 1), 60000, f32)], "f16")
    assert got.ravel().tolist() == [np.inf]
