"""The totals of metrics over the batches of an evaluation, and over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_backprop.converters.training.names import NEXT_TOKEN, PERPLEXITY
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.distributed.communicator import Communicator, gathered
from onnx_backprop.opset.core.errors import InvalidArgumentError, UnsupportedError
from onnx_backprop.training.reports.history import COLUMNS

if TYPE_CHECKING:  # metrics emit nodes, for which onnx_ir is imported
    from onnx_backprop.converters.training.metrics import Metric

Names = Mapping[str, Mapping[str, str]]
Metrics = Any  # what `named_metrics` takes


def chosen_metrics(given: Metrics | None) -> Mapping[str, Metric]:
    """The metrics that are asked for, by the names that results have; errors as `named_metrics`."""
    if given is None:
        return {}
    from onnx_backprop.converters.training.metrics.choose import named_metrics  # for which onnx_ir is imported

    metrics = named_metrics(given)
    if taken := [name for name in metrics if name in COLUMNS]:
        raise InvalidArgumentError(f"metrics: {taken[0]!r} is what a record calls something else. Name it otherwise")
    return metrics


def counts_tokens(graph: TrainingGraph) -> bool:
    """Whether the loss is a mean over tokens, whose perplexity is a metric that nobody need ask for."""
    loss = graph.options.loss
    return isinstance(loss, dict) and loss.get("name") == NEXT_TOKEN and loss.get("reduction") != "sum"


def result_names(graph: TrainingGraph, metrics: Mapping[str, Metric]) -> tuple[str, ...]:
    """The names of the numbers that an evaluation gives beside its loss."""
    return tuple(dict.fromkeys(([PERPLEXITY] if counts_tokens(graph) else []) + list(metrics)))


def plain_numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as a record holds them: arrays are lists."""
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in metrics.items()}


class Measures:
    """metrics: by the names of their results. sums: of each the outputs of the model that hold its sums."""

    def __init__(self, metrics: Mapping[str, Metric], sums: Names) -> None:
        self._metrics, self._names = metrics, sums
        self._totals: dict[str, dict[str, np.ndarray]] = {}

    def add(self, results: Mapping[str, Any]) -> None:
        """The outputs of one batch more."""
        for name, metric in self._metrics.items():
            sums = {what: np.asarray(results[output]) for what, output in self._names[name].items()}
            sums = {
                what: a.astype(np.float64) if a.dtype.kind == "f" and a.ndim == 0 else a for what, a in sums.items()
            }
            self._totals[name] = metric.merged(self._totals[name], sums) if name in self._totals else sums

    def gather(self, communicator: Communicator) -> None:
        """Merge the totals of all ranks, in their order, on all of them; a rank may have had no batch."""
        from onnx_backprop.converters.training.metrics import Function

        if functions := [name for name, metric in self._metrics.items() if isinstance(metric, Function)]:
            raise UnsupportedError(
                f"metrics: {functions[0]!r} is a function of all arrays together, which several ranks do not have. "
                "Take a ready metric, or evaluate on one rank"
            )
        for name, metric in self._metrics.items():
            ranks: list[dict[str, np.ndarray]] = [{} for _ in range(communicator.size)]
            for what in self._names[name]:
                for sums, array in zip(
                    ranks, _of_ranks(communicator, self._totals.get(name, {}).get(what)), strict=True
                ):
                    if array is not None:
                        sums[what] = array
            if there := [sums for sums in ranks if sums]:
                self._totals[name] = reduce(metric.merged, there)

    def values(self) -> dict[str, float | np.ndarray]:
        """The number of each metric."""
        if missing := [name for name in self._metrics if name not in self._totals]:
            raise InvalidArgumentError(f"metrics: there was no batch to compute {missing[0]!r} of")
        return {name: metric.value(self._totals[name]) for name, metric in self._metrics.items()}


def _of_ranks(communicator: Communicator, local: np.ndarray | None) -> list[np.ndarray | None]:
    """The array of each rank, a number or a row of numbers, as float64; None where there is none."""
    length = int(gathered(communicator, np.array([0 if local is None else local.size], np.int64)).max())
    row = np.zeros(length + 1, np.float64)  # counts below 2⁵³ stay what they are
    if local is not None:
        row[:-1], row[-1] = local.reshape(-1), 1 + local.ndim
    rows = gathered(communicator, row)
    return [None if not r[-1] else r[:-1].reshape(() if r[-1] == 1 else (length,)) for r in rows]
