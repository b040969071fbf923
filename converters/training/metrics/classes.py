"""Metrics of decisions: of one class at every position, or yes and no for every element."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import dims
from onnx_backprop.converters.training.losses.base import Expectation, one_of
from onnx_backprop.converters.training.metrics.base import Metric, Number, Read, Sums, histogram, ratio, share, total
from onnx_backprop.opset.core.errors import InvalidArgumentError

THRESHOLD: Expectation = ("None or a number", lambda given: given is None or np.isfinite(given))


@dataclass(frozen=True, kw_only=True)
class Accuracy(Metric):
    """The share of positions whose highest score is that of the label; for yes and no, of elements that agree.

    Args:
        threshold: for targets 0 and 1, the score above which a prediction is a yes. Default: 0 for logits, 1/2 for
            probabilities.

    Positions whose label the loss ignores do not count. Of equal scores the first class is chosen.
    """

    name: ClassVar[str] = "accuracy"
    higher: ClassVar[bool] = True
    expects: ClassVar[Mapping[str, Expectation]] = {"threshold": THRESHOLD}
    threshold: float | None = None

    def emit(self, op: Builder, read: Read) -> dict[str, ir.Value]:
        if not read.classes:
            yes, true = read.decided(op, self.threshold)
            right = op.Equal(yes, true)
            return {"right": total(op, right), "all": op.Size(right)}
        labels, mask = read.labels(op)
        return _right(op, op.Equal(read.chosen(op), labels), mask)

    def value(self, sums: Sums) -> float:
        return ratio(self.name, sums["right"], sums["all"])


@dataclass(frozen=True, kw_only=True)
class TopK(Metric):
    """The share of positions whose label is among the k highest scores; of equal scores the first classes."""

    name: ClassVar[str] = "top_k"
    higher: ClassVar[bool] = True
    expects: ClassVar[Mapping[str, Expectation]] = {"k": ("1 or more", lambda k: isinstance(k, int) and k >= 1)}
    k: int = 5

    @property
    def label(self) -> str:
        """top5."""
        return f"top{self.k}"

    def emit(self, op: Builder, read: Read) -> dict[str, ir.Value]:
        if not read.classes:
            raise read.refuse("scores of classes")
        classes = (dims(read.y) or ())[read.axis()]
        if isinstance(classes, int) and classes < self.k:
            raise InvalidArgumentError(f"top_k: k: expected at most {classes}, the number of classes, got {self.k}")
        labels, mask = read.labels(op)
        _, best = op.emit("TopK", [read.rows(op), op.ints([self.k])], {"axis": -1}, outputs=2)
        hits = op.Cast(op.Equal(best, op.Unsqueeze(labels, [1])), to=ir.DataType.INT64)
        return _right(op, op.Greater(op.ReduceMax(hits, [1], keepdims=0), 0), mask)

    def value(self, sums: Sums) -> float:
        return ratio(self.label, sums["right"], sums["all"])


def _right(op: Builder, right: ir.Value, mask: ir.Value | None) -> dict[str, ir.Value]:
    if mask is None:
        return {"right": total(op, right), "all": op.Size(right)}
    return {"right": total(op, op.And(right, mask)), "all": total(op, mask)}


@dataclass(frozen=True, kw_only=True)
class ConfusionMatrix(Metric):
    """n[i, j], how many positions of class i have their highest score at class j; of yes and no [[TN, FP], [FN, TP]].

    Args:
        threshold: as Accuracy has it.

    Shapes: (C, C), int64, or (2, 2).
    """

    name: ClassVar[str] = "confusion_matrix"
    higher: ClassVar[bool] = True
    expects: ClassVar[Mapping[str, Expectation]] = {"threshold": THRESHOLD}
    threshold: float | None = None

    def emit(self, op: Builder, read: Read) -> dict[str, ir.Value]:
        if not read.classes:
            yes, true = (op.Cast(op.Reshape(x, [-1]), to=ir.DataType.INT64) for x in read.decided(op, self.threshold))
            return {"counts": histogram(op, op.Add(op.Mul(true, 2), yes), op.scalar(4, true), None)}
        labels, mask = read.labels(op)
        classes = read.count(op)
        places = op.Add(op.Mul(labels, classes), read.chosen(op))
        return {"counts": histogram(op, places, op.Mul(classes, classes), mask)}

    def value(self, sums: Sums) -> np.ndarray:
        count = round(len(sums["counts"]) ** 0.5)
        return np.asarray(sums["counts"]).astype(np.int64).reshape(count, count)


@dataclass(frozen=True, kw_only=True)
class OverlapMetric(Metric):
    """A ratio of TP, FP and FN: of every class, or of yes in every channel, and their mean.

    Args:
        average: "macro": the mean over the classes that occur in targets or predictions; "micro": from the TP, FP and
            FN of all classes together; "binary": that of class 1 of two; None: of every class, NaN if it does not
            occur.
        threshold: as in Accuracy.

    For yes and no, channels are along axis 1.
    """

    higher: ClassVar[bool] = True
    expects: ClassVar[Mapping[str, Expectation]] = {
        "average": one_of("macro", "micro", "binary", None),
        "threshold": THRESHOLD,
    }
    average: str | None = "macro"
    threshold: float | None = None

    @abstractmethod
    def of(self, hit: np.ndarray, predicted: np.ndarray, true: np.ndarray) -> np.ndarray:
        """The ratio of TP, TP + FP and TP + FN."""

    def emit(self, op: Builder, read: Read) -> dict[str, ir.Value]:
        if not read.classes:
            yes, true = read.decided(op, self.threshold)
            masks = {"hit": op.And(yes, true), "predicted": yes, "true": true}
            count = ir.DataType.INT64
            return {n: op.ReduceSum(op.Cast(mask, to=count), [0, 2], keepdims=0) for n, mask in masks.items()}
        labels, counted = read.labels(op)
        chosen, classes = read.chosen(op), read.count(op)
        both = op.Equal(chosen, labels)
        both = both if counted is None else op.And(both, counted)
        return {
            "hit": histogram(op, chosen, classes, both),
            "predicted": histogram(op, chosen, classes, counted),
            "true": histogram(op, labels, classes, counted),
        }

    def value(self, sums: Sums) -> Number:
        hit, predicted, true = (np.asarray(sums[name]) for name in ("hit", "predicted", "true"))
        if self.average == "micro":
            hit, predicted, true = hit.sum(), predicted.sum(), true.sum()
        each = self.of(hit, predicted, true)
        if self.average == "binary":
            if len(each) > 2:
                raise InvalidArgumentError(
                    f"{self.name}: average='binary' is for two classes, there are {len(each)}. Take 'macro' or None"
                )
            return float(each[-1])
        if self.average is None:
            return each
        return float(each) if self.average == "micro" else _mean(self.name, each)


def _mean(name: str, each: np.ndarray) -> float:
    there = each[~np.isnan(each)]
    if not len(there):
        raise InvalidArgumentError(f"{name}: no position of the evaluation counts. Give it more, or other labels")
    return float(there.mean())


@dataclass(frozen=True, kw_only=True)
class F1(OverlapMetric):
    """2·TP / (2·TP + FP + FN) of every class, which is 2·precision·recall / (precision + recall).

    average, threshold, channels: as OverlapMetric has them.
    """

    name: ClassVar[str] = "f1"

    def of(self, hit: np.ndarray, predicted: np.ndarray, true: np.ndarray) -> np.ndarray:
        return share(2 * hit, predicted + true)


@dataclass(frozen=True, kw_only=True)
class IoU(OverlapMetric):
    """TP / (TP + FP + FN) of every class, over the positions of all images together: intersection over union.

    average, threshold, channels: as OverlapMetric has them.
    """

    name: ClassVar[str] = "iou"

    def of(self, hit: np.ndarray, predicted: np.ndarray, true: np.ndarray) -> np.ndarray:
        return share(hit, predicted + true - hit)


@dataclass(frozen=True, kw_only=True)
class Dice(F1):
    """2·TP / (2·TP + FP + FN) of masks that are decided, over all images together: F1 by its name in segmentation.

    The loss `losses.Dice` is of probabilities, and of every row by itself.
    """

    name: ClassVar[str] = "dice"


@dataclass(frozen=True, kw_only=True)
class Precision(OverlapMetric):
    """TP / (TP + FP) of every class; 0 where the class is never predicted and labels are of it.

    average, threshold, channels: as OverlapMetric has them.
    """

    name: ClassVar[str] = "precision"

    def of(self, hit: np.ndarray, predicted: np.ndarray, true: np.ndarray) -> np.ndarray:
        return _of_those_there(share(hit, predicted), predicted, true)


@dataclass(frozen=True, kw_only=True)
class Recall(OverlapMetric):
    """TP / (TP + FN) of every class; 0 where no label is of the class and it is predicted.

    average, threshold, channels: as OverlapMetric has them.
    """

    name: ClassVar[str] = "recall"

    def of(self, hit: np.ndarray, predicted: np.ndarray, true: np.ndarray) -> np.ndarray:
        return _of_those_there(share(hit, true), predicted, true)


def _of_those_there(each: np.ndarray, predicted: np.ndarray, true: np.ndarray) -> np.ndarray:
    """0 in the place of 0/0 where a class is in targets or predictions."""
    return np.where(np.isnan(each) & (predicted + true > 0), 0.0, each)
