"""What a body computes of known numbers is a number, and what changes nothing is no node."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from onnx_backprop.opset.bodies.expressions import BOOL, FLOAT, INT64, Vector


class Nodes:
    """Stands for a Body: the operators that are emitted."""

    def __init__(self) -> None:
        self.emitted: list[str] = []

    def constant(self, array: np.ndarray) -> str:
        return f"constant {array}"

    def ints(self, values: Any) -> str:
        return f"ints {values}"

    def __getattr__(self, op_type: str) -> Any:
        def emit(*names: str, **attributes: Any) -> str:
            self.emitted.append(op_type)
            return f"{op_type}{names}"

        return emit


def applied(op_type: str, left: Any, right: Any) -> tuple[Any, list[str]]:
    """The result of an operator on two entries, None for one that is not known, and the nodes that it takes."""
    body: Any = Nodes()
    dtype = BOOL if op_type in ("And", "Or") else INT64
    x, y = (Vector(body, [v], "" if v is not None else name, dtype) for v, name in ((left, "x"), (right, "y")))
    return x._binary(op_type, y), [op for op in body.emitted if op != "Cast"]


NEUTRAL = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1, "And": True, "Or": False}
DECIDES = {("Mod", 1): 0, ("And", False): False, ("Or", True): True}


@pytest.mark.parametrize("op_type", NEUTRAL)
def test_what_changes_nothing(op_type: str) -> None:
    result, emitted = applied(op_type, None, NEUTRAL[op_type])
    assert (result.name, emitted) == ("x", [])
    result, emitted = applied(op_type, NEUTRAL[op_type], None)
    commutes = op_type in ("Add", "Mul", "And", "Or")
    assert (result.name == "y", emitted) == ((True, []) if commutes else (False, [op_type]))
    other = not NEUTRAL[op_type] if op_type in ("And", "Or") else 3
    result, emitted = applied(op_type, None, other)
    assert emitted == ([] if (op_type, other) in DECIDES else [op_type])


@pytest.mark.parametrize(("op_type", "number"), DECIDES)
def test_what_decides_alone(op_type: str, number: Any) -> None:
    result, emitted = applied(op_type, None, number)
    assert (result.value, emitted) == (DECIDES[op_type, number], [])
    if op_type in ("And", "Or"):
        result, emitted = applied(op_type, number, None)
        assert (result.value, emitted) == (DECIDES[op_type, number], [])


FOLDED = {
    "Add": 7 + -3, "Sub": 7 - -3, "Mul": 7 * -3, "Div": 7 // -3, "Mod": 7 % -3, "Max": 7, "Min": -3, "Equal": False,
    "Less": False, "LessOrEqual": False, "Greater": True, "GreaterOrEqual": True,
}  # fmt: skip


@pytest.mark.parametrize("op_type", FOLDED)
def test_known_numbers(op_type: str) -> None:
    result, emitted = applied(op_type, 7, -3)
    assert (result.value, emitted) == (FOLDED[op_type], [])
    equal = {"Equal": 1, "LessOrEqual": 1, "GreaterOrEqual": 1, "Less": 0, "Greater": 0}
    if op_type in equal:
        assert applied(op_type, 7, 7)[0].value == equal[op_type]


@pytest.mark.parametrize(("op_type", "expected"), [("Abs", 2.5), ("Floor", -3), ("Ceil", -2), ("Not", None)])
def test_known_numbers_alone(op_type: str, expected: float | None) -> None:
    body: Any = Nodes()
    if expected is None:
        assert [Vector(body, [v], dtype=BOOL).unary("Not").value for v in (True, False)] == [False, True]  # type: ignore[attr-defined]
    else:
        result: Any = Vector(body, [-2.5], dtype=FLOAT).unary(op_type)
        assert result.value == expected
        assert math.copysign(1, result.value) == math.copysign(1, expected)
    assert not body.emitted
