"""Trainings compared by numbers, since exporters rename, transpose, join and split tensors: no torch in here.

Two tensors are the same if they hold the same numbers in any order. What order is right, the losses decide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

Arrays = Mapping[str, np.ndarray]
MOST_JOINED = 4  # tensors that an exporter may have joined to one: W, R and two biases of a recurrent layer
SMALL, LARGE = 1e-4, 1e-3  # relative gaps of losses
NONE = 1e-12  # of the largest gradient: less is 0 but for the rounding errors of float64


@dataclass(frozen=True)
class Difference:
    """extra: tensors that are trained here and not there; missing: parameters that are trained there and not here."""

    extra: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.extra or self.missing)

    def __str__(self) -> str:
        parts = ("trained, no parameter", self.extra), ("parameter, not trained", self.missing)
        return "; ".join(f"{what}: {', '.join(names)}" for what, names in parts if names)


@dataclass
class _Open:
    """The tensors of both sides that no partner has been found for, as sorted numbers."""

    got: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    slack: Mapping[str, float] = field(default_factory=dict)

    def close(self, got: Sequence[str], expected: Sequence[str]) -> bool:
        a, b = _joined(self.got, got), _joined(self.expected, expected)
        slack = max((self.slack.get(name, 0.0) for name in expected), default=0.0)
        return a.size == b.size and rms(a - b) <= slack

    def take(self, got: Sequence[str], expected: Sequence[str]) -> None:
        for name in got:
            del self.got[name]
        for name in expected:
            del self.expected[name]


def difference(
    got: Arrays, expected: Arrays, slack: Mapping[str, float] | None = None, live: Arrays | None = None
) -> Difference:
    """What has no partner on the other side.

    slack: of each expected tensor, the root mean square that its numbers may be off by. live: of each expected tensor, which elements
    influence the loss; an exporter may have stored those alone.
    """
    rest = _Open({k: _flat(v) for k, v in got.items()}, {k: _flat(v) for k, v in expected.items()}, slack or {})
    for name in list(rest.got):
        if name in rest.expected and rest.close([name], [name]):
            rest.take([name], [name])
    for name in list(rest.got):
        partners = [other for other in rest.expected if rest.close([name], [other])]
        partner = min(partners, key=lambda other, value=rest.got[name]: rms(value - rest.expected[other]), default=None)
        if partner is not None:
            rest.take([name], [partner])
    for name in list(rest.got):  # several parameters in one tensor
        parts = _parts(rest.got[name].size, rest.expected, lambda names, name=name: rest.close([name], names))
        if parts:
            rest.take([name], parts)
    for name in list(rest.expected):  # one parameter in several tensors
        parts = _parts(rest.expected[name].size, rest.got, lambda names, name=name: rest.close(names, [name]))
        if parts:
            rest.take(parts, [name])
    for name in [name for name in live or {} if name in rest.expected]:  # what influences the loss of a parameter
        whole, off = rest.expected[name], rest.slack.get(name, 0.0)
        used = _flat(np.asarray(expected[name])[(live or {})[name]])
        holds = (k for k, v in rest.got.items() if _is_part(used, v, off) and _is_part(v, whole, off))
        holder = next(holds, None)
        if holder is not None or not used.size:
            rest.take([] if holder is None else [holder], [name])
    return Difference(tuple(rest.got), tuple(rest.expected))


def gradient_slack(exact: Arrays, runs: Sequence[Arrays]) -> dict[str, float]:
    """Of each gradient, the root mean square that its numbers may be off by, exact and those of runs in float32 given.

    A thousandth of it, and four times what the worst run is off by. Of one that is 0 but for rounding errors, in
    float64 as in float32, any that float32 may have beside the largest gradient.
    """
    largest = max((float(np.abs(g).max()) for g in exact.values() if g.size), default=0.0)
    result: dict[str, float] = {}
    for name, gradient in exact.items():
        error = max((rms(run[name] - gradient) for run in runs), default=0.0)
        result[name] = 1e-3 * rms(gradient) + 4 * error
        if gradient.size and np.abs(gradient).max() <= NONE * largest and rms(gradient) < 1e-3 * error:
            result[name] += 1e-6 * largest
    return result


def rms(value: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(value)))) if value.size else 0.0


def _flat(value: np.ndarray) -> np.ndarray:
    return np.sort(np.asarray(value, np.float64).ravel())


def _equal(value: np.ndarray, numbers: np.ndarray) -> bool:
    """Whether a tensor has these sorted numbers."""
    return value.size == numbers.size and np.array_equal(_flat(value), numbers)


def _joined(arrays: Arrays, names: Sequence[str]) -> np.ndarray:
    return arrays[names[0]] if len(names) == 1 else np.sort(np.concatenate([arrays[name] for name in names]))


def _parts(size: int, of: Arrays, fits: Callable[[list[str]], bool]) -> list[str] | None:
    names = [name for name, value in of.items() if value.size < size][:16]
    for count in range(2, MOST_JOINED + 1):
        for chosen in combinations(names, count):
            if sum(of[name].size for name in chosen) == size and fits(list(chosen)):
                return list(chosen)
    return None


def _is_part(part: np.ndarray, whole: np.ndarray, slack: float) -> bool:
    """Whether every number of a sorted array is one of a longer one's, each as often at most."""
    if not 0 < part.size <= whole.size:
        return False
    steps = np.arange(part.size)
    # of each number the first that is near enough, behind that of the number before
    places = steps + np.maximum.accumulate(np.searchsorted(whole, part - slack) - steps)
    return bool(places[-1] < whole.size and (whole[places] <= part + slack).all())


def unnamed(
    mismatch: Difference, warnings: Iterable[str], file: Arrays, expected: Arrays, trained: Iterable[str] = ()
) -> list[str]:
    """The tensors of a difference that no warning names.

    A missing parameter is named by its own name, by its module's or by the tensor of the file with its numbers; if
    the file has no such tensor, the exporter has folded it into one of the extra tensors, of the trained ones that have
    no parameter's name or of the doubtful ones: one of them is named. Tensors that are trained and hold one number all
    over are those of other parameters where there is an extra tensor; which of equal ones is missing cannot be told.
    """
    warnings, trained = list(warnings), set(trained)
    text = "\n".join(warnings)
    doubts = "\n".join(line for line in warnings if "does not say for sure" in line)
    holders = {*mismatch.extra, *trained, *(k for k in file if _names(doubts, k))} - set(expected)
    named = any(_names(text, name) for name in (*holders, *mismatch.extra))
    result = [name for name in mismatch.extra if not _names(text, name)]
    for name in mismatch.missing:
        numbers = _flat(expected[name])
        others = trained if mismatch.extra and numbers.size and numbers[0] == numbers[-1] else ()
        stored = [k for k, v in file.items() if k not in others and _equal(v, numbers)]
        folded = not stored and named
        alike = [k for k in expected if others and k not in file and _equal(expected[k], numbers)]
        if not folded and not any(_names(text, k) for k in (name, name.rpartition(".")[0], *stored, *alike) if k):
            result.append(name)
    return result


def _names(text: str, name: str) -> bool:
    return re.search(rf"(?<![\w.:/]){re.escape(name)}(?!\w|\.\w)", text) is not None


def loss_gap(got: Collection[float], expected: Collection[float]) -> float:
    """The largest |a - b| / |b|, losses below a hundredth of the largest counted as that; inf for another number of losses."""
    a, b = np.asarray(list(got), np.float64), np.asarray(list(expected), np.float64)
    if a.shape != b.shape or not np.isfinite(a).all():
        return float("inf")
    return float((np.abs(a - b) / np.maximum(np.abs(b), 1e-2 * np.abs(b).max() + 1e-30)).max())


def tolerance(float32_gap: float) -> float:
    """Of losses: 1e-4, and 1e-3 where PyTorch's float32 is about that far from its float64 (float32_gap)."""
    return LARGE if float32_gap > SMALL / 2 else SMALL
