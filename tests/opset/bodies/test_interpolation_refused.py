"""Empty tensors, and what a run of an interpolation gradient in standard operators refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import onnx_backprop as ob
from tests.opset.bodies.body_models import (
    KNOWLEDGE,
    RESAMPLE,
    SPEC,
    Arrays,
    answer,
    assert_right,
    floats,
    int32s,
    int64s,
    model_of,
    plain_session,
    run,
)

f32 = np.float32


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, f32)


@pytest.mark.parametrize("knowledge", KNOWLEDGE[:-1])
def test_an_empty_gradient_gives_zeros(knowledge: str) -> None:
    for source, out in (((2, 3, 4, 5), (2, 3, 0, 7)), ((0, 3, 4, 5), (0, 3, 6, 7)), ((2, 3, 4, 0), (2, 3, 6, 0))):
        zeros, dy = np.zeros(source, f32), ones(*out)
        calls: list[tuple[str, dict[str, Any], Arrays]] = [
            ("InterpolateBackward", SPEC, [zeros, dy]),
            ("ResampleGrad", RESAMPLE, [dy, int32s(source)]),
            ("ResizeGrad", {"mode": "cubic"}, [dy, zeros, None, None, int64s(out)]),
        ]
        for op, attributes, arrays in calls:
            got = answer(op, attributes, arrays, knowledge, constants=False)
            np.testing.assert_array_equal(got, zeros, strict=True, err_msg=f"{op} {source} -> {out}")


X, DY = ones(2, 3, 4), ones(2, 3, 5)
ROI = {"coordinate_transformation_mode": "tf_crop_and_resize", "mode": "linear"}
LARGER = {"keep_aspect_ratio_policy": "not_larger", "mode": "linear"}
SIZED = "batch and channels of src"
REFUSED: list[tuple[str, dict[str, Any], Arrays, str]] = [
    ("InterpolateBackward", SPEC, [X, ones(1, 3, 5)], SIZED),
    ("InterpolateBackward", SPEC, [X, ones(0, 3, 5)], SIZED),
    ("InterpolateBackward", SPEC, [X, ones(2, 4, 5)], SIZED),
    ("InterpolateBackward", SPEC, [X, ones(2, 4, 0)], SIZED),
    ("InterpolateBackward", SPEC, [X, DY, int32s([4])], "the spatial shape that sizes says"),
    ("InterpolateBackward", SPEC, [X, DY, int32s([-1])], "the spatial shape that sizes says"),
    ("InterpolateBackward", SPEC, [X, ones(2, 3, 0), int32s([-1])], "the spatial shape that sizes says"),
    ("InterpolateBackward", SPEC, [X, DY, int32s([5, 5])], "expected input sizes"),
    ("InterpolateBackward", SPEC, [X, DY, int32s([])], "expected input sizes"),
    ("InterpolateBackward", SPEC, [ones(2, 3, 0), DY], "lengths >= 1"),
    ("InterpolateBackward", SPEC | {"scales": [2.0]}, [X, ones(2, 3, 9)], "within one pixel"),
    ("InterpolateBackward", SPEC | {"sizes": [4]}, [X, DY], "the spatial shape that sizes says"),
    ("InterpolateBackward", SPEC | {"sizes": [5]}, [X, DY, int32s([4])], "input sizes [5] as the attribute says"),
    ("InterpolateBackprop", SPEC | {"data_format": "NXC"}, [X, ones(2, 3, 5)], "channels of input_forward"),
    ("ResampleGrad", RESAMPLE, [DY, int32s([2, 3, -4])], "expected output_sizes >= 0"),
    ("ResampleGrad", RESAMPLE, [ones(2, 3, 0), int32s([2, 3, -4])], "expected output_sizes >= 0"),
    ("ResampleGrad", RESAMPLE, [DY, int32s([2, 3, 0])], "expected output_sizes >= 0"),
    ("ResampleGrad", RESAMPLE, [DY, int32s([2, 3])], "output_sizes of 3 entries"),
    ("ResampleGrad", RESAMPLE, [DY, int32s([2**31 - 1] * 3)], "output_sizes that fit in memory"),
    ("ResampleGrad", RESAMPLE | {"output_sizes": [2, 3, 4]}, [DY, int32s([2, 3, 5])], "[2, 3, 4] as the attribute"),
    ("ResizeGrad", {}, [DY, X, None, floats([1, 1, 1.5]), None], "expected dY with the lengths"),
    ("ResizeGrad", {}, [DY, X, None, floats([1, 1, -1.3]), None], "positive, finite scales"),
    ("ResizeGrad", {}, [DY, X, None, floats([1, np.nan, 1.3]), None], "positive, finite scales"),
    ("ResizeGrad", {}, [DY, X, None, floats([1, np.inf, 1.3]), None], "positive, finite scales"),
    ("ResizeGrad", {}, [DY, X, None, floats([1, 1.3]), None], "expected 3 scales"),
    ("ResizeGrad", {}, [DY, X, None, None, int64s([2, 3, 6])], "expected dY with the lengths"),
    ("ResizeGrad", {}, [DY, X, None, None, int64s([2, 3, -5])], "sizes >= 0"),
    ("ResizeGrad", {}, [DY, X, None, None, int64s([2, 3, 5, 5])], "expected 3 sizes"),
    ("ResizeGrad", {}, [DY, X, None, floats([1, 1, 1.3]), int64s([2, 3, 5])], "scales or sizes, not both"),
    ("ResizeGrad", {}, [DY, X, None, floats([]), int64s([])], "scales or sizes, not both"),
    ("ResizeGrad", {"axes": [-1]}, [DY, ones(2, 4, 4), None, None, int64s([5])], "expected dY with the lengths"),
    ("ResizeGrad", {"axes": [-1]}, [DY, ones(2, 3, 0), None, None, int64s([5])], "lengths >= 1"),
    ("ResizeGrad", LARGER, [DY, X, None, floats([1, 1, 1.3]), int64s([])], "as keep_aspect_ratio_policy wants"),
    ("ResizeGrad", LARGER, [DY, X, None, None, int64s([2, 3, 5])], "expected dY with the lengths"),
    ("ResizeGrad", ROI, [DY, X, floats([0, 1]), None, int64s([2, 3, 5])], "6 entries of roi"),
    ("ResizeGrad", ROI, [DY, X, floats([0, 0, 0, 1, 1, np.nan]), None, int64s([2, 3, 5])], "finite numbers in roi"),
]


@pytest.mark.parametrize("knowledge", ["symbolic", "nothing"])
@pytest.mark.parametrize("call", REFUSED, ids=[f"{n}-{c[0]}-{c[3]}" for n, c in enumerate(REFUSED)])
def test_what_contradicts_itself_is_a_failed_run(call: tuple[str, dict[str, Any], Arrays, str], knowledge: str) -> None:
    """The node that fails is named after the reason."""
    op, attributes, arrays, sentence = call
    knowledge = "rank" if op != "InterpolateBackward" and knowledge == "nothing" else knowledge
    session = plain_session(model_of(op, attributes, arrays, knowledge, constants=False))
    with pytest.raises(Exception, match=r"Name:'[^']*'") as failed:
        run(session, op, arrays)
    assert type(failed.value).__module__.startswith("onnxruntime")
    name = str(failed.value).split("Name:'")[1].split("'")[0]
    assert f"{op}: " in name, name
    # a body of unknown rank splits one sentence into several
    assert sentence in name or (knowledge == "nothing" and "expected" in name), name


@pytest.mark.parametrize("op", ["InterpolateBackward", "ResampleGrad", "ResizeGrad"])
def test_another_rank_is_a_failed_run(op: str) -> None:
    """Only the other tensor, or the list of sizes, tells the rank."""
    five, four = ones(2, 3, 5, 1), ones(2, 3, 4)
    arrays: dict[str, list[np.ndarray | None]] = {
        "InterpolateBackward": [four, five],
        "ResampleGrad": [five, int32s([2, 3, 4])],
        "ResizeGrad": [five, four, None, None, int64s([2, 3, 5])],
    }
    attributes = {"InterpolateBackward": SPEC, "ResampleGrad": RESAMPLE, "ResizeGrad": {}}[op]
    model = model_of(op, attributes, arrays[op], "static", constants=True)
    large = next(n for n, a in enumerate(arrays[op]) if a is five)
    model.graph.input[large].type.tensor_type.ClearField("shape")
    session = plain_session(model)
    with pytest.raises(Exception, match=f"Name:'[^']*{op}: expected [^']*'"):
        run(session, op, arrays[op])


def test_the_rank_must_be_known_somewhere() -> None:
    with pytest.raises(ob.KernelError, match=r"ResampleGrad 'the_node': .* needs to know the rank: .* dimension_count"):
        ob.use_kernels(model_of("ResampleGrad", RESAMPLE, [DY, int32s([2, 3, 4])], "nothing", constants=False), "onnx")
    known = RESAMPLE | {"dimension_count": 3}
    assert_right("ResampleGrad", known, [DY, int32s([2, 3, 4])], "nothing")


@pytest.mark.parametrize("more", [{"dimension_count": 13}, {"input_pixel_offsets": [0.5, 0.5]}])
def test_attributes_of_two_ranks_are_refused(more: dict[str, Any]) -> None:
    """Found by `make fuzz`: with all shapes unknown the body took the first and answered."""
    model = model_of(
        "ResampleGrad", RESAMPLE | {"scales": [1.25]} | more, [ones(31), int32s([2])], "nothing", constants=False
    )
    with pytest.raises(ob.ShapeError, match=f"expected one rank, got 1 .scales., .*{next(iter(more))}"):
        ob.use_kernels(model, "onnx")


def test_what_cannot_be_allocated_is_refused() -> None:
    """When the body is written; a single length that is too large by the session or the run, never by a crash."""
    for sizes in ([2**40, 2**40], [2**46, 3]):
        with pytest.raises(ob.ShapeError, match=r"ResampleGrad 'the_node': .* does not fit in memory"):
            answer("ResampleGrad", RESAMPLE | {"output_sizes": sizes}, [ones(2, 2)], "static", constants=True)
    for knowledge in ("static", "symbolic"):
        for sizes in ([2**45, 2], [2**44, 5]):
            with pytest.raises(Exception, match=r"(?i)memory|alloc|size|fail") as failed:
                answer("ResampleGrad", RESAMPLE | {"output_sizes": sizes}, [ones(2, 2)], knowledge, constants=True)
            assert type(failed.value).__module__.startswith("onnxruntime")
