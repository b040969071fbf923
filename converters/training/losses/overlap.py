"""Losses of how far two masks overlap, for every row and class."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from onnx_backprop.converters.reverse.known import element_type
from onnx_backprop.converters.rules.common import cast
from onnx_backprop.converters.training.losses.base import (
    NOT_NEGATIVE,
    Expectation,
    Loss,
    LossBuilder,
    compared,
    one_of,
    require_rank,
    shaped_as,
    wide,
)
from onnx_backprop.converters.training.losses.cross_entropy import check_axis, check_labels, labels_of
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.shapes import describe


@dataclass(frozen=True, kw_only=True)
class OverlapLoss(Loss):
    """1 - (TP + s) / (TP + α·FP + β·FN + s) of every row and class, their mean or sum."""

    expects: ClassVar[Mapping[str, Expectation]] = {
        "activation": one_of(None, "sigmoid", "softmax"),
        "smooth": NOT_NEGATIVE,
    }
    activation: str | None = None
    smooth: float = 1.0
    axis: int = 1
    label_type: str = "int64"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_axis(self.name, self.axis)
        check_labels(self.name, self.label_type)

    def squashes(self) -> bool:
        return self.activation is not None

    def takes(self) -> str:
        return "logits" if self.activation else "probabilities"

    @abstractmethod
    def shares(self) -> tuple[float, float, float]:
        """α, β and s."""

    def emit(self, op: LossBuilder, *predictions: ir.Value) -> ir.Value:
        """Emit the nodes, with the target as a new input: a mask, or with softmax labels."""
        (prediction,) = predictions
        shape = require_rank(prediction)
        least = 3 if self.activation == "softmax" else 2
        if len(shape) < least:
            raise InvalidArgumentError(
                f"loss: {self.name} expects a prediction of {least} dimensions or more, a row, "
                f"{'classes ' if least == 3 else ''}and positions, got {prediction.name!r} of shape {describe(shape)}"
            )
        classes = self.axis % len(shape) if len(shape) > 2 else None
        if self.activation == "softmax":
            p, t = self._of_labels(op, prediction)
        else:
            p, t = compared(op, self, prediction)
            p = op.typed(op.Sigmoid(p), p) if self.activation else p
        axes = [axis for axis in range(1, len(shape)) if axis != classes]
        alpha, beta, smooth = self.shares()
        start = len(op.nodes)
        product = op.Mul(p, t)
        shaped_as(op, start, p)
        left = ir.Shape([shape[axis] for axis in range(len(shape)) if axis not in axes])

        def total(value: ir.Value) -> ir.Value:
            result = op.ReduceSum(value, axes, keepdims=0)
            result.shape = left
            return result

        start = len(op.nodes)
        hit, predicted, true = total(product), total(p), total(t)
        # TP + α·FP + β·FN = (1 - α - β)·TP + α·Σp + β·Σt
        below = op.Add(op.Mul(alpha, predicted), op.Mul(beta, true))
        if alpha + beta != 1:
            below = op.Add(below, op.Mul(1 - alpha - beta, hit))
        loss = op.Sub(1.0, op.Div(op.Add(hit, smooth), op.Add(below, smooth)))
        shaped_as(op, start, hit)
        return self.reduced(op, loss, p)

    def _of_labels(self, op: LossBuilder, prediction: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Softmax along the axis of the classes, and the labels as ones and zeros of its shape."""
        labels, shape = labels_of(op, self, prediction, self.axis, self.label_type)
        y, count = wide(op, prediction), op.Gather(op.Shape(prediction), self.axis)
        labels = op.Gather(
            op.Range(0, count, 1), labels, axis=0
        )  # itself, and a failing run where there is no such class
        ones = cast(op, op.OneHot(labels, count, [0.0, 1.0], axis=self.axis), element_type(y))  # never float64
        ones.shape = ir.Shape(shape)
        return op.typed(op.Softmax(y, axis=self.axis), y), ones


@dataclass(frozen=True, kw_only=True)
class Dice(OverlapLoss):
    """1 - (2·Σ p·t + s) / (Σ p + Σ t + s) of every row and class, the sums over its positions; then the mean.

    Args:
        activation: None: y are probabilities p; "sigmoid": p = sigmoid(y); "softmax": p = softmax(y) along `axis`.
        smooth: s. With 0 a row without the class, of which nothing is predicted, gives 0/0 = NaN.
        axis: of the classes: 1, or -1 where they are last. A prediction (N, d) has none: a row is one mask.
        label_type: with "softmax", of the labels, as SoftmaxCrossEntropy has it.

    Shapes: y (N, C, d1, …); the target is the new input `target` of its type and shape, with "softmax" `labels` of
    shape (N, d1, …). Source: Milletari et al., "V-Net", 2016.
    """

    name: ClassVar[str] = "dice"

    def shares(self) -> tuple[float, float, float]:
        return 0.5, 0.5, self.smooth / 2


@dataclass(frozen=True, kw_only=True)
class Tversky(OverlapLoss):
    """1 - (TP + s) / (TP + α·FP + β·FN + s), TP = Σ p·t, FP = Σ p·(1 - t), FN = Σ (1 - p)·t; then the mean.

    Args:
        alpha, beta: α and β, what a false positive and a false negative cost. α = β = 1/2 is Dice with twice the s.
        activation, smooth, axis, label_type: as Dice has them.

    Shapes: those of Dice. Source: Salehi et al., "Tversky loss function for image segmentation", 2017.
    """

    name: ClassVar[str] = "tversky"
    expects: ClassVar[Mapping[str, Expectation]] = {**OverlapLoss.expects, "alpha": NOT_NEGATIVE, "beta": NOT_NEGATIVE}
    alpha: float = 0.3
    beta: float = 0.7

    def shares(self) -> tuple[float, float, float]:
        return self.alpha, self.beta, self.smooth
