"""Inferred shapes beside executed ones, for all examples and random calls, known in full or in part."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, TensorProto, checker

from tests.declarations.declaration import Example
from tests.declarations.registry import EXAMPLES
from tests.opset.operators.test_convolution import Case, case
from tests.support.checks import evaluate, evaluate_all, infer, inferred, one_node_model


def symbolic(rng: np.random.Generator, shape: tuple[int, ...]) -> list[int | str | None]:
    """A true statement about a shape: numbers, names that stand for their number, gaps."""
    return [[d, f"is_{d}", None][rng.choice(3, p=[0.5, 0.3, 0.2])] for d in shape]


def assert_true_statement(dims: list[int | str | None] | None, shape: tuple[int, ...], what: object) -> None:
    assert dims is not None, what
    assert len(dims) == len(shape), what
    for stated, real in zip(dims, shape, strict=True):
        assert stated in (None, real, f"is_{real}"), f"{dims} of {shape}: {what}"


def random_calls(rng: np.random.Generator) -> list[tuple[str, dict[str, object], list[np.ndarray | None]]]:
    calls = [(e.op, e.attributes, e.arrays()) for e in EXAMPLES]
    for padding in ("explicit", "VALID", "SAME_UPPER", "SAME_LOWER") * 10:
        c: Case = case(rng, padding, transposed=False)
        ncx = c.attributes_in(data_format="NCX", weights_format="OIX")
        calls.append(("Convolution", ncx, [c.x, c.w, *([c.w.ravel()[: len(c.w)]] if rng.random() < 0.5 else [])]))
        calls.append(("ConvolutionBackwardData", ncx, [c.dy, c.w, np.int32(c.x.shape)]))
        calls.append(("ConvolutionBackwardWeights", ncx, [c.x, c.dy, np.int32(c.w.shape)]))
        c = case(rng, padding, transposed=True)
        ncx = c.attributes_in(data_format="NCX", weights_format="IOX")
        calls.append(("ConvTransposeBackwardData", ncx, [c.x, c.w]))
        calls.append(("ConvTransposeBackwardWeights", ncx, [c.dy, c.x, np.int32(c.w.shape)]))
    return calls


def test_inferred_shapes_are_the_executed_ones(rng: np.random.Generator) -> None:
    """Fully known shapes give the executed shape; partly known ones never a false statement."""
    for op, attributes, arrays in random_calls(rng):
        executed, *more = (answer.shape for answer in evaluate_all(op, attributes, arrays))
        known = [a if a is None or a.dtype.kind == "i" else list(a.shape) for a in arrays]
        what = (op, attributes, [None if a is None else a.shape for a in arrays])
        assert inferred(one_node_model(op, attributes, known)) == list(executed), what
        for _ in range(3):
            partly = [
                None if a is None else a if a.dtype.kind == "i" and rng.random() < 0.5 else symbolic(rng, a.shape)
                for a in arrays
            ]
            m = one_node_model(op, attributes, partly, output_ranks=[len(shape) for shape in (executed, *more)])
            assert_true_statement(inferred(m), executed, (what, partly))


def test_every_example_passes_the_full_check() -> None:
    for example in EXAMPLES:
        for element_type in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16):
            m = static(example, element_type)
            checker.check_model(m, full_check=True)
            assert infer(m).graph.output[0].type.tensor_type.elem_type == element_type


def static(example: Example, element_type: int = TensorProto.FLOAT) -> ModelProto:
    inputs = [a if a is None or a.dtype.kind == "i" else list(a.shape) for a in example.arrays()]
    ranks = [np.ndim(answer) for answer in (example.expected, *example.more)]
    return one_node_model(example.op, example.attributes, inputs, element_type=element_type, output_ranks=ranks)


def test_auto_pad_in_every_spelling() -> None:
    same = next(e for e in EXAMPLES if e.id == "conv-dx-SAME_UPPER-K2")
    for spelling in ("SAME_UPPER", "same_upper", "Same_Upper"):
        changed = Example(same.id, same.op, same.attributes | {"auto_pad": spelling}, same.inputs, same.expected)
        checker.check_model(static(changed), full_check=True)
        np.testing.assert_array_equal(evaluate(changed.op, changed.attributes, changed.arrays()), same.expected)
