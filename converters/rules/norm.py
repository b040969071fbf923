"""Gradients of softmax, and of normalisations along axes or over neighbouring channels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder, dims, element_type
from onnx_backprop.converters.reverse.forward import Forward
from onnx_backprop.converters.reverse.registry import Grads, gradient
from onnx_backprop.converters.rules.common import (
    DOMAIN_TYPES,
    cast,
    length,
    lengths_from,
    narrow,
    size_ratio,
    widen,
    work_type,
)
from onnx_backprop.converters.rules.merged_shapes import merged_length
from onnx_backprop.converters.rules.standardise import Standardised, scale_to_unit, standardise
from onnx_backprop.opset.core.shapes import Dims

MEAN_VARIANCE_EPSILON = 1e-9  # added to the deviation by MeanVarianceNormalization, from its function body


@gradient("Softmax", versions=(13,))
def softmax(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = e^x / Σ e^x along an axis  =>  dx = Y · (dy - Σ Y · dy)."""
    if node.output().dtype in DOMAIN_TYPES:
        return (op.domain.SoftMaxBackward(dy, node.output(), axis=node.int("axis", -1)),)
    y, axis = node.output(), op.ints([node.int("axis", -1)])
    return (op.Mul(y, op.Sub(dy, op.ReduceSum(op.Mul(y, dy), axis, keepdims=1))),)


@gradient("LogSoftmax", versions=(13,))
def log_softmax(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x - ln Σ e^x along an axis  =>  dx = dy - e^Y · Σ dy."""
    y, axis = node.output(), op.ints([node.int("axis", -1)])
    return (op.Sub(dy, op.Mul(op.Exp(y), op.ReduceSum(dy, axis, keepdims=1))),)


@gradient("LayerNormalization", versions=(17,), all_outputs=True)
def layer_normalization(op: Builder, node: Forward, dys: Sequence[ir.Value | None]) -> Grads:
    """Y = s · z + b, z = (x - μ) · r, r = 1/√(σ² + ε) over the n elements from `axis` on
    =>  dx = r · (g - mean g - z · mean(g · z)), g = s · dy; ds = Σ dy · z, db = Σ dy as s and b were broadcast.

    That is LayerNormBackward, which takes the statistics of x anew: InvStdDev is not the variance, and 1/r² - ε loses
    a small one. float64, and an s that has axes before `axis`, are done in standard operators.
    The outputs Mean and InvStdDev add dμ / n and -z · r² · dr / n to dx. Half types are computed in float32, whatever
    stash_type says.
    """
    x = node.input(0)
    dy, dmean, drate = (*dys, None, None)[:3]
    grads: list[ir.Value | None] = [None] * len(node.inputs)
    terms: list[ir.Value] = []
    if dy is not None:
        own = _layer_norm_backward(op, node, dy) or _layer_norm_composed(op, node, dy)
        grads[: len(own)] = own
    if node.wants(0) and (dmean is not None or drate is not None):
        if grads[0] is not None:
            terms.append(widen(op, grads[0], x))
        if dmean is not None:
            share = _per_element(op, node, 1, dmean)
            terms.append(op.Expand(share, op.shape(x)))
        if drate is not None:
            unit = _standardised(op, node)
            share = op.Mul(_per_element(op, node, 2, drate), op.Mul(unit.rate, unit.rate))
            terms.append(op.Neg(op.Mul(unit.z, share)))
        grads[0] = narrow(op, op.accumulate(terms), x)
    return grads


def _standardised(op: Builder, node: Forward) -> Standardised:
    x = node.input(0)
    return standardise(op, widen(op, x, x), _axes_from(op, node), node.float("epsilon", 1e-5), work_type(x))


def _layer_norm_composed(op: Builder, node: Forward, dy: ir.Value) -> list[ir.Value | None]:
    """dx, ds and db in standard operators."""
    x = node.input(0)
    dx = dscale = dbias = None
    if node.wants(0) or node.wants(1):
        wide, dscale = _scaled(op, node, _standardised(op, node), dy)
        dx = None if wide is None else narrow(op, wide, x)
    if node.wants(2):
        bias = node.input(2)
        dbias = narrow(op, op.unbroadcast(widen(op, dy, x), bias, node.output()), bias)
    return [dx, dscale, dbias][: len(node.inputs)]


def _layer_norm_backward(op: Builder, node: Forward, dy: ir.Value) -> list[ir.Value | None] | None:
    """The same by LayerNormBackward; None for what it does not take, or where db alone is wanted.

    s and b are stretched to the normalised axes where it cannot be seen that they have their lengths.
    """
    x, axis, known = node.input(0), node.int("axis", -1), dims(node.input(0))
    count = -axis if axis < 0 else None if known is None else len(known) - axis
    parameters = [node.input(n) for n in (1, 2) if node.has(n)]
    ranks = [None if (shape := dims(value)) is None else len(shape) for value in parameters]
    if x.dtype not in DOMAIN_TYPES or count is None or any(rank is None or rank > count for rank in ranks):
        return None
    if not node.wants(0) and not node.wants(1):
        return None
    within: Dims = (None,) * count if known is None else known[len(known) - count :]
    scale, own = parameters[0], element_type(parameters[0])
    gamma = cast(op, scale, own, ir.DataType.FLOAT)
    if dims(scale) != within or None in within:
        gamma = op.Expand(gamma, lengths_from(op, x, -count))
    attributes = {"begin_norm_axis": -count, "use_affine": 1, "epsilon": node.float("epsilon", 1e-5)}
    results = op.domain.emit("LayerNormBackward", [x, dy, None, None, gamma], attributes, outputs=3)
    grads: list[ir.Value | None] = [results[0] if node.wants(0) else None]
    for n, (value, result) in enumerate(zip(parameters, results[1:], strict=False), start=1):
        result.dtype, result.shape = ir.DataType.FLOAT, ir.Shape(within)
        summed = op.unbroadcast(result, value, result) if node.wants(n) else None
        grads.append(None if summed is None else cast(op, summed, ir.DataType.FLOAT, element_type(value)))
    return grads


def _per_element(op: Builder, node: Forward, index: int, g: ir.Value) -> ir.Value:
    """The gradient of one of the statistics over the number of elements that went into each, in the type to sum in."""
    x, statistic = node.input(0), node.output(index)
    wide = work_type(x)
    return op.Mul(cast(op, g, element_type(statistic), wide), size_ratio(op, statistic, x))


@gradient("RMSNormalization", versions=(23,))
def rms_normalization(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = s · z, z = x · r, r = 1/√(mean x² + ε) over the elements from `axis` on
    =>  dx = r · (g - z · mean(g · z)), g = s · dy; ds = Σ dy · z as s was broadcast.

    Half types are computed in float32, whatever stash_type says.
    """
    x = node.input(0)
    unit = scale_to_unit(op, widen(op, x, x), _axes_from(op, node), node.float("epsilon", 1e-5), work_type(x))
    dx, dscale = _scaled(op, node, unit, dy)
    return None if dx is None else narrow(op, dx, x), dscale


def _axes_from(op: Builder, node: Forward) -> ir.Value:
    """The axes from the attribute `axis` to the last."""
    axis, known = node.int("axis", -1), dims(node.input(0))
    if axis < 0:
        return op.ints(range(axis, 0))
    if known is not None:
        return op.ints(range(axis, len(known)))
    rank = op.Size(op.shape(node.input(0)))
    return op.Range(op.constant(np.array(axis)), rank, op.constant(np.array(1)))


def _scaled(op: Builder, node: Forward, unit: Standardised, dy: ir.Value) -> tuple[ir.Value | None, ir.Value | None]:
    """dx, in the type to sum in, and ds of Y = s · z + …, s broadcasting to z."""
    x, scale = node.input(0), node.input(1)
    wide_dy = widen(op, dy, x)
    dx = dscale = None
    if node.wants(0):
        dx = unit.gradient(op, op.Mul(wide_dy, cast(op, scale, element_type(scale), work_type(x))))
    if node.wants(1):
        summed = op.unbroadcast(op.Mul(wide_dy, unit.z), scale, node.output())
        dscale = cast(op, summed, work_type(x), element_type(scale))
    return dx, dscale


@gradient("MeanVarianceNormalization", versions=(13,))
def mean_variance_normalization(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = (x - μ) / (σ + ε) over axes, ε = 1e-9  =>  dx = (dy - mean dy) / (σ + ε) - Y · mean(dy · Y) / σ.

    Edge: where σ = 0 the second term is left out; the first is about 10⁹ · dy there.
    """
    x, axes, wide = node.input(0), op.ints(node.ints("axes", [0, 2, 3]) or []), work_type(node.input(0))
    zero = op.constant(np.zeros((), wide.numpy()))
    g, y = widen(op, dy, x), widen(op, node.output(), x)
    deviation = op.Sub(widen(op, x, x), op.ReduceMean(widen(op, x, x), axes, keepdims=1))
    sigma = op.Sqrt(op.ReduceMean(op.Mul(deviation, deviation), axes, keepdims=1))
    divisor = op.Add(sigma, op.constant(np.array(MEAN_VARIANCE_EPSILON).astype(wide.numpy())))
    along = op.ReduceMean(op.Mul(g, y), axes, keepdims=1)
    share = op.Where(op.Equal(sigma, zero), zero, op.Div(along, sigma))
    dx = op.Sub(op.Div(op.Sub(g, op.ReduceMean(g, axes, keepdims=1)), divisor), op.Mul(y, share))
    return (narrow(op, dx, x),)


@gradient("LpNormalization", versions=(1, 22))
def lp_normalization(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x / n, n = (Σ |x|^p)^(1/p) along an axis, p 1 or 2  =>  dx = (dy - t · Σ Y · dy) / n, t = Y for p = 2, sign x
    for p = 1.

    Edge: 0 where n = 0. Half types are summed in float32.
    """
    power, axis = node.int("p", 2), op.ints([node.int("axis", -1)])
    if power not in (1, 2):
        raise node.refuse("p", power, "of 1 and 2")
    x = node.input(0)
    wide, y, g = (widen(op, value, x) for value in (x, node.output(), dy))
    zero = op.constant(np.zeros((), work_type(x).numpy()))
    norm = op.ReduceL1(wide, axis, keepdims=1) if power == 1 else op.ReduceL2(wide, axis, keepdims=1)
    direction = op.Sign(wide) if power == 1 else y
    along = op.ReduceSum(op.Mul(y, g), axis, keepdims=1)
    dx = op.Div(op.Sub(g, op.Mul(direction, along)), norm)
    return (narrow(op, op.Where(op.Equal(norm, zero), zero, dx), x),)


@gradient("LRN", versions=(13,))
def local_response_normalization(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x · S^-β, S = k + α/w · Σ x² over the w channels around  =>  dx = dy · S^-β - 2αβ/w · x · Σ' dy · Y / S.

    Σ reaches from ⌊(w-1)/2⌋ channels before to ⌈(w-1)/2⌉ behind, its adjoint Σ' the other way round. k is `bias`.
    Shapes: x (N, C, …). Half types are computed in float32.
    """
    x, width, wide = node.input(0), node.int("size", 0), work_type(node.input(0))
    alpha, beta = node.float("alpha", 1e-4), node.float("beta", 0.75)
    before = (width - 1) // 2
    behind = width - 1 - before
    view = op.Concat(length(op, x, 0), op.ints([1]), length(op, x, 1), merged_length(op, x, 2), axis=0)
    ones = op.constant(np.ones((1, 1, width, 1), wide.numpy()))
    values, y, g = (op.Reshape(widen(op, value, x), view, allowzero=1) for value in (x, node.output(), dy))

    def number(value: float) -> ir.Value:
        return op.constant(np.array(value).astype(wide.numpy()))

    around = op.Conv(op.Mul(values, values), ones, pads=[before, 0, behind, 0])
    base = op.Add(number(node.float("bias", 1.0)), op.Mul(number(alpha / width), around))
    reached = op.Conv(op.Div(op.Mul(g, y), base), ones, pads=[behind, 0, before, 0])
    first = op.Mul(g, op.Pow(base, number(-beta)))
    dx = op.Sub(first, op.Mul(op.Mul(number(2 * alpha * beta / width), values), reached))
    return (narrow(op, op.Reshape(dx, op.shape(x), allowzero=1), x),)
