"""Standardising x over some axes, the part that Batch-, Group-, Instance- and LayerNormalization share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder


@dataclass(frozen=True)
class Standardised:
    """z = (x - μ) · r, r = 1/√(σ² + ε), μ and σ² the mean and the variance of x over `axes`.

    Shapes: z that of x; r and centres of length 1 along the axes.
    """

    z: ir.Value
    rate: ir.Value
    axes: ir.Value
    centred: bool = True

    def gradient(self, op: Builder, g: ir.Value) -> ir.Value:
        """dx = r · (dz - mean dz - z · mean(dz · z)), the means over the axes; without centring there is no mean dz."""
        along = op.Mul(self.z, op.ReduceMean(op.Mul(g, self.z), self.axes, keepdims=1))
        if self.centred:
            along = op.Add(along, op.ReduceMean(g, self.axes, keepdims=1))
        return op.Mul(self.rate, op.Sub(g, along))


def standardise(op: Builder, x: ir.Value, axes: ir.Value, epsilon: float, dtype: ir.DataType) -> Standardised:
    """z = (x - μ) / √(σ² + ε), computed anew from x, which has the type `dtype`."""
    deviation = op.Sub(x, op.ReduceMean(x, axes, keepdims=1))
    return _scaled(op, deviation, axes, epsilon, dtype, centred=True)


def scale_to_unit(op: Builder, x: ir.Value, axes: ir.Value, epsilon: float, dtype: ir.DataType) -> Standardised:
    """z = x / √(mean x² + ε): the same without taking the mean off."""
    return _scaled(op, x, axes, epsilon, dtype, centred=False)


def _scaled(
    op: Builder, x: ir.Value, axes: ir.Value, epsilon: float, dtype: ir.DataType, *, centred: bool
) -> Standardised:
    power = op.ReduceMean(op.Mul(x, x), axes, keepdims=1)
    rate = op.Reciprocal(op.Sqrt(op.Add(power, op.constant(np.array(epsilon).astype(dtype.numpy())))))
    return Standardised(op.Mul(x, rate), rate, axes, centred)
