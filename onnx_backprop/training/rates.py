"""Steps of a trial: which learning rate suits, and running statistics of other weights. The trainer stays as it was."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_backprop.converters.pages import chart, fragment
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.hints import explaining
from onnx_backprop.opset.core.progress import shown
from onnx_backprop.training.data.batches import shard_of_rank
from onnx_backprop.training.divergence import BadBatchError
from onnx_backprop.training.reports.history import Losses
from onnx_backprop.training.reports.plots import check_plot, plot_curves
from onnx_backprop.training.schedules import checked_rate

if TYPE_CHECKING:
    from onnx_backprop.training.trainer import Trainer

_KEPT = ("learning_rate", "epoch", "batch", "schedule", "losses", "read", "kept")
_MEMORY = 0.9  # of the running mean of the losses, unbiased
_WORSE = 4  # times the best mean, at which a search ends


@dataclass(frozen=True)
class RateSearch:
    """Losses over learning rates. points: (rate, loss); means: with running means of the losses.

    suggestion: the rate at which the mean falls most steeply over the logarithm of the rate.
    """

    points: tuple[tuple[float, float], ...]
    means: tuple[tuple[float, float], ...]
    suggestion: float

    def __repr__(self) -> str:
        """What it suggests, in one line."""
        tried = f"{len(self.points)} rates, {self.points[0][0]:.2g} … {self.points[-1][0]:.2g}"
        return f"<RateSearch: {self.suggestion:.2g} of {tried}>"

    def chart(self) -> str:
        """Losses over rates, as a part of a page."""
        curves = {"loss": self.points, "running mean": self.means}
        return chart(curves, "learning rate", "loss", across="logarithmic")

    def _repr_html_(self) -> str:
        return fragment(f"<p>suggested learning rate: {self.suggestion:.2g}</p>", self.chart())


@explaining()
def find_learning_rate(
    trainer: Any,  # a Trainer, whose method this is
    loader: Iterable[Any],
    lowest: float = 1e-7,
    highest: float = 1.0,
    *,
    steps: int = 100,
    plot: str | Path | None = None,
) -> RateSearch:
    """Take steps at learning rates that grow from lowest to highest by equal factors, then restore the trainer.

    The trainer is unchanged afterwards, bit for bit. The search ends early if the running mean of the losses reaches
    four times its least, or a loss is not finite. plot: a picture of the losses. Errors: InvalidArgumentError unless
    0 < lowest < highest, and for fewer than 5 losses. Source: Smith, "Cyclical Learning Rates", 2017.
    """
    checked_rate(highest, np.dtype(np.float32))
    if not 0 < lowest < highest:
        raise InvalidArgumentError(f"lowest, highest: expected 0 < lowest < highest, got {lowest!r}, {highest!r}")
    if steps < 5:
        raise InvalidArgumentError(f"steps: expected 5 or more, got {steps!r}")
    if plot is not None:
        check_plot(plot)
    trainer.inputs.check_loader(loader)
    rates = [lowest * (highest / lowest) ** (n / (steps - 1)) for n in range(steps)]
    points: list[tuple[float, float]] = []
    means: list[tuple[float, float]] = []
    total = weight = 0.0
    with unchanged(trainer):
        batches = _again(shard_of_rank(loader, trainer.communicator))
        for rate in shown(rates, what="trying rates", unit="step"):
            trainer.learning_rate = rate
            try:
                loss = trainer.step(trainer.named(next(batches)))
                trainer.read_losses()
                loss = trainer.losses.last if math.isnan(loss) else loss
            except BadBatchError:
                raise
            except FloatingPointError:
                break
            total, weight = _MEMORY * total + (1 - _MEMORY) * loss, _MEMORY * weight + 1 - _MEMORY
            points.append((rate, loss))
            means.append((rate, total / weight))
            if means[-1][1] > _WORSE * min(mean for _, mean in means) > 0:
                break
    if len(points) < 5:
        raise InvalidArgumentError(
            f"lowest: the loss is no finite number after {len(points)} steps from {lowest:g} on. Begin lower"
        )
    result = RateSearch(tuple(points), tuple(means), _steepest(means))
    if plot is not None:
        plot_curves(plot, {"loss": points, "running mean": means}, "learning rate", "loss", across="logarithmic")
    return result


def _steepest(means: list[tuple[float, float]]) -> float:
    """The rate in the middle of the two neighbours between which the mean falls most, the first few left out."""
    first = min(len(means) // 10, 10)
    pairs = pairwise(means[first:])
    return min((after[1] - before[1], math.sqrt(before[0] * after[0])) for before, after in pairs)[1]


def _again(loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of a loader, over and over."""
    while True:
        count = 0
        for batch in loader:
            count += 1
            yield batch
        if not count:
            raise InvalidArgumentError("the loader is empty; expected batches each time it is gone through")


@contextmanager
def unchanged(trainer: Trainer) -> Iterator[None]:
    """A block behind which the trainer is what it was before, bit for bit, with the same count of steps."""
    trainer.read_losses()
    state, steps = trainer.state(), trainer.steps
    before = {name: getattr(trainer, name) for name in _KEPT}
    trainer.losses = Losses()
    try:
        yield
    finally:
        trainer.rewind(state, steps)
        for name, value in before.items():
            setattr(trainer, name, value)
