"""Gradients of trigonometric and hyperbolic functions."""

from __future__ import annotations

import pytest

from tests.support.gradient_checks import VARIANTS, case, check_cases, positive, spread

SHAPE = (2, 3, 4)
INSIDE = spread(SHAPE) / 4  # |x| < 1

CASES = [
    *(
        case(f"y = {op}(x)", x=x, since=since)
        for first, ops, x in [
            (18, ("Sin", "Cos", "Tan", "Sinh", "Cosh", "Atan", "Asinh"), spread(SHAPE)),
            (18, ("Asin", "Acos", "Atanh"), INSIDE),
            (18, ("Acosh",), 1 + positive(SHAPE)),
        ]
        for op in ops
        for since in (first, 22)
    ),
    case("y = Sin(x)", x=()),
    case("y = Atan(x)", x=(0, 3)),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient(variant: str) -> None:
    check_cases(CASES, variant)
