"""Learning-rate schedules against torch.optim.lr_scheduler's stored rates, written down and read back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import onnx_backprop as ob
from onnx_backprop.training.schedules import SCHEDULES, Cosine, OneCycle, Step, Warmup, described, restored
from tests.support import training_cases
from tests.support.training_models import data, training


def test_every_schedule_has_a_case() -> None:
    assert {type(case.ours).__name__ for case in training_cases.SCHEDULES.values()} == set(SCHEDULES)


@pytest.mark.parametrize("name", training_cases.SCHEDULES)
def test_rates(name: str) -> None:
    case = training_cases.SCHEDULES[name]
    with np.load(training_cases.SCHEDULE_VALUES, allow_pickle=False) as file:
        expected = file[name]
    np.testing.assert_allclose([case.ours(t) for t in range(case.steps)], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", training_cases.SCHEDULES)
def test_written_down_and_read_back(name: str) -> None:
    schedule = training_cases.SCHEDULES[name].ours
    values = described(schedule)
    assert values is not None
    assert restored(values) == schedule


def test_rates_behind_the_end_stay() -> None:
    assert Cosine(1.0, steps=10, final=0.1)(25) == pytest.approx(0.1)
    assert OneCycle(1.0, steps=10)(25) == OneCycle(1.0, steps=10)(9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cosine(-1, steps=5), "Cosine: rate: expected 0 or more, got -1"),
        (lambda: Cosine(1, steps=0), "Cosine: steps: expected 1 or more, got 0"),
        (lambda: Step(1, every=0), "Step: every: expected 1 or more"),
        (lambda: Warmup(Step(1, every=2), steps=0), "Warmup: steps: expected 1 or more"),
        (lambda: OneCycle(1, steps=5, rise=1.0), "OneCycle: rise: expected more than 0 and less than 1"),
        (lambda: restored({"name": "Cosin"}), "schedule: expected one of .*, got 'Cosin'"),
    ],
)
def test_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ob.InvalidArgumentError, match=message):
        make()


def test_a_rate_that_is_set_ends_the_schedule() -> None:
    trainer = ob.Trainer(training())
    trainer.fit([data(8)], 3, schedule=lambda _: 0.1, progress=False)
    assert [r.learning_rate for r in trainer.fit([data(8)], 4, progress=False)] == [0.1]  # it goes on
    trainer.learning_rate = 0.05
    assert [r.learning_rate for r in trainer.fit([data(8)], 6, progress=False)] == [0.05, 0.05]
