"""BatchNormTrainingBackward: the gradient of batch normalisation by the statistics of the batch itself."""

from collections.abc import Sequence

import numpy as np

from onnx_backprop.opset.bodies import batch_norm
from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.bodies.elementwise import MAX_RANK, proof_of_shape, require_epsilon, same_shape
from onnx_backprop.opset.core.layout import data_to_ncx
from onnx_backprop.opset.core.op import Arg, Attribute, Attributes, Float64Array, Input, Op, Output
from onnx_backprop.opset.core.shapes import Dims
from onnx_backprop.opset.maths import convolution_attributes

DOC = """
dx = γ·r·(dy - mean dy - z·mean(dy·z)),  dγ = Σ dy·z,  dβ = Σ dy,  z = (x - μ)·r,  r = 1/√(σ² + ε)

The adjoint of y = γ·z + β in x, γ and β, where μ and σ² are the mean and the variance of x; Σ and mean run over every
axis but the channels. x = src, dy = diff_dst, μ = mean, σ² = variance, γ = gamma; dx = diff_src, dγ = diff_gamma,
dβ = diff_beta.

Shapes: src and diff_dst (N, C, …) for NCX or (N, …, C) for NXC, rank >= 2; mean, variance, gamma (C,) -> diff_src as
src, diff_gamma and diff_beta (C,).

Edge cases: without mean or variance those of src are used: ONNX's BatchNormalization does not return them.
Without gamma it is 1. A batch of no elements gives zeros. Sums are taken in float32 or better, statistics in two
passes.

Errors: shapes that differ; a parameter without one entry per channel; an epsilon that is negative or not finite.
"""

PER_CHANNEL = ("mean", "variance", "gamma")


def shape(attrs: Attributes, args: Sequence[Arg | None]) -> Sequence[Dims | None]:
    require_epsilon(attrs)
    src = same_shape(attrs.op, args, ("src", "diff_dst"), 2, MAX_RANK)
    src, channels = batch_norm.channels(attrs, src, zip(PER_CHANNEL, args[2:], strict=True))
    return src, (channels,), (channels,)


def reference(
    attrs: Attributes,
    out: tuple[tuple[int, ...], ...],
    src: Float64Array,
    diff_dst: Float64Array,
    mean: Float64Array | None,
    variance: Float64Array | None,
    gamma: Float64Array | None,
) -> tuple[Float64Array, ...]:
    if 0 in src.shape:
        return tuple(np.zeros(shape) for shape in out)
    channels = data_to_ncx(attrs["data_format"], src.ndim)[1]
    others = tuple(axis for axis in range(src.ndim) if axis != channels)
    per = [-1 if axis == channels else 1 for axis in range(src.ndim)]

    def spread(values: Float64Array) -> Float64Array:
        return values.reshape(per)

    centre = src.mean(axis=others) if mean is None else mean
    deviation = src - spread(centre)
    power = (deviation * deviation).mean(axis=others) if variance is None else variance
    rate = 1 / np.sqrt(power + np.float64(np.float32(attrs["epsilon"])))
    z = deviation * spread(rate)
    slope = rate if gamma is None else rate * gamma
    along, whole = (diff_dst * z).mean(axis=others), diff_dst.mean(axis=others)
    dx = spread(slope) * (diff_dst - spread(whole) - z * spread(along))
    return dx, (diff_dst * z).sum(axis=others), diff_dst.sum(axis=others)


def body(
    b: Body,
    attrs: Attributes,
    src: Tensor,
    diff_dst: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    gamma: Tensor | None,
) -> Sequence[str]:
    """dx = k₁·dy + k₂·(x - μ) + k₃ with three numbers per channel, so that as few passes as possible are over x."""
    dy = diff_dst.name
    zero = proof_of_shape(b, diff_dst, b.Shape(src), src.dims, "expected diff_dst of the shape of src")
    if zero:
        dy = b.Reshape(diff_dst, b.Add(b.Shape(src), zero), allowzero=1)
    axes = batch_norm.Axes(b, attrs, src)
    x, dy, spread = axes.x, axes.view(dy), axes.spread
    whole = axes.sum(dy)
    part = axes.part(whole)
    parameters = zip((mean, variance, gamma), PER_CHANNEL, strict=True)
    given = [batch_norm.per_channel(b, value, name, whole) for value, name in parameters]
    centre = given[0] or b.Mul(axes.sum(x), part)
    deviation = b.Sub(x, spread(centre))
    power = given[1] or b.Mul(axes.sum(b.Mul(deviation, deviation)), part)
    rate = b.Reciprocal(b.Sqrt(b.Add(power, b.float_scalar(attrs["epsilon"]))))
    dgamma = b.Mul(axes.sum(b.Mul(dy, deviation)), rate)
    slope = b.Mul(rate, given[2]) if given[2] else rate
    level = b.Neg(b.Mul(b.Mul(slope, whole), part))
    along = b.Neg(b.Mul(b.Mul(b.Mul(slope, rate), dgamma), part))
    dx = b.Add(b.Add(b.Mul(dy, spread(slope)), spread(level)), b.Mul(deviation, spread(along)))
    return axes.back(dx), dgamma, whole


OP = Op(
    name="BatchNormTrainingBackward",
    doc=DOC,
    source="oneDNN Graph, BatchNormTrainingBackward (mean and variance may be left out, src may have rank 2)",
    attributes=(
        Attribute("epsilon", "float", "Added to the variance, >= 0.", required=True),
        convolution_attributes.DATA_FORMAT,
    ),
    inputs=(
        Input("src", "T1", "Source of the normalisation."),
        Input("diff_dst", "T1", "Gradient with respect to its destination."),
        Input("mean", "T5", "Mean of src per channel, 1-D.", optional=True),
        Input("variance", "T5", "Variance of src per channel, 1-D, divided by the number of elements.", optional=True),
        Input("gamma", "T5", "Scale per channel, 1-D.", optional=True),
    ),
    outputs=(
        Output("diff_src", "Gradient with respect to src."),
        Output("diff_gamma", "Gradient with respect to gamma, 1-D.", "T5"),
        Output("diff_beta", "Gradient with respect to the bias per channel, 1-D.", "T5"),
    ),
    shape=shape,
    reference=reference,
    body=body,
)
