"""Losses and optimizers of one's own that go wrong: one sentence, never an error of Python's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from onnx import parser

import onnx_backprop as ob

MODEL = """<ir_version: 10, opset_import: ["": 18]> g (float[N, 2] x) => (float[N, 2] y)
    <float[2, 2] w = {1, 2, 3, 4}> { y = MatMul(x, w) }"""
LOSSES: dict[str, tuple[Callable[..., Any], str]] = {
    "Python's operators": (lambda op, o: op.ReduceMean(o["y"] ** 2), "raised .* It emits nodes with op, as op.Abs"),
    "NumPy": (lambda _, o: np.mean(o["y"]), "the callable raised .* from the outputs 'y'"),
    "another output": (lambda op, o: op.Abs(o["z"]), "the callable raised KeyError: 'z'.* from the outputs 'y'"),
    "no operator": (lambda op, o: op.Meen(o["y"]), "'Meen' is no operator of ONNX. Did you mean 'Mean'"),
    "no attribute": (
        lambda op, o: op.ReduceMean(o["y"], keepdim=0),
        "ReduceMean has no attribute 'keepdim'. Did you mean",
    ),
    "many elements": (lambda op, o: op.Abs(o["y"]), r"a value of the shape \(N, 2\), expected one element. Reduce it"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_losses(case: str) -> None:
    loss, message = LOSSES[case]
    with pytest.raises(ob.InvalidArgumentError, match=f"loss: .*{message}"):
        ob.training_graph(parser.parse_model(MODEL), loss=loss)


def test_arithmetic_and_a_name() -> None:
    """Once by operators of Python, once by nodes; a class and a function have names."""
    x, target = np.array([[1, 2], [3, 4]], np.float32), np.array([[0, 1], [1, 0]], np.float32)

    @ob.register_loss("half_squares")
    def half_squares(op: Any, outputs: Any) -> Any:
        difference = outputs["y"] - op.input("target", outputs["y"])
        return op.ReduceMean(0.5 * difference * difference / 1.0 + 0, keepdims=0)

    @ob.register_loss("cubes")
    @dataclass(frozen=True, kw_only=True)
    class Cubes(ob.losses.Loss):
        name = "cubes"

        def emit(self, op: Any, *predictions: Any) -> Any:
            (y,) = predictions
            difference = op.Abs(y - op.target(self, y, "target", shape=y.shape.dims))
            return self.reduced(op, difference * difference * difference, y)

    def first(loss: Any) -> float:
        graph = ob.training_graph(parser.parse_model(MODEL), loss=loss, optimizer="sgd")
        return ob.Trainer(graph).step(x=x, target=target)

    y = x @ np.array([[1, 2], [3, 4]], np.float32)
    assert first("half_squares") == pytest.approx(np.mean((y - target) ** 2) / 2)
    assert first("cubes") == pytest.approx(np.mean(np.abs(y - target) ** 3))
    assert first({"y": "cubes"}) == pytest.approx(np.mean(np.abs(y - target) ** 3))
    assert first(0.5 * Cubes() + ob.losses.MSE()) == pytest.approx(
        np.mean(0.5 * np.abs(y - target) ** 3 + (y - target) ** 2)
    )
    names: list[Any] = ["mse", "", 3]
    for name in names:
        with pytest.raises(ob.InvalidArgumentError, match="name: expected one that no loss of this package has"):
            ob.register_loss(name)
    with pytest.raises(ob.InvalidArgumentError, match="nothing: expected a function or a subclass"):
        ob.register_loss("nothing")(names[-1])


def test_an_optimizer_has_a_name() -> None:
    @ob.register_optimizer
    @dataclass(frozen=True, kw_only=True)
    class Plain(ob.optimizers.Optimizer):
        name = "Plain"

        def update(self, u: Any, x: str, g: str, *_: str) -> Any:
            return (u.Sub(x, u.Mul(u.rate, g)),)

    graphs = [ob.training_graph(parser.parse_model(MODEL), loss="mse", optimizer=name) for name in ("plain", "sgd")]
    trainers = [ob.Trainer(graph, learning_rate=0.01) for graph in graphs]
    x = np.float32([[1, 2], [3, 4]])
    losses = [[trainer.step(x=x, target=x) for _ in range(3)] for trainer in trainers]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    wrongs: list[Any] = [ob.optimizers.Optimizer, Plain(), type("Adam", (Plain,), {"name": "Adam"})]
    for wrong in wrongs:
        with pytest.raises(ob.InvalidArgumentError, match="optimizer: "):
            ob.register_optimizer(wrong)


UPDATES: dict[str, tuple[Callable[..., Any], str]] = {
    "Python's operators": (lambda _u, x, g, m: (x - g, m), r"raised TypeError: .* as u.Sub\(x, g\) for x - g"),
    "NumPy": (
        lambda _u, _x, _g, _m: np.ones(2),
        "returned array.*, expected the new value and one for each of 1 slots",
    ),
    "no operator": (lambda u, x, g, m: (u.Subb(x, g), m), "'Subb' is no operator of ONNX. Did you mean 'Sub'"),
    "a state is missing": (
        lambda u, x, g, _m: u.Sub(x, g),
        r"returned \('.*',\), expected the new value and one for each",
    ),
}


@pytest.mark.parametrize("case", UPDATES)
def test_updates(case: str) -> None:
    written, message = UPDATES[case]

    @dataclass(frozen=True, kw_only=True)
    class Own(ob.optimizers.Optimizer):
        name = "Own"

        def slots(self) -> dict[str, float]:
            return {"mean": 0.0}

        def update(self, u: Any, x: Any, g: Any, *state: Any) -> Any:
            return written(u, x, g, *state)

    with pytest.raises(ob.InvalidArgumentError, match=f"optimizer Own: update:? {message}"):
        ob.training_graph(parser.parse_model(MODEL), loss="mse", optimizer=Own())
