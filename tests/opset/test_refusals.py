"""Bad input is refused before any arithmetic, by a sentence that names operator, culprit, expected and got.

The sentence must be the same at run time and, where the model alone shows the contradiction, in onnx's shape inference.
"""

from __future__ import annotations

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

import onnx_backprop as ob
from onnx_backprop.opset.core.op import NUMBER_TYPES
from onnx_backprop.opset.operators.registry import BY_NAME
from tests.opset.refusals.all import REFUSED
from tests.opset.refusals.bad import (
    BIAS,
    BN,
    CD,
    CV,
    CW,
    IB,
    IBP,
    MP,
    RELU,
    RG,
    RZ,
    SM,
    TD,
    TF,
    TW,
    VALID,
    Bad,
    Value,
    ints,
)
from tests.support.checks import evaluate, infer, one_node_model

f32 = np.float32


def arrays(inputs: list[Value]) -> list[np.ndarray | None]:
    return [np.ones(i, f32) if isinstance(i, tuple) else i for i in inputs]


@pytest.mark.parametrize("op", list(VALID))
def test_the_unchanged_calls_are_valid(op: str) -> None:
    """Otherwise the table below would prove nothing."""
    attributes, inputs = VALID[op]
    assert np.isfinite(evaluate(op, attributes, arrays(inputs))).all()
    infer(one_node_model(op, attributes, [list(i) if isinstance(i, tuple) else i for i in inputs]))


def test_every_operator_is_refused_something() -> None:
    assert set(VALID) == set(BY_NAME)
    assert {bad.op for bad in REFUSED} == set(VALID)


@pytest.mark.parametrize("bad", REFUSED, ids=lambda bad: bad.id)
def test_refusals(bad: Bad) -> None:
    attributes, inputs = bad.call()
    sentence = f"{bad.op}: {bad.message}"
    with pytest.raises(bad.error) as e:
        evaluate(bad.op, attributes, arrays(inputs))
    assert str(e.value) == sentence
    if bad.model_shows_it:
        model = one_node_model(bad.op, attributes, [list(i) if isinstance(i, tuple) else i for i in inputs])
        with pytest.raises(bad.error) as e:
            infer(model)
        assert str(e.value) == sentence


@pytest.mark.parametrize(
    ("op", "given", "got"),
    [
        (IB, ["float64", "float64"], "src float64, diff_dst float64"),
        (IB, ["float32", "float16"], "src float32, diff_dst float16"),
        (IBP, ["float16", "float32"], "input_forward float16, output_delta float32"),
        (CV, ["float32", "float32", "float16"], "src float32, weights float32, bias float16"),
        (CD, ["float16", "float32"], "diff_dst float16, weights float32"),
        (CW, ["int32", "int32"], "src int32, diff_dst int32"),
        (TD, ["float32", "float64"], "diff_dst float32, weights float64"),
        (TW, ["float32", "int8"], "src float32, diff_dst int8"),
        (TF, ["float32", "bool"], "input_forward float32, output_delta bool"),
        (RG, ["int64"], "input_gradient int64"),
        (BIAS, ["float64"], "diff_dst float64"),
        (MP, ["float64", "float64"], "src float64, diff_dst float64"),
        (BN, ["float32", "float16", "float32", "float32", "float32"], "src float32, diff_dst float16"),
        (SM, ["float32", "float16"], "diff_dst float32, dst float16"),
        (RELU, ["float32", "float16"], "src float32, diff_dst float16"),
        (RZ, ["float32", "float64", "", "", ""], "dY float32, X float64"),
    ],
)
def test_element_types(op: str, given: list[str], got: str) -> None:
    """One type for all, and no silent conversion."""
    attributes, inputs = VALID[op]
    operands = [np.ones(i, dtype) for i, dtype in zip(inputs, given, strict=True) if isinstance(i, tuple)]
    with pytest.raises(ob.InvalidModelError) as e:
        BY_NAME[op].evaluate(operands, attributes)  # checks.evaluate would cast
    assert str(e.value) == f"{op}: expected one type of float32, float16, bfloat16 for all, got {got}"


@pytest.mark.parametrize(
    ("op", "position"), [(IB, 2), (IBP, 2), (RG, 1), (CD, 2), (CW, 2), (TW, 2), (TF, 2), (RZ, 2), (RZ, 3), (RZ, 4)]
)
def test_types_of_inputs_that_carry_numbers(op: str, position: int) -> None:
    attributes, inputs = VALID[op]
    target = BY_NAME[op]
    name, kind = target.inputs[position].name, np.dtype(NUMBER_TYPES[target.inputs[position].type_name].dtype)
    for wrong, got in (
        *((np.ones(3, t), f"1-D {t}") for t in ("int32", "int64", "float32", "float64") if t != kind),
        (np.ones((1, 3), kind), f"2-D {kind}"),
        (np.ones((), kind), f"0-D {kind}"),
    ):
        operands = [*arrays(inputs), *[None] * len(target.inputs)][: len(target.inputs)]
        operands[position] = wrong
        with pytest.raises(ob.InvalidModelError) as e:
            target.evaluate(operands, attributes)
        assert str(e.value) == f"{op}: input {name}: expected a 1-D {kind} tensor, got {got}"


@pytest.mark.parametrize("op", list(VALID))
def test_number_of_inputs(op: str) -> None:
    attributes, inputs = VALID[op]
    target = BY_NAME[op]
    names = ", ".join(i.name + ("?" if i.optional else "") for i in target.inputs)
    required = sum(not i.optional for i in target.inputs)
    operands = arrays(inputs)[:required]
    assert all(given is not None for given in operands)
    many = [*operands, *[ints(1)] * (len(target.inputs) - required + 1)]
    for wrong in ([], operands[:-1], [None, *operands[1:]], many):
        with pytest.raises(ob.InvalidModelError) as e:
            target.evaluate(wrong, attributes)
        assert str(e.value) == f"{op}: expected inputs {names}, got {sum(i is not None for i in wrong)}"


def test_the_reference_evaluator_passes_the_refusal_on() -> None:
    attributes, inputs = VALID[CD]
    model = one_node_model(CD, attributes | {"dst_shape": [1, 4, 7]}, [["N", "C", "O"], ["OC", "IC", "K"]])
    evaluator = ReferenceEvaluator(model, new_ops=ob.reference_ops())
    feeds = dict(zip(("diff_dst", "weights"), arrays(inputs), strict=True))
    with pytest.raises(ob.ShapeError, match="ConvolutionBackwardData: spatial axis 0: dst_shape length 7"):
        evaluator.run(None, feeds)


def test_what_cannot_be_allocated_is_refused() -> None:
    attributes = VALID[RG][0] | {"output_sizes": [2**40, 2**40]}
    with pytest.raises(ob.ShapeError, match="ResampleGrad: output_gradient of shape .* does not fit in memory"):
        evaluate(RG, attributes, [np.ones((4, 6), f32)])


def test_errors_carry_the_operator() -> None:
    attributes, inputs = VALID[IB]
    with pytest.raises(ob.ShapeError) as e:
        evaluate(IB, attributes | {"sizes": [4]}, arrays(inputs))
    assert (e.value.op_type, e.value.node) == (IB, "")
    assert e.value.message == "the spatial shape of diff_dst and attribute sizes must agree, got 7 and 4"
    with pytest.raises(ob.InvalidModelError) as kind:
        evaluate(IB, attributes | {"sizes": 7}, arrays(inputs))
    assert isinstance(kind.value.__cause__, TypeError)
