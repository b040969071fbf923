"""Losses of every element of a regression."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.training.losses.base import POSITIVE, ElementLoss, Expectation


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
    expects: ClassVar[Mapping[str, Expectation]] = {"delta": POSITIVE}
    delta: float = 1.0

    def elements(self, op: Builder, y: ir.Value, t: ir.Value) -> ir.Value:
        return _huber(op, y, t, self.delta)


@dataclass(frozen=True, kw_only=True)
class SmoothL1(ElementLoss):
    """d² / 2β where |d| <= β, else |d| - β/2, d = y - t: the Huber loss with δ = β, divided by β.

    Source: Girshick, "Fast R-CNN", 2015.
    """

    name: ClassVar[str] = "smooth_l1"
    expects: ClassVar[Mapping[str, Expectation]] = {"beta": POSITIVE}
    beta: float = 1.0

    def elements(self, op: Builder, y: ir.Value, t: ir.Value) -> ir.Value:
        return op.Mul(_huber(op, y, t, self.beta), 1 / self.beta)


def _huber(op: Builder, y: ir.Value, t: ir.Value, delta: float) -> ir.Value:
    difference = op.Sub(y, t)
    clipped = op.Clip(difference, -delta, delta)
    return op.Mul(clipped, op.Sub(difference, op.Mul(0.5, clipped)))
