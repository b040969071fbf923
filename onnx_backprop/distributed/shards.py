"""Which rows of a batch a rank has, and what they weigh in the mean over all of them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from onnx_backprop.converters.training.names import NEXT_TOKEN
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.opset.core.errors import InvalidArgumentError, UnsupportedError


class Shard(dict[str, Any]):
    """The rows of a batch that this rank has, by the names of the inputs: a step does not divide them again.

    Each rank gives `Trainer.step` a shard of its own; one without rows takes part all the same.
    """

    @property
    def rows(self) -> int:
        """The length of axis 0 of the first array that has axes; 1 if none has, 0 without arrays."""
        shapes = [np.shape(array) for array in self.values()]
        return next((shape[0] for shape in shapes if shape), min(len(shapes), 1))


def bounds(count: int, rank: int, size: int) -> tuple[int, int]:
    """[start, end) of this rank among `count` rows: the first count mod size ranks have one more than the others."""
    share, more = divmod(count, size)
    start = rank * share + min(rank, more)
    return start, start + share + (rank < more)


def shard_rows(feeds: Mapping[str, Any], rank: int, size: int) -> Shard:
    """This rank's rows of a batch that all ranks have; InvalidArgumentError unless all arrays have rows, as many."""
    if isinstance(feeds, Shard):
        return feeds
    arrays = {name: value if isinstance(value, np.ndarray) else _array(name, value) for name, value in feeds.items()}
    lengths = {name: array.shape[0] if array.ndim else None for name, array in arrays.items()}
    count = next(iter(lengths.values()), None)
    if count is None or any(length != count for length in lengths.values()):
        dims = ", ".join(f"{name!r} {list(array.shape)}" for name, array in arrays.items())
        raise InvalidArgumentError(
            f"a batch on several ranks: expected inputs with one number of rows along axis 0, got {dims}. Ranks divide "
            "that axis; give each a distributed.Shard where it means something else"
        )
    start, end = bounds(count, rank, size)
    return Shard({name: array[start:end] for name, array in arrays.items()})


def _array(name: str, value: Any) -> np.ndarray:
    try:
        return np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    except (ValueError, TypeError, RuntimeError) as e:
        raise InvalidArgumentError(f"{name!r}: expected an array, got {type(value).__name__}: {e}") from e


class Weights:
    """What a shard weighs: the denominator of its loss, so that Σ weight · loss / Σ weight is that of the whole batch.

    The number of rows; for losses of classes Σ w[label] of the positions that are not ignored, for NextToken Σ w of
    the tokens that count. `summed`: the loss
    is a sum over rows, and so is that of all ranks. Errors: UnsupportedError for a sum of losses that weigh rows
    differently.
    """

    def __init__(self, graph: TrainingGraph) -> None:
        loss = graph.options.loss
        losses = _terms(loss)
        self.summed = all(term.get("reduction") == "sum" for term in losses)
        self._labels: str | None = None
        self._ignored: int | None = None
        self._classes: np.ndarray | None = None
        weighted = [term for term in losses if _counts_labels(term)]
        if len(losses) > 1 and (weighted or len({term.get("reduction") == "sum" for term in losses}) > 1):
            raise UnsupportedError(
                "loss: several ranks cannot divide a sum of losses of which some have class weights or ignored labels, "
                "or some are sums and some means. Train it on one rank, or give all one reduction and no weights"
            )
        self._shift, self._tokens = False, None
        if weighted and losses[0].get("name") == NEXT_TOKEN:
            self._labels, self._ignored = next(iter(graph.options.labels), graph.target), losses[0].get("ignore_index")
            self._shift, self._tokens = bool(losses[0].get("shift")), losses[0].get("weights")
        elif weighted and graph.target is not None:
            self._labels, self._ignored = graph.target, losses[0].get("ignore_index")
            classes = losses[0].get("weight")
            self._classes = None if classes is None else np.asarray(classes, np.float64)

    @property
    def of_labels(self) -> bool:
        """Whether labels count, and not rows."""
        return self._labels is not None

    def of(self, shard: Shard) -> float:
        """The weight of a shard that has been checked."""
        if not shard.rows or self._labels is None:
            return float(shard.rows)
        labels = self._array(shard, self._labels)
        mask = np.ones(labels.shape, bool) if self._ignored is None else labels != self._ignored
        if self._tokens is not None:
            return float(self._array(shard, self._tokens)[mask].sum(dtype=np.float64))
        return float(mask.sum() if self._classes is None else self._classes[labels[mask]].sum())

    def _array(self, shard: Shard, name: str) -> np.ndarray:
        """Labels, or their weights; of those that are compared with the logits before them, all but the first."""
        value = shard[name]
        array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
        return array[..., 1:] if self._shift else array

    def stand_in(self, shard: Shard) -> dict[str, np.ndarray]:
        """Labels that count, for a shard all of whose labels do not."""
        if self._labels is None:
            return {}
        classes = [0, 1] if self._classes is None else np.flatnonzero(self._classes).tolist()
        counts = next(label for label in classes if label != self._ignored)
        labels = np.asarray(shard[self._labels])
        return {self._labels: np.full(labels.shape, counts, labels.dtype)}


def _terms(loss: Any) -> list[dict[str, Any]]:
    """The settings of a loss, or of each loss of a sum; empty ones for what is not a ready loss."""
    if isinstance(loss, dict) and isinstance(terms := loss.get("terms"), list):
        return [settings for _, term in terms for settings in _terms(term)]
    return [loss if isinstance(loss, dict) else {}]


def _counts_labels(loss: dict[str, Any]) -> bool:
    """Whether the mean of a loss is one over labels with weights, or over those that are not ignored."""
    given = loss.get("ignore_index") is not None or loss.get("weight") is not None
    return given and loss.get("reduction") != "sum"
