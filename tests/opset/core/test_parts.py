"""The small parts under the operators: dimensions, layouts, and the contract every operator fulfils."""

from __future__ import annotations

from itertools import permutations, product

import ml_dtypes
import numpy as np
import pytest

import onnx_backprop as ob
from onnx_backprop.opset.core import layout, shapes
from onnx_backprop.opset.core.op import Attributes
from onnx_backprop.opset.operators.registry import BY_NAME
from tests.opset.operators import naive
from tests.support.checks import evaluate

f32 = np.float32


@pytest.mark.parametrize(
    ("a", "b", "merged"),
    [(2, 2, 2), (2, "N", 2), ("N", 2, 2), (2, None, 2), (None, 2, 2), ("N", None, "N"), (None, "N", "N"),
     ("N", "M", "N"), (None, None, None), (0, "N", 0)],
)  # fmt: skip
def test_merge(a: shapes.Dim, b: shapes.Dim, merged: shapes.Dim) -> None:
    assert shapes.merge(a, b, op="Op", subject="lengths") == merged


def test_merge_refuses_two_numbers() -> None:
    with pytest.raises(ob.ShapeError, match=r"^Op: lengths must agree, got 2 and 3$"):
        shapes.merge(2, 3, op="Op", subject="lengths")


def test_times() -> None:
    assert [shapes.times(d, 3) for d in (2, 0, "N", None)] == [6, 0, None, None]
    assert [shapes.times(d, 1) for d in (2, "N", None)] == [2, "N", None]


def test_stated_shape() -> None:
    def stated(dims, value):
        return shapes.stated_shape(dims, value, 2, 3, op="Op", subject="input s")

    assert stated((2,), (4, 5)) == (4, 5)
    assert stated((2,), ("N", None)) == ("N", None)
    assert stated(None, (4, 5)) == (4, 5)
    assert stated((3,), None) == (None, None, None)
    assert stated(("K",), None) is None
    assert stated((None,), None) is None
    assert stated(None, None) is None
    for dims, value, message in (
        ((4,), None, "input s: expected 2 to 3 entries, got 4"),
        ((2**40,), None, f"input s: expected 2 to 3 entries, got {2**40}"),
        (None, (1,), "input s: expected 2 to 3 entries, got 1"),
        ((2, 2), None, r"input s: expected rank 1, got 2 with shape \(2, 2\)"),
        ((), None, r"input s: expected rank 1, got 0 with shape \(\)"),
        ((2,), (1, -1), r"input s: expected values >= 0, got \[1, -1\]"),
    ):
        with pytest.raises(ob.ShapeError, match=f"^Op: {message}$"):
            stated(dims, value)


def test_show() -> None:
    assert shapes.show((2, "N", None)) == "(2, N, ?)"


def test_inverse_undoes_a_permutation() -> None:
    dims: shapes.Dims = ("a", "b", "c", "d")
    for order in permutations(range(4)):
        assert shapes.permute(shapes.permute(dims, order), layout.inverse(order)) == dims


def test_layouts_against_letters() -> None:
    """Every permutation is the one that the letters of the layout's name describe."""
    for rank in (3, 4, 5):
        shape = tuple(range(2, 2 + rank))
        array = np.arange(np.prod(shape)).reshape(shape)
        for have in ("NCX", "NXC"):
            order = layout.data_to_ncx(have, rank)
            np.testing.assert_array_equal(array.transpose(order), naive.relayout(array, have, "NCX"))
        for have in ("OIX", "XIO"):
            order = layout.conv_weights_to_canonical(have, rank)
            np.testing.assert_array_equal(array.transpose(order), naive.relayout(array, have, "OIX"))
        for have in ("IOX", "XOI", "OIX", "XIO"):
            order = layout.conv_transpose_weights_to_canonical(have, rank)
            np.testing.assert_array_equal(array.transpose(order), naive.relayout(array, have, "IOX"))
    assert layout.data_to_ncx("NXC", 2) == (0, 1)


def test_attributes_are_a_mapping_completed_with_defaults() -> None:
    op = BY_NAME["InterpolateBackward"]
    bound = Attributes(op, {"mode": b"linear", "sizes": np.array([7]), "scales": []})
    assert dict(bound) == {
        "mode": "linear",
        "coordinate_transformation_mode": "half_pixel",
        "sizes": (7,),
        "scales": None,  # an empty optional list is absent
        "data_format": "NXC",
    }
    assert len(bound) == len(op.attributes)
    # an empty required list stays one
    convolution = {"strides": [1], "dilations": [1], "pads_begin": [], "pads_end": []}
    assert Attributes(BY_NAME["ConvTransposeBackwardData"], convolution)["pads_begin"] == ()
    assert op.attribute("mode").required


def test_inputs_are_not_changed_and_the_answer_is_a_new_array() -> None:
    """BiasAddBackward of one row is that row, but must not be a view of it."""
    dy = np.ones((1, 3), f32)
    got = evaluate("BiasAddBackward", {}, [dy])
    got[:] = 7
    np.testing.assert_array_equal(dy, np.ones((1, 3), f32))
    one = {"mode": "nearest", "data_format": "NCX"}
    got = evaluate("InterpolateBackward", one, [(1, 1, 3), dy[None]])
    got[:] = 7
    np.testing.assert_array_equal(dy, np.ones((1, 3), f32))


@pytest.mark.parametrize("order", ["fortran", "strided", "reversed"])
def test_memory_order_does_not_matter(order: str, rng: np.random.Generator) -> None:
    dy, w = (rng.integers(-4, 5, shape).astype(f32) for shape in ((2, 6, 3, 4), (6, 2, 3, 2)))
    attributes = {
        "strides": [2, 1], "pads_begin": [1, 0], "pads_end": [1, 0], "dilations": [1, 1], "groups": 2,
        "data_format": "NCX", "weights_format": "OIX", "dst_shape": [2, 4, 5, 5],
    }  # fmt: skip
    expected = evaluate("ConvolutionBackwardData", attributes, [dy, w])

    def arranged(a: np.ndarray) -> np.ndarray:
        if order == "strided":
            wide = np.zeros((*a.shape[:-1], 2 * a.shape[-1]), f32)
            wide[..., ::2] = a
            return wide[..., ::2]
        if order == "reversed":
            return np.ascontiguousarray(a[..., ::-1])[..., ::-1]
        return np.asfortranarray(a)

    got = evaluate("ConvolutionBackwardData", attributes, [arranged(dy), arranged(w)])
    np.testing.assert_array_equal(got, expected, strict=True)


def test_nan_and_infinity_travel_silently() -> None:
    """Warnings are errors here, so this also says that none is given."""
    for bad, axis in product((np.nan, np.inf, -np.inf), (0, 1)):
        dy = np.zeros((2, 3), f32)
        dy[axis, axis] = bad
        got = evaluate("BiasAddBackward", {}, [dy])
        np.testing.assert_array_equal(got[axis], f32(bad))
    twice = np.array([[np.inf], [-np.inf]], f32)
    assert np.isnan(evaluate("BiasAddBackward", {}, [twice])).all()
    large = np.full((2, 1), np.finfo(f32).max, f32)
    assert evaluate("BiasAddBackward", {}, [large]).item() == np.inf


def test_sums_are_in_float64() -> None:
    """In float32, 2^25 + 1 ones would vanish beside 2^25."""
    dy = np.ones((1001, 1), f32)
    dy[0] = 2.0**25
    dy[-1] = -(2.0**25)
    assert evaluate("BiasAddBackward", {}, [dy]).item() == 999
    assert evaluate("BiasAddBackward", {}, [dy[1:]], "bf16").dtype == ml_dtypes.bfloat16
