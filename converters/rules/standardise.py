"""Standardising x over some axes, the part that Batch-, Group-, Instance- and LayerNormalization share."""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.long_sums import mean_over
from onnx_backprop.opset.core.shapes import Dims


@dataclass(frozen=True)
class Standardised:
    """z = (x - μ) · r, r = 1/√(σ² + ε), μ and σ² the mean and the variance of x over `axes`.

    Shapes: z that of x; r and centres of length 1 along the axes.
    """

    z: ir.Value
    rate: ir.Value
    axes: ir.Value | Sequence[int]
    centred: bool = True
    lengths: Dims | None = None

    def gradient(self, op: Builder, g: ir.Value) -> ir.Value:
        """dx = r · (dz - mean dz - z · mean(dz · z)), the means over the axes; without centring there is no mean dz."""
        along = op.Mul(self.z, _mean(op, op.Mul(g, self.z), self.axes, self.lengths))
        if self.centred:
            along = op.Add(along, _mean(op, g, self.axes, self.lengths))
        return op.Mul(self.rate, op.Sub(g, along))


def standardise(
    op: Builder,
    x: ir.Value,
    axes: ir.Value | Sequence[int],
    epsilon: float,
    *,
    centred: bool = True,
    lengths: Dims | None = None,
) -> Standardised:
    """z = (x - μ) / √(σ² + ε), computed anew from x; not centred: x / √(mean x² + ε).

    Where the lengths of x are given, and the axes by their numbers, means over many elements are taken in stages.
    """
    deviation = op.Sub(x, _mean(op, x, axes, lengths)) if centred else x
    power = _mean(op, op.Mul(deviation, deviation), axes, lengths)
    rate = op.Reciprocal(op.Sqrt(op.Add(power, epsilon)))
    return Standardised(op.Mul(deviation, rate), rate, axes, centred, lengths)


def _mean(op: Builder, x: ir.Value, axes: ir.Value | Sequence[int], lengths: Dims | None) -> ir.Value:
    return op.ReduceMean(x, axes, keepdims=1) if isinstance(axes, ir.Value) else mean_over(op, x, axes, lengths)
