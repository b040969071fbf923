"""Gradients of CumProd and TensorScatter."""

from __future__ import annotations

import numpy as np
import pytest

import onnx_backprop as ob
from tests.support.gradient_checks import LINEAR, VARIANTS, build, case, check_cases

SHAPE = (2, 4, 3)
ZEROS = np.float32([[[2, 0, -3], [0.5, 4, 0]], [[0, 0, 1], [1, 2, 0]], [[-1, 3, 2], [0, 0, 0]], [[3, 1, 1], [1, 2, 2]]])

CASES = [
    *(
        case(
            f"y = CumProd <exclusive = {exclusive}, reverse = {reverse}> (x, axis)",
            x=x,
            constants={"axis": np.array(axis)},
            since=26,
            skips=["half"],
            note=note,
        )
        for exclusive in (0, 1)
        for reverse in (0, 1)
        for x, axis, note in [(SHAPE, 1, ""), (SHAPE, 0, ""), (SHAPE, -1, ""), ((5,), 0, ""), (ZEROS, 0, "zeros")]
    ),
    *(
        case(
            f'y = TensorScatter <mode = "{mode}", axis = {axis}> (x, u{more})',
            x=x,
            u=u,
            constants=constants,
            oracle=LINEAR,
            since=24,
            refuses=["unranked"],
        )
        for x, u, axis in [((2, 6, 3), (2, 4, 3), -2), ((2, 2, 3, 6), (2, 2, 3, 6), 3), ((2, 6), (2, 1), 1)]
        for mode, more, constants in [
            ("linear", "", {}),
            ("linear", ", w", {"w": np.array([0, 6 - u[axis]])}),
            ("circular", ", w", {"w": np.array([3, 7])}),
        ]
    ),
    case("y = TensorScatter (x, u)", x=(1, 5, 2), u=(1, 3, 2), oracle=LINEAR, since=24, refuses=["unranked"]),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient(variant: str) -> None:
    check_cases(CASES, variant)


def test_only_what_is_wanted_is_computed() -> None:
    model, _, _ = build(CASES[-1], opset=24)
    kinds = {wrt: {n.op_type for n in ob.backward(model, wrt=[wrt]).graph.node} for wrt in ("x", "u")}
    assert "GatherElements" not in kinds["x"]
    assert "GatherElements" in kinds["u"]
