"""What was asked for of a training graph, as a record and as the plain values that a file holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Settings:
    """What was asked for, as plain values.

    loss, optimizer: by `name` and numbers. loss_inputs: names of the inputs that the loss has added. labels: those that
    hold classes, and what is known of them, see `LossBuilder`. compared: what each loss reads, see `Comparison`.
    doubtful: parameters, and what speaks against them. memory: what is expected of a budget. frozen_statistics: the
    nodes in inference mode for being frozen. privacy: `clip`, `noise` and `expected` of steps that clip rows.
    """

    loss: Any = None
    optimizer: dict[str, Any] | None = None
    loss_inputs: Sequence[str] = ()
    labels: dict[str, Any] = field(default_factory=dict)
    compared: Sequence[dict[str, Any]] = ()
    blocks: dict[str, int] = field(default_factory=dict)
    training_mode: bool = False
    precision: str | None = None
    doubtful: dict[str, str] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    frozen_statistics: Sequence[str] = ()
    privacy: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(values: Mapping[str, Any]) -> "Settings":
        """The record of what `described` has written, by this version or an earlier one."""
        return Settings(**{f.name: values[f.name] for f in fields(Settings) if values.get(f.name) is not None})

    def described(self) -> dict[str, Any]:
        """The record as values of JSON; what is empty as a rule is left out."""
        return {name: value for name, value in vars(self).items() if value or name not in _OFTEN_EMPTY}

    @property
    def accumulate(self) -> int:
        """The runs of the graph that one update takes."""
        return (self.optimizer or {}).get("accumulate", 1)


_OFTEN_EMPTY = ("labels", "compared", "blocks", "doubtful", "memory", "frozen_statistics", "privacy")


def plain(chosen: object) -> Any:
    """A loss or an optimizer as something that JSON can hold."""
    if is_dataclass(chosen):
        named = {f.name: plain(getattr(chosen, f.name)) for f in fields(chosen)}
        return {"name": getattr(chosen, "name", type(chosen).__name__), **named}
    if chosen is None or isinstance(chosen, str | bool | int | float):
        return chosen
    if isinstance(chosen, np.generic):
        return chosen.item()
    if isinstance(chosen, np.ndarray):
        return chosen.tolist()
    if isinstance(chosen, Sequence):
        return [plain(entry) for entry in chosen]
    return getattr(chosen, "__name__", None) or str(chosen)
