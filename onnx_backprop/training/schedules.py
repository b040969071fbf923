"""Learning-rate schedules: `schedule(t)` is the learning rate of update t, counted from 0.

    schedule = Warmup(Cosine(rate=1e-3, steps=10_000), steps=500)

They are plain values: `described` writes one down for a checkpoint, `restored` reads it back.
"""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from onnx_backprop.opset.core.errors import InvalidArgumentError

__all__ = ["Constant", "Cosine", "Linear", "OneCycle", "Schedule", "Step", "Warmup", "described", "restored"]


@dataclass(frozen=True)
class Schedule(ABC):
    """A learning rate for every update."""

    positive: ClassVar[tuple[str, ...]] = ()  # fields that count something

    def __post_init__(self) -> None:
        """Refuse negative numbers, counts below 1, and a number where a schedule is expected."""
        for field in fields(self):
            value, name = getattr(self, field.name), f"{type(self).__name__}: {field.name}"
            if field.type is Schedule:
                if not isinstance(value, Schedule):
                    raise InvalidArgumentError(f"{name}: expected a schedule, got {value!r}")
                continue
            low, types = (1, int) if field.name in self.positive else (0, (int, float))
            if not (isinstance(value, types) and low <= value <= sys.float_info.max):
                raise InvalidArgumentError(f"{name}: expected {low} or more, got {value!r}")

    @abstractmethod
    def __call__(self, t: int) -> float:
        """The learning rate of update t."""


@dataclass(frozen=True)
class Constant(Schedule):
    """η(t) = rate."""

    rate: float

    def __call__(self, t: int) -> float:
        del t
        return self.rate


@dataclass(frozen=True)
class Warmup(Schedule):
    """η(t) = after(t) · min(1, (t + 1) / steps): a linear rise in front of another schedule, which runs meanwhile."""

    after: Schedule
    steps: int
    positive: ClassVar[tuple[str, ...]] = ("steps",)

    def __call__(self, t: int) -> float:
        return self.after(t) * min(1.0, (t + 1) / self.steps)


@dataclass(frozen=True)
class Linear(Schedule):
    """η(t) = rate + (final - rate) · min(1, t / steps)."""

    rate: float
    steps: int
    final: float = 0.0
    positive: ClassVar[tuple[str, ...]] = ("steps",)

    def __call__(self, t: int) -> float:
        return self.rate + (self.final - self.rate) * min(1.0, t / self.steps)


@dataclass(frozen=True)
class Cosine(Schedule):
    """η(t) = final + (rate - final) · (1 + cos(π · min(1, t / steps))) / 2.

    Source: Loshchilov, Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017.
    """

    rate: float
    steps: int
    final: float = 0.0
    positive: ClassVar[tuple[str, ...]] = ("steps",)

    def __call__(self, t: int) -> float:
        return _along_cosine(self.rate, self.final, min(1.0, t / self.steps))


@dataclass(frozen=True)
class Step(Schedule):
    """η(t) = rate · factor^⌊t / every⌋."""

    rate: float
    every: int
    factor: float = 0.1
    positive: ClassVar[tuple[str, ...]] = ("every",)

    def __call__(self, t: int) -> float:
        return self.rate * self.factor ** (t // self.every)


@dataclass(frozen=True)
class OneCycle(Schedule):
    """Along half a cosine from rate / `below` up to rate, over the share `rise` of all steps, then down to
    rate / (below · end_below). The peak is at t = rise · steps - 1, the end at steps - 1.

    Source: Smith, Topin, "Super-Convergence", 2018, in the form of torch's OneCycleLR.
    """

    rate: float
    steps: int
    rise: float = 0.3
    below: float = 25.0
    end_below: float = 1e4
    positive: ClassVar[tuple[str, ...]] = ("steps",)

    def __post_init__(self) -> None:
        """Refuse a rise that is no share, and divisors of 0."""
        super().__post_init__()
        if not 0 < self.rise < 1:
            raise InvalidArgumentError(f"OneCycle: rise: expected more than 0 and less than 1, got {self.rise}")
        if not (self.below > 0 and self.end_below > 0):
            raise InvalidArgumentError("OneCycle: below, end_below: expected more than 0")

    def __call__(self, t: int) -> float:
        start, last, peak = self.rate / self.below, self.steps - 1, self.rise * self.steps - 1
        t = min(t, last)
        if t <= peak:
            return _along_cosine(start, self.rate, t / peak if peak > 0 else 1.0)
        return _along_cosine(self.rate, start / self.end_below, (t - peak) / (last - peak))


def _along_cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


def checked_rate(rate: Any, dtype: np.dtype) -> float:
    """A learning rate; InvalidArgumentError unless it is a finite number of 0 or more, in its type too."""
    try:
        value = float("nan" if isinstance(rate, str) else rate)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    with np.errstate(over="ignore"):
        if not (value >= 0 and np.isfinite(np.asarray(value).astype(dtype))):
            raise InvalidArgumentError(f"learning_rate: expected a finite number of 0 or more in {dtype}, got {rate!r}")
    return value


SCHEDULES: dict[str, type[Schedule]] = {
    schedule.__name__: schedule for schedule in (Constant, Warmup, Linear, Cosine, Step, OneCycle)
}


def described(schedule: object) -> dict[str, Any] | None:
    """A schedule of this module as plain values; None for a callable of somebody's own."""
    if type(schedule).__name__ not in SCHEDULES or not isinstance(schedule, Schedule):
        return None
    values = {f.name: getattr(schedule, f.name) for f in fields(schedule)}
    return {"name": type(schedule).__name__} | {
        name: described(value) if isinstance(value, Schedule) else value for name, value in values.items()
    }


def restored(values: Mapping[str, Any]) -> Schedule:
    """The schedule that `described` has written down; InvalidArgumentError for an unknown name."""
    given = dict(values)
    name = given.pop("name", None)
    if not isinstance(name, str) or name not in SCHEDULES:
        raise InvalidArgumentError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {name!r}")
    return SCHEDULES[name](**{k: restored(v) if isinstance(v, Mapping) else v for k, v in given.items()})


def __dir__() -> list[str]:
    return list(__all__)
