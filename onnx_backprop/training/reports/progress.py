"""What a person sees of a training: a bar where somebody watches, lines everywhere, a table of epochs in a notebook."""

from __future__ import annotations

import logging
import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

from onnx_backprop.converters.pages import fragment, table
from onnx_backprop.opset.core import progress as bars
from onnx_backprop.training.reports.history import Record, Records

if TYPE_CHECKING:
    from onnx_backprop.training.trainer import Trainer

logger = logging.getLogger("onnx_backprop")
_SILENCE = 60  # seconds without a line, at most
_ROWS = 200  # epochs of the table


class Progress:
    """Tells how a training goes: see `fit`.

    Lines go to the logger "onnx_backprop" at INFO; to the standard error too where a bar is wanted and nobody watches.
    """

    def __init__(self, wanted: bool | None, loader: Any, epochs: int, trainer: Trainer) -> None:
        self._batches = len(loader) if hasattr(loader, "__len__") else None
        total = None if self._batches is None else self._batches * epochs
        shown = {"total": total, "initial": trainer.steps, "desc": "training", "unit": "step", "mininterval": 0.1}
        self._bar = bars.bar(dynamic_ncols=True, **shown)
        self._lines = wanted is True and not bars.watched()
        self._table = _Table() if wanted is not False and bars.in_notebook() else None
        self._epochs, self._rates = epochs, set[float]()
        self._mean: float | None = None
        self._doing = "training"
        self._sum, self._count, self._began = 0.0, 0, time.monotonic()
        self._spoke = self._began
        self._measured: dict[str, Any] = {}

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.set_description_str(self._doing, False)  # what stays on the screen
        self._bar.close()

    def wait(self, what: str) -> None:
        """Say what takes the time until the next step."""
        self._bar.set_description_str(what)

    def show(self, record: Record, *, ends_epoch: bool) -> None:
        """Move on by one step."""
        self._doing = f"epoch {record.epoch + 1}/{self._epochs}"
        self._bar.set_description_str(self._doing, False)
        self._mean = record.loss if self._mean is None else 0.98 * self._mean + 0.02 * record.loss
        self._rates.add(record.learning_rate)
        self._measured = measured_of(record) or self._measured
        rate = f", η {record.learning_rate:.2g}" if len(self._rates) > 1 else ""
        metrics = "".join(f", {name} {value:.4g}" for name, value in self._measured.items())
        self._bar.set_postfix_str(f"loss {self._mean:.4g}{rate}{metrics}", False)
        self._bar.update()
        self._sum, self._count = self._sum + record.loss, self._count + 1
        now = time.monotonic()
        if ends_epoch:
            self._epoch(record, now)
        elif now - self._spoke >= _SILENCE:
            of = "" if self._batches is None else f" of {self._batches * self._epochs:,}"
            self._say(f"{self._doing}, step {record.step + 1:,}{of}: loss {self._mean:.4g}{rate}", now)

    def _epoch(self, record: Record, now: float) -> None:
        seconds, loss = now - self._began, self._sum / self._count
        self._sum, self._count, self._began = 0.0, 0, now
        metrics = "".join(f", {name} {value:.4g}" for name, value in measured_of(record).items())
        rate = f"learning rate {record.learning_rate:.3g}"
        self._say(f"{self._doing}: loss {loss:.4g}{metrics}, {rate}, {seconds:.1f} s", now)
        if self._table is not None:
            self._table.add(record, loss, seconds)

    def _say(self, line: str, now: float) -> None:
        self._spoke = now
        logger.info(line)
        if self._lines:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()


def measured_of(record: Record) -> dict[str, float]:
    """The numbers of the evaluation behind a step, by name."""
    metrics = {name: value for name, value in record.metrics.items() if isinstance(value, int | float)}
    return ({} if record.evaluation is None else {"evaluation": record.evaluation}) | metrics


class _Table:
    """A table with a row for each epoch in the output of a notebook's cell, which grows in its place."""

    def __init__(self) -> None:
        self._rows: list[dict[str, str]] = []
        self._shown: Any = None

    def add(self, record: Record, loss: float, seconds: float) -> None:
        """An epoch more."""
        shows: Any = import_module("IPython.display")  # which is there where a notebook runs
        cells = {"epoch": str(record.epoch + 1), "loss": f"{loss:.4g}"}
        cells |= {name: f"{value:.4g}" for name, value in measured_of(record).items()}
        self._rows.append(cells | {"learning rate": f"{record.learning_rate:.3g}", "seconds": f"{seconds:.1f}"})
        names = list(dict.fromkeys(name for row in self._rows for name in row))
        rows = [[row.get(name, "") for name in names] for row in self._rows[-_ROWS:]]
        page = shows.HTML(fragment(table(names, rows, numbers=range(len(names)))))
        if self._shown is None:
            self._shown = shows.display(page, display_id=True)
        else:
            self._shown.update(page)


def tell_summary(records: Records) -> None:
    """What came of a training, as lines of the log."""
    logger.info("trained: %s", records.summary().replace("\n", "; "))
