"""Metrics of probabilities: perplexity, and the area under the receiver's curve."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.training.losses.base import Expectation
from onnx_backprop.converters.training.metrics.base import Metric, Number, Read, Sums, double, histogram, ratio, total
from onnx_backprop.converters.training.names import PERPLEXITY
from onnx_backprop.opset.core.errors import InvalidArgumentError


@dataclass(frozen=True, kw_only=True)
class Perplexity(Metric):
    """exp(-Σ log p[t] / n) over the n labels that count; infinity where float64 does not hold it."""

    name: ClassVar[str] = PERPLEXITY
    higher: ClassVar[bool] = False

    def emit(self, op: Builder, read: Read) -> dict[str, ir.Value]:
        if not read.classes:
            raise read.refuse("scores of classes")
        labels, mask = read.labels(op)
        rows = read.rows(op)
        if read.about.takes == "probabilities":
            rows = op.Log(rows)
        elif read.about.takes == "logits":
            rows = op.LogSoftmax(rows, axis=-1)
        elif read.about.takes != "log_probabilities":
            raise read.refuse("logits or probabilities of classes, which a loss of this package reads")
        safe = labels if mask is None else op.Where(mask, labels, 0)
        each = op.Squeeze(op.GatherElements(rows, op.Unsqueeze(safe, [1]), axis=1), [1])
        if mask is None:
            return {"sum": total(op, op.Neg(each)), "all": op.Size(each)}
        return {
            "sum": total(op, op.Where(mask, op.Neg(each), op.number(0, ir.DataType.DOUBLE))),
            "all": total(op, mask),
        }

    def value(self, sums: Sums) -> float:
        with np.errstate(over="ignore"):
            return float(np.exp(np.float64(ratio(self.name, sums["sum"], sums["all"]))))


@dataclass(frozen=True, kw_only=True)
class AUROC(Metric):
    """The probability that a positive has a higher score than a negative; equal scores count one half.

    With several classes, each against the rest, and the mean of those that have positives and negatives.

    Args:
        bins: of a histogram of scores in 0 … 1; scores in one bin count as equal. The error is at most half the share
            of pairs of a positive and a negative in one bin.
        average: None for that of every class, NaN if it has no positives or no negatives.
    """

    name: ClassVar[str] = "auroc"
    higher: ClassVar[bool] = True
    expects: ClassVar[Mapping[str, Expectation]] = {
        "bins": ("2 … 2²⁰", lambda bins: isinstance(bins, int) and 2 <= bins <= 2**20),
        "average": ("'macro' or None", lambda given: given in ("macro", None)),
    }
    bins: int = 16384
    average: str | None = "macro"

    def emit(self, op: Builder, read: Read) -> dict[str, ir.Value]:
        takes = read.about.takes
        if takes == "values":
            raise read.refuse("logits or probabilities, which a loss of classes of this package reads")
        if not read.classes:
            y, t = (op.Reshape(x, [-1]) for x in read.values(op))
            places = self._places(op, op.Sigmoid(y) if takes == "logits" else y)
            length = op.number(self.bins, ir.DataType.INT64)
            masks = {"all": None, "positive": op.Greater(t, 0.5)}
            return {what: histogram(op, places, length, mask) for what, mask in masks.items()}
        labels, mask = read.labels(op)
        rows, classes = read.rows(op), read.count(op)
        p = op.Exp(rows) if takes == "log_probabilities" else op.Softmax(rows, axis=-1) if takes == "logits" else rows
        places = op.Add(self._places(op, p), op.Mul(op.Range(0, classes, 1), self.bins))
        length = op.Mul(classes, self.bins)
        safe = op.Unsqueeze(labels if mask is None else op.Where(mask, labels, 0), [1])
        labelled = op.Reshape(op.GatherElements(places, safe, axis=1), [-1])
        each = None if mask is None else op.Reshape(op.Expand(op.Unsqueeze(mask, [1]), op.Shape(places)), [-1])
        return {
            "all": histogram(op, op.Reshape(places, [-1]), length, each),
            "positive": histogram(op, labelled, length, mask),
        }

    def _places(self, op: Builder, p: ir.Value) -> ir.Value:
        """The bins of probabilities; 1 goes into the last."""
        places = op.Cast(op.Floor(op.Mul(double(op, p), float(self.bins))), to=ir.DataType.INT64)
        return op.Where(op.Equal(places, self.bins), self.bins - 1, places)

    def value(self, sums: Sums) -> Number:
        positive = np.asarray(sums["positive"], np.float64).reshape(-1, self.bins)
        negative = np.asarray(sums["all"], np.float64).reshape(-1, self.bins) - positive
        below = np.cumsum(negative, axis=1) - negative / 2
        with np.errstate(invalid="ignore"):
            each = (positive * below).sum(axis=1) / (positive.sum(axis=1) * negative.sum(axis=1))
        if self.average is None:
            return each
        there = each[~np.isnan(each)]
        if not len(there):
            raise InvalidArgumentError(
                "auroc: expected positives and negatives in the evaluation, there is one kind alone"
            )
        return float(there.mean())
