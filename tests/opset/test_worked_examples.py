"""Every worked example through the float64 reference and onnx's ReferenceEvaluator, in every element type.

The inputs are small numbers that each type holds exactly, so the answer is the exact one rounded once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

import onnx_backprop as ob
from onnx_backprop.opset import OPS
from onnx_backprop.opset.core.op import Op
from onnx_backprop.opset.operators.registry import BY_NAME
from onnx_backprop.ort_ops.loops import BY_LOOPS
from tests.declarations.declaration import Example
from tests.declarations.registry import DECLARED, EXAMPLES
from tests.support import single_op
from tests.support.batch import check_each
from tests.support.checks import DTYPES, assert_rounded_once, evaluate_all
from tests.support.renamed import renamed

each_dtype = pytest.mark.parametrize("dtype", list(DTYPES))


def answers(example: Example) -> list[list]:
    """All outputs."""
    return [example.expected, *example.more]


def test_the_table_covers_every_operator_and_names_each_example_once() -> None:
    assert all({e.op for e in d.examples} == {op} for op, d in DECLARED.items())
    assert set(DECLARED) == {op.name for op in OPS}
    assert [name for name, count in Counter(e.id for e in EXAMPLES).items() if count > 1] == []


@each_dtype
@pytest.mark.parametrize("operators", [BY_NAME, BY_LOOPS], ids=["reference", "numba"])
def test_reference(operators: Mapping[str, Op], dtype: str) -> None:
    def run(examples: Sequence[Example]) -> list[tuple[np.ndarray, ...]]:
        return [evaluate_all(e.op, e.attributes, e.arrays(), dtype, operators) for e in examples]

    def check(example: Example, results: tuple[np.ndarray, ...]) -> None:
        for got, expected, spec in zip(results, answers(example), BY_NAME[example.op].outputs, strict=True):
            assert_rounded_once(got, expected, dtype if spec.type_name == "T1" else "f32")

    check_each([example for example in EXAMPLES if example.op in operators], run, check)


@each_dtype
def test_reference_evaluator(dtype: str) -> None:
    """The model casts its float32 inputs to the type and the answer back, which is exact. Each type has other names."""

    def run(examples: Sequence[Example]) -> list[list[np.ndarray]]:
        results = []
        for example in examples:
            model = single_op.model(example.op, example.attributes, example.arrays(), dtype=dtype)
            model, names = renamed(model, {"f32": "unnamed", "f16": "odd", "bf16": "ours"}[dtype])
            evaluator = ReferenceEvaluator(model, new_ops=ob.reference_ops())
            feeds = single_op.feeds(example.op, example.arrays())
            results.append(evaluator.run(None, {names[name]: array for name, array in feeds.items()}))
        return results

    def check(example: Example, results: list[np.ndarray]) -> None:
        for got, exact, spec in zip(results, answers(example), BY_NAME[example.op].outputs, strict=True):
            rounded = DTYPES[dtype if spec.type_name == "T1" else "f32"]
            expected = np.asarray(exact, np.float64).astype(rounded).astype(np.float32)
            np.testing.assert_array_equal(got, expected, strict=True)

    check_each(EXAMPLES, run, check)
