"""A wrong case in a batch is found and named, and none hides another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from onnx import ModelProto, parser

import onnx_backprop as ob
from tests.support import gradient_checks
from tests.support.adjoint import Adjoint, check_adjoints
from tests.support.batch import check_each, switched, together
from tests.support.broken_rules import break_rule, scaled
from tests.support.gradient_checks import LINEAR, case, check_cases

FEEDS = {"x": np.float32([1, 2])}


def doubled(factor: str = "2.0", inner: str = "t") -> ModelProto:
    return parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        g (float[n] x) => (float[n] y) <float f = {{{factor}}}> {{ {inner} = Mul(x, f)  y = Identity({inner}) }}""")


def run(factors: Sequence[str]) -> list[list[np.ndarray]]:
    models = [doubled(factor) for factor in factors]
    return together(models, [FEEDS] * len(models), partial(ob.session, kernels="onnx"))()


def is_doubled(_: str, answers: list[np.ndarray]) -> None:
    np.testing.assert_array_equal(answers[0], 2 * FEEDS["x"])


def test_the_wrong_cases_are_named() -> None:
    check_each(["2.0"] * 3, run, is_doubled)
    with pytest.raises(pytest.fail.Exception) as failed:
        check_each(["2.0", "2.5", "2.0", "3.0"], run, is_doubled)
    message = str(failed.value)
    assert message.startswith("2 of 4 are wrong\n\n2.5: AssertionError: ")
    assert "\n\n3.0: AssertionError: " in message


def test_a_case_that_does_not_run_is_named() -> None:
    with pytest.raises(pytest.fail.Exception) as failed:
        check_each(["2.0", "nothing", "3.0"], run, is_doubled)
    message = str(failed.value)
    assert message.startswith("2 of 3 are wrong\n\nnothing: ParseError: ")
    assert "\n\n3.0: AssertionError: " in message
    assert "2.0: " not in message


def test_a_case_that_is_wrong_only_among_others_fails() -> None:
    def mixed_up(factors: Sequence[str]) -> list[list[np.ndarray]]:
        return run([*factors[1:], factors[0]])

    with pytest.raises(pytest.fail.Exception, match="2.5: AssertionError: right alone, wrong among 2: "):
        check_each(["2.0", "2.5"], mixed_up, lambda f, y: np.testing.assert_array_equal(y[0], float(f) * FEEDS["x"]))


def test_names_do_not_meet() -> None:
    """Equal names, symbols of other lengths and equal constants."""
    feeds = [{"x": np.ones(n, np.float32)} for n in (1, 3, 2)]
    answers = together([doubled(inner="y_1"), doubled("3.0"), doubled()], feeds, partial(ob.session, kernels="onnx"))()
    assert [a.tolist() for (a,) in answers] == [[2], [3, 3, 3], [2, 2]]


def test_one_branch_runs() -> None:
    session = ob.session(switched([doubled(), doubled("3.0")]), kernels="onnx")
    feeds = {f"{n}/x": FEEDS["x"] for n in (0, 1)}
    y = session.run(None, feeds | {"0/on": np.array(False), "1/on": np.array(True)})
    assert [np.asarray(value).tolist() for value in y] == [[0], [3, 6]]


@pytest.mark.parametrize("variant", gradient_checks.VARIANTS)
def test_a_wrong_rule_fails_among_right_ones(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    break_rule(monkeypatch, "Neg", scaled(-1))
    texts = ("z = Identity(x) y = Add(z, c)", "z = Neg(x) y = Add(z, c)", "y = Sub(c, x)")
    cases = [case(text, x=(2, 3), constants={"c": np.float32(1)}, oracle=LINEAR) for text in texts]
    check_cases([cases[0], cases[2]], variant)
    with pytest.raises(pytest.fail.Exception, match=r"^1 of 3 are wrong\n\nz=Neg\(x\)y=Add.*differences say"):
        check_cases(cases, variant)


def test_a_wrong_adjoint_fails_among_right_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    break_rule(monkeypatch, "Identity", scaled(-1))
    text = '<ir_version: 10, opset_import: ["": 18]> g (float[2] x) => (float[2] y) {{ y = {}(x) }}'
    problems = [Adjoint(op, parser.parse_model(text.format(op)), FEEDS, ["x"], 7) for op in ("Neg", "Identity", "Abs")]
    check_adjoints(problems[:1])
    with pytest.raises(pytest.fail.Exception, match=r"(?s)^1 of 2 are wrong.*Identity \(seed 7\): .*Mismatch"):
        check_adjoints(problems[:2])
