"""Losses of two classes, for every element: t is 1 where it is of the class, 0 where not, or between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import dims, element_type
from onnx_backprop.converters.training.losses.base import ElementLoss, Expectation, require_broadcast, require_held


@dataclass(frozen=True, kw_only=True)
class BCEWithLogits(ElementLoss):
    """p · t · softplus(-y) + (1 - t) · softplus(y), which for p = 1 is max(y, 0) - y·t + log(1 + exp(-|y|)).

    This form neither overflows nor cancels, and its derivative sigmoid(y) - t also holds at y = 0, where max and
    |·| have a kink each. p is `pos_weight`, a number or an array that broadcasts to y.
    """

    name: ClassVar[str] = "bce_with_logits"
    pos_weight: ArrayLike | None = None

    def squashes(self) -> bool:
        return True

    def elements(self, op: Builder, y: ir.Value, t: ir.Value) -> ir.Value:
        positive = op.Mul(t, op.Softplus(op.Neg(y)))
        if self.pos_weight is not None:
            weight = require_held("bce_with_logits: pos_weight", self.pos_weight, np.float32)
            require_broadcast("bce_with_logits: pos_weight", weight.shape, dims(y) or ())
            positive = op.Mul(positive, weight.astype(element_type(y).numpy()))
        negative = op.Mul(op.Sub(1.0, t), op.Softplus(y))
        return op.Add(positive, negative)


@dataclass(frozen=True, kw_only=True)
class BCE(ElementLoss):
    """-(t · log y + (1 - t) · log(1 - y)) of probabilities y, each logarithm at least -100.

    For a model that ends in a sigmoid. BCEWithLogits on its logits is more accurate: `prediction` may name them. Where
    a logarithm is cut off, at y = 0 or y = 1, its derivative is 0; y outside 0 … 1 gives NaN.
    """

    name: ClassVar[str] = "bce"

    def takes(self) -> str:
        return "probabilities"

    def elements(self, op: Builder, y: ir.Value, t: ir.Value) -> ir.Value:
        complement = op.Sub(1.0, t)
        return op.Neg(op.Add(op.Mul(t, log(op, y)), op.Mul(complement, log(op, op.Sub(1.0, y)))))


@dataclass(frozen=True, kw_only=True)
class Focal(ElementLoss):
    """-a · (1 - q)^γ · log q,  q = p where t = 1, else 1 - p,  a = α where t = 1, else 1 - α,  p = sigmoid(y).

    For t between 0 and 1: a = α·t + (1 - α)·(1 - t), 1 - q = p + t - 2·p·t, and -log q is BCEWithLogits. alpha: α, None
    for a = 1. With γ = 0 and without α it is BCEWithLogits.
    Source: Lin et al., "Focal Loss for Dense Object Detection", 2017.
    """

    name: ClassVar[str] = "focal"
    expects: ClassVar[Mapping[str, Expectation]] = {
        "alpha": ("0 … 1 or None", lambda alpha: alpha is None or 0 <= alpha <= 1),
        "gamma": ("0, or 1 or more", lambda gamma: gamma == 0 or 1 <= gamma < np.inf),  # or infinite slopes at q = 1
    }
    alpha: float | None = 0.25
    gamma: float = 2.0

    def squashes(self) -> bool:
        return True

    def elements(self, op: Builder, y: ir.Value, t: ir.Value) -> ir.Value:
        loss = BCEWithLogits().elements(op, y, t)
        if self.gamma:
            p = op.Sigmoid(y)
            missed = op.Sub(op.Add(p, t), op.Mul(2.0, op.Mul(p, t)))
            factor = missed if self.gamma == 1 else op.Mul(missed, missed) if self.gamma == 2 else None
            loss = op.Mul(loss, op.Pow(missed, self.gamma) if factor is None else factor)
        if self.alpha is not None:
            share = op.Add(op.Mul(2 * self.alpha - 1, t), 1 - self.alpha)
            loss = op.Mul(loss, share)
        return loss


def log(op: Builder, p: ir.Value) -> ir.Value:
    """log p, at least -100, with the derivative 0 at p = 0."""
    zero = op.Equal(p, 0.0)
    safe = op.Where(zero, 1.0, p)
    return op.Where(zero, -100.0, op.Max(op.Log(safe), op.scalar(-100.0, p)))
