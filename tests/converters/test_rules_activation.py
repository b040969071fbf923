"""Gradients of activation functions."""

from __future__ import annotations

import pytest

from tests.gradient_checks import SMOOTH, VARIANTS, Case, case, check_case, spread

SHAPE = (2, 3, 4)

CASES = [
    *(case(f"y = {op}(x)", x=SHAPE) for op in ("Relu", "LeakyRelu", "Elu", "Sigmoid", "Tanh", "Softplus")),
    *(case(f"y = {op}(x)", x=3 * spread(SHAPE)) for op in ("HardSigmoid", "HardSwish")),
    *(case(f"y = {op} <alpha = {alpha}> (x)", x=SHAPE) for op in ("LeakyRelu", "Elu") for alpha in (0.3, -0.7)),
    *(
        case(f"y = HardSigmoid <alpha = {alpha}, beta = {beta}> (x)", x=SHAPE)
        for alpha, beta in [(0.6, 0.3), (-0.6, 0.3)]
    ),
    *(case("y = PRelu(x, s)", x=SHAPE, s=s) for s in (SHAPE, (3, 1), (1,), (4,), (), (1, 1, 4))),
    *(case(f'y = Gelu <approximate = "{how}"> (x)', x=SHAPE, since=20, oracle=SMOOTH) for how in ("none", "tanh")),
    case("y = Gelu(x)", x=SHAPE, since=20, oracle=SMOOTH),
    case("y = Identity(x)", x=SHAPE),
    case("y = Dropout(x)", x=SHAPE),
    case("y = Dropout(x, ratio)", x=SHAPE, constants={"ratio": spread(())}),
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient(case: Case, variant: str) -> None:
    check_case(case, variant)
