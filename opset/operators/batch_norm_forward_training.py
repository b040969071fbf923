"""BatchNormForwardTraining: batch normalisation by the statistics of the batch itself."""

import math
from collections.abc import Sequence

import numpy as np

from onnx_backprop.opset.bodies import batch_norm
from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.bodies.elementwise import MAX_RANK, require_epsilon
from onnx_backprop.opset.core.errors import ShapeError
from onnx_backprop.opset.core.layout import data_to_ncx
from onnx_backprop.opset.core.op import Arg, Attribute, Attributes, Float64Array, Input, Op, Output
from onnx_backprop.opset.core.shapes import Dims, require_rank
from onnx_backprop.opset.maths import convolution_attributes

DOC = """
dst = γ·(x - μ)·r + β,  r = 1/√(σ² + ε);  running_mean = m·mean + (1 - m)·μ,  running_variance = m·variance + (1 - m)·σ²

μ and σ² are the mean and the variance of x over every axis but the channels, the latter divided by the number of
elements. x = src, γ = gamma, β = beta, m = momentum, ε = epsilon; batch_mean = μ, batch_variance = σ².

Shapes: src (N, C, …) for NCX or (N, …, C) for NXC, rank >= 2; all other inputs (C,) -> dst as src, the others (C,).

Edge cases: gamma is 1 by default, beta 0. Statistics of a batch of no elements are 0. Sums are taken in float32
or better.

Errors: an input without one entry per channel; an epsilon that is negative or not finite; a momentum that is not
finite.
"""

PER_CHANNEL = ("mean", "variance", "gamma", "beta")


def shape(attrs: Attributes, args: Sequence[Arg | None]) -> Sequence[Dims | None]:
    require_epsilon(attrs)
    if not math.isfinite(attrs["momentum"]):
        raise ShapeError(f"attribute momentum: expected a finite number, got {attrs['momentum']}", op_type=attrs.op)
    src = args[0].dims if args[0] is not None else None
    if src is not None:
        require_rank(src, 2, MAX_RANK, op=attrs.op, subject="src")
    src, channels = batch_norm.channels(attrs, src, zip(PER_CHANNEL, args[1:], strict=True))
    return src, *[(channels,)] * 4


def reference(
    attrs: Attributes,
    _out: tuple[tuple[int, ...], ...],
    src: Float64Array,
    mean: Float64Array,
    variance: Float64Array,
    gamma: Float64Array | None,
    beta: Float64Array | None,
) -> tuple[Float64Array, ...]:
    channels = data_to_ncx(attrs["data_format"], src.ndim)[1]
    others = tuple(axis for axis in range(src.ndim) if axis != channels)
    per = [-1 if axis == channels else 1 for axis in range(src.ndim)]
    count = max(1, src.size // max(1, len(mean)))
    centre = src.sum(axis=others) / count
    deviation = src - centre.reshape(per)
    power = (deviation * deviation).sum(axis=others) / count
    slope = 1 / np.sqrt(power + np.float64(np.float32(attrs["epsilon"])))
    slope = slope if gamma is None else slope * gamma
    dst = deviation * slope.reshape(per) + (0 if beta is None else beta.reshape(per))
    momentum = np.float64(np.float32(attrs["momentum"]))
    running = (momentum * mean + (1 - momentum) * centre, momentum * variance + (1 - momentum) * power)
    return dst, *running, centre, power


def body(
    b: Body, attrs: Attributes, src: Tensor, mean: Tensor, variance: Tensor, gamma: Tensor | None, beta: Tensor | None
) -> Sequence[str]:
    axes = batch_norm.Axes(b, attrs, src)
    sums = axes.sum(axes.x)
    part = axes.part(sums)
    given = [
        batch_norm.per_channel(b, value, name, sums)
        for value, name in zip((mean, variance, gamma, beta), PER_CHANNEL, strict=True)
    ]
    centre = b.Mul(sums, part)
    deviation = b.Sub(axes.x, axes.spread(centre))
    power = b.Mul(axes.sum(b.Mul(deviation, deviation)), part)
    slope = b.Reciprocal(b.Sqrt(b.Add(power, b.float_scalar(attrs["epsilon"]))))
    slope = b.Mul(slope, given[2]) if given[2] else slope
    dst = b.Mul(deviation, axes.spread(slope))
    dst = b.Add(dst, axes.spread(given[3])) if given[3] else dst
    momentum, new = b.float_scalar(attrs["momentum"]), b.float_scalar(1 - np.float64(np.float32(attrs["momentum"])))
    running = [
        b.Add(b.Mul(old, momentum), b.Mul(batch, new)) for old, batch in zip(given[:2], (centre, power), strict=True)
    ]
    return axes.back(dst), *running, centre, power


OP = Op(
    name="BatchNormForwardTraining",
    doc=DOC,
    source="oneDNN Graph, BatchNormForwardTraining (momentum is required, src may have rank 2)",
    attributes=(
        Attribute("epsilon", "float", "Added to the variance, >= 0.", required=True),
        Attribute("momentum", "float", "How much of the running statistics is kept.", required=True),
        convolution_attributes.DATA_FORMAT,
    ),
    inputs=(
        Input("src", "T1", "What is normalised."),
        Input("mean", "T5", "Running mean per channel, 1-D."),
        Input("variance", "T5", "Running variance per channel, 1-D."),
        Input("gamma", "T5", "Scale per channel, 1-D.", optional=True),
        Input("beta", "T5", "What is added per channel, 1-D.", optional=True),
    ),
    outputs=(
        Output("dst", "Result."),
        Output("running_mean", "Updated running mean, 1-D.", "T5"),
        Output("running_variance", "Updated running variance, 1-D.", "T5"),
        Output("batch_mean", "Mean of src, 1-D.", "T5"),
        Output("batch_variance", "Variance of src, 1-D.", "T5"),
    ),
    shape=shape,
    reference=reference,
    body=body,
)
