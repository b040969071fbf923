"""Gradients of reductions."""

from __future__ import annotations

import numpy as np
import pytest

import onnx_backprop as ob
from tests.support.gradient_checks import LINEAR, SMOOTH, VARIANTS, build, case, check_cases, positive, session_run

SHAPE = (2, 3, 4)
LINEAR_OPS = ("ReduceSum", "ReduceMean")
COMPOSED_OPS = ("ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceProd")
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
    *(
        case("y = ReduceProd <keepdims = 0> (x, axes)", x=np.float32(x), constants={"axes": [-1]})
        for x in ([[2, 0, -3], [0, 4, 0], [1, 2, -1]], [[0], [3]], [[0, 0]])
    ),
    *(
        case(f"y = ReduceLogSum <keepdims = {keep}> (x{axes})", x=positive(SHAPE), constants=constants)
        for keep in (0, 1)
        for axes, constants in (("", {}), (", axes", {"axes": [1]}), (", axes", {"axes": [-1, 0]}))
    ),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient(variant: str) -> None:
    check_cases(CASES, variant)


def test_a_product_beyond_the_range_of_its_type() -> None:
    """Y is 0 or inf; the products of the other entries are what they are, as far as float32 can say."""
    training = ob.backward(build(case("y = ReduceProd(x)", x=(1, 3)), opset=18)[0], wrt=["x"])
    for x in ([1e-25, 1e-16, 1e-10], [1e25, 1e12, 1e10]):
        numbers = np.float32([x])
        y, dx = session_run(training)({"x": numbers})
        assert y.item() in (0, np.inf)
        want = np.asarray(np.prod(numbers.astype(np.float64)) / numbers)
        seen = want < np.finfo(np.float32).max
        np.testing.assert_allclose(dx[seen], want[seen], rtol=1e-6, atol=1e-44)
