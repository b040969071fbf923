"""What a newcomer hands over that does not fit: an error of ours in each case, with what was expected."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

import onnx_backprop as ob
from tests.support.training_models import data, training


@cache
def graph() -> ob.TrainingGraph:
    return training()


def rows(count: int = 8) -> tuple[np.ndarray, np.ndarray]:
    arrays = data(count)
    return arrays["x"], arrays["labels"]


FITS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a generator function": (lambda: iter([rows()]), {}, "loader: expected batches .* got function"),
    "no loader": (None, {}, "loader: expected batches .* got NoneType"),
    "a number": (3, {}, "loader: expected batches .* got int"),
    "half an epoch": ([rows()], {"epochs": 1.5}, "epochs, every: expected whole numbers .* got 1.5, 0"),
    "no epochs": ([rows()], {"epochs": None}, "epochs, every: expected whole numbers .* got None, 0"),
    "one callback": ([rows()], {"callbacks": print}, "callbacks: expected a list of functions"),
    "a callback that is none": ([rows()], {"callbacks": [3]}, r"callbacks: expected a list of functions, got \(3,\)"),
    "a schedule by name": ([rows()], {"schedule": "cosine"}, "schedule: expected a function .* got 'cosine'"),
    "an evaluation that is no loader": ([rows()], {"evaluation": 3}, "loader: expected batches .* got int"),
}


@pytest.mark.parametrize("case", FITS)
def test_fit(case: str) -> None:
    loader, more, sentence = FITS[case]
    with pytest.raises(ob.InvalidArgumentError, match=sentence):
        ob.Trainer(graph(), kernels="onnx").fit(loader, **{"epochs": 1, **more})


def test_numbers_of_numpy_are_numbers() -> None:
    trainer = ob.Trainer(graph(), kernels="onnx", seed=np.int64(3))
    assert len(trainer.fit([rows()], np.int64(2))) == 2


def test_a_batch_is_evaluated_as_step_takes_it() -> None:
    trainer = ob.Trainer(graph(), kernels="onnx")
    x, labels = rows()
    losses = {
        trainer.evaluate(x, labels),
        trainer.evaluate({"x": x, "labels": labels}),
        trainer.evaluate(x=x, labels=labels),
        trainer.evaluate(x, labels=labels),
    }
    assert len(losses) == 1
    assert trainer.evaluate([(x, labels)]) == pytest.approx(losses.pop())
    with pytest.raises(ob.InvalidArgumentError, match="loader: expected batches"):
        trainer.evaluate(3)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"seed": "a"}, "seed: expected a whole number of 64 bits, got 'a'"),
        ({"seed": 2**70}, "seed: expected a whole number of 64 bits"),
        ({"session_options": 3}, "session_options: expected onnxruntime.SessionOptions, got int"),
    ],
)
def test_trainer(more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ob.InvalidArgumentError, match=sentence):
        ob.Trainer(graph(), **more)


@pytest.mark.parametrize("arrays", ["a", rows()])
def test_batches(arrays: Any) -> None:
    with pytest.raises(ob.InvalidArgumentError, match="arrays: expected arrays by the names of the inputs"):
        ob.Batches(arrays, 16)


class Nameless(ob.optimizers.Optimizer):
    def update(self, u: Any, x: Any, g: Any, *_slots: Any) -> Any:
        return u.Sub(x, g)


class WithoutField(Nameless):
    name = "WithoutField"
    hyper = ("beta",)


@dataclass(frozen=True, kw_only=True)
class Whole(WithoutField):
    beta: float = 0.5


@pytest.mark.parametrize(("optimizer", "lacking"), [(Nameless, "'name'"), (WithoutField, "'beta'")])
def test_an_optimizer_that_lacks_what_it_names(optimizer: type, lacking: str) -> None:
    with pytest.raises(ob.InvalidArgumentError, match=f"{optimizer.__name__} has no {lacking}.*@dataclass"):
        optimizer()
    assert Whole().beta == 0.5
