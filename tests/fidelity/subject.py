"""What is trained on both sides: a module, its inputs, its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

Draw = Callable[[np.random.Generator], np.ndarray]
MSE, CROSS_ENTROPY = "mse", "softmax_cross_entropy"


@dataclass(frozen=True)
class Subject:
    """kind: of module, for the counts. inputs: what draws each of them. loss: None if the module returns its loss.

    frozen: patterns that a user writes because plain exporters do not say what does not require a gradient.
    lost: exporters whose files have no trace of where the module stops the gradient, or of what it trains.
    perturbed: trained from values as after some training, not from those that the constructor gives.
    """

    name: str
    kind: str
    build: Callable[[], Any]
    inputs: tuple[Draw, ...]
    loss: str | None = MSE
    frozen: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    perturbed: bool = False

    def module(self) -> Any:
        """The same at every call, in the mode that the constructor leaves it in."""
        torch = import_module("torch")
        torch.manual_seed(0)
        module = self.build()
        if self.perturbed:
            for parameter in module.parameters():
                parameter.data += 0.02 * torch.randn_like(parameter)
        return module

    def batch(self, seed: int) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(seed)
        return tuple(draw(rng) for draw in self.inputs)


def floats(*shape: int) -> Draw:
    return lambda rng: rng.standard_normal(shape).astype(np.float32)


def positive(*shape: int) -> Draw:
    return lambda rng: rng.uniform(0.1, 1.0, shape).astype(np.float32)


def integers(high: int, *shape: int, low: int = 0) -> Draw:
    return lambda rng: rng.integers(low, high, shape)


def true(*shape: int) -> Draw:
    return lambda _: np.ones(shape, np.int64)
