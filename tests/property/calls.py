"""Hypothesis strategies: valid calls of every operator, over all attributes, layouts, ranks and small lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

DATA_FORMATS = ("NCX", "NXC")
CONV_FORMATS = ("OIX", "XIO")
CONV_TRANSPOSE_FORMATS = ("IOX", "XOI", "OIX", "XIO")


@dataclass(frozen=True)
class Call:
    """One operator with attributes and inputs in the operator's order; None for an absent optional input."""

    op: str
    attributes: dict[str, Any]
    inputs: list[np.ndarray | None]
    seed: int

    def __repr__(self) -> str:
        shapes = [None if i is None else f"{i.dtype}{list(i.shape)}" for i in self.inputs]
        return f"{self.op}({self.attributes}, {shapes}, seed={self.seed})"


@dataclass(frozen=True)
class Correlation:
    """A correlation in NCX and (D, S/g, k…) order: what the six convolution operators are calls of."""

    attributes: dict[str, Any]
    source: np.ndarray
    destination: np.ndarray
    weights: np.ndarray
    seed: int


def values(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Multiples of 1/8 between -2 and 2, exact in every float type."""
    return (np.random.default_rng(seed).integers(-16, 17, shape) / 8).astype(np.float32)


seeds = st.integers(0, 2**32 - 1)


@st.composite
def correlations(draw: st.DrawFn, *, transposed: bool) -> Correlation:
    """Any geometry; `transposed` finds SAME_* pads by the rule of a transposed convolution, from its input's length."""
    axes = draw(st.integers(1, 3))
    groups, d, s = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    auto_pad = draw(st.sampled_from(["None", "None", "None", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    kernel, strides, dilations, begin, end, long, short = ([] for _ in range(7))
    for _ in range(axes):
        k, stride, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
        p, e = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        extent = (k - 1) * dilation + 1
        if auto_pad.startswith("SAME") and not transposed:
            length = draw(st.integers(1, 7))
            out = -(-length // stride)
        else:
            out = draw(st.integers(1, 4))
            total = {"None": p + e, "VALID": 0}.get(auto_pad, max(extent - stride, 0))
            natural = stride * (out - 1) + extent - total
            if natural < 1:  # more padding than cells: without any it fits
                p = e = 0
                natural = stride * (out - 1) + extent
            rest = 0 if auto_pad.startswith("SAME") else draw(st.integers(0, stride - 1))
            length = natural + rest
        for values_, value in zip(
            (kernel, strides, dilations, begin, end, long, short), (k, stride, dilation, p, e, length, out), strict=True
        ):
            values_.append(value)
    batch, seed = draw(st.integers(1, 3)), draw(seeds)
    attributes: dict[str, Any] = {
        "strides": strides,
        "dilations": dilations,
        "pads_begin": begin,
        "pads_end": end,
        "auto_pad": auto_pad,
        "groups": groups,
    }
    return Correlation(
        attributes,
        values((batch, groups * s, *long), seed),
        values((batch, groups * d, *short), seed + 1),
        values((groups * d, s, *kernel), seed + 2),
        seed,
    )


def to_data(x: np.ndarray, data_format: str) -> np.ndarray:
    """NCX into a data format."""
    return np.ascontiguousarray(x if data_format == "NCX" else np.moveaxis(x, 1, -1))


def to_weights(w: np.ndarray, order: str) -> np.ndarray:
    """(D, S/g, k…) into a weights format of three letters that say where D, S and the kernel go."""
    d, s, *k = range(w.ndim)
    return np.ascontiguousarray(
        w.transpose([axis for letter in order for axis in {"D": [d], "S": [s], "X": k}[letter]])
    )


def conv_order(weights_format: str) -> str:
    """OIX and XIO of a convolution: O is the destination."""
    return weights_format.replace("O", "D").replace("I", "S")


def conv_transpose_order(weights_format: str) -> str:
    """IOX … of a transposed convolution: its input I is the correlation's destination."""
    return weights_format.replace("I", "D").replace("O", "S")


def stated(shape: tuple[int, ...], how: str, name: str) -> tuple[dict[str, Any], list[np.ndarray | None]]:
    """A shape as attribute, as input or as both."""
    attribute = {name: list(shape)} if how in ("attribute", "both") else {}
    return attribute, [np.array(shape, np.int32)] if how in ("input", "both") else []


hows = st.sampled_from(["attribute", "input", "both"])


@st.composite
def convolution(draw: st.DrawFn) -> Call:
    c = draw(correlations(transposed=False))
    data, weights = draw(st.sampled_from(DATA_FORMATS)), draw(st.sampled_from(CONV_FORMATS))
    attributes = c.attributes | {"data_format": data, "weights_format": weights}
    inputs: list[np.ndarray | None] = [to_data(c.source, data), to_weights(c.weights, conv_order(weights))]
    if draw(st.booleans()):
        inputs.append(values(c.weights.shape[:1], c.seed + 3))
    return Call("Convolution", attributes, inputs, c.seed)


@st.composite
def convolution_backward_data(draw: st.DrawFn) -> Call:
    c = draw(correlations(transposed=False))
    data, weights = draw(st.sampled_from(DATA_FORMATS)), draw(st.sampled_from(CONV_FORMATS))
    shape, extra = stated(to_data(c.source, data).shape, draw(hows), "dst_shape")
    attributes = c.attributes | {"data_format": data, "weights_format": weights} | shape
    inputs = [to_data(c.destination, data), to_weights(c.weights, conv_order(weights)), *extra]
    return Call("ConvolutionBackwardData", attributes, inputs, c.seed)


@st.composite
def convolution_backward_weights(draw: st.DrawFn) -> Call:
    c = draw(correlations(transposed=False))
    data, weights = draw(st.sampled_from(DATA_FORMATS)), draw(st.sampled_from(CONV_FORMATS))
    shape, extra = stated(to_weights(c.weights, conv_order(weights)).shape, draw(hows), "weights_shape")
    attributes = c.attributes | {"data_format": data, "weights_format": weights} | shape
    return Call(
        "ConvolutionBackwardWeights",
        attributes,
        [to_data(c.source, data), to_data(c.destination, data), *extra],
        c.seed,
    )


@st.composite
def conv_transpose_backward_data(draw: st.DrawFn) -> Call:
    c = draw(correlations(transposed=True))
    data, weights = draw(st.sampled_from(DATA_FORMATS)), draw(st.sampled_from(CONV_TRANSPOSE_FORMATS))
    attributes = c.attributes | {"data_format": data, "weights_format": weights}
    inputs = [to_data(c.source, data), to_weights(c.weights, conv_transpose_order(weights))]
    return Call("ConvTransposeBackwardData", attributes, inputs, c.seed)


@st.composite
def conv_transpose_backward_weights(draw: st.DrawFn, op: str, prefix: str) -> Call:
    c = draw(correlations(transposed=True))
    data, weights = draw(st.sampled_from(DATA_FORMATS)), draw(st.sampled_from(CONV_TRANSPOSE_FORMATS))
    shape, extra = stated(to_weights(c.weights, conv_transpose_order(weights)).shape, draw(hows), f"{prefix}_shape")
    attributes = c.attributes | {"data_format": data, f"{prefix}_format": weights} | shape
    return Call(op, attributes, [to_data(c.destination, data), to_data(c.source, data), *extra], c.seed)


@st.composite
def interpolate_backward(draw: st.DrawFn, op: str) -> Call:
    axes, seed = draw(st.integers(1, 3)), draw(seeds)
    lengths = [draw(st.integers(1, 7)) for _ in range(axes)]
    outs = [draw(st.integers(1, 7)) for _ in range(axes)]
    data = draw(st.sampled_from(DATA_FORMATS))
    head = (draw(st.integers(1, 2)), draw(st.integers(1, 3)))
    attributes: dict[str, Any] = {
        "mode": draw(st.sampled_from(["nearest", "linear", "bilinear", "trilinear"])),
        "coordinate_transformation_mode": draw(st.sampled_from(["half_pixel", "align_corners"])),
        "data_format": data,
    }
    given = draw(st.sampled_from(["", "sizes", "scales"]))
    if given:
        attributes[given] = outs if given == "sizes" else [o / i for o, i in zip(outs, lengths, strict=True)]
    sizes = [np.array(outs, np.int32)] if draw(st.booleans()) else []
    source = to_data(values((*head, *lengths), seed), data)
    return Call(op, attributes, [source, to_data(values((*head, *outs), seed + 1), data), *sizes], seed)


@st.composite
def resample_grad(draw: st.DrawFn) -> Call:
    rank, seed = draw(st.integers(1, 4)), draw(seeds)
    lengths = [draw(st.integers(1, 6)) for _ in range(rank)]
    outs = [draw(st.integers(1, 6)) for _ in range(rank)]
    quarters = st.integers(-6, 6).map(lambda n: n / 4)
    lists: dict[str, list[float]] = {
        "scales": draw(
            st.one_of(st.just([]), st.lists(st.integers(1, 12).map(lambda n: n / 4), min_size=rank, max_size=rank))
        ),
        "input_pixel_offsets": draw(st.one_of(st.just([]), st.lists(quarters, min_size=rank, max_size=rank))),
        "output_pixel_offsets": draw(st.one_of(st.just([]), st.lists(quarters, min_size=rank, max_size=rank))),
    }
    mode = draw(st.sampled_from(["NEAREST_NEIGHBOR", "LINEAR"]))
    shape, extra = stated(tuple(lengths), draw(hows), "output_sizes")
    dimension_count = {"dimension_count": rank} if draw(st.booleans()) else {}
    attributes = {"interpolation_mode": mode} | lists | shape | dimension_count
    return Call("ResampleGrad", attributes, [values(tuple(outs), seed), *extra], seed)


@st.composite
def bias_add_backward(draw: st.DrawFn) -> Call:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=2, max_size=5)))
    seed = draw(seeds)
    return Call("BiasAddBackward", {"data_format": draw(st.sampled_from(DATA_FORMATS))}, [values(shape, seed)], seed)


@st.composite
def resize_grad(draw: st.DrawFn) -> Call:
    """One or two axes are resized; cubic and antialias as onnxruntime takes them."""
    seed = draw(seeds)
    lengths = [draw(st.integers(1, 7)) for _ in range(4)]
    axes = draw(st.sampled_from([[2, 3], [3, 2], [-1, -2], [3], [-2]]))
    outs = [draw(st.integers(1, 7)) for _ in axes]
    mode = draw(st.sampled_from(["nearest", "linear", "cubic"]))
    coordinates = [
        "half_pixel",
        "half_pixel_symmetric",
        "pytorch_half_pixel",
        "align_corners",
        "asymmetric",
        "tf_crop_and_resize",
    ]
    attributes: dict[str, Any] = {
        "mode": mode,
        "coordinate_transformation_mode": draw(st.sampled_from(coordinates)),
        "nearest_mode": draw(st.sampled_from(["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])),
        "axes": axes,
    }
    if mode != "nearest":
        attributes["antialias"] = draw(st.integers(0, 1))
    if mode == "cubic":
        attributes["cubic_coeff_a"] = draw(st.sampled_from([-0.75, -0.5]))
        attributes["exclude_outside"] = draw(st.integers(0, 1))
    roi = None
    if attributes["coordinate_transformation_mode"] == "tf_crop_and_resize":
        roi = np.array([0.25] * len(axes) + [1.125] * len(axes), np.float32)
        attributes.pop("antialias", None)
    result = list(lengths)
    scales = sizes = None
    if draw(st.booleans()):
        sizes = np.array(outs, np.int64)
    else:
        scales = np.array([o / lengths[axis] for o, axis in zip(outs, axes, strict=True)], np.float32)
        outs = [int(np.float32(lengths[axis]) * s) for s, axis in zip(scales, axes, strict=True)]
        if 0 in outs:
            scales, sizes, outs = None, np.ones(len(axes), np.int64), [1] * len(axes)
    for o, axis in zip(outs, axes, strict=True):
        result[axis] = o
    dy, x = values(tuple(result), seed), values(tuple(lengths), seed + 1)
    return Call("ResizeGrad", attributes, [dy, x, roi, scales, sizes], seed)


@st.composite
def pools(draw: st.DrawFn, *, dilated: bool) -> tuple[dict[str, Any], list[int], list[int]]:
    """Attributes, and lengths of source and windows, the latter rounded down or up."""
    axes = draw(st.integers(1, 3))
    auto_pad = draw(st.sampled_from(["None", "None", "None", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    same = auto_pad.startswith("SAME")
    kernel, strides, dilations, begin, end, lengths, outs = ([] for _ in range(7))
    for _ in range(axes):
        k, stride = draw(st.integers(1, 4)), draw(st.integers(1, 3))
        dilation = draw(st.integers(1, 3)) if dilated and not same else 1
        p, e, length = draw(st.integers(0, k - 1)), draw(st.integers(0, k - 1)), draw(st.integers(1, 7))
        room = length - (k - 1) * dilation - 1 + (p + e if auto_pad == "None" else 0)
        out = -(-length // stride) if same else max(room // stride + 1, 0)
        up = -(-room // stride) + 1
        if not same and (up - 1) * stride < length + (p if auto_pad == "None" else 0) and draw(st.booleans()):
            out = max(up, 0)
        for values_, value in zip(
            (kernel, strides, dilations, begin, end, lengths, outs),
            (k, stride, dilation, p, e, length, out),
            strict=True,
        ):
            values_.append(value)
    attributes = {"kernel": kernel, "strides": strides, "pads_begin": begin, "pads_end": end, "auto_pad": auto_pad}
    return (
        attributes | ({"dilations": dilations} if (dilated and draw(st.booleans())) or max(dilations) > 1 else {}),
        lengths,
        outs,
    )


@st.composite
def max_pool_backward(draw: st.DrawFn) -> Call:
    """Values of few kinds, so that there are ties; one in eight is minus infinity."""
    attributes, lengths, outs = draw(pools(dilated=True))
    data, seed = draw(st.sampled_from(DATA_FORMATS)), draw(seeds)
    head = (draw(st.integers(1, 2)), draw(st.integers(1, 3)))
    x = values((*head, *lengths), seed).round()
    x[np.random.default_rng(seed).random(x.shape) < 1 / 8] = -np.inf
    inputs = [to_data(x, data), to_data(values((*head, *outs), seed + 1), data)]
    return Call("MaxPoolBackward", attributes | {"data_format": data}, [*inputs], seed)


@st.composite
def avg_pool_backward(draw: st.DrawFn) -> Call:
    """The source's shape as an attribute or as an input."""
    attributes, lengths, outs = draw(pools(dilated=False))
    data, seed = draw(st.sampled_from(DATA_FORMATS)), draw(seeds)
    head = (draw(st.integers(1, 2)), draw(st.integers(1, 3)))
    attributes |= {"data_format": data, "exclude_pad": draw(st.integers(0, 1))}
    shape = to_data(np.empty((*head, *lengths)), data).shape
    inputs: list[np.ndarray | None] = [to_data(values((*head, *outs), seed), data)]
    if draw(st.booleans()):
        attributes["src_shape"] = list(shape)
    else:
        inputs.append(np.array(shape, np.int64))
    return Call("AvgPoolBackward", attributes, inputs, seed)


@st.composite
def relu_backward(draw: st.DrawFn) -> Call:
    shape, seed = tuple(draw(st.lists(st.integers(0, 4), max_size=5))), draw(seeds)
    attributes = {"use_dst": draw(st.integers(0, 1))} if draw(st.booleans()) else {}
    return Call(
        "ReLUBackward", attributes, [np.asarray(values(shape, seed)), np.asarray(values(shape, seed + 1))], seed
    )


@st.composite
def batch_norm_training_backward(draw: st.DrawFn) -> Call:
    """Variances are not too small, so that float32 is not far from float64."""
    shape, seed = [draw(st.integers(1, 3)), *draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))], draw(seeds)
    data, channels = draw(st.sampled_from(DATA_FORMATS)), shape[1]
    x, dy = (to_data(values(tuple(shape), seed + n), data) for n in range(2))
    given = [values((channels,), seed + 2), np.abs(values((channels,), seed + 3)) + 1, values((channels,), seed + 4)]
    parameters = [array if draw(st.booleans()) else None for array in given]
    while parameters and parameters[-1] is None:
        parameters.pop()
    attributes = {"epsilon": draw(st.sampled_from([0.5, 0.25])), "data_format": data}
    return Call("BatchNormTrainingBackward", attributes, [x, dy, *parameters], seed)


@st.composite
def batch_norm_forward_training(draw: st.DrawFn) -> Call:
    """With ε, so that a small variance in float32 is not far from that in float64."""
    shape, seed = [draw(st.integers(0, 3)), *draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))], draw(seeds)
    data, channels = draw(st.sampled_from(DATA_FORMATS)), shape[1]
    parameters = [values((channels,), seed + n) for n in range(1, 5)]
    given = [array if draw(st.booleans()) else None for array in parameters[2:]]
    while given and given[-1] is None:
        given.pop()
    attributes = {
        "epsilon": draw(st.sampled_from([0.5, 0.25])),
        "momentum": draw(st.sampled_from([0.0, 0.875, 1.0])),
        "data_format": data,
    }
    inputs = [to_data(values(tuple(shape), seed), data), *parameters[:2], *given]
    return Call("BatchNormForwardTraining", attributes, inputs, seed)


@st.composite
def layer_norm_backward(draw: st.DrawFn) -> Call:
    """Variances are not too small, so that float32 is not far from float64."""
    shape, seed = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))), draw(seeds)
    axis, affine = draw(st.integers(-len(shape), len(shape) - 1)), draw(st.booleans())
    x, dy, gamma, beta, mean, variance = layer_norm_arrays(shape, axis, seed)
    statistics = [array if draw(st.booleans()) else None for array in (mean, variance)]
    parameters = [gamma, beta if draw(st.booleans()) else None] if affine else []
    inputs = [x, dy, *statistics, *parameters]
    while inputs[-1] is None:
        inputs.pop()
    attributes = {"epsilon": draw(st.sampled_from([0.5, 0.25])), "begin_norm_axis": axis, "use_affine": int(affine)}
    return Call("LayerNormBackward", attributes, inputs, seed)


def layer_norm_arrays(shape: tuple[int, ...], axis: int, seed: int) -> list[np.ndarray]:
    """x, dy, γ, β, μ, σ²."""
    tensors = [values(shape, seed + n) for n in range(2)]
    parameters = [values(shape[axis:], seed + n) for n in (2, 3)]
    statistics = [np.asarray(values(shape[:axis], seed + n), np.float32) for n in (4, 5)]
    return [*tensors, *parameters, statistics[0], np.asarray(np.abs(statistics[1]) + 1, np.float32)]


@st.composite
def soft_max_backward(draw: st.DrawFn) -> Call:
    """dst need not add up to 1 for the formula to hold."""
    shape, seed = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))), draw(seeds)
    attributes = {"axis": draw(st.integers(-len(shape), len(shape) - 1))}
    return Call("SoftMaxBackward", attributes, [values(shape, seed), values(shape, seed + 1)], seed)


CALLS: dict[str, Callable[[], st.SearchStrategy[Call]]] = {
    "InterpolateBackward": lambda: interpolate_backward("InterpolateBackward"),
    "InterpolateBackprop": lambda: interpolate_backward("InterpolateBackprop"),
    "ResampleGrad": resample_grad,
    "ResizeGrad": resize_grad,
    "Convolution": convolution,
    "ConvolutionBackwardData": convolution_backward_data,
    "ConvolutionBackwardWeights": convolution_backward_weights,
    "ConvTransposeBackwardData": conv_transpose_backward_data,
    "ConvTransposeBackwardWeights": lambda: conv_transpose_backward_weights("ConvTransposeBackwardWeights", "weights"),
    "ConvTransposeBackpropFilters": lambda: conv_transpose_backward_weights("ConvTransposeBackpropFilters", "filter"),
    "BiasAddBackward": bias_add_backward,
    "BatchNormForwardTraining": batch_norm_forward_training,
    "BatchNormTrainingBackward": batch_norm_training_backward,
    "LayerNormBackward": layer_norm_backward,
    "SoftMaxBackward": soft_max_backward,
    "ReLUBackward": relu_backward,
    "MaxPoolBackward": max_pool_backward,
    "AvgPoolBackward": avg_pool_backward,
}
