"""A few cases of every operator, and the judge itself; all cases run under `make conformance`.

The rules' own tests run every case too, and in more forms.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from onnx import ModelProto, defs

import onnx_backprop as ob
from onnx_backprop.converters.reverse import expand, registry
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.forward import Forward
from tests.conformance import operators
from tests.support.gradient_checks import Case, build

PER_OPERATOR = 3
SEED = 5


def sample() -> list[Case]:
    """Some cases of every operator, another choice for each, the same every time; all that are listed here alone."""
    by_operator: defaultdict[str, list[Case]] = defaultdict(list)
    for one in operators.cases():
        by_operator[one.op].append(one)
    rng = np.random.default_rng(SEED)
    chosen = [
        cases[i]
        for cases in by_operator.values()
        for i in sorted(rng.choice(len(cases), min(PER_OPERATOR, len(cases)), replace=False))
    ]
    return [*chosen, *(one for one in operators.MORE if all(one is not other for other in chosen))]


def test_every_operator_has_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    rows = operators.report(sample())
    with capsys.disabled():
        print(f"\nOperators, a sample, seed {SEED}: {dict(Counter(row.verdict for row in rows.values()))}")
    assert [what for row in rows.values() for what in row.wrong] == []
    assert len(rows) >= 198, "every operator of the default domain"
    assert {row.verdict for row in rows.values()} == {"right", "no derivative", "refused"}
    for name, row in rows.items():
        if row.verdict == "right":
            assert all(row.counts[form]["right"] for form in operators.FORMS), f"{name}: {row.counts}"
    assert "| Relu | 14 | right | 1 right | 1 right |  |" in operators.section(rows)


def test_there_are_cases_enough() -> None:
    every = operators.cases()
    assert len(every) >= 1500
    assert len({str(one) for one in every}) > 0.98 * len(every), "cases differ"
    assert {one.op for one in every} <= operators.operators().keys()


# Differentiated through the function body that ONNX gives them, or through their branches or steps
WITHOUT_A_RULE = {"If", "NegativeLogLikelihoodLoss", "ReduceLogSum", "RotaryEmbedding"}
WITHOUT_A_RULE |= {"Loop", "Scan", "SequenceMap"}
# Refused unless straight_through opens them
ROUNDING = {"ConvInteger", "MatMulInteger", "QuantizeLinear"}
# For models of an opset that onnxruntime does not run yet
AHEAD = {("", name, 28) for name in ("Cast", "Mod", "Optional", "OptionalGetElement", "SpaceToDepth")}
AHEAD |= {("", "Range", 27)}
# onnx's checker takes no model with it; rules/test_channel_norm.py tests it without the checker
WITHDRAWN = {("", "GroupNormalization", 18)}
OF_ONNX = {key for key in registry.RULES if not key[0]}  # rules/test_domain.py and test_packed.py test the others


def test_the_table_of_rules_is_complete() -> None:
    """Every version that a model can hold, of every operator that is differentiated by a rule, has one: none may go."""
    ruled = {
        name
        for name, row in operators.report([]).items()
        if operators.takes_floats(name) and row.verdict != "no derivative" and name not in WITHOUT_A_RULE
    } - operators.REFUSED.keys()
    ruled |= ROUNDING
    wanted = {("", name, version) for name in ruled for version in operators.operators()[name]}
    assert wanted | AHEAD == OF_ONNX


@pytest.mark.parametrize("key", sorted(OF_ONNX - AHEAD - WITHDRAWN), ids=lambda key: f"{key[1]}-{key[2]}")
def test_without_a_rule_a_case_fails(key: registry.Key, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case is served by the rule, and is refused without it, unless ONNX has a body for the operator."""
    rule, called = registry.RULES[key], []

    def spy(*arguments: object) -> registry.Grads:
        called.append(key)
        return rule.function(*arguments)

    model, wrt = a_model(key)
    monkeypatch.setitem(registry.RULES, key, replace(rule, function=spy))
    ob.backward(model, wrt=wrt, straight_through=True)
    assert called, "another rule, or none, serves the case"
    for one in [one for one in registry.RULES if one[:2] == key[:2]]:  # that of an equal earlier version would do
        monkeypatch.delitem(registry.RULES, one)
    if not expand.has_body(defs.get_schema(key[1], key[2], "")):
        with pytest.raises(ob.UnsupportedOpError, match=rf"{key[1]}\b"):
            ob.backward(model, wrt=wrt, straight_through=True)


def a_model(key: registry.Key) -> tuple[ModelProto, list[str]]:
    """A case of an operator in an opset that has the given version of it."""
    _, name, version = key
    opsets = [
        n for n in range(18, 27) if defs.has(name, n, "") and defs.get_schema(name, n, "").since_version == version
    ]
    if name in ROUNDING:
        (text, _), *_ = operators.REFUSED[name]
        return operators.model_of(text, opsets[0]), ["x"]
    cases = [one for one in operators.cases() if one.op == name and "static" not in (*one.refuses, *one.skips)]
    suits = [(opset, one) for one in cases for opset in opsets if one.since <= opset <= one.until]
    opset, one = suits[0] if suits else (cases[0].since, cases[0])
    model, _, wrt = build(one, opset=opset)
    model.opset_import[0].version = opsets[0] if not suits else opset  # converted only, not run
    return model, wrt


@pytest.mark.parametrize("form", operators.FORMS)
def test_a_wrong_gradient_is_seen(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge itself: a rule that answers a little too much is wrong, one that is missing is not right either."""
    one = next(one for one in operators.cases() if one.op == "Tanh")
    assert operators.verdict(one, form) == "right"
    key = ("", "Tanh", 13)
    rule = registry.RULES[key]

    def more(op: Builder, node: Forward, dy: ir.Value) -> registry.Grads:
        dx = rule.function(op, node, dy)
        assert isinstance(dx, ir.Value)
        return op.Mul(dx, 1.01)

    monkeypatch.setitem(registry.RULES, key, replace(rule, function=more))
    assert "differences say" in operators.verdict(one, form)
    monkeypatch.delitem(registry.RULES, key)
    assert "no gradient rule" in operators.verdict(one, form)
    rows = operators.report([one])
    assert rows["Tanh"].verdict == "wrong"
    assert len(rows["Tanh"].wrong) == 2
