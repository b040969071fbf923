"""Gradients of reductions."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gradient_checks import LINEAR, SMOOTH, VARIANTS, Case, case, check_case

SHAPE = (2, 3, 4)
LINEAR_OPS = ("ReduceSum", "ReduceMean")
COMPOSED_OPS = ("ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSumExp")
OPS = (*LINEAR_OPS, "ReduceMax", "ReduceMin", *COMPOSED_OPS)
AXES = [[0], [1], [-1], [0, 2], [-2, 0], [0, 1, 2]]

CASES = [
    *(
        case(f"y = {op} <keepdims = {keep}> (x, axes)", x=SHAPE, constants={"axes": axes})
        for op in OPS
        for keep in (0, 1)
        for axes in AXES
    ),
    *(case(f"y = {op} <keepdims = {keep}> (x)", x=SHAPE) for op in OPS for keep in (0, 1)),
    *(case(f"y = {op}(x)", x=(), oracle=SMOOTH) for op in OPS),
    *(
        case(f"y = {op} <noop_with_empty_axes = 1> (x)", x=SHAPE, oracle=LINEAR)
        for op in (*LINEAR_OPS, "ReduceMax", "ReduceMin")
    ),
    *(
        case(f"y = {op} <keepdims = {keep}> (x, axes)", x=SHAPE, constants={"axes": np.zeros(0, np.int64)})
        for op in OPS
        for keep in (0, 1)
    ),
    *(
        case(
            f"y = {op} <keepdims = {keep}, noop_with_empty_axes = 1> (x, axes)",
            x=SHAPE,
            constants={"axes": np.zeros(0, np.int64)},
            oracle=LINEAR,
        )
        for op in (*LINEAR_OPS, "ReduceMax")
        for keep in (0, 1)
    ),
    *(
        case(
            f"y = {op} <noop_with_empty_axes = 1> (x, axes)",
            x=SHAPE,
            constants={"axes": [1]},
            refuses=["fed"] if op in COMPOSED_OPS else [],
        )
        for op in OPS
    ),
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient(case: Case, variant: str) -> None:
    check_case(case, variant)
