"""Bad input is refused before any arithmetic, by a sentence that names operator, culprit, expected and got.

The sentence must be the same at run time and, where the model alone shows the contradiction, in onnx's shape inference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

import onnx_backprop as ob
from onnx_backprop.opset.core.op import NUMBER_TYPES
from onnx_backprop.opset.operators.registry import BY_NAME
from tests.declarations.declaration import Bad, ints, ones
from tests.declarations.registry import DECLARED, REFUSED, VALID, spoilt
from tests.support.batch import check_each
from tests.support.checks import evaluate, infer, one_node_model

f32 = np.float32


@pytest.mark.parametrize("op", list(VALID))
def test_the_unchanged_calls_are_valid(op: str) -> None:
    """Otherwise the declarations would prove nothing."""
    attributes, inputs = VALID[op]
    assert np.isfinite(evaluate(op, attributes, ones(inputs))).all()
    infer(one_node_model(op, attributes, [list(i) if isinstance(i, tuple) else i for i in inputs]))


def test_every_operator_is_refused_something() -> None:
    assert set(VALID) == set(BY_NAME)
    assert all({bad.op for bad in declaration.refused} == {op} for op, declaration in DECLARED.items())


@pytest.mark.parametrize("op", list(VALID))
def test_refusals(op: str) -> None:
    def refuse(bads: Sequence[Bad]) -> list[list[Exception]]:
        return [refused(bad) for bad in bads]

    def refused(bad: Bad) -> list[Exception]:
        attributes, inputs = spoilt(bad)
        with pytest.raises(bad.error) as e:
            evaluate(bad.op, attributes, ones(inputs))
        errors = [e.value]
        if bad.model_shows_it:
            model = one_node_model(bad.op, attributes, [list(i) if isinstance(i, tuple) else i for i in inputs])
            with pytest.raises(bad.error) as e:
                infer(model)
            errors.append(e.value)
        return errors

    def check(bad: Bad, errors: list[Exception]) -> None:
        assert len(errors) == 1 + bad.model_shows_it
        assert {str(e) for e in errors} == {f"{bad.op}: {bad.message}"}

    check_each([bad for bad in REFUSED if bad.op == op], refuse, check)


@pytest.mark.parametrize("op", list(VALID))
def test_element_types(op: str) -> None:
    """One type for all, and no silent conversion."""
    attributes, inputs = VALID[op]
    given = dict(zip((i.name for i in BY_NAME[op].inputs), ones(inputs), strict=False))
    names = [i.name for i in BY_NAME[op].inputs if i.type_name == "T1" and given.get(i.name) is not None]
    wrong = [dict.fromkeys(names, kind) for kind in ("float64", "int32", "bool")]
    if len(names) > 1:
        wrong += [dict.fromkeys(names, "float32") | {name: k} for name in names for k in ("float16", "float64")]
    for kinds in wrong:
        operands = [a.astype(kinds.get(name, a.dtype)) if a is not None else a for name, a in given.items()]
        with pytest.raises(ob.InvalidModelError) as e:
            BY_NAME[op].evaluate(operands, attributes)  # checks.evaluate would cast
        got = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
        assert str(e.value) == f"{op}: expected one type of float32, float16, bfloat16 for all, got {got}"


NUMBERS = [(op, n) for op in VALID for n, spec in enumerate(BY_NAME[op].inputs) if not spec.tensor]


@pytest.mark.parametrize(("op", "position"), NUMBERS)
def test_types_of_inputs_that_carry_numbers(op: str, position: int) -> None:
    attributes, inputs = VALID[op]
    target = BY_NAME[op]
    name, kind = target.inputs[position].name, np.dtype(NUMBER_TYPES[target.inputs[position].type_name].dtype)
    for wrong, got in (
        *((np.ones(3, t), f"1-D {t}") for t in ("int32", "int64", "float32", "float64") if t != kind),
        (np.ones((1, 3), kind), f"2-D {kind}"),
        (np.ones((), kind), f"0-D {kind}"),
    ):
        operands = [*ones(inputs), *[None] * len(target.inputs)][: len(target.inputs)]
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
    operands = ones(inputs)[:required]
    assert all(given is not None for given in operands)
    many = [*operands, *[ints(1)] * (len(target.inputs) - required + 1)]
    for wrong in ([], operands[:-1], [None, *operands[1:]], many):
        with pytest.raises(ob.InvalidModelError) as e:
            target.evaluate(wrong, attributes)
        assert str(e.value) == f"{op}: expected inputs {names}, got {sum(i is not None for i in wrong)}"


def test_the_reference_evaluator_passes_the_refusal_on() -> None:
    attributes, inputs = VALID["ConvolutionBackwardData"]
    model = one_node_model(
        "ConvolutionBackwardData", attributes | {"dst_shape": [1, 4, 7]}, [["N", "C", "O"], ["OC", "IC", "K"]]
    )
    evaluator = ReferenceEvaluator(model, new_ops=ob.reference_ops())
    feeds = dict(zip(("diff_dst", "weights"), ones(inputs), strict=True))
    with pytest.raises(ob.ShapeError, match="ConvolutionBackwardData: spatial axis 0: dst_shape length 7"):
        evaluator.run(None, feeds)


def test_what_cannot_be_allocated_is_refused() -> None:
    attributes = VALID["ResampleGrad"][0] | {"output_sizes": [2**40, 2**40]}
    with pytest.raises(ob.ShapeError, match="ResampleGrad: output_gradient of shape .* does not fit in memory"):
        evaluate("ResampleGrad", attributes, [np.ones((4, 6), f32)])


def test_errors_carry_the_operator() -> None:
    attributes, inputs = VALID["InterpolateBackward"]
    with pytest.raises(ob.ShapeError) as e:
        evaluate("InterpolateBackward", attributes | {"sizes": [4]}, ones(inputs))
    assert (e.value.op_type, e.value.node) == ("InterpolateBackward", "")
    assert e.value.message == "the spatial shape of diff_dst and attribute sizes must agree, got 7 and 4"
    with pytest.raises(ob.InvalidModelError) as kind:
        evaluate("InterpolateBackward", attributes | {"sizes": 7}, ones(inputs))
    assert isinstance(kind.value.__cause__, TypeError)
