"""The forms of the product that the bodies of the interpolation gradients have: each suits some lengths."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

import onnx_backprop as ob
from onnx_backprop.opset.bodies.interpolation import forms
from onnx_backprop.opset.functions import onnx as onnx_route
from tests.opset.bodies.body_models import RESAMPLE, SPEC, assert_right, floats, int32s, int64s, model_of
from tests.support.checks import one_node_model

f32 = np.float32
Shape = tuple[int, ...]
CROPS = {"coordinate_transformation_mode": "tf_crop_and_resize"}
BLOCKS, BAND, TURNED = {"MatMul"}, {"MatMul", "Gather"}, {"MatMul", "Gather", "Transpose"}
COMPUTED = {"ScatterElements", "Gather", "Slice"}  # windows that would be too large a constant
TELLING = BLOCKS | TURNED | COMPUTED | {"ReduceSum"}
# operator, attributes, source, destination, which of the telling operators the static body has
FORMS: list[tuple[str, dict[str, Any], Shape, Shape, set[str]]] = [
    ("InterpolateBackward", SPEC | {"mode": "nearest"}, (2, 3, 60, 40), (2, 3, 180, 80), BLOCKS),
    ("InterpolateBackward", SPEC | {"mode": "nearest"}, (1, 2, 6, 150), (1, 2, 18, 150), {"ReduceSum"}),
    ("InterpolateBackward", SPEC | {"mode": "nearest"}, (2, 3, 60, 40), (2, 3, 30, 10), BLOCKS),
    ("InterpolateBackward", SPEC | {"mode": "nearest"}, (2, 4, 40, 150), (2, 4, 30, 150), BLOCKS),
    ("InterpolateBackward", SPEC, (2, 3, 60, 40), (2, 3, 30, 10), BLOCKS),
    ("InterpolateBackward", {"mode": "nearest"}, (2, 40, 60, 3), (2, 80, 180, 3), BLOCKS | {"ReduceSum"}),
    ("InterpolateBackward", {"mode": "nearest"}, (2, 40, 60, 1), (2, 80, 180, 1), BLOCKS),
    ("InterpolateBackward", SPEC, (1, 2, 9, 11), (1, 2, 13, 17), {"MatMul"}),
    ("InterpolateBackward", SPEC, (1, 2, 200, 150), (1, 2, 400, 300), TURNED),
    ("InterpolateBackward", SPEC, (1, 2, 150, 7), (1, 2, 75, 23), {"MatMul"}),
    ("InterpolateBackward", SPEC | {"mode": "nearest"}, (2, 3, 100, 101), (2, 3, 333, 217), BAND | {"ScatterElements"}),
    ("InterpolateBackward", SPEC, (3, 5, 127), (3, 5, 401), TURNED | {"Slice"}),
    ("InterpolateBackward", SPEC, (3, 5, 401), (3, 5, 127), TURNED | {"Slice"}),
    ("InterpolateBackward", {"mode": "linear"}, (2, 80, 120, 3), (2, 160, 91, 3), TURNED),
    ("InterpolateBackward", {"mode": "linear"}, (2, 80, 120, 20), (2, 160, 90, 20), BAND),
    ("InterpolateBackward", SPEC, (1, 2, 4, 90, 6), (1, 2, 9, 151, 6), TURNED),
    ("ResampleGrad", RESAMPLE, (500,), (1300,), BAND),
    ("ResampleGrad", RESAMPLE | {"interpolation_mode": "NEAREST_NEIGHBOR"}, (70, 300), (190, 203), TURNED),
    ("ResizeGrad", {"mode": "cubic"}, (1, 2, 120, 160), (1, 2, 290, 250), TURNED),
    ("ResizeGrad", {"mode": "cubic", "antialias": 1}, (300, 400), (37, 61), BAND | {"ScatterElements", "ReduceSum"}),
    ("ResizeGrad", {"mode": "linear", "antialias": 1}, (3, 500, 20), (3, 60, 20), BAND),
    ("ResizeGrad", CROPS | {"mode": "linear", "axes": [1]}, (2, 200, 18), (2, 320, 18), BAND),
]


@pytest.mark.parametrize("emitted", [False, True])
@pytest.mark.parametrize("case", FORMS, ids=[f"{n}-{c[0]}" for n, c in enumerate(FORMS)])
def test_every_form(
    case: tuple[str, dict[str, Any], Shape, Shape, set[str]],
    emitted: bool,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With taps as constants and as nodes make them (`emitted`), for lengths that the model knows and does not."""
    op, attributes, source, out, operators = case
    if emitted:
        monkeypatch.setattr(forms, "CONSTANT_BYTES", 0)
        monkeypatch.setattr(onnx_route, "_written", OrderedDict())
    dy, zeros = rng.standard_normal(out).astype(f32), np.zeros(source, f32)
    arrays: list[np.ndarray | None] = [zeros, dy]
    if op == "ResampleGrad":
        arrays = [dy, int32s(source)]
    elif op == "ResizeGrad":
        listed = attributes.get("axes", range(len(out)))
        # a region that runs backwards
        roi = floats([0.9, 0.1]) if "axes" in attributes else None
        arrays = [dy, zeros, roi, None, int64s([out[a] for a in listed])]
    for knowledge in ("static", "batch", "symbolic"):
        assert_right(op, attributes, arrays, knowledge, constants=knowledge != "symbolic")
    if not emitted:
        (function,) = ob.use_kernels(model_of(op, attributes, arrays, "static", True), "onnx").functions
        assert {n.op_type for n in function.node} & TELLING == operators


@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_files_of_large_images_stay_small(mode: str, data_format: str) -> None:
    last = data_format == "NXC"
    shapes = [(1, *s, 3) if last else (1, 3, *s) for s in ((1080, 1920), (2160, 3840), (1079, 3001))]
    for source, out in zip(shapes, (shapes[1], shapes[2], shapes[0]), strict=True):
        model = one_node_model("InterpolateBackward", {"mode": mode, "data_format": data_format}, [source, out])
        assert ob.use_kernels(model, "onnx").ByteSize() < 2**17
