"""The learning rates of LinearLRScheduler, at every number of updates, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from onnx_backprop.artifacts import LinearLRScheduler
from onnx_backprop.opset.core.errors import OnnxBackpropError


class Counted:
    """Stands for an optimizer: how many updates there have been, and the rate that was set."""

    steps, rate = 0, -1.0

    def set_learning_rate(self, rate: float) -> None:
        self.rate = rate


@pytest.mark.parametrize(
    ("warmup", "total", "expected"),
    [(0, 4, [1, 3 / 4, 1 / 2, 1 / 4, 0, 0]), (2, 4, [0, 1 / 2, 1, 1 / 2, 0, 0]), (3, 4, [0, 1 / 3, 2 / 3, 1, 0, 0])],
)
def test_rates(warmup: int, total: int, expected: list[float]) -> None:
    optimizer: Any = Counted()
    scheduler = LinearLRScheduler(optimizer, warmup, total, 0.5)
    rates = []
    for optimizer.steps in range(len(expected)):
        scheduler.step()
        rates.append(optimizer.rate / 0.5)
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize(("warmup", "total"), [(-1, 4), (4, 4), (5, 4), (0, 0)])
def test_refused(warmup: int, total: int) -> None:
    optimizer: Any = Counted()
    with pytest.raises(
        OnnxBackpropError, match=f"expected 0 <= warmup_step_count < total_step_count, got {warmup}, {total}"
    ):
        LinearLRScheduler(optimizer, warmup, total, 0.5)
