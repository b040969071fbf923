"""One case of every operator under `vmap`, and the judge itself; all cases run under `make conformance`."""

from __future__ import annotations

import zlib

import numpy as np
import onnx_ir as ir
import pytest

from onnx_backprop.converters.reverse.batching import registry
from onnx_backprop.converters.reverse.batching.elementwise import POINTWISE
from onnx_backprop.converters.reverse.builder import Builder
from tests.conformance import operators, vmap
from tests.converters.derivatives.test_vmap_forms import CASES
from tests.support.gradient_checks import Case

SEED = 5


def sample() -> list[Case]:
    """One case of every operator, the same every time."""
    by_operator: dict[str, list[Case]] = {}
    for one in operators.cases():
        by_operator.setdefault(one.op, []).append(one)
    rng = np.random.default_rng(SEED)
    return [cases[rng.integers(len(cases))] for cases in by_operator.values()]


def test_a_case_of_every_operator(capsys: pytest.CaptureFixture[str]) -> None:
    """In one of the two forms, as a model; one in four with its gradients and tangents too."""
    wrong, right = [], 0
    for number, one in enumerate(sample()):
        form = operators.FORMS[zlib.crc32(one.op.encode()) % 2]
        modes = vmap.MODES if number % 4 == 0 else vmap.MODES[:1]
        for mode, answers in vmap.examine(one, form, modes).items():
            wrong += [f"{one}, {form}, {mode}: {a}" for a in answers if vmap.verdict(a) in ("wrong", "refused")]
            right += sum(vmap.verdict(answer) == "right" for answer in answers)
    with capsys.disabled():
        print(f"\nvmap, a sample, seed {SEED}: {right} right")
    assert wrong == []
    assert right > 300


def test_every_rule_has_a_case() -> None:
    tested = {one.op for one in operators.cases()} | set(POINTWISE)
    texts = " ".join(text for text, _ in CASES.values())
    left = {name for domain, name in registry.RULES if not domain and name not in tested}
    assert {name for name in left if f" {name}" not in texts} == set()


@pytest.mark.parametrize("form", operators.FORMS)
def test_wrong_rows_are_seen(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = next(one for one in operators.cases() if one.op == "Softmax" and one.inputs["x"].ndim > 1)

    def over_rows(op: Builder, node: registry.Rows) -> ir.Value:
        return op.Softmax(node.value(0), axis=0)

    assert vmap.examine(one, form, ["forward"])["forward"] == ["right"]
    monkeypatch.setitem(registry.RULES, ("", "Softmax"), over_rows)
    (answer,) = vmap.examine(one, form, ["forward"])["forward"]
    assert "off by" in answer
    assert vmap.verdict(answer) == "wrong"
    counts, wrong = vmap.report([one], [form])
    assert len(wrong) > 0
    assert "wrong" in vmap.section(counts)
