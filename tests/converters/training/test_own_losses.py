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
    "Python's operators": (lambda op, o: op.ReduceMean(o["y"] - 1), "raised .* It emits nodes with op, as op.Sub"),
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


UPDATES: dict[str, tuple[Callable[..., Any], str]] = {
    "Python's operators": (lambda _u, x, g, m: (x - g, m), r"raised TypeError: .* as u.Sub\(x, g\) for x - g"),
    "NumPy": (
        lambda _u, _x, _g, _m: np.ones(2),
        "returned array.*, expected the new value and one for each of 1 slots",
    ),
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

    with pytest.raises(ob.InvalidArgumentError, match=f"optimizer Own: update {message}"):
        ob.training_graph(parser.parse_model(MODEL), loss="mse", optimizer=Own())
