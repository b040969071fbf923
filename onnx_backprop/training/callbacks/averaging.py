"""The mean of the weights of some epochs."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from onnx_backprop.converters.training.slots import STATISTIC
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.training.callbacks.base import Callback, Run
from onnx_backprop.training.data.batches import shard_of_rank
from onnx_backprop.training.inputs import rows
from onnx_backprop.training.rates import unchanged
from onnx_backprop.training.reports.history import Record


class StochasticWeightAveraging(Callback):
    """When `fit` ends, replaces the weights by their mean over the last epochs.

    start: the first epoch that counts, from 0, or the share of the epochs before it. The running statistics of
    BatchNormalization become means over the batches with the averaged weights, in one pass. The checkpoint of `fit`
    holds the training without the averaging.

    Source: Izmailov et al., "Averaging Weights Leads to Wider Optima", 2018.
    """

    def __init__(self, start: float = 0.75) -> None:
        share = isinstance(start, float) and 0 <= start < 1
        if isinstance(start, bool) or not (share or (isinstance(start, int) and start >= 0)):
            raise InvalidArgumentError(
                f"StochasticWeightAveraging: start: expected an epoch, or a share of 0 … 1, got {start!r}"
            )
        self.begin, self.count, self._first = start, 0, 0
        self._means: dict[str, np.ndarray] = {}  # in float64

    def start(self, run: Run) -> bool | None:
        self._first = round(self.begin * run.epochs) if isinstance(self.begin, float) else self.begin
        if self._first >= run.epochs:
            raise InvalidArgumentError(
                f"StochasticWeightAveraging: start: expected one of the {run.epochs} epochs, got {self.begin!r}"
            )
        return None

    def __call__(self, trainer: Any, record: Record) -> bool | None:
        if trainer.batch or record.epoch < self._first:
            return None
        self.count += 1
        for name, value in trainer.parameters().items():
            mean = self._means.setdefault(name, np.zeros(value.shape, np.float64))
            mean += (value - mean) / self.count
        return None

    def finish(self, run: Run) -> None:
        if self.count:
            run.trainer.set_state(self._means)
            renew_statistics(run.trainer, run.loader)

    def state(self) -> dict[str, Any]:
        return {"count": self.count}

    def arrays(self) -> dict[str, np.ndarray]:
        return dict(self._means)

    def restore(self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        self.count, self._means = int(state["count"]), {name: np.array(a, np.float64) for name, a in arrays.items()}


def renew_statistics(trainer: Any, loader: Any) -> None:
    """Running statistics: the means, over the rows of a loader's batches, of what each batch has at these weights.

    A step makes s' = m · s + (1 - m) · b of a statistic s and that of the batch, b. From s = 0 it makes (1 - m) · b,
    and from s = 1 that and m more.
    """
    names = [slot.name for slot in trainer.graph.state if slot.role == STATISTIC]
    if not names:
        return
    sums = dict.fromkeys(names, 0.0)
    momentum: dict[str, np.ndarray] = {}
    seen = 0
    with unchanged(trainer):

        def of_batch(batch: Any, first: float) -> dict[str, np.ndarray]:
            state = trainer.state()
            trainer.set_state({name: np.full(state[name].shape, first) for name in names})
            trainer.learning_rate = 0.0
            trainer.step(batch)
            after = trainer.state()
            return {name: after[name].astype(np.float64) for name in names}

        for given in shard_of_rank(loader, trainer.communicator):
            batch = trainer.named(given)
            count = np.array([rows(next(iter(batch.values()), ()))], np.int64)
            trainer.communicator.sum(count)  # or ranks with other numbers of rows would come to other means
            statistics = of_batch(batch, 0.0)
            if not momentum:
                momentum = {name: one - statistics[name] for name, one in of_batch(batch, 1.0).items()}
            sums = {name: total + count[0] * statistics[name] / (1 - momentum[name]) for name, total in sums.items()}
            seen += int(count[0])
    if not seen:
        raise InvalidArgumentError(
            "StochasticWeightAveraging: the loader gives no batch any more, of which running statistics are made. Give "
            "batches that can be gone through again"
        )
    trainer.set_state({name: total / seen for name, total in sums.items()})
