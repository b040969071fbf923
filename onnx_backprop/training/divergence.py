"""A training that has diverged writes nothing: what was finite at the start is so in every file.

Where a loss is no finite number because of what a batch holds, the error says so, and where it is.
"""

from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np

from onnx_backprop.opset.core.mapped import look_at

_LOWER = "ower the learning rate, or clip the gradients: clip_norm=1.0"
AT_ONCE = (  # before any update, which no learning rate changes
    "No step has changed a weight yet: the model itself gives that for this batch. Look for a division by 0, a "
    "logarithm of 0 or an overflow in it"
)


class BadBatchError(FloatingPointError):
    """A loss that is no finite number because of what a batch holds. row: where in the batch; None: everywhere."""

    def __init__(self, what: str, fault: str, row: int | None, advice: str) -> None:
        self.parts, self.row = (what, fault, advice), row
        super().__init__(f"{what}: {fault}. {advice}")

    def of_row(self, row: int, where: str) -> "BadBatchError":
        """The same, with the number of the row among all data."""
        what, fault, advice = self.parts
        return BadBatchError(what, f"{fault}, row {row} of {where}", self.row, advice)


def bad_batch(
    what: str, batch: Mapping[str, Any], labels: Mapping[str, Mapping[str, Any]], *, nan_alone: bool = False
) -> BadBatchError | None:
    """The error about a loss that is no finite number, where a batch explains it: NaN, no label that counts, infinity.

    what: what has happened. batch: arrays, or OrtValues, by names. labels: see `Inputs`.
    nan_alone: whether nothing but NaN is at fault.
    """
    arrays = {n: np.asarray(value if isinstance(value, np.ndarray) else value.numpy()) for n, value in batch.items()}
    floats = {n: array for n, array in arrays.items() if array.dtype.kind == "f" or array.dtype.name == "bfloat16"}
    for name, array in floats.items():
        if (bad := np.isnan(array)).any():
            message, row = _first(name, array, bad)
            advice = "The data are at fault, not the training: put a number there, or leave the row out"
            return BadBatchError(what, message, row, advice)
    if nan_alone:
        return None
    for name, about in labels.items():
        ignored = about.get("ignored")
        if ignored is not None and name in arrays and (arrays[name] == ignored).all():
            fault = f"every label in {name!r} is {ignored}, which is ignored, so that there is nothing to average"
            return BadBatchError(what, fault, None, "Leave such batches out, or make them larger")
    for name, array in floats.items():
        if (bad := np.isinf(array)).any():
            message, row = _first(name, array, bad)
            return BadBatchError(what, message, row, f"If that is not meant, put a number there. If it is, l{_LOWER}")
    return None


def _first(name: str, array: np.ndarray, bad: np.ndarray) -> tuple[str, int | None]:
    at = tuple(map(int, np.argwhere(bad)[0]))
    return f"{name!r} holds {array[at]} at {at}", at[0] if at else None


def not_finite(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Where arrays hold infinity or NaN, as a mask of -inf does on purpose; those that do not are left out."""
    masks: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        finite = np.isfinite(array)
        look_at(array.nbytes)
        if not finite.all():
            masks[name] = ~finite
    return masks


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
    instead: str = ", nothing is written",
) -> None:
    """FloatingPointError for a number that is not finite, but where `accepted` has it; kept: as `diverged`.

    instead: what does not happen.
    """
    for name, where in not_finite(arrays).items():
        new = where & ~accepted.get(name, np.False_)
        if new.any():
            at = tuple(map(int, np.argwhere(new)[0]))
            when = "" if step is None else f" after step {step}"
            raise diverged(f"{name!r} holds {arrays[name][at]} at {at}{when}{instead}", kept)


def diverged(
    what: str, kept: tuple[str | PathLike[str], int | None] | None, advice: str = f"L{_LOWER}"
) -> FloatingPointError:
    """The error of a training that has diverged. kept: a checkpoint of finite numbers, and its step."""
    good = ""
    if kept:
        path, step = kept
        good = f". The checkpoint {path}{'' if step is None else f' of step {step}'} is still good"
    return FloatingPointError(f"{what}{good}. {advice}")
