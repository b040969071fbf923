"""What `fit` calls: a function after every step, or a `Callback`, which also has a start, an end and a state."""

import math
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from onnx_backprop.distributed.communicator import Communicator, broadcast_json
from onnx_backprop.opset.core.errors import CheckpointError, InvalidArgumentError, require_numbers
from onnx_backprop.opset.core.hints import near
from onnx_backprop.training.reports.history import Record

_PREFIX = "callback/"  # of tensors in a checkpoint that are a callback's
_DOWN = {"loss": False, "evaluation": False, "perplexity": False}  # less of it is better


@dataclass(frozen=True)
class Run:
    """A call of `fit`: the trainer, its batches, the epochs in all.

    measured: the names that a record has, and whether more of each is better; None where nobody says.
    """

    trainer: Any
    loader: Iterable[Any]
    epochs: int
    measured: Mapping[str, bool | None]


class Callback:
    """Called as callback(trainer, record) after every step; returning True ends the training.

    A checkpoint holds its `state` and `arrays`; when one is loaded, `restore` gets them before the first step. A
    callback is found again by its class, and its place among others of that class.
    """

    def start(self, run: Run) -> bool | None:
        """Before the first step; True: there is none."""

    def __call__(self, trainer: Any, record: Record) -> bool | None:
        """Behind a step, before its checkpoint."""

    def finish(self, run: Run) -> None:
        """Behind the last checkpoint, of a training that has not failed."""

    def state(self) -> dict[str, Any]:
        """What JSON can hold of what it needs to go on."""
        return {}

    def arrays(self) -> dict[str, np.ndarray]:
        """Arrays that it needs to go on."""
        return {}

    def restore(self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Go on from what `state` and `arrays` have given; wrong ones are a KeyError, TypeError or ValueError."""


class Monitor(Callback):
    """A callback that looks at a number after every epoch.

    monitor: "evaluation", its loss; "loss", the mean over the epoch; or the name of a metric. mode: "min" or "max",
    which is better. Default: what the metric says. min_delta: the least difference that counts as an improvement.
    """

    _fields: ClassVar[tuple[str, ...]] = ("best", "waited", "_sum", "_count")

    def __init__(self, monitor: str = "evaluation", *, mode: str | None = None, min_delta: float = 0.0) -> None:
        if mode not in ("min", "max", None):
            raise InvalidArgumentError(f"{type(self).__name__}: mode: expected 'min', 'max' or None, got {mode!r}")
        check_number(self, "min_delta", min_delta, 0)
        self.monitor, self.min_delta = monitor, float(min_delta)
        self._mode, self._up = mode, mode == "max"
        self.best: float | None = None
        self.waited = 0  # evaluations since the best
        self._sum, self._count = 0.0, 0

    def start(self, run: Run) -> bool | None:
        """InvalidArgumentError for a number that no record has."""
        name = type(self).__name__
        if self.monitor not in run.measured:
            evaluation = "" if "evaluation" in run.measured else ". Give fit evaluation=, the batches to measure"
            raise InvalidArgumentError(
                f"{name}: monitor: expected one of {', '.join(run.measured)}, got {self.monitor!r}"
                f"{near(self.monitor, run.measured)}{evaluation}"
            )
        if self._mode is None:
            up = run.measured[self.monitor]
            if up is None:
                raise InvalidArgumentError(
                    f"{name}: mode: whether more of {self.monitor!r} is better is not known. Say 'min' or 'max'"
                )
            self._up = up
        return None

    def __call__(self, trainer: Any, record: Record) -> bool | None:
        """Behind an epoch: whether it was better goes to `seen`."""
        self._sum, self._count = self._sum + record.loss, self._count + 1
        if trainer.batch:
            return None
        value = self._sum / self._count if self.monitor == "loss" else record.known().get(self.monitor)
        self._sum, self._count = 0.0, 0
        if value is None:
            return None
        if not isinstance(value, int | float):
            raise InvalidArgumentError(
                f"{type(self).__name__}: monitor: expected a number, {self.monitor!r} is an array. Give it an average"
            )
        gain = math.inf if self.best is None else (value - self.best) * (1 if self._up else -1)
        better = not math.isnan(value) and gain > (self.min_delta if self.best is not None else 0)
        self.best, self.waited = (float(value), 0) if better else (self.best, self.waited + 1)
        return self.seen(trainer, record, better=better)

    def seen(self, trainer: Any, record: Record, *, better: bool) -> bool | None:
        """Behind an epoch."""

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._fields}

    def restore(self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        del arrays
        for name in self._fields:
            if not isinstance(state[name], int | float | None):
                raise TypeError(f"{name}: expected a number, got {state[name]!r}")
            setattr(self, name, state[name])


def check_number(owner: Any, name: str, value: Any, least: float, *, whole: bool = False) -> None:
    """InvalidArgumentError for what is no finite number of `least` or more."""
    require_numbers(least, whole=whole, **{f"{type(owner).__name__}: {name}": value})


class CallbackStates:
    """The states of callbacks: of those that `fit` calls now, and of those that a loaded checkpoint had."""

    def __init__(self) -> None:
        self._active: dict[str, Callback] = {}
        self._stored: dict[str, tuple[dict[str, Any], dict[str, np.ndarray]]] = {}

    def begin(self, callbacks: Iterable[Any], path: Any) -> None:
        """Take the callbacks of a training, and give each what the checkpoint, `path`, had of it."""
        self._active = {}
        for callback in callbacks:
            if isinstance(callback, Callback):
                kind = type(callback).__name__
                count = sum(type(other) is type(callback) for other in self._active.values())
                self._active[f"{kind}_{count}" if count else kind] = callback
        for name, callback in self._active.items():
            if name in self._stored:
                try:
                    callback.restore(*self._stored[name])
                except (KeyError, TypeError, ValueError) as e:
                    raise CheckpointError(f"{path}: the state of {name} is no such: {type(e).__name__}: {e}") from e
        self._stored = {}

    def described(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """What a checkpoint holds of them: values of JSON, and tensors."""
        states = self._stored | {name: (c.state(), c.arrays()) for name, c in self._active.items()}
        tensors = {f"{_PREFIX}{name}/{n}": a for name, (_, arrays) in states.items() for n, a in arrays.items()}
        return {name: state for name, (state, _) in states.items()}, tensors

    def take(
        self, path: Any, about: Mapping[str, Any], tensors: Mapping[str, np.ndarray], communicator: Communicator
    ) -> None:
        """Keep what a checkpoint that rank 0 has read has of callbacks, on all ranks; `about`: what all have of it."""
        states = about.get("callbacks", {})
        if not isinstance(states, dict) or not all(isinstance(state, dict) for state in states.values()):
            raise CheckpointError(f"{path}: callbacks: expected their states by name, got {reprlib.repr(states)}")
        stored = {name: array for name, array in tensors.items() if name.startswith(_PREFIX)}
        shapes = broadcast_json(communicator, {name: [a.shape, a.dtype.name] for name, a in stored.items()})
        arrays: dict[str, np.ndarray] = {}
        for name, (shape, kind) in shapes.items():
            arrays[name] = stored.get(name, np.empty(shape, np.dtype(kind)))
            communicator.broadcast(arrays[name])
        self._active = {}
        self._stored = {}
        for name, state in states.items():
            start = f"{_PREFIX}{name}/"
            stored = {n.removeprefix(start): a for n, a in arrays.items() if n.startswith(start)}
            self._stored[name] = state, stored


def without_callbacks(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint that are the trainer's."""
    return {name: array for name, array in tensors.items() if not name.startswith(_PREFIX)}


def better_of(metrics: Mapping[str, Any], names: Iterable[str], *, evaluation: bool) -> dict[str, bool | None]:
    """What a record has behind an epoch, and whether more of it is better."""
    result: dict[str, bool | None] = {"loss": False}
    if evaluation:
        result["evaluation"] = False
    for name in names:
        metric = metrics.get(name)
        better = getattr(metric, "better", None)  # of a function
        result[name] = _DOWN.get(name, getattr(metric, "higher", None if better is None else better == "higher"))
    return result
