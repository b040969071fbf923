"""Gradients of matrix products."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.support.gradient_checks import VARIANTS, case, check_cases

SHAPES = [
    ((2, 3), (3, 4)),
    ((3,), (3,)),
    ((3,), (3, 4)),
    ((3,), (2, 3, 4)),
    ((3,), (2, 1, 3, 4)),
    ((2, 3), (3,)),
    ((4, 2, 3), (3,)),
    ((4, 1, 2, 3), (3,)),
    ((4, 2, 3), (3, 5)),
    ((2, 4, 2, 3), (3, 5)),
    ((2, 3), (4, 3, 5)),
    ((4, 2, 3), (4, 3, 5)),
    ((1, 2, 3), (4, 3, 5)),
    ((4, 2, 3), (1, 3, 5)),
    ((2, 1, 2, 3), (4, 3, 2)),
    ((4, 2, 3), (2, 1, 3, 2)),
    ((1, 1), (1, 1)),
    ((2, 1, 1), (1, 2)),
    ((0, 3), (3, 2)),
    ((0, 2, 3), (3, 2)),
    ((2, 0), (0, 3)),
]

CASES = [
    *(case("y = MatMul(a, b)", a=a, b=b, refuses=["unranked"]) for a, b in SHAPES),
    *(
        case(f"y = Gemm <transA = {ta}, transB = {tb}> (a, b)", a=(3, 2) if ta else (2, 3), b=(4, 3) if tb else (3, 4))
        for ta, tb in itertools.product((0, 1), repeat=2)
    ),
    *(
        case(
            f"y = Gemm <alpha = 0.5, beta = -1.5, transA = {ta}, transB = {tb}> (a, b, c)",
            a=(3, 2) if ta else (2, 3),
            b=(4, 3) if tb else (3, 4),
            c=c,
        )
        for ta, tb in itertools.product((0, 1), repeat=2)
        for c in ((2, 4), (4,), (2, 1), (1,), (), (1, 4))
    ),
    case("y = Gemm(a, b, c)", a=(2, 3), b=(3, 4), c=(4,), wrt=["c"]),
    *(case("y = Det(x)", x=x, since=since) for x in [(3, 3), (2, 2, 2), (2, 1, 4, 4), (1, 1)] for since in (18, 22)),
    case("y = Det(x)", x=np.float32([[1, 2, 3], [2, 4, 6], [0, 1, 1]]), note="singular"),
    case("y = Det(x)", x=np.float32([[1, 2, 3], [2, 4, 6], [3, 6, 9]]), note="rank 1"),
    case("y = Det(x)", x=(0, 2, 2)),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient(variant: str) -> None:
    check_cases(CASES, variant)
