"""Metrics of numbers beside numbers: regression, and images."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import dims
from onnx_backprop.converters.training.losses.base import POSITIVE, Expectation
from onnx_backprop.converters.training.metrics.base import Metric, Read, Sums, like, ratio, total
from onnx_backprop.opset.core.errors import InvalidArgumentError

_WINDOW, _SIGMA = 11, 1.5  # Wang et al., 2004, section III.B
_K1, _K2 = 0.01, 0.03


@dataclass(frozen=True, kw_only=True)
class MAE(Metric):
    """Σ |y - t| / n over all elements."""

    name: ClassVar[str] = "mae"
    higher: ClassVar[bool] = False

    def emit(self, op: Builder, read: Read) -> dict[str, ir.Value]:
        y, t = read.values(op)
        return {"sum": total(op, op.Abs(op.Sub(y, t))), "all": op.Size(y)}

    def value(self, sums: Sums) -> float:
        return ratio(self.name, sums["sum"], sums["all"])


@dataclass(frozen=True, kw_only=True)
class RMSE(Metric):
    """√(Σ (y - t)² / n) over all elements."""

    name: ClassVar[str] = "rmse"
    higher: ClassVar[bool] = False

    def emit(self, op: Builder, read: Read) -> dict[str, ir.Value]:
        y, t = read.values(op)
        difference = op.Sub(y, t)
        return {"sum": total(op, op.Mul(difference, difference)), "all": op.Size(y)}

    def value(self, sums: Sums) -> float:
        return ratio(self.name, sums["sum"], sums["all"]) ** 0.5


@dataclass(frozen=True, kw_only=True)
class R2(Metric):
    """1 - Σ (y - t)² / Σ (t - mean t)²; of (N, d) the mean of that of every column, of others over all elements.

    Edge: of a constant target it is 1 where all predictions are equal to it, else 0, as in scikit-learn.
    """

    name: ClassVar[str] = "r2"
    higher: ClassVar[bool] = True

    def emit(self, op: Builder, read: Read) -> dict[str, ir.Value]:
        y, t = read.values(op)
        if len(dims(read.y) or ()) != 2:
            y, t = (op.Reshape(x, [-1, 1]) for x in (y, t))
        difference, mean = op.Sub(y, t), op.ReduceMean(t, [0], keepdims=1)
        deviation = op.Sub(t, mean)
        return {
            "all": op.Cast(op.Gather(op.Shape(t), 0), to=ir.DataType.DOUBLE),
            "mean": op.Squeeze(mean, [0]),
            "deviation": op.ReduceSum(op.Mul(deviation, deviation), [0], keepdims=0),
            "error": op.ReduceSum(op.Mul(difference, difference), [0], keepdims=0),
        }

    def merged(self, one: Sums, other: Sums) -> Sums:
        """Means and squared deviations of two batches together (Chan et al., 1979), which do not cancel."""
        n, m = one["all"], other["all"]
        if not m or not n:
            return one if n else other
        step = other["mean"] - one["mean"]
        return {
            "all": n + m,
            "mean": one["mean"] + step * (m / (n + m)),
            "deviation": one["deviation"] + other["deviation"] + step**2 * (n * m / (n + m)),
            "error": one["error"] + other["error"],
        }

    def value(self, sums: Sums) -> float:
        error, deviation = sums["error"], sums["deviation"]
        constant = np.where(error == 0, 1.0, 0.0)
        there = deviation > 0
        each = np.where(there, 1 - np.divide(error, deviation, out=np.zeros_like(error), where=there), constant)
        return float(each.mean())


@dataclass(frozen=True, kw_only=True)
class PSNR(Metric):
    """10 · log₁₀(R² / mean (y - t)²) of every image, a row, and the mean of these.

    Args:
        data_range: R, the largest number of the data less the smallest.
        per_image: False for that of all images together.

    Edge: infinity where an image is equal to its target.
    """

    name: ClassVar[str] = "psnr"
    higher: ClassVar[bool] = True
    expects: ClassVar[Mapping[str, Expectation]] = {"data_range": POSITIVE}
    data_range: float = 1.0
    per_image: bool = True

    def emit(self, op: Builder, read: Read) -> dict[str, ir.Value]:
        y, t = read.values(op)
        difference = op.Sub(y, t)
        square = op.Mul(difference, difference)
        if not self.per_image:
            return {"sum": total(op, square), "all": op.Size(y)}
        rows = op.ReduceMean(op.Reshape(square, op.joined(op.length(y, 0), op.ints([-1]))), [1], keepdims=0)
        return {"sum": total(op, self._decibels(op, rows)), "all": op.Size(rows)}

    def _decibels(self, op: Builder, mean: ir.Value) -> ir.Value:
        return op.Mul(op.Log(op.Div(float(self.data_range) ** 2, mean)), 10 / np.log(10))

    def value(self, sums: Sums) -> float:
        mean = ratio(self.name, sums["sum"], sums["all"])
        with np.errstate(divide="ignore"):
            return mean if self.per_image else float(10 * np.log10(np.float64(self.data_range) ** 2 / np.float64(mean)))


@dataclass(frozen=True, kw_only=True)
class SSIM(Metric):
    """(2·μy·μt + c₁)(2·σyt + c₂) / ((μy² + μt² + c₁)(σy² + σt² + c₂)), the mean over places, channels and images.

    Means and variances are those of a Gaussian window of 11 × 11 with σ = 1.5 that lies inside the image,
    c₁ = (0.01·R)² and c₂ = (0.03·R)². data_range: R, the largest number of the data less the smallest.

    Shapes: (N, C, H, W) of 11 × 11 or more. Source: Wang et al., "Image quality assessment", 2004.
    """

    name: ClassVar[str] = "ssim"
    higher: ClassVar[bool] = True
    expects: ClassVar[Mapping[str, Expectation]] = {"data_range": POSITIVE}
    data_range: float = 1.0

    def emit(self, op: Builder, read: Read) -> dict[str, ir.Value]:
        shape = dims(read.y) or ()
        if len(shape) != 4 or any(isinstance(d, int) and d < _WINDOW for d in shape[2:]):
            raise read.refuse(f"images (N, C, H, W) of {_WINDOW} × {_WINDOW} or more")
        y, t = read.values(op)
        moments = op.Concat(y, t, op.Mul(y, y), op.Mul(t, t), op.Mul(y, t), axis=0)
        for axis in (2, 3):
            moments = _blurred(op, like(moments, y), axis)
        mean_y, mean_t, yy, tt, yt = op.emit("Split", [moments], {"axis": 0, "num_outputs": 5}, outputs=5)
        c1, c2 = (_K1 * self.data_range) ** 2, (_K2 * self.data_range) ** 2
        product, squares = op.Mul(mean_y, mean_t), op.Add(op.Mul(mean_y, mean_y), op.Mul(mean_t, mean_t))
        above = op.Mul(op.Add(op.Mul(2.0, product), c1), op.Add(op.Mul(2.0, op.Sub(yt, product)), c2))
        below = op.Mul(op.Add(squares, c1), op.Add(op.Sub(op.Add(yy, tt), squares), c2))
        places = op.Div(above, below)
        return {"sum": total(op, places), "all": op.Size(places)}

    def value(self, sums: Sums) -> float:
        if not sums["all"]:
            raise InvalidArgumentError(f"ssim: expected images of {_WINDOW} × {_WINDOW} or more, got smaller ones")
        return ratio(self.name, sums["sum"], sums["all"])


def _blurred(op: Builder, images: ir.Value, axis: int) -> ir.Value:
    """Σ_k w_k · x[k + i] along an axis, w a Gaussian: as long as the window lies inside."""
    at = np.arange(_WINDOW) - _WINDOW // 2
    weights = np.exp(-(at**2) / (2 * _SIGMA**2))
    ends = op.Max(op.Add(op.length(images, axis), op.ints([1 - _WINDOW])), op.ints([0]))
    parts = [
        op.Mul(float(w), like(op.Slice(images, [k], op.Add(ends, op.ints([k])), [axis]), images))
        for k, w in enumerate(weights / weights.sum())
    ]
    result = parts[0]
    for part in parts[1:]:
        result = op.Add(result, part)
    return like(result, images)
