"""Callbacks that look at what an evaluation gives, or at the clock."""

import logging
import time
from pathlib import Path
from typing import Any

from onnx_backprop.converters.prepare.writing.files import check_writable
from onnx_backprop.opset.core.errors import InvalidArgumentError, warn
from onnx_backprop.training.callbacks.base import Callback, Monitor, Run, check_number
from onnx_backprop.training.reports.history import Record

logger = logging.getLogger("onnx_backprop")


class EarlyStopping(Monitor):
    """Ends the training if a number has not improved in `patience` epochs.

    If a training is resumed from a checkpoint after that point, it runs no step and says so; with more patience it
    continues. reason: why it has ended the last training, "" if it has not.
    """

    reason = ""

    def __init__(
        self, monitor: str = "evaluation", *, patience: int = 5, mode: str | None = None, min_delta: float = 0.0
    ) -> None:
        super().__init__(monitor, mode=mode, min_delta=min_delta)
        check_number(self, "patience", patience, 1, whole=True)
        self.patience = patience

    def start(self, run: Run) -> bool | None:
        super().start(run)
        self.reason = ""
        if self.waited < self.patience:
            return None
        warn(
            f"EarlyStopping: {self.monitor} was not better than {self.best:.6g} in {self.waited} epochs before the "
            "checkpoint, so that no step is run. Give it more patience, or leave it out"
        )
        return True

    def seen(self, trainer: Any, record: Record, *, better: bool) -> bool | None:
        del trainer, better
        if self.waited < self.patience:
            return None
        best = self.best if self.best is not None else float("nan")
        self.reason = f"behind epoch {record.epoch + 1}: {self.monitor} was not better than {best:.6g}"
        self.reason += f" in {self.waited} epochs"
        logger.info("stopped %s", self.reason)
        return True


class KeepBest(Monitor):
    """Saves a checkpoint whenever a number has improved, and returns to it at the end.

    path: of the checkpoint. restore: whether the trainer has the state of the best epoch when `fit` returns, so that
    `export` writes its weights. The checkpoint of `fit` itself stays that of the last step.
    """

    _fields = (*Monitor._fields, "best_step")

    def __init__(
        self,
        path: str | Path,
        monitor: str = "evaluation",
        *,
        mode: str | None = None,
        min_delta: float = 0.0,
        restore: bool = True,
    ) -> None:
        super().__init__(monitor, mode=mode, min_delta=min_delta)
        check_writable(path)
        self.path, self._goes_back, self.best_step = path, restore, 0

    def seen(self, trainer: Any, record: Record, *, better: bool) -> bool | None:
        del record
        if better:
            self.best_step = trainer.steps
            kept = trainer.kept
            trainer.save(self.path)
            trainer.kept = kept or trainer.kept
        return None

    def finish(self, run: Run) -> None:
        if not self._goes_back or self.best is None or run.trainer.steps == self.best_step:
            return
        if run.trainer.communicator.rank == 0 and not Path(self.path).is_file():
            raise InvalidArgumentError(f"KeepBest: the checkpoint {self.path} of the best epoch is not there any more")
        run.trainer.load(self.path)
        logger.info("went back to step %d, whose %s is the best: %.6g", run.trainer.steps, self.monitor, self.best)


class ReduceLROnPlateau(Monitor):
    """Multiplies the learning rate by `factor` if a number has not improved in `patience` epochs.

    least: the lowest rate. Works only without a schedule, which would set the rate of every step.
    """

    def __init__(
        self,
        monitor: str = "evaluation",
        *,
        factor: float = 0.1,
        patience: int = 3,
        least: float = 0.0,
        mode: str | None = None,
        min_delta: float = 0.0,
    ) -> None:
        super().__init__(monitor, mode=mode, min_delta=min_delta)
        check_number(self, "patience", patience, 1, whole=True)
        check_number(self, "least", least, 0)
        check_number(self, "factor", factor, 0)
        if not factor < 1:
            raise InvalidArgumentError(f"ReduceLROnPlateau: factor: expected less than 1, got {factor!r}")
        self.factor, self.patience, self.least = factor, patience, least

    def start(self, run: Run) -> bool | None:
        if run.trainer.schedule is not None:
            raise InvalidArgumentError(
                "ReduceLROnPlateau: goes without a schedule, which sets the rate of every step. Leave one of them out"
            )
        return super().start(run)

    def seen(self, trainer: Any, record: Record, *, better: bool) -> bool | None:
        del better
        if self.waited >= self.patience:
            self.waited = 0
            rate = max(trainer.learning_rate * self.factor, min(self.least, trainer.learning_rate))
            logger.info("epoch %d: the learning rate is %g from here on", record.epoch + 1, rate)
            trainer.learning_rate = rate
        return None


class TimeLimit(Callback):
    """Ends the training before a step that would exceed a number of seconds, if it took as long as the longest so far.

    The clock starts with each call of `fit`, so a resumed job has its own limit. reason: why it has ended the last
    training, "" if it has not.
    """

    reason = ""

    def __init__(self, seconds: float = 0.0, *, minutes: float = 0.0, hours: float = 0.0) -> None:
        for name, value in (("seconds", seconds), ("minutes", minutes), ("hours", hours)):
            check_number(self, name, value, 0)
        self.limit = seconds + 60 * minutes + 3600 * hours
        if not self.limit:
            raise InvalidArgumentError("TimeLimit: expected seconds, minutes or hours of more than 0")
        self._began = self._last = 0.0
        self._longest = 0.0

    def start(self, run: Run) -> bool | None:
        del run
        self._began = self._last = time.monotonic()
        self._longest = 0.0
        self.reason = ""
        return None

    def __call__(self, trainer: Any, record: Record) -> bool | None:
        del trainer
        now = time.monotonic()
        self._longest, self._last = max(self._longest, now - self._last), now
        if now - self._began + self._longest <= self.limit:
            return None
        self.reason = f"behind step {record.step}: the {self.limit:g} seconds are over"
        logger.info("stopped %s", self.reason)
        return True
