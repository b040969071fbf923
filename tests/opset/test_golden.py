"""The operators give what the oneDNN library gave: as references, and in sessions on every route."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import ModelProto

import onnx_backprop as ob
from onnx_backprop.opset import KERNELS
from onnx_backprop.opset.functions.use_kernels import PYTHON_KERNELS
from onnx_backprop.opset.operators.registry import BY_NAME
from tests.support import single_op
from tests.support.batch import check_each, together

GOLDEN = Path(__file__).parent.parent / "golden"
# of the largest value: the library sums in float32 in an order of its own, and rounds to bf16 once
TOLERANCE = {"f32": 2e-6, "bf16": 2.0**-9}
COUNTS = {
    "InterpolateBackward": 96,
    "ConvolutionBackwardData": 33,
    "ConvolutionBackwardWeights": 82,
    "ConvTransposeBackwardData": 39,
    "ConvTransposeBackwardWeights": 68,
}


@dataclass(frozen=True)
class Golden:
    """One recorded call; arrays are float32, which holds every bf16 number."""

    name: str
    op: str
    dtype: str
    attributes: dict[str, Any]
    inputs: list[np.ndarray]
    output: np.ndarray

    def __str__(self) -> str:
        return f"{self.name} of {self.op}"


def load(path: Path) -> list[Golden]:
    with np.load(path, allow_pickle=False) as arrays:
        cases = []
        for case in json.loads(arrays["cases"].tobytes()):
            values = [_widen(arrays[f"{case['name']}/{what}"]) for what in (*case["inputs"], "output")]
            assert case["inputs"] == [i.name for i in BY_NAME[case["op"]].inputs][: len(case["inputs"])]
            assert (case["api"], case["version"]) == ("graph", "3.2.0")
            cases.append(Golden(case["name"], case["op"], case["dtype"], case["attributes"], values[:-1], values[-1]))
        return cases


def _widen(array: np.ndarray) -> np.ndarray:
    return array.view(ml_dtypes.bfloat16).astype(np.float32) if array.dtype == np.uint16 else array


def renamed(case: Golden) -> Golden | None:
    """The same call of the operator's older name, where it has one."""
    if case.op == "InterpolateBackward":
        return replace(case, op="InterpolateBackprop")
    if case.op != "ConvTransposeBackwardWeights":
        return None
    attributes = dict(case.attributes)
    old_format, axes = {"IOX": ("OIX", (0, 1)), "XOI": ("XIO", (-2, -1))}[attributes.pop("weights_format")]
    output = case.output.swapaxes(*axes)
    assert attributes.pop("weights_shape") == list(case.output.shape)
    attributes |= {"filter_format": old_format, "filter_shape": list(output.shape)}
    return replace(case, op="ConvTransposeBackpropFilters", attributes=attributes, output=output)


RECORDED = [case for path in sorted(GOLDEN.glob("*.npz")) for case in load(path)]
ALL = RECORDED + [old for case in RECORDED if (old := renamed(case)) is not None]


def assert_agrees(case: Golden, got: np.ndarray) -> None:
    assert got.shape == case.output.shape
    error = float(np.abs(got.astype(np.float64) - case.output).max(initial=0))
    largest = float(np.abs(case.output).max(initial=0))
    assert error <= TOLERANCE[case.dtype] * largest, f"off by {error} of {largest}: {case.attributes}"


def test_every_recorded_call_is_here() -> None:
    assert Counter(case.op for case in RECORDED) == COUNTS
    assert len({case.name for case in RECORDED}) == len(RECORDED) == 318
    assert {case.dtype for case in RECORDED} == set(TOLERANCE)
    # one sum of small whole numbers is 0
    assert sum(not case.output.any() for case in RECORDED) == 1


def test_reference() -> None:
    elements = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}

    def run(cases: Sequence[Golden]) -> list[np.ndarray]:
        typed = [[i.astype(elements[c.dtype]) if i.dtype == np.float32 else i for i in c.inputs] for c in cases]
        return [BY_NAME[c.op].evaluate(inputs, c.attributes) for c, inputs in zip(cases, typed, strict=True)]

    def check(case: Golden, got: np.ndarray) -> None:
        assert got.dtype == elements[case.dtype]
        assert_agrees(case, got.astype(np.float32))

    check_each(ALL, run, check)


# a Python operator is the same whatever is known of the shapes
@pytest.mark.parametrize(
    ("kernels", "shapes"),
    [
        (k, shapes)
        for k in KERNELS
        for shapes in ("symbolic", "known")
        if k not in PYTHON_KERNELS or shapes == "symbolic"
    ],
)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("op", sorted({case.op for case in ALL}))
def test_sessions(op: str, dtype: str, kernels: str, shapes: str) -> None:
    """All calls of an operator in one session."""

    def model(case: Golden) -> ModelProto:
        result = single_op.model(case.op, case.attributes, case.inputs, dtype=dtype)
        for graph_input, array in zip(result.graph.input, case.inputs, strict=True):
            for dim, length in zip(graph_input.type.tensor_type.shape.dim, array.shape, strict=True):
                if shapes == "known":
                    dim.dim_value = length
        return result

    def run(cases: Sequence[Golden]) -> list[np.ndarray]:
        feeds = [single_op.feeds(case.op, case.inputs) for case in cases]
        run_all = together([model(case) for case in cases], feeds, partial(ob.session, kernels=kernels))
        return [answers[0] for answers in run_all()]

    check_each([case for case in ALL if (case.op, case.dtype) == (op, dtype)], run, assert_agrees)
