"""Gradients of normalisations."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gradient_checks import VARIANTS, Case, case, check_case, positive


def batch_norm(x: tuple[int, ...], attributes: str = "", **given: Any) -> Case:
    channels = x[1:2]
    nodes = f"y = BatchNormalization {attributes} (x, s, b, m, v)"
    refuses = ["unranked"] if "x" in given.get("wrt", "x") else []  # the place of the channel axis follows from rank x
    return case(nodes, x=x, s=channels, b=channels, m=channels, v=positive(channels), refuses=refuses, **given)


CASES = [
    *(case(f"y = {op}(x)", x=(3, 4)) for op in ("Softmax", "LogSoftmax")),
    *(
        case(f"y = {op} <axis = {axis}> (x)", x=(2, 3, 4))
        for op in ("Softmax", "LogSoftmax")
        for axis in (-1, 0, 1, 2, -2)
    ),
    *(case(f"y = {op}(x)", x=10 * positive((2, 5))) for op in ("Softmax", "LogSoftmax")),
    *(batch_norm(x) for x in [(3, 2), (2, 3, 4), (2, 3, 2, 2), (2, 2, 2, 1, 2), (1, 1, 3)]),
    batch_norm((2, 3, 4), "<epsilon = 0.1, momentum = 0.5, training_mode = 0>"),
    *(batch_norm((2, 3, 4), wrt=[name]) for name in "xsbmv"),
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient(case: Case, variant: str) -> None:
    check_case(case, variant)
