"""LayerNormBackward: the gradient of layer normalisation."""

from collections.abc import Sequence
from functools import reduce

import numpy as np

from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.bodies.elementwise import MAX_RANK, proof_of_shape, require_epsilon, same_shape, share
from onnx_backprop.opset.bodies.sums import sum_rows
from onnx_backprop.opset.core.errors import ShapeError
from onnx_backprop.opset.core.op import Arg, Attribute, Attributes, Float64Array, Input, Op, Output
from onnx_backprop.opset.core.shapes import Dims, merge, product, require_rank

DOC = """
dx = r·(g - mean g - z·mean(g·z)),  dγ = Σ dy·z,  dβ = Σ dy,  g = γ·dy,  z = (x - μ)·r,  r = 1/√(σ² + ε)

The adjoint of y = γ·z + β in x, γ and β, where μ and σ² are the mean and the variance of x over the axes from
begin_norm_axis to the last. mean runs over these axes, Σ over those before them. x = src, dy = diff_dst, μ = mean,
σ² = variance, γ = gamma, β = beta; dx = diff_src, dγ = diff_gamma, dβ = diff_beta.

Shapes: src and diff_dst of one shape, rank >= 1; mean and variance have its axes before begin_norm_axis, gamma and beta
those from there on -> diff_src as src, diff_gamma and diff_beta as gamma.

Edge cases: without mean or variance those of src are used: ONNX's LayerNormalization returns 1/√(σ² + ε)
instead of σ². use_affine = 0 means a gamma of 1. beta may be left out, no gradient depends on it. A src of no elements
gives zeros. Sums are taken in float32 or better, statistics in two passes.

Errors: shapes that differ; a begin_norm_axis that src does not have; use_affine = 1 without gamma, or 0 with gamma or
beta; an epsilon that is negative or not finite.
"""


def shape(attrs: Attributes, args: Sequence[Arg | None]) -> Sequence[Dims | None]:
    _require_attributes(attrs, args)
    start = attrs["begin_norm_axis"]
    src = same_shape(attrs.op, args, ("src", "diff_dst"), 1, MAX_RANK)
    if src is None:
        before = None if start < 0 else (None,) * start
        within = None if start >= 0 else (None,) * -start
    elif -len(src) <= start < len(src):
        before, within = src[:start], src[start:]
    else:
        raise ShapeError(
            f"attribute begin_norm_axis: expected {-len(src)} to {len(src) - 1} for rank {len(src)}, got {start}",
            op_type=attrs.op,
        )
    for name, arg in zip(("mean", "variance"), args[2:4], strict=True):
        before = _merged(attrs.op, before, arg, name, "axis {} before the normalised ones")
    for name, arg in zip(("gamma", "beta"), args[4:], strict=True):
        within = _merged(attrs.op, within, arg, name, "normalised axis {}")
    whole = None if before is None or within is None else before + within
    return whole, within, within


def _require_attributes(attrs: Attributes, args: Sequence[Arg | None]) -> None:
    require_epsilon(attrs)
    affine, (gamma, beta) = attrs["use_affine"], args[4:]
    attrs.require_flags("use_affine")
    if affine and gamma is None:
        raise ShapeError("use_affine is 1: expected gamma, got none; set use_affine to 0", op_type=attrs.op)
    if not affine and (gamma is not None or beta is not None):
        raise ShapeError("use_affine is 0: expected neither gamma nor beta; set use_affine to 1", op_type=attrs.op)


def _merged(op: str, known: Dims | None, arg: Arg | None, name: str, axis: str) -> Dims | None:
    """What is known of some of src's axes, with what a parameter of their shape says."""
    if arg is None or arg.dims is None:
        return known
    if known is None:
        return arg.dims
    require_rank(arg.dims, len(known), len(known), op=op, subject=name)
    pairs = enumerate(zip(known, arg.dims, strict=True))
    return tuple(merge(a, b, op=op, subject=f"lengths of {axis.format(n)} of src and {name}") for n, (a, b) in pairs)


def reference(
    attrs: Attributes,
    out: tuple[tuple[int, ...], ...],
    src: Float64Array,
    diff_dst: Float64Array,
    mean: Float64Array | None,
    variance: Float64Array | None,
    gamma: Float64Array | None,
    _beta: Float64Array | None,
) -> tuple[Float64Array, ...]:
    if 0 in src.shape:
        return tuple(np.zeros(shape) for shape in out)
    start = attrs["begin_norm_axis"] % src.ndim
    axes, before = tuple(range(start, src.ndim)), tuple(range(start))
    per = (*src.shape[:start], *[1] * len(axes))
    centre = src.mean(axis=axes, keepdims=True) if mean is None else mean.reshape(per)
    deviation = src - centre
    power = (deviation * deviation).mean(axis=axes, keepdims=True) if variance is None else variance.reshape(per)
    rate = 1 / np.sqrt(power + np.float64(np.float32(attrs["epsilon"])))
    z = deviation * rate
    g = diff_dst if gamma is None else diff_dst * gamma
    dx = rate * (g - g.mean(axis=axes, keepdims=True) - z * (g * z).mean(axis=axes, keepdims=True))
    return dx, (diff_dst * z).sum(axis=before), diff_dst.sum(axis=before)


def body(
    b: Body,
    attrs: Attributes,
    src: Tensor,
    diff_dst: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
) -> Sequence[str]:
    """On rows of the normalised elements; what is the same for a whole row is multiplied before it meets the row."""
    start = attrs["begin_norm_axis"]
    whole, before, within = b.lengths(src, 0, None), b.lengths(src, 0, start), b.lengths(src, start, None)
    known = (None, None) if src.dims is None else (src.dims[:start], src.dims[start:])
    outer, inner = "of the shape of src before the normalised axes", "of the shape of the normalised axes of src"
    zeros = [
        proof_of_shape(b, value, expected, dims, f"expected {name} {subject}")
        for name, value, expected, dims, subject in (
            ("diff_dst", diff_dst, whole, src.dims, "of the shape of src"),
            ("mean", mean, before, known[0], outer),
            ("variance", variance, before, known[0], outer),
            ("gamma", gamma, within, known[1], inner),
            ("beta", beta, within, known[1], inner),
        )
    ]
    if start == 0 and src.dims is None:  # else Flatten refuses a scalar
        first = b.Gather(whole, b.int_scalar(0), name=f"{b.op}: expected rank 1 or more")
        zeros.append(b.Sub(first, first))
    x, dy, columns = b.Flatten(src, axis=start), b.Flatten(diff_dst, axis=start), b.ints([1])
    part = share(b, known[1], lambda: b.ReduceProd(within, keepdims=0))

    def per_row(values: str) -> str:
        return b.ReduceSum(values, columns, keepdims=1)

    upright = b.ints([-1, 1])
    centre = b.Reshape(mean, upright) if mean else b.Mul(per_row(x), part)
    deviation = b.Sub(x, centre)
    power = b.Reshape(variance, upright) if variance else b.Mul(per_row(b.Mul(deviation, deviation)), part)
    rate = b.Reciprocal(b.Sqrt(b.Add(power, b.float_scalar(attrs["epsilon"]))))
    along = b.Mul(dy, deviation)
    lengths = tuple(None if axes is None else product(axes) for axes in known)
    dgamma, dbeta = sum_rows(b, lengths, b.Mul(along, rate), dy)
    if gamma is not None:
        scale = b.Reshape(gamma, b.ints([1, -1]))
        along, dy = b.Mul(along, scale), b.Mul(dy, scale)
    level = b.Mul(per_row(dy), part)
    slope = b.Mul(b.Mul(per_row(along), part), b.Mul(rate, rate))
    dx = b.Mul(b.Sub(dy, b.Add(b.Mul(deviation, slope), level)), rate)
    proven = [zero for zero in zeros if zero]
    whole, within = (reduce(b.Add, proven, shape) for shape in (whole, within))
    shapes = (whole, within, within)
    return [b.Reshape(value, shape, allowzero=1) for value, shape in zip((dx, dgamma, dbeta), shapes, strict=True)]


OP = Op(
    name="LayerNormBackward",
    doc=DOC,
    source="oneDNN Graph, LayerNormBackward (mean, variance and beta may be left out, src may have any rank from 1)",
    attributes=(
        Attribute(
            "begin_norm_axis",
            "int",
            "The first of the normalised axes, which go to the last; negative ones count from the end.",
            default=-1,
        ),
        Attribute("use_affine", "int", "1: there is a gamma; 0: it is 1.", default=1),
        Attribute("epsilon", "float", "Added to the variance, >= 0.", default=float(np.float32(1e-5))),
    ),
    inputs=(
        Input("src", "T1", "Source of the normalisation."),
        Input("diff_dst", "T1", "Gradient with respect to its destination."),
        Input("mean", "T5", "Mean of src over the normalised axes.", optional=True),
        Input("variance", "T5", "Variance of src over them, divided by the number of elements.", optional=True),
        Input("gamma", "T5", "Scale, of the normalised axes; needed where use_affine is 1.", optional=True),
        Input("beta", "T5", "Bias, of the shape of gamma; its values do not matter.", optional=True),
    ),
    outputs=(
        Output("diff_src", "Gradient with respect to src."),
        Output("diff_gamma", "Gradient with respect to gamma.", "T5"),
        Output("diff_beta", "Gradient with respect to beta.", "T5"),
    ),
    shape=shape,
    reference=reference,
    body=body,
)
