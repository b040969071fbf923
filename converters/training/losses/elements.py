"""Losses of every element of a regression."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.training.losses.base import ElementLoss
from onnx_backprop.opset.core.errors import InvalidArgumentError


@dataclass(frozen=True, kw_only=True)
class MSE(ElementLoss):
    """(y - t)²."""

    name: ClassVar[str] = "mse"

    def elements(self, op: Builder, y: ir.Value, t: ir.Value) -> ir.Value:
        difference = op.Sub(y, t)
        return op.Mul(difference, difference)


@dataclass(frozen=True, kw_only=True)
class L1(ElementLoss):
    """|y - t|; the derivative is 0 where y = t."""

    name: ClassVar[str] = "l1"

    def elements(self, op: Builder, y: ir.Value, t: ir.Value) -> ir.Value:
        return op.Abs(op.Sub(y, t))


@dataclass(frozen=True, kw_only=True)
class Huber(ElementLoss):
    """d² / 2 where |d| <= δ, else δ · (|d| - δ/2), d = y - t.  With c = d clipped to ±δ that is c · (d - c/2).

    Source: Huber, "Robust Estimation of a Location Parameter", 1964.
    """

    name: ClassVar[str] = "huber"
    delta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive("huber: delta", self.delta)

    def elements(self, op: Builder, y: ir.Value, t: ir.Value) -> ir.Value:
        return _huber(op, y, t, self.delta)


@dataclass(frozen=True, kw_only=True)
class SmoothL1(ElementLoss):
    """d² / 2β where |d| <= β, else |d| - β/2, d = y - t: the Huber loss with δ = β, divided by β.

    Source: Girshick, "Fast R-CNN", 2015.
    """

    name: ClassVar[str] = "smooth_l1"
    beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive("smooth_l1: beta", self.beta)

    def elements(self, op: Builder, y: ir.Value, t: ir.Value) -> ir.Value:
        return op.Mul(_huber(op, y, t, self.beta), 1 / self.beta)


def _huber(op: Builder, y: ir.Value, t: ir.Value, delta: float) -> ir.Value:
    difference = op.Sub(y, t)
    clipped = op.Clip(difference, -delta, delta)
    return op.Mul(clipped, op.Sub(difference, op.Mul(0.5, clipped)))


def _require_positive(what: str, number: float) -> None:
    if not 0 < number < np.inf:
        raise InvalidArgumentError(f"{what}: expected more than 0, got {number}")
