"""What a step of a training carries over: one record for each input that it renews."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from onnx_backprop.converters.training.names import (
    GOOD_STEPS,
    LOSS_SCALE,
    MICRO_STEP,
    RANDOM_STATE,
    SKIPPED_STEPS,
    STEP,
)

PARAMETER, STATISTIC = "parameter", "statistic"  # of the model
MOMENT, MEAN, SUM = "moment", "mean", "sum"  # of one parameter: slots of the optimizer, `ema`, accumulated gradients
COUNTER, RANDOM, SCALE = "counter", "random", "scale"  # of the training
ROLES = (PARAMETER, STATISTIC, MOMENT, MEAN, SUM, COUNTER, RANDOM, SCALE)


@dataclass(frozen=True)
class Slot:
    """An input that a step renews.

    name: of the input. output: that is its new value. role: one of `ROLES`. start: the number that it is full of
    before the first step; None where it is the value of an initializer: its own, or of a mean that of its parameter.
    of: the parameter that a moment, a mean or a sum belongs to; what a counter counts.
    """

    name: str
    output: str
    role: str
    start: float | None = None
    of: str = ""

    def described(self) -> dict[str, Any]:
        """The record as values of JSON, without what is not there."""
        return {name: value for name, value in vars(self).items() if value not in (None, "")}


def of_format_1(
    updates: Mapping[str, str], fill: Mapping[str, float], copies: Mapping[str, str], parameters: Collection[str]
) -> tuple[Slot, ...]:
    """The records of a file that tells them by names alone: `<parameter>.<slot>`, and those of the training.

    Each name may have a number behind it, where a tensor of the model had it already.
    """
    training = {RANDOM_STATE: RANDOM, LOSS_SCALE: SCALE}
    training |= dict.fromkeys((STEP, MICRO_STEP, GOOD_STEPS, SKIPPED_STEPS), COUNTER)

    def slot(name: str, output: str) -> Slot:
        start, plain = fill.get(name), re.sub(r"_\d+$", "", name)
        if start is None:
            if name in copies:
                return Slot(name, output, MEAN, of=copies[name])
            return Slot(name, output, PARAMETER if name in parameters else STATISTIC)
        if plain in training:
            return Slot(name, output, training[plain], start, plain if training[plain] == COUNTER else "")
        of = max((p for p in parameters if name.startswith(f"{p}.")), key=len, default="")
        return Slot(name, output, SUM if plain == f"{of}.accumulated" else MOMENT, start, of)

    return tuple(slot(*update) for update in updates.items())
