"""Gradients of softmax, and of normalisations along axes or over neighbouring channels."""

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnx_backprop.converters.reverse.expand import amends
from onnx_backprop.converters.reverse.known import dims
from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads, gradient
from onnx_backprop.converters.rules.common import (
    DOMAIN_TYPES,
    as_shaped,
    cast,
    divided,
    narrow,
    size_ratio,
    widen,
    work_type,
)
from onnx_backprop.converters.rules.merged_shapes import merged_length
from onnx_backprop.converters.rules.standardise import Standardised, standardise
from onnx_backprop.opset.core.shapes import Dims

MEAN_VARIANCE_EPSILON = 1e-9  # added to the deviation by MeanVarianceNormalization, from its function body


@gradient("Softmax", versions=(13,))
def softmax(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = e^x / Σ e^x along an axis  =>  dx = Y · (dy - Σ Y · dy)."""
    y, axis = node.output(), node.axis(-1)
    if y.dtype in DOMAIN_TYPES:
        return op.domain.SoftMaxBackward(dy, y, axis=axis)
    return op.Mul(y, op.Sub(dy, op.ReduceSum(op.Mul(y, dy), [axis], keepdims=1)))


@gradient("LogSoftmax", versions=(13,))
def log_softmax(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x - ln Σ e^x along an axis  =>  dx = dy - e^Y · Σ dy."""
    total = op.ReduceSum(dy, [node.axis(-1)], keepdims=1)
    return op.Sub(dy, op.Mul(op.Exp(node.output()), total))


@amends("LayerNormalization")
@amends("ReduceL2")
@amends("RMSNormalization")
def normalization_body(body: onnx.FunctionProto, node: ir.Node) -> None:
    """float64 is computed in float64, as by onnxruntime's kernels and by the rules; the body has casts to float32.

    GroupNormalization has no kernel there, and is computed as its body says. A statistic that is read, which is a
    float32 output, keeps the body as it is.
    """
    double = node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.DOUBLE
    if not double or any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        return
    for inner in body.node:
        for attribute in inner.attribute:
            if inner.op_type == "Cast" and attribute.i == onnx.TensorProto.FLOAT:
                attribute.i = onnx.TensorProto.DOUBLE


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
    dx, *others = [None] if dy is None else _layer_norm_backward(op, node, dy) or _layer_norm_composed(op, node, dy)
    terms = [] if dx is None else [widen(op, dx, x)]
    if dmean is not None:
        terms.append(op.Expand(_per_element(op, node, 1, dmean), op.shape(x)))
    if drate is not None:
        unit = _standardised(op, node)
        share = op.Mul(_per_element(op, node, 2, drate), op.Mul(unit.rate, unit.rate))
        terms.append(op.Neg(op.Mul(unit.z, share)))
    return [narrow(op, op.accumulate(terms), x) if len(terms) > 1 or dx is None else dx, *others]


def _standardised(op: Builder, node: Forward, *, centred: bool = True) -> Standardised:
    epsilon = node.float("epsilon", 1e-5)
    return standardise(op, widen(op, node.input(0)), _axes_from(op, node), epsilon, centred=centred)


def _layer_norm_composed(op: Builder, node: Forward, dy: ir.Value) -> list[ir.Value]:
    """dx, ds and db in standard operators."""
    grads = _scaled(op, node, _standardised(op, node), dy)
    if node.has(2):
        bias = node.input(2)
        grads.append(narrow(op, op.unbroadcast(widen(op, dy), bias, node.output()), bias))
    return grads


def _layer_norm_backward(op: Builder, node: Forward, dy: ir.Value) -> list[ir.Value] | None:
    """The same by LayerNormBackward; None for what it does not take, or where db alone is wanted.

    s and b are stretched to the normalised axes where it cannot be seen that they have their lengths.
    """
    x, axis, static_shape = node.input(0), node.axis(-1), dims(node.input(0))
    count = -axis if axis < 0 else None if static_shape is None else len(static_shape) - axis
    parameters = [node.input(n) for n in (1, 2) if node.has(n)]
    ranks = [None if (shape := dims(value)) is None else len(shape) for value in parameters]
    if x.dtype not in DOMAIN_TYPES or count is None or any(rank is None or rank > count for rank in ranks):
        return None
    if not node.wants(0) and not node.wants(1):
        return None
    within: Dims = (None,) * count if static_shape is None else static_shape[len(static_shape) - count :]
    scale = cast(op, parameters[0], ir.DataType.FLOAT)
    if dims(parameters[0]) != within or None in within:
        scale = op.Expand(scale, op.lengths(x, -count))
    attributes = {"begin_norm_axis": -count, "use_affine": 1, "epsilon": node.float("epsilon", 1e-5)}
    results = op.domain.emit("LayerNormBackward", [x, dy, None, None, scale], attributes, outputs=3)
    grads = [results[0]]
    for value, result in zip(parameters, results[1:], strict=False):
        result.shape = ir.Shape(within)
        grads.append(narrow(op, op.unbroadcast(result, value, result), value))
    return grads


def _per_element(op: Builder, node: Forward, index: int, g: ir.Value) -> ir.Value:
    """The gradient of one of the statistics over the number of elements that went into each, in the type to sum in."""
    x = node.input(0)
    return op.Mul(cast(op, g, work_type(x)), size_ratio(op, node.output(index), x))


@gradient("RMSNormalization", versions=(23,))
def rms_normalization(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = s · z, z = x · r, r = 1/√(mean x² + ε) over the elements from `axis` on
    =>  dx = r · (g - z · mean(g · z)), g = s · dy; ds = Σ dy · z as s was broadcast.

    Half types are computed in float32, whatever stash_type says.
    """
    return _scaled(op, node, _standardised(op, node, centred=False), dy)


def _axes_from(op: Builder, node: Forward) -> ir.Value:
    """The axes from the attribute `axis` to the last."""
    axis, static_shape = node.axis(-1), dims(node.input(0))
    if axis < 0:
        return op.ints(range(axis, 0))
    if static_shape is not None:
        return op.ints(range(axis, len(static_shape)))
    return op.Range(axis, op.rank(node.input(0)), 1)


def _scaled(op: Builder, node: Forward, unit: Standardised, dy: ir.Value) -> list[ir.Value]:
    """dx and ds of Y = s · z + …, s broadcasting to z."""
    x, scale, g = node.input(0), node.input(1), widen(op, dy)
    dx = unit.gradient(op, op.Mul(g, cast(op, scale, work_type(x))))
    return [narrow(op, dx, x), narrow(op, op.unbroadcast(op.Mul(g, unit.z), scale, node.output()), scale)]


@gradient("MeanVarianceNormalization", versions=(13,))
def mean_variance_normalization(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = (x - μ) / (σ + ε) over axes, ε = 1e-9  =>  dx = (dy - mean dy) / (σ + ε) - Y · mean(dy · Y) / σ.

    Edge: where σ = 0 the second term is left out; the first is about 10⁹ · dy there.
    """
    axes = node.ints("axes", [0, 2, 3])
    x, y, g = (widen(op, value) for value in (node.input(0), node.output(), dy))
    deviation = op.Sub(x, op.ReduceMean(x, axes, keepdims=1))
    sigma = op.Sqrt(op.ReduceMean(op.Mul(deviation, deviation), axes, keepdims=1))
    along = op.ReduceMean(op.Mul(g, y), axes, keepdims=1)
    share = divided(op, along, sigma)
    centred = op.Sub(g, op.ReduceMean(g, axes, keepdims=1))
    dx = op.Sub(op.Div(centred, op.Add(sigma, MEAN_VARIANCE_EPSILON)), op.Mul(y, share))
    return narrow(op, dx, dy)


@gradient("LpNormalization", versions=(1, 22))
def lp_normalization(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x / n, n = (Σ |x|^p)^(1/p) along an axis, p 1 or 2  =>  dx = (dy - t · Σ Y · dy) / n, t = Y for p = 2, sign x
    for p = 1.

    Edge: 0 where n = 0. Half types are summed in float32.
    """
    power, axis = node.int("p", 2), [node.axis(-1)]
    if power not in (1, 2):
        raise node.refuse("p", power, "of 1 and 2")
    x, y, g = (widen(op, value) for value in (node.input(0), node.output(), dy))
    norm = op.ReduceL1(x, axis, keepdims=1) if power == 1 else op.ReduceL2(x, axis, keepdims=1)
    direction = op.Sign(x) if power == 1 else y
    along = op.ReduceSum(op.Mul(y, g), axis, keepdims=1)
    return narrow(op, divided(op, op.Sub(g, op.Mul(direction, along)), norm), dy)


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
    view = op.Concat(op.length(x, 0), [1], op.length(x, 1), merged_length(op, x, 2), axis=0)
    ones = op.constant(np.ones((1, 1, width, 1), wide.numpy()))
    values, y, g = (op.Reshape(widen(op, value), view, allowzero=1) for value in (x, node.output(), dy))

    around = op.Conv(op.Mul(values, values), ones, pads=[before, 0, behind, 0])
    base = op.Add(node.float("bias", 1.0), op.Mul(alpha / width, around))
    reached = op.Conv(op.Div(op.Mul(g, y), base), ones, pads=[behind, 0, before, 0])
    first = op.Mul(g, op.Pow(base, op.number(-beta, wide)))
    dx = op.Sub(first, op.Mul(op.Mul(2 * alpha * beta / width, values), reached))
    return narrow(op, as_shaped(op, dx, x), x)
