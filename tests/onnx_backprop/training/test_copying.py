"""Trainers and functions that are pickled or copied go on where they were, bit for bit."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import parser

import onnx_backprop as ob
from tests.support.training_models import data, training

ENERGY = """
    <ir_version: 10, opset_import: ["": 18]>
    g (float[3] x) => (float y) { a = Sin (x) b = Mul (a, x) y = ReduceSum <keepdims = 0> (b) }"""


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("how", [pickled, copy.deepcopy, copy.copy])
def test_a_trainer_goes_on(how: Any) -> None:
    arrays = data(8)
    trainer = ob.Trainer(training(), seed=3, learning_rate=0.02)
    trainer.fit([arrays] * 3, 1, schedule=ob.schedules.Cosine(0.02, steps=9))
    other = how(trainer)
    assert (other.steps, other.epoch, other.learning_rate) == (trainer.steps, trainer.epoch, trainer.learning_rate)
    assert other.losses.points == trainer.losses.points
    assert other.kept == trainer.kept
    assert other.schedule == trainer.schedule
    before = trainer.state()
    losses = [other.step(arrays) for _ in range(3)]
    for name, value in trainer.state().items():  # nothing is shared
        np.testing.assert_array_equal(value, before[name], strict=True)
    assert losses == [trainer.step(arrays) for _ in range(3)]
    for name, value in trainer.state().items():
        np.testing.assert_array_equal(value, other.state()[name], strict=True)


@pytest.mark.parametrize("how", [pickled, copy.deepcopy])
def test_a_trainer_of_a_file_goes_on(how: Any, tmp_path: Path) -> None:
    """It keeps no first values, and large ones of what is not trained lie in the file."""
    training().save(tmp_path / "training.onnx")
    trainer = ob.Trainer(tmp_path / "training.onnx", seed=3)
    trainer.step(data(8))
    other = how(trainer)
    (tmp_path / "training.onnx").unlink()
    assert [other.step(data(8)) for _ in range(2)] == [trainer.step(data(8)) for _ in range(2)]
    for name, value in trainer.state().items():
        np.testing.assert_array_equal(value, other.state()[name], strict=True)


def test_options_of_ones_own_are_refused() -> None:
    trainer = ob.Trainer(training(), session_options=onnxruntime.SessionOptions())
    with pytest.raises(ob.InvalidArgumentError, match="a trainer with session_options of yours cannot be copied"):
        copy.deepcopy(trainer)


def test_a_function_goes_to_other_processes() -> None:
    f = ob.value_and_grad(parser.parse_model(ENERGY), wrt=["x"], hvp=True)
    points = np.random.default_rng(0).standard_normal((6, 3))
    expected = [f(x) for x in points]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = pool.map(f, points)
    for (y, gradient), (value, slope) in zip(expected, results, strict=True):
        assert y == value
        np.testing.assert_array_equal(gradient, slope)
    np.testing.assert_array_equal(pickled(f).hvp(points[0], points[1]), f.hvp(points[0], points[1]))
