"""Losses of classes: the target is the number of the class at every position."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import ClassVar, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import dims, element_type
from onnx_backprop.converters.training.losses.base import (
    Expectation,
    Loss,
    LossBuilder,
    between,
    checked,
    require_held,
    require_rank,
    scalar,
    symbolic,
    wide,
)
from onnx_backprop.converters.training.losses.binary import log
from onnx_backprop.converters.training.losses.linear import emit_blocks, head_of, positions_shape
from onnx_backprop.converters.training.names import CLASSES_LAST, SOFTMAX_CROSS_ENTROPY
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.shapes import Dim, Dims, describe
from onnx_backprop.opset.graphs.walk import is_standard

LABEL_TYPES = {name: ir.DataType[name.upper()] for name in ("int64", "int32", "int16", "int8", "uint8", "bool")}


BLOCK_ROWS: Expectation = ("None or a number of rows", lambda rows: rows is None or rows >= 0)


class Positions(NamedTuple):
    """A prediction y of shape (N, C) or (N, C, d1, …) and the labels of its positions, int64 of shape (N, d1, …).

    ignored: where the label is the one to leave out. safe: the labels with 0 there; others outside 0 … C - 1 fail the
    run where they are used as an index. weight: a number for each class.
    """

    y: ir.Value
    labels: ir.Value
    safe: ir.Value
    ignored: ir.Value | None
    weight: ir.Value | None


@dataclass(frozen=True, kw_only=True)
class ClassLoss(Loss):
    """A loss of the classes along one axis of the prediction, and one label for every position."""

    roles: ClassVar[tuple[str, ...]] = ("labels",)
    weight: ArrayLike | None = None
    ignore_index: int | None = None
    axis: int | None = None
    label_type: str = "int64"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_labels(self.name, self.label_type, self.ignore_index)
        check_axis(self.name, self.axis)

    def positions(self, op: LossBuilder, prediction: ir.Value) -> Positions:
        """The prediction, its classes along axis 1, beside its labels.

        With the classes last, all positions go into one axis: (N, d1, …, C) becomes (N · d1 · …, C), and nothing moves.
        """
        axis = self.axis_of(prediction)
        t, shape = labels_of(op, self, prediction, axis, self.label_type, self.ignore_index)
        y, rank = wide(op, prediction), len(shape)
        if self.axis is None and axis == -1 and rank > 2:
            name = str(op.target(self, prediction, "labels", dtype=LABEL_TYPES[self.label_type], shape=shape[:-1]).name)
            op.labels[name]["first"] = [d if isinstance(d, int) else None for d in (shape[0], *shape[2:])]
        weight = self._weights(op, y, shape, axis)
        if axis == -1 and rank > 2:
            y = op.typed(op.Reshape(y, op.joined(op.ints([-1]), op.lengths(y, rank - 1))), y)
            t = op.Reshape(t, [-1])
            y.shape, t.shape = ir.Shape((_together(shape), shape[-1])), ir.Shape((_together(shape),))
        ignored = None if self.ignore_index is None else op.Equal(t, self.ignore_index)
        return Positions(y, t, t if ignored is None else op.Where(ignored, 0, t), ignored, weight)

    def axis_of(self, prediction: ir.Value) -> int:
        """1 or -1: that of the loss, or the last where a softmax goes along it or a matrix product has made it."""
        if self.axis is not None:
            return self.axis
        rank, node = len(dims(prediction) or ()), prediction.producer()
        if node is not None and is_standard(node, "Softmax", "LogSoftmax"):
            axis = node.attributes.get("axis")
            return -1 if rank > 2 and (axis is None or axis.as_int() in (-1, rank - 1)) else 1
        return -1 if rank > 2 and head_of(prediction) is not None else 1

    def _weights(self, op: Builder, y: ir.Value, shape: Dims, axis: int) -> ir.Value | None:
        if self.weight is None:
            return None
        values, classes = require_held(f"{self.name}: weight", self.weight, np.float32), shape[axis]
        if values.ndim != 1 or (isinstance(classes, int) and len(values) != classes):
            last = values.ndim == 1 and axis == 1 and len(shape) > 2 and shape[-1] == len(values)
            raise InvalidArgumentError(
                f"{self.name}: weight: expected one number for each of {classes} classes, got an array of shape "
                f"{values.shape}{'. ' + CLASSES_LAST if last else ''}"
            )
        return op.constant(values.astype(element_type(y).numpy()))

    def over_positions(self, op: Builder, terms: ir.Value, at: Positions) -> ir.Value:
        """Σ of the terms, for a mean divided by Σ w of the positions that count; terms: with their weights."""
        if at.ignored is not None:
            terms = op.Where(at.ignored, 0, terms)
        if self.reduction == "sum":
            return op.ReduceSum(terms, keepdims=0)
        if at.weight is None and at.ignored is None:
            return op.ReduceMean(terms, keepdims=0)
        return op.Div(op.ReduceSum(terms, keepdims=0), self.divisor(op, at))

    def divisor(self, op: Builder, at: Positions) -> ir.Value:
        """Σ w of the positions that count, 0-D."""
        if at.weight is None and at.ignored is None:
            return op.Cast(op.Size(at.labels), to=element_type(at.y))
        if at.weight is None:
            counts: ir.Value = op.Where(at.ignored, op.scalar(0, at.y), op.scalar(1, at.y))
        else:
            counts = op.Gather(at.weight, at.safe, axis=0)
            counts = counts if at.ignored is None else op.Where(at.ignored, 0, counts)
        counts.shape = at.labels.shape
        return op.ReduceSum(counts, keepdims=0)


@dataclass(frozen=True, kw_only=True)
class SoftmaxCrossEntropy(ClassLoss):
    """(1 - ε) · Σ -w[t] · log p[t] / W + ε/C · Σ_n Σ_c -w_c · log p_c / W, p = softmax(y) along `axis`.

    W = Σ w[t] over the positions (their number without weights), 1 for reduction "sum". Positions with the label
    `ignore_index` do not count; if all are ignored, the mean is 0/0 = NaN.

    Args:
        weight: w, one number for each of the C classes.
        ignore_index: a label to leave out, in or outside 0 … C - 1.
        label_smoothing: ε in 0 … 1, the share of the target that is spread evenly over all classes.
        axis: of the classes: 1, or -1 if they are last. Default: -1 if a matrix product makes the last axis of a
            prediction of three axes or more, or a softmax goes along it, as in language models; else 1.
        block_rows: how many rows of the last matrix product have their logits computed at once, 0 for all. Default:
            blocks from 2²⁰ logits on, or 4096 classes if the number of rows is unknown. For classes on the last axis.
        label_type: of the labels: "int64", "int32", "int16", "int8", "uint8" or "bool".

    Shapes: y (N, C, d1, …), or (N, d1, …, C) for axis -1; the target is the new input `labels`, of shape (N, d1, …).
    Source: ONNX SoftmaxCrossEntropyLoss; Szegedy et al., "Rethinking the Inception Architecture", section 7.
    """

    name: ClassVar[str] = SOFTMAX_CROSS_ENTROPY
    expects: ClassVar[Mapping[str, Expectation]] = {"label_smoothing": between(0, 1), "block_rows": BLOCK_ROWS}
    label_smoothing: float = 0.0
    block_rows: int | None = None

    def squashes(self) -> bool:
        return True

    def emit(self, op: LossBuilder, *predictions: ir.Value) -> ir.Value:
        """Emit the nodes, with the target as a new input `labels`."""
        (prediction,) = predictions
        at = self.positions(op, prediction)
        smooth = self.label_smoothing
        if len(dims(at.y) or ()) == 2 and not (smooth and at.weight is not None):
            weights = None if at.weight is None else op.Gather(at.weight, at.safe, axis=0)
            divisor = None if self.reduction == "sum" else scalar(self.divisor(op, at), at.y)  # before the blocks
            total = emit_blocks(
                op, prediction, at.labels, weights, self.ignore_index, rows=self.block_rows, smoothing=smooth
            )
            if total is not None:
                return scalar(total if divisor is None else op.Div(total, divisor), at.y)
        attributes = {"reduction": self.reduction, "ignore_index": self.ignore_index}
        inputs = [at.y, at.labels, at.weight]
        outputs = op.emit("SoftmaxCrossEntropyLoss", inputs, attributes, outputs=2 if smooth else 1)
        loss = outputs[0]
        if smooth:
            outputs[1].shape = at.y.shape
            even = self.over_positions(op, self._even(op, outputs[1], at.weight), at)
            share = op.Div(smooth, op.Cast(op.Gather(op.Shape(at.y), 1), to=element_type(at.y)))
            loss = op.Add(op.Mul(1 - smooth, loss), op.Mul(share, even))
        return scalar(loss, at.y)

    def _even(self, op: Builder, log_p: ir.Value, weight: ir.Value | None) -> ir.Value:
        """Σ_c -w_c · log p_c of every position."""
        rank = len(dims(log_p) or ())
        if weight is not None:
            log_p = op.Mul(log_p, op.Reshape(weight, [-1] + [1] * (rank - 2)))
        return op.Neg(op.ReduceSum(log_p, [1], keepdims=0))


@dataclass(frozen=True, kw_only=True)
class NLL(ClassLoss):
    """Σ -w[t] · log y[t] / W of probabilities y, W as in SoftmaxCrossEntropy.

    For a model that ends in a softmax. SoftmaxCrossEntropy on its logits is more accurate: `prediction` may name them.
    A logarithm is at least -100, and its derivative 0 at y = 0.

    Args:
        log_probabilities: whether y is the logarithm already, of a model that ends in LogSoftmax.
        weight, ignore_index, axis, label_type: as in SoftmaxCrossEntropy.

    Shapes: those of SoftmaxCrossEntropy.
    """

    name: ClassVar[str] = "nll"
    log_probabilities: bool = False

    def takes(self) -> str:
        return "log_probabilities" if self.log_probabilities else "probabilities"

    def emit(self, op: LossBuilder, *predictions: ir.Value) -> ir.Value:
        """Emit the nodes, with the target as a new input `labels`."""
        (prediction,) = predictions
        at = self.positions(op, prediction)
        picked = op.Squeeze(op.GatherElements(at.y, op.Unsqueeze(at.safe, [1]), axis=1), [1])
        picked.type, picked.shape = at.y.type, at.labels.shape
        start = len(op.nodes)
        terms = op.Neg(picked if self.log_probabilities else log(op, picked))
        if at.weight is not None:
            terms = op.Mul(terms, op.Gather(at.weight, at.safe, axis=0))
        for node in op.nodes[start:]:
            if node.op_type != "Constant":
                node.outputs[0].shape = at.labels.shape
        return scalar(self.over_positions(op, terms, at), at.y)


def _together(shape: Dims) -> Dim:
    """The number of positions of a prediction whose classes are last."""
    known = all(isinstance(d, int) for d in shape[:-1])
    return prod(d for d in shape[:-1] if isinstance(d, int)) if known else None


def check_labels(name: str, label_type: str, ignored: int | None = None) -> None:
    """Refuse a type that labels cannot have, and a label to leave out that the type does not hold."""
    if not isinstance(label_type, str) or label_type not in LABEL_TYPES:
        expected = ", ".join(map(repr, LABEL_TYPES))
        raise InvalidArgumentError(f"{name}: label_type: expected one of {expected}, got {label_type!r}")
    low, high = _range(label_type)
    if ignored is not None and not low <= ignored <= high:
        raise InvalidArgumentError(f"{name}: ignore_index: expected a label of type {label_type}, got {ignored!r}")


def check_axis(name: str, axis: int | None) -> None:
    """Refuse an axis of classes other than 1 and -1; None: it is found."""
    if axis not in (1, -1, None):
        raise InvalidArgumentError(f"{name}: axis: expected 1 or -1, got {axis!r}. Put a Transpose into the model")


def labels_of(
    op: LossBuilder, loss: Loss, prediction: ir.Value, axis: int, label_type: str, ignored: int | None = None
) -> tuple[ir.Value, Dims]:
    """The labels of a prediction as int64, with those below 0 sent out of range, and the shape of the prediction.

    Runtimes count a negative label from the last class; out of range, it fails the run where it is used as an index.
    """
    shape = require_rank(prediction)
    if len(shape) < 2:
        raise InvalidArgumentError(
            f"loss: {loss.name} expects a prediction of shape "
            f"{'(N, C) or (N, C, d1, …)' if axis == 1 else '(N, C) or (N, d1, …, C)'}, "
            f"got {prediction.name!r} of shape {describe(shape)}"
        )
    at, dtype, highest = axis % len(shape), LABEL_TYPES[label_type], _range(label_type)[1]
    positions = (*shape[:at], *shape[at + 1 :])
    classes = shape[at]
    if isinstance(classes, int) and classes - 1 > highest:
        last = axis == 1 and isinstance(shape[-1], int) and shape[-1] - 1 <= highest
        raise InvalidArgumentError(
            f"{loss.name}: label_type: {label_type} holds labels up to {highest}, and {prediction.name!r} has "
            f"{classes} classes along axis {axis}. {CLASSES_LAST if last else 'Take another'}"
        )
    labels = op.target(loss, prediction, "labels", dtype=dtype, shape=positions)
    op.compared[-1] |= {"axis": axis, "ignored": ignored}
    op.labels[str(labels.name)] = {
        "classes": classes if isinstance(classes, int) else None,
        "ignored": ignored,
        "last": [d if isinstance(d, int) else None for d in shape[:-1]] if axis == 1 and len(shape) > 2 else None,
    }
    wanted = None
    if symbolic(positions):
        axes = [axis for axis in range(len(shape)) if axis != at]
        last = at == len(shape) - 1
        wanted = positions_shape(op, prediction) if last else op.Gather(op.Shape(prediction), axes)
    t = checked(op, labels, positions, wanted, prediction)
    if dtype != ir.DataType.INT64:
        t = op.Cast(t, to=ir.DataType.INT64)
    bad = op.Less(t, 0)
    if ignored is not None:
        bad = op.And(bad, op.Not(op.Equal(t, ignored)))
    t = op.Where(bad, np.iinfo(np.int64).max, t)
    t.shape = ir.Shape(positions)
    return t, shape


def _range(label_type: str) -> tuple[int, int]:
    if label_type == "bool":
        return 0, 1
    numbers = np.iinfo(label_type)
    return int(numbers.min), int(numbers.max)
