"""Connectionist temporal classification: the probability of a sequence of labels, over all ways to place it in time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import element_type
from onnx_backprop.converters.training.losses.base import (
    Expectation,
    Loss,
    LossBuilder,
    checked,
    one_of,
    require_rank,
    wide,
)
from onnx_backprop.converters.training.losses.cross_entropy import LABEL_TYPES, check_labels
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.shapes import describe

_NEVER = -1e30  # the logarithm of the probability of what cannot happen: -inf has no difference to itself
_IMPOSSIBLE = 1e29


@dataclass(frozen=True, kw_only=True)
class CTC(Loss):
    """-log Σ_π Π_t p[t, π_t] over all paths π that give the labels after removing repetitions, then blanks.

    α_t(s) = p[t, z_s] · (α_{t-1}(s) + α_{t-1}(s - 1) + α_{t-1}(s - 2) if z_s is no blank and not z_{s-2}), z being the
    labels between blanks, in logarithms, as a Scan over the steps.

    Args:
        form: what y is: "log_probabilities", log p, as of a model that ends in LogSoftmax, or "logits".
        blank: the number of the class that means no label.
        batch_first: whether y is (N, T, C) and not (T, N, C).
        zero_infinity: whether a row whose labels do not fit into its steps counts 0, not infinity. Its gradient is 0.
        label_type: of the labels, as in SoftmaxCrossEntropy.
        reduction: "mean": of the rows, each divided by the number of its labels (1 for none); "sum".

    Shapes: y (T, N, C); new inputs `labels` (N, S), with any padding, and `input_lengths` and `target_lengths` (N),
    int64: how many steps and labels of a row count. Lengths beyond T and S fail the run.
    Source: Graves et al., "Connectionist Temporal Classification", 2006.
    """

    name: ClassVar[str] = "ctc"
    roles: ClassVar[tuple[str, ...]] = ("labels", "input_lengths", "target_lengths")
    expects: ClassVar[Mapping[str, Expectation]] = {
        "form": one_of("log_probabilities", "logits"),
        "blank": ("the number of a class", lambda blank: blank >= 0),
    }
    form: str = "log_probabilities"
    blank: int = 0
    batch_first: bool = False
    zero_infinity: bool = False
    label_type: str = "int64"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_labels(self.name, self.label_type)

    def squashes(self) -> bool:
        return self.form == "logits"

    def takes(self) -> str:
        return "values"  # since no class of an element is compared

    def emit(self, op: LossBuilder, *predictions: ir.Value) -> ir.Value:
        """Emit the nodes, with the labels and the lengths as new inputs."""
        (prediction,) = predictions
        shape = require_rank(prediction)
        if len(shape) != 3 or (isinstance(shape[2], int) and self.blank >= shape[2]):
            raise InvalidArgumentError(
                f"loss: ctc expects a prediction of shape {'(N, T, C)' if self.batch_first else '(T, N, C)'} with a "
                f"class {self.blank} for the blank, got {prediction.name!r} of shape {describe(shape)}"
            )
        of_rows = 0 if self.batch_first else 1
        rows = shape[of_rows]
        labels = op.target(self, prediction, "labels", dtype=LABEL_TYPES[self.label_type], shape=(rows, None))
        steps = op.target(self, prediction, "input_lengths", dtype=ir.DataType.INT64, shape=(rows,))
        counts = op.target(self, prediction, "target_lengths", dtype=ir.DataType.INT64, shape=(rows,))
        if not isinstance(rows, int):
            number = op.Shape(prediction, start=of_rows, end=of_rows + 1)
            wanted = op.Concat(number, op.Shape(labels, start=1, end=2), axis=0)
            labels = checked(op, labels, (rows, None), wanted, prediction)
            steps, counts = (checked(op, value, (rows,), number, prediction) for value in (steps, counts))
        # a negative index would count from the end; the run fails at this one
        most = np.iinfo(np.int64).max
        steps, counts = (op.Where(op.Less(value, 0), most, value) for value in (steps, counts))
        y = wide(op, prediction)
        if self.form == "logits":
            y = op.LogSoftmax(y, axis=2)
        if self.batch_first:
            y = op.Transpose(y, perm=[1, 0, 2])
        return self._reduced(op, self._negative_logs(op, y, labels, steps, counts), counts, y)

    def _negative_logs(
        self, op: LossBuilder, y: ir.Value, labels: ir.Value, steps: ir.Value, counts: ir.Value
    ) -> ir.Value:
        """-log p of the labels of every row, (N); what cannot happen has a number above 10²⁹."""
        never, rows = op.scalar(_NEVER, y), op.length(y, 1)
        z = self._between_blanks(op, labels, counts, rows)
        same = op.Slice(op.Concat(op.Expand(-1, op.Concat(rows, [2], axis=0)), z, axis=1), [0], [-2], [1])
        skips = op.And(op.Not(op.Equal(z, self.blank)), op.Not(op.Equal(z, same)))
        barred = op.Where(skips, op.scalar(0, y), never)
        length = op.length(y, 0)
        index = op.Expand(op.Unsqueeze(z, [0]), op.Concat(length, [1, 1], axis=0))
        emitted = op.GatherElements(y, index, axis=2)  # (T, N, 2S + 1)
        begins = op.Equal(op.Range(0, op.Gather(op.Shape(z), 1), 1), 0)
        start = op.Expand(op.Where(begins, op.scalar(0, y), never), op.Shape(z))
        # a length beyond T is no index: the run fails
        steps = op.Gather(op.Range(0, op.Add(op.Squeeze(length, [0]), 1), 1), steps, axis=0)
        counting = op.Less(op.Unsqueeze(op.Range(0, op.Squeeze(length, [0]), 1), [1]), op.Unsqueeze(steps, [0]))
        alpha = _scanned(op, start, emitted, op.Unsqueeze(counting, [2]), barred)
        last = op.Mul(counts, 2)
        ends = op.Concat(op.Unsqueeze(last, [1]), op.Unsqueeze(op.Max(op.Sub(last, 1), 0), [1]), axis=1)
        final = op.GatherElements(alpha, ends, axis=1)
        empty = op.And(op.Unsqueeze(op.Equal(counts, 0), [1]), np.array([False, True]))
        return op.Neg(op.ReduceLogSumExp(op.Where(empty, never, final), [1], keepdims=0))

    def _between_blanks(self, op: LossBuilder, labels: ir.Value, counts: ir.Value, rows: ir.Value) -> ir.Value:
        """The labels with a blank before, between and behind them, (N, 2S + 1); padding is blank too."""
        numbers = labels if labels.dtype == ir.DataType.INT64 else op.Cast(labels, to=ir.DataType.INT64)
        length = op.Gather(op.Shape(numbers), 1)
        counts = op.Gather(op.Range(0, op.Add(length, 1), 1), counts, axis=0)  # beyond S, no index: the run fails
        used = op.Less(op.Unsqueeze(op.Range(0, length, 1), [0]), op.Unsqueeze(counts, [1]))
        wrong = op.Or(op.Less(numbers, 0), op.Equal(numbers, self.blank))
        numbers = op.Where(wrong, np.iinfo(np.int64).max, numbers)
        numbers = op.Unsqueeze(op.Where(used, numbers, self.blank), [2])
        pairs = op.Concat(op.Expand(self.blank, op.Shape(numbers)), numbers, axis=2)
        between = op.Reshape(pairs, op.Concat(rows, [-1], axis=0))
        return op.Concat(between, op.Expand(self.blank, op.Concat(rows, [1], axis=0)), axis=1)

    def _reduced(self, op: LossBuilder, loss: ir.Value, counts: ir.Value, y: ir.Value) -> ir.Value:
        other = 0.0 if self.zero_infinity else np.inf
        loss = op.Where(op.Greater(loss, _IMPOSSIBLE), op.scalar(other, y), loss)
        if self.reduction == "mean":
            loss = op.Div(loss, op.Cast(op.Max(counts, 1), to=element_type(y)))
        return self.reduced(op, loss, y)


def _scanned(op: Builder, start: ir.Value, emitted: ir.Value, counting: ir.Value, barred: ir.Value) -> ir.Value:
    """α of the last step that counts, (N, 2S + 1)."""
    inner, dtype = op.inside(), element_type(start)
    inner.prefix = f"{op.prefix}/step"
    kind = ir.TensorType(dtype)
    before = ir.Value(name=inner.unique("alpha"), type=kind, shape=ir.Shape([None, None]))
    step = ir.Value(name=inner.unique("emitted"), type=kind, shape=ir.Shape([None, None]))
    counts = ir.Value(name=inner.unique("counting"), type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([None, 1]))
    wide = inner.Pad(before, [0, 2, 0, 0], inner.number(_NEVER, dtype))
    ways = [before, inner.Slice(wide, [1], [-1], [1]), inner.Add(inner.Slice(wide, [0], [-2], [1]), barred)]
    together = inner.Concat(*(inner.Unsqueeze(way, [0]) for way in ways), axis=0)
    after = inner.Add(inner.ReduceLogSumExp(together, [0], keepdims=0), step)
    result = inner.Where(counts, after, before)
    result.type, result.shape = kind, ir.Shape([None, None])
    body = ir.Graph([before, step, counts], [result], nodes=inner.nodes, name=inner.unique(inner.prefix))
    (alpha,) = op.emit("Scan", [start, emitted, counting], {"body": body, "num_scan_inputs": 2})
    return op.typed(alpha, start)
