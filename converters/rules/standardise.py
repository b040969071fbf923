"""Standardising x over some axes, the part that Batch-, Group-, Instance- and LayerNormalization share."""

from dataclasses import dataclass

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


def standardise(op: Builder, x: ir.Value, axes: ir.Value, epsilon: float, *, centred: bool = True) -> Standardised:
    """z = (x - μ) / √(σ² + ε), computed anew from x; not centred: x / √(mean x² + ε)."""
    deviation = op.Sub(x, op.ReduceMean(x, axes, keepdims=1)) if centred else x
    power = op.ReduceMean(op.Mul(deviation, deviation), axes, keepdims=1)
    rate = op.Reciprocal(op.Sqrt(op.Add(power, epsilon)))
    return Standardised(op.Mul(deviation, rate), rate, axes, centred)
