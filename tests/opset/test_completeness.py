"""Every operator has every facet, and its registered schema is the one its specification describes."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, ModelProto, TensorProto, checker, helper
from onnx.defs import OpSchema, get_schema

import onnx_backprop as ob
from onnx_backprop.opset import OPS, operators
from onnx_backprop.opset.core.op import Attributes
from onnx_backprop.opset.core.schema import register
from onnx_backprop.opset.operators.registry import BY_NAME
from tests.declarations.declaration import AUTO_PAD, FLOAT, REQUIRED, STRING
from tests.declarations.registry import DECLARED, EXAMPLES
from tests.support.checks import one_node_model

SPECIFICATION = {op: declaration.schema for op, declaration in DECLARED.items()}
T1 = {"tensor(float)", "tensor(float16)", "tensor(bfloat16)"}
NUMBERS = {"T2": {"tensor(int32)"}, "T3": {"tensor(float)"}, "T4": {"tensor(int64)"}, "T5": {"tensor(float)"}}
NUMBERS |= {"T6": {"tensor(uint8)"}, "T7": {"tensor(int64)"}}
each_op = pytest.mark.parametrize("name", list(SPECIFICATION))


def schema(name: str) -> OpSchema:
    return get_schema(name, ob.OPSET_VERSION, ob.DOMAIN)


def required(name: str) -> list[str]:
    """The inputs that are not optional."""
    return [i for i, kind in SPECIFICATION[name].inputs.items() if not kind.endswith("?")]


def test_the_operators() -> None:
    assert sorted(op.name for op in OPS) == sorted(SPECIFICATION)
    assert len({op.name for op in OPS}) == len(OPS)
    assert sorted(c.__name__ for c in ob.reference_ops()) == sorted(SPECIFICATION)
    registered = {s.name for s in onnx.defs.get_all_schemas_with_history() if s.domain == ob.DOMAIN}
    assert registered == set(SPECIFICATION)


@each_op
def test_attributes(name: str) -> None:
    expected = SPECIFICATION[name].attributes
    got = schema(name).attributes
    assert set(got) == set(expected)
    for attribute, (kind, default, *_) in expected.items():
        stated = got[attribute]
        assert stated.type == kind, attribute
        assert stated.required == (default is REQUIRED), attribute
        assert stated.description.rstrip().endswith("."), attribute
        if default is REQUIRED or default is None:
            assert stated.default_value.type == AttributeProto.UNDEFINED, attribute
        else:
            value = helper.get_attribute_value(stated.default_value)
            assert (value.decode() if isinstance(value, bytes) else value) == default, attribute


@each_op
def test_defaults_at_run_time_are_those_of_the_schema(name: str) -> None:
    """A node without optional attributes means what the schema says."""
    expected = SPECIFICATION[name].attributes
    required = {a.name: example_attributes(name)[a.name] for a in BY_NAME[name].attributes if a.required}
    assert set(required) == {a for a, (_, default, *_) in expected.items() if default is REQUIRED}
    bound = Attributes(BY_NAME[name], required)
    assert {a: v for a, v in bound.items() if a not in required} == {
        a: default for a, (_, default, *_) in expected.items() if default is not REQUIRED
    }


@each_op
def test_inputs_outputs_and_types(name: str) -> None:
    expected, got = SPECIFICATION[name], schema(name)
    optional = OpSchema.FormalParameterOption.Optional
    assert [(i.name, i.type_str + "?" * (i.option == optional)) for i in got.inputs] == [*expected.inputs.items()]
    assert [(o.name, o.type_str) for o in got.outputs] == [*expected.outputs.items()]
    assert (got.min_output, got.max_output) == (1, len(expected.outputs))
    assert (got.min_input, got.max_input) == (len(required(name)), len(expected.inputs))
    constraints = {c.type_param_str: set(c.allowed_type_strs) for c in got.type_constraints}
    used = {kind.rstrip("?") for kind in (*expected.inputs.values(), *expected.outputs.values())}
    assert constraints == {kind: T1 if kind == "T1" else NUMBERS[kind] for kind in used}
    assert all(formal.description.rstrip().endswith(".") for formal in (*got.inputs, *got.outputs))


@each_op
def test_choices(name: str) -> None:
    for attribute in BY_NAME[name].attributes:
        kind, default, *choices = SPECIFICATION[name].attributes[attribute.name]
        assert [attribute.choices] == (choices or [()])
        assert (attribute.kind == "string") == (kind == STRING) == bool(choices)
        if not choices:
            continue
        spellings, others = {*attribute.choices}, {"other", *(spelling.swapcase() for spelling in attribute.choices)}
        if (kind, default, *choices) == AUTO_PAD:  # in any letters
            spellings, others = spellings | others | {"NOTSET", "notset"}, {"SAME"}
            spellings.remove("other")
        for spelling in spellings:
            assert attribute.normalise(spelling, name) in attribute.choices
            assert attribute.normalise(spelling.encode(), name) in attribute.choices
        for wrong in others:
            with pytest.raises(ob.InvalidModelError) as e:
                attribute.normalise(wrong, name)
            listed = ", ".join(choices[0])
            assert str(e.value) == f"{name}: attribute {attribute.name}: expected one of {listed}, got {wrong!r}"


@each_op
def test_documentation_of_the_schema(name: str) -> None:
    """The formula first, then shapes, errors and the source."""
    doc = schema(name).doc or ""
    formula, *rest = doc.split("\n\n")
    assert " = " in formula
    assert len(formula.splitlines()) == 1
    for label in ("Shapes", "Edge cases", "Errors", "Source"):
        assert any(re.match(rf"{label}( \(|:)", paragraph) for paragraph in rest), label
    assert BY_NAME[name].source in doc
    # every input, and the output or its symbol, is spoken of
    for formal in SPECIFICATION[name].inputs:
        assert formal in doc


@each_op
def test_the_module_is_named_after_the_operator(name: str) -> None:
    stem = re.sub(r"(?<!^)(?=[A-Z][a-z])", "_", name).lower()
    module = import_module(f"onnx_backprop.opset.operators.{stem}")
    assert module.OP is BY_NAME[name]
    assert (module.__doc__ or "").startswith(f"{name}: ")


def test_every_module_of_an_operator_is_in_the_list() -> None:
    """An `OP` that nobody listed would be a dead file."""
    assert operators.__file__ is not None
    stems = {p.stem for p in Path(operators.__file__).parent.glob("*.py")} - {"__init__", "registry"}
    assert sorted(import_module(f"{operators.__name__}.{stem}").OP.name for stem in stems) == sorted(SPECIFICATION)


def test_a_second_registration_is_refused() -> None:
    for op in OPS:
        with pytest.raises(
            ob.RegistrationError, match=f"^{op.name}: a schema for onnx_backprop::{op.name} exists already"
        ):
            register([op])


# ----- What onnx's checker makes of the schemas -----------------------------------------------------------------------


def example_attributes(name: str) -> dict[str, object]:
    return dict(next(e for e in EXAMPLES if e.op == name).attributes)


def example_model(name: str) -> ModelProto:
    example = next(e for e in EXAMPLES if e.op == name)
    inputs = [a if a is None or a.dtype.kind == "i" else list(a.shape) for a in example.arrays()]
    ranks = [np.ndim(answer) for answer in (example.expected, *example.more)]
    return one_node_model(name, example.attributes, inputs, output_ranks=ranks)


@each_op
def test_checker_accepts_the_example_and_demands_what_is_required(name: str) -> None:
    model = example_model(name)
    checker.check_model(model, full_check=True)
    attributes = SPECIFICATION[name].attributes
    for attribute in [a for a, (_, default, *_) in attributes.items() if default is REQUIRED]:
        without = ModelProto()
        without.CopyFrom(model)
        node = without.graph.node[0]
        kept = [a for a in node.attribute if a.name != attribute]
        assert len(kept) < len(node.attribute)
        del node.attribute[:]
        node.attribute.extend(kept)
        with pytest.raises(checker.ValidationError, match=f"Required attribute '{attribute}' is missing"):
            checker.check_model(without)
        given = {k: v for k, v in example_attributes(name).items() if k != attribute}
        with pytest.raises(ob.InvalidModelError, match=f"^{name}: required attribute {attribute} is missing$"):
            Attributes(BY_NAME[name], given)


@each_op
def test_checker_refuses_unknown_attributes_and_wrong_kinds(name: str) -> None:
    model = example_model(name)
    model.graph.node[0].attribute.append(helper.make_attribute("group", 1))
    with pytest.raises(checker.ValidationError, match=f"Unrecognized attribute: group for operator {name}"):
        checker.check_model(model)
    with pytest.raises(ob.InvalidModelError, match=f"^{name}: unknown attribute group; it takes "):
        Attributes(BY_NAME[name], example_attributes(name) | {"group": 1})
    for attribute, (kind, *_) in SPECIFICATION[name].attributes.items():
        model = example_model(name)
        node = model.graph.node[0]
        kept = [a for a in node.attribute if a.name != attribute]
        del node.attribute[:]
        wrong = "half" if kind == FLOAT else 0.5
        node.attribute.extend([*kept, helper.make_attribute(attribute, wrong)])
        with pytest.raises(checker.ValidationError, match=f"Mismatched attribute type in 'the_node : {attribute}'"):
            checker.check_model(model)
        with pytest.raises(ob.InvalidModelError, match=f"^{name}: attribute {attribute}: expected .*, got {wrong!r}$"):
            Attributes(BY_NAME[name], example_attributes(name) | {attribute: wrong})


@each_op
def test_checker_counts_inputs_and_outputs(name: str) -> None:
    expected = SPECIFICATION[name].inputs
    model = example_model(name)
    node = model.graph.node[0]
    first = node.input[0]
    del node.input[:]
    node.input.extend([first] * (len(expected) + 1))
    with pytest.raises(checker.ValidationError, match="has input size"):
        checker.check_model(model)
    del node.input[:]
    with pytest.raises(checker.ValidationError, match="has input size 0 not in range"):
        checker.check_model(model)
    node.input.extend([first] * len(required(name)))
    node.output.append("one more")
    count = len(node.output)
    with pytest.raises(checker.ValidationError, match=f"has output size {count} not in range"):
        checker.check_model(model)


@each_op
def test_double_is_outside_the_type_constraint(name: str) -> None:
    model, schema = example_model(name), SPECIFICATION[name]
    kinds = [*(schema.inputs[value.name] for value in model.graph.input), *schema.outputs.values()]
    for value, kind in zip((*model.graph.input, *model.graph.output), kinds, strict=True):
        if kind.startswith("T1"):
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    with pytest.raises(onnx.shape_inference.InferenceError, match="unsupported type: tensor\\(double\\)"):
        checker.check_model(model, full_check=True)
