"""Gradients of the operators of our own domain, where they are operators of it again; the others have their bodies.

A gradient is linear in the dy that it is given, and its adjoint there is the forward operator: so every convolution
leads to the two others, ReLU and softmax to themselves, and a ResizeGrad back to Resize.
"""

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnx_backprop.converters.reverse.known import dims, element_type
from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads, flows, gradient
from onnx_backprop.converters.rules.common import cast, count_up, narrow, size_ratio
from onnx_backprop.converters.rules.conv import wanted_shape
from onnx_backprop.opset import DOMAIN
from onnx_backprop.opset.maths.convolution_roles import Role
from onnx_backprop.opset.operators import (
    conv_transpose_backward_data,
    conv_transpose_backward_weights,
    convolution,
    convolution_backward_data,
    convolution_backward_weights,
)
from onnx_backprop.opset.operators.registry import OPS

# Tensors whose values decide in jumps, or not at all; besides, those of which the shape alone is read.
_CONSTANT = {"ReLUBackward": ("src",), "MaxPoolBackward": ("src",), "LayerNormBackward": ("beta",)}
for _op in OPS:
    _zero = [
        n
        for n, i in enumerate(_op.inputs)
        if i.shape_only or i.type_name == "T7" or i.name in _CONSTANT.get(_op.name, ())
    ]
    flows(_op.name, DOMAIN, [n for n, i in enumerate(_op.inputs) if i.tensor and n not in _zero], _zero)

_ROLES = {
    module.OP.name: module.ROLES
    for module in (
        convolution,
        convolution_backward_data,
        convolution_backward_weights,
        conv_transpose_backward_data,
        conv_transpose_backward_weights,
    )
}
# A ConvTranspose's input is the destination of the convolution that it is the adjoint of: O and I change names.
_OF_CONVOLUTION = {"IOX": "OIX", "XOI": "XIO"}


def _explicit(node: ir.Node) -> bool:
    """Whether a gradient of ConvTranspose says its pads, and has weights in an order that convolutions know too."""
    pads, order = (node.attributes.get(name) for name in ("auto_pad", "weights_format"))
    return (pads is None or pads.as_string().lower() in ("none", "notset", "valid")) and (
        order is None or order.as_string() in _OF_CONVOLUTION
    )


@gradient("Convolution", versions=(1,), domain=DOMAIN)
@gradient("ConvolutionBackwardData", versions=(1,), domain=DOMAIN)
@gradient("ConvolutionBackwardWeights", versions=(1,), domain=DOMAIN)
@gradient("ConvTransposeBackwardData", versions=(1,), domain=DOMAIN, serves=_explicit)
@gradient("ConvTransposeBackwardWeights", versions=(1,), domain=DOMAIN, serves=_explicit)
def convolutions(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """<y, x ⋆ w> is linear in each of the three; the result's place being taken by its gradient, the others are left.

    Destination: Convolution(x, w); source: ConvolutionBackwardData(y, w); weights: ConvolutionBackwardWeights(x, y).
    """
    roles = _ROLES[node.op_type]
    attributes = {n: v for n, v in node.written.items() if n not in ("output_padding", "dst_shape", "weights_shape")}
    if roles.transposed:
        attributes["weights_format"] = _OF_CONVOLUTION[node.string("weights_format", "XOI")]
    inputs = dict(zip(roles.names, (node.input(0), node.input(1)), strict=False))
    grads: list[ir.Value | None] = [
        _third(op, role, inputs[role], {**inputs, roles.result: dy}, attributes) for role in list(roles.names)[:2]
    ]
    if node.op_type == "Convolution" and node.has(2):
        grads.append(op.domain.BiasAddBackward(dy, data_format=node.string("data_format", "NXC")))
    return grads


def _third(
    op: Builder, role: Role, like: ir.Value, tensors: dict[Role, ir.Value], attributes: dict[str, Any]
) -> ir.Value:
    """What stands in one role, shaped `like`, of the tensors in the others."""
    if role == "destination":
        return op.domain.Convolution(tensors["source"], tensors["weights"], **attributes)
    shape, shape_input = wanted_shape(op, like)
    if role == "source":
        given = (tensors["destination"], tensors["weights"], *shape_input)
        return op.domain.ConvolutionBackwardData(*given, dst_shape=shape, **attributes)
    given = (tensors["source"], tensors["destination"], *shape_input)
    return op.domain.ConvolutionBackwardWeights(*given, weights_shape=shape, **attributes)


@gradient("BiasAddBackward", versions=(1,), domain=DOMAIN)
def bias_add_backward(op: Builder, node: Forward, g: ir.Value) -> Grads:
    """db = Σ dy over all but the channels  =>  ddy = g along the channels, repeated over the others."""
    shape = op.shape(node.input(0))
    if node.string("data_format", "NXC") == "NCX":
        behind = op.filled(op.Sub(op.Shape(shape), 2), 1)
        g = op.Reshape(g, op.Concat([-1], behind, axis=0))
    return op.Expand(g, shape)


@gradient("ReLUBackward", versions=(1,), domain=DOMAIN)
def relu_backward(op: Builder, node: Forward, g: ir.Value) -> Grads:
    """dx = dy where x > 0, else 0  =>  ddy = g where x > 0, else 0. The kink at x = 0 is left out."""
    return None, op.domain.ReLUBackward(node.input(0), g, **node.written)


@gradient("SoftMaxBackward", versions=(1,), domain=DOMAIN)
def soft_max_backward(op: Builder, node: Forward, g: ir.Value) -> Grads:
    """dx = y·(dy - Σ dy·y)  =>  ddy = y·(g - Σ g·y), the same again; dY = g·(dy - Σ dy·y) - dy·Σ g·y."""
    dy, y, axis = node.input(0), node.input(1), [node.int("axis", 1)]
    along, across = (op.ReduceSum(op.Mul(value, y), axis, keepdims=1) for value in (dy, g))
    return op.domain.SoftMaxBackward(g, y, **node.written), op.Sub(op.Mul(g, op.Sub(dy, along)), op.Mul(dy, across))


def _source_ranked(node: ir.Node) -> bool:
    return node.inputs[0] is not None and node.inputs[0].shape is not None


@gradient("BatchNormForwardTraining", versions=(1,), domain=DOMAIN, all_outputs=True, serves=_source_ranked)
def batch_norm_forward_training(op: Builder, node: Forward, dys: Sequence[ir.Value | None]) -> Grads:
    """dst = γ·z + β by the statistics μ and σ² of x, m' = p·m + (1-p)·μ, v' = p·v + (1-p)·σ²
    =>  dx, dγ, dβ = BatchNormTrainingBackward(x, ddst, μ, σ², γ), dm = p·dm', dv = p·dv'; besides
    dx += (dμ + (1-p)·dm' + 2·(x - μ)·(dσ² + (1-p)·dv')) / n, n = the elements of a channel.
    """
    x, gamma = node.input(0), node.optional(3)
    rank, momentum, layout = node.rank(0), node.float("momentum", 0.0), node.string("data_format", "NXC")
    channel = rank - 1 if layout == "NXC" else 1
    per = [-1, *[1] * (rank - 1 - channel)]
    mean, variance = ([v if v.name else None for v in node.node.outputs] + [None] * 5)[3:5]  # may be left out
    ddst, drunning_mean, drunning_variance, dmean, dvariance = (*dys, *[None] * 5)[:5]
    grads: list[ir.Value | None] = [None] * 5
    terms: list[ir.Value] = []
    if ddst is not None:
        attributes = {"epsilon": node.float("epsilon", 0.0), "data_format": layout}
        inputs = [x, ddst, mean, variance, gamma]
        dx, *grads[3:] = op.domain.emit("BatchNormTrainingBackward", inputs, attributes, outputs=3)
        terms.append(cast(op, dx, ir.DataType.FLOAT))
    ratio = size_ratio(op, node.input(1), x)

    def shared(direct: ir.Value | None, running: ir.Value | None) -> ir.Value | None:
        """What flows into a statistic, over n."""
        parts = [direct] if direct is not None else []
        parts += [op.Mul(running, 1 - momentum)] if running is not None else []
        return op.Reshape(op.Mul(op.accumulate(parts), ratio), per) if parts else None

    level, slant = shared(dmean, drunning_mean), shared(dvariance, drunning_variance)
    if level is not None:
        terms.append(op.Expand(level, op.shape(x)))
    if slant is not None:
        wide = cast(op, x, ir.DataType.FLOAT)
        others = [axis for axis in range(rank) if axis != channel]
        centre = op.ReduceMean(wide, op.ints(others), keepdims=1) if mean is None else op.Reshape(mean, per)
        terms.append(op.Mul(op.Mul(op.Sub(wide, centre), slant), 2))
    grads[0] = narrow(op, op.accumulate(terms), x)
    grads[1:3] = [None if g is None else op.Mul(g, momentum) for g in (drunning_mean, drunning_variance)]
    return grads[: len(node.node.inputs)]


@gradient("AttentionForwardTraining", versions=(1,), domain=DOMAIN, all_outputs=True)
def attention_forward_training(op: Builder, node: Forward, dys: Sequence[ir.Value | None]) -> Grads:
    """y_i = Σ_j p_ij·v_j, L_i = log Σ_j e^s_ij  =>  AttentionBackward(dy, …), in which ds_ij = p_ij·(dy_i·v_j - δ_i).

    A gradient g of L makes that ds_ij + p_ij·g_i: as if values had a last entry 0, y there -1 and dy there g.
    """
    query, key, value = (node.input(n) for n in range(3))
    outputs: list[ir.Value] = [v for v in node.node.outputs if v.name]
    if len(outputs) < 2:
        given = [v if v is not None and v.name else None for v in node.node.inputs]
        outputs = list(op.domain.emit(node.op_type, given, node.written, outputs=2))
    y, logarithm = outputs
    dy, g = (*dys, None)[:2]
    dy = op.zeros_like(y) if dy is None else dy
    if g is not None:
        y, dy = (
            op.Concat(x, op.Unsqueeze(more, [3]), axis=3)
            for x, more in ((y, _minus_ones(op, y)), (dy, narrow(op, g, y)))
        )
        column = op.zeros(op.joined(op.lengths(value, 0, 3), op.ints([1])), value)
        value = op.Concat(value, column, axis=3)
    inputs = [dy, query, key, value, y, logarithm, *map(node.optional, (3, 4, 5, 6))]
    count = 5 if node.wants(5) else 4 if node.wants(3) else 3
    grads: list[ir.Value | None] = [
        *op.domain.emit("AttentionBackward", inputs, node.written, outputs=count),
        None,
        None,
    ]
    if count == 5 and not node.wants(3):
        assert grads[3] is not None
        grads[3].name = ""  # the kernel computes what has a name
    dq, dk, dv, dbias, dsinks = grads[:5]
    if g is not None and dv is not None:
        dv = op.Slice(dv, [0], [-1], [3])
    grads = [dq, dk, dv, dbias if node.wants(3) else None, None, dsinks if node.wants(5) else None, None]
    return grads[: len(node.node.inputs)]


def _minus_ones(op: Builder, y: ir.Value) -> ir.Value:
    """-1 for each query, of the type of y."""
    return op.filled(op.lengths(y, 0, 3), -1, element_type(y))


def _is_resized(node: ir.Node) -> bool:
    """Whether ONNX's Resize has the coordinates in the model's opset, which is 18 or later."""
    given = node.attributes.get("coordinate_transformation_mode")
    coordinates = "half_pixel" if given is None else given.as_string()
    newer = node.graph is not None and node.graph.opset_imports.get("", 0) >= 19
    return coordinates != "tf_half_pixel_for_nn" and (coordinates != "half_pixel_symmetric" or newer)


@gradient("ResizeGrad", versions=(1,), domain=DOMAIN, serves=_is_resized)
def resize_grad(op: Builder, node: Forward, g: ir.Value) -> Grads:
    """dX = Wᵀ·dY  =>  ddY = W·g: the Resize itself, which writes zeros where it reads beyond its region.

    Its shapes are those of a Resize that onnxruntime has run.
    """
    return op.Resize(g, *map(node.optional, (2, 3, 4)), **{**node.written, "extrapolation_value": 0.0})


def _ranked(node: ir.Node) -> bool:
    """Whether the rank of a tensor is known, and so the axes."""
    return any(value is not None and value.shape is not None for value in node.inputs[:2])


@gradient("InterpolateBackward", versions=(1,), domain=DOMAIN, serves=_ranked)
@gradient("InterpolateBackprop", versions=(1,), domain=DOMAIN, serves=_ranked)
def interpolate_backward(op: Builder, node: Forward, g: ir.Value) -> Grads:
    """dx = Wᵀ·dy  =>  ddy = W·g, axis by axis; where it is what ONNX's Resize does, as that."""
    src, dy = node.input(0), node.input(1)
    rank, first = len(dims(src) or dims(dy) or ()), 1 if node.string("data_format", "NXC") == "NXC" else 2
    coordinates, nearest = node.string("coordinate_transformation_mode", "half_pixel"), node.string("mode", "")
    if nearest != "nearest" and first == 2:
        attributes = {"mode": "linear", "coordinate_transformation_mode": coordinates}
        return None, op.Resize(g, None, None, op.shape(dy), **attributes)
    for axis in range(first, first + rank - 2):
        length, out = op.length(src, axis), op.length(dy, axis)
        o, last = count_up(op, out), op.Sub(length, 1)
        if coordinates == "half_pixel":
            numerator = op.Sub(op.Mul(op.Add(op.Mul(o, 2), 1), length), out)
            denominator = op.Max(op.Mul(out, 2), 2)
        else:
            numerator, denominator = op.Mul(o, last), op.Max(op.Sub(out, 1), 1)
        if nearest == "nearest":  # in integers, as `place_onednn`: ties go where they went
            pixel = op.Div(op.Add(op.Mul(numerator, 2), denominator), op.Mul(denominator, 2))
            g = op.Gather(g, op.Min(pixel, last), axis=axis)
        else:
            x = op.Div(*(op.Cast(part, to=ir.DataType.DOUBLE) for part in (numerator, denominator)))
            g = _between(op, g, x, last, axis, rank)
    return None, g


@gradient("ResampleGrad", versions=(1,), domain=DOMAIN, serves=_ranked)
def resample_grad(op: Builder, node: Forward, g: ir.Value) -> Grads:
    """dx = Wᵀ·dy  =>  ddy = W·g, axis by axis, the taps being placed as `place_resample` says."""
    dy = node.input(0)
    rank, lengths, outs = node.rank(0), dims(node.output()), dims(dy)
    defaults = {"scales": None, "input_pixel_offsets": 0.5, "output_pixel_offsets": -0.5}
    given = [[float(v) for v in node.written.get(n, ())] or [d] * rank for n, d in defaults.items()]
    for axis, (scale, before, after) in enumerate(zip(*given, strict=True)):
        if scale == 1 and before + after == 0 and lengths and outs and (lengths[axis] or 0) == outs[axis]:
            continue
        double = ir.DataType.DOUBLE
        o = op.Sub(op.Cast(count_up(op, op.length(dy, axis)), to=double), after)
        length = op.Gather(op.Shape(g), [axis])
        if scale is None:
            o = op.Mul(o, op.Cast(length, to=double))
            x = op.Div(o, op.Cast(op.length(dy, axis), to=double))
        else:
            x = op.Div(o, scale)
        x, last = op.Sub(x, before), op.Sub(length, 1)
        if node.string("interpolation_mode", "") == "NEAREST_NEIGHBOR":
            pixel = op.Cast(op.Ceil(op.Sub(x, 0.5)), to=ir.DataType.INT64)
            g = op.Gather(g, op.Min(op.Max(pixel, 0), last), axis=axis)
        else:
            g = _between(op, g, x, last, axis, rank)
    return (g,)


def _between(op: Builder, g: ir.Value, x: ir.Value, last: ir.Value, axis: int, rank: int) -> ir.Value:
    """What lies at x, clamped to the pixels 0 to `last`, on the lines between them."""
    x = op.Min(op.Max(x, 0), op.Cast(last, to=ir.DataType.DOUBLE))
    left = op.Floor(x)
    share = op.Unsqueeze(op.Cast(op.Sub(x, left), to=ir.DataType.FLOAT), list(range(1, rank - axis)))
    first = op.Cast(left, to=ir.DataType.INT64)
    low, high = (op.Gather(g, pixel, axis=axis) for pixel in (first, op.Min(op.Add(first, 1), last)))
    return op.Add(op.Mul(low, op.Sub(1, share)), op.Mul(high, share))
