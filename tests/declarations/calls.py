"""A call of an operator, and what the numbers of one are drawn from.

`Small` has Hypothesis draw lengths of a few elements, so that a failure is easy to read; `Large` draws at random, across
the sizes of registers, tiles and bands. A declaration writes its calls once, for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

DATA_FORMATS = ("NCX", "NXC")
MAX_ELEMENTS = 60_000  # of a tensor of a large call


@dataclass(frozen=True)
class Call:
    """One operator with attributes and inputs in the operator's order; None for an absent optional input."""

    op: str
    attributes: dict[str, Any]
    inputs: list[np.ndarray | None]
    seed: int

    def __repr__(self) -> str:
        shapes = [None if i is None else f"{i.dtype}{list(i.shape)}" for i in self.inputs]
        return f"{self.op}({self.attributes}, {shapes}, seed={self.seed})"


class Draws(ABC):
    """What a call is drawn from."""

    large: bool

    @abstractmethod
    def integer(self, low: int, high: int) -> int:
        """One of low … high."""

    @abstractmethod
    def pick(self, *choices: Any) -> Any:
        """One of the choices."""

    @abstractmethod
    def length(self, high: int, *, low: int = 1, small: int = 4) -> int:
        """A length: low … small of a small call, 1 … high of a large one."""

    @abstractmethod
    def fits(self, *shapes: list[int]) -> bool:
        """Whether tensors of these shapes are not too large."""

    def flag(self) -> bool:
        return self.pick(False, True)

    def seed(self) -> int:
        return self.integer(0, 2**31 - 1)

    def shape(self, least: int, most: int, *, high: int = 70, low: int = 1, small: int = 4) -> tuple[int, ...]:
        """From `least` to `most` lengths."""
        while True:
            shape = [self.length(high, low=low, small=small) for _ in range(self.integer(least, most))]
            if self.fits(shape):
                return tuple(shape)


class Small(Draws):
    """Hypothesis draws."""

    large = False

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def pick(self, *choices: Any) -> Any:
        return self._draw(st.sampled_from(choices))

    def length(self, high: int, *, low: int = 1, small: int = 4) -> int:  # noqa: ARG002 - for large calls
        return self.integer(low, small)

    def fits(self, *shapes: list[int]) -> bool:  # noqa: ARG002 - all of these fit
        return True


class Large(Draws):
    """A generator of random numbers draws."""

    large = True

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def integer(self, low: int, high: int) -> int:
        return int(self._rng.integers(low, high + 1))

    def pick(self, *choices: Any) -> Any:
        return choices[self._rng.integers(len(choices))]

    def length(self, high: int, *, low: int = 1, small: int = 4) -> int:  # noqa: ARG002 - for small calls
        """Small ones and those around the sizes of registers and tiles are as likely as all others together."""
        if self.flag():
            return self.integer(1, high)
        return min(high, self.pick(1, 2, 3, 4, 8, 11, 12, 13, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65))

    def fits(self, *shapes: list[int]) -> bool:
        return all(np.prod(shape) <= MAX_ELEMENTS for shape in shapes)


def values(shape: tuple[int, ...] | list[int], seed: int) -> np.ndarray:
    """Multiples of 1/8 between -2 and 2, exact in every float type."""
    return np.asarray(np.random.default_rng(seed).integers(-16, 17, tuple(shape)) / 8, np.float32)


def without_end(inputs: list[np.ndarray | None]) -> list[np.ndarray | None]:
    """The inputs up to the last one that is there."""
    while inputs and inputs[-1] is None:
        inputs = inputs[:-1]
    return inputs


def to_data(x: np.ndarray, data_format: str) -> np.ndarray:
    """NCX into a data format."""
    return np.ascontiguousarray(x if data_format == "NCX" else np.moveaxis(x, 1, -1))


def stated(draws: Draws, shape: tuple[int, ...], name: str) -> tuple[dict[str, Any], list[np.ndarray | None]]:
    """A shape as attribute, as input or as both."""
    how = draws.pick("attribute", "input", "both")
    attribute = {name: list(shape)} if how in ("attribute", "both") else {}
    return attribute, [np.array(shape, np.int32)] if how in ("input", "both") else []
