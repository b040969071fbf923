"""A training that has diverged writes nothing: what was finite at the start is so in every file."""

from collections.abc import Mapping
from os import PathLike

import numpy as np


def not_finite(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Where arrays hold infinity or NaN, as a mask of -inf does on purpose; those that do not are left out."""
    return {name: ~finite for name, array in arrays.items() if not (finite := np.isfinite(array)).all()}


def accept(accepted: dict[str, np.ndarray], arrays: Mapping[str, np.ndarray]) -> None:
    """Take note of what somebody puts in the place of arrays: where that is not finite it is meant so."""
    for name in arrays:
        accepted.pop(name, None)
    accepted.update(not_finite(arrays))


def check_finite(
    arrays: Mapping[str, np.ndarray],
    accepted: Mapping[str, np.ndarray],
    *,
    step: int | None,
    kept: tuple[str | PathLike[str], int | None] | None = None,
) -> None:
    """FloatingPointError for a number that is not finite, but where `accepted` has it; kept: as `diverged`."""
    for name, where in not_finite(arrays).items():
        new = where & ~accepted.get(name, np.False_)
        if new.any():
            at = tuple(map(int, np.argwhere(new)[0]))
            when = "" if step is None else f" after step {step}"
            raise diverged(f"{name!r} holds {arrays[name][at]} at {at}{when}, nothing is written", kept)


def diverged(what: str, kept: tuple[str | PathLike[str], int | None] | None) -> FloatingPointError:
    """The error of a training that has diverged. kept: a checkpoint of finite numbers, and its step."""
    good = ""
    if kept:
        path, step = kept
        good = f". The checkpoint {path}{'' if step is None else f' of step {step}'} is still good"
    return FloatingPointError(f"{what}{good}. Lower the learning rate, or clip the gradients: clip_norm=1.0")
