"""Random valid calls of every operator, large enough that blocked and vectorised loops meet their tails.

The strategies of tests/property stay small, so that a failure is easy to read; these cross the sizes of registers,
tiles and bands.
"""

from __future__ import annotations

import numpy as np

from tests.property.calls import (
    CONV_FORMATS,
    CONV_TRANSPOSE_FORMATS,
    Call,
    conv_order,
    conv_transpose_order,
    layer_norm_arrays,
    to_data,
    to_weights,
    values,
)

Rng = np.random.Generator
MAX_ELEMENTS = 60_000  # of a tensor


def _pick(rng: Rng, *choices):
    return choices[rng.integers(len(choices))]


def _length(rng: Rng, high: int) -> int:
    """Small ones and those around the sizes of registers and tiles are as likely as all others together."""
    if rng.random() < 0.5:
        return int(rng.integers(1, high + 1))
    return min(high, int(_pick(rng, 1, 2, 3, 4, 8, 11, 12, 13, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65)))


def _fits(*shapes: list[int]) -> bool:
    return all(np.prod(shape) <= MAX_ELEMENTS for shape in shapes)


def convolution(rng: Rng, op: str) -> Call:
    while True:
        axes = int(rng.integers(1, 4))
        groups = int(_pick(rng, 1, 1, 1, 2, 3, 16, 33))
        d, s = (1, 1) if groups > 3 and rng.random() < 0.7 else (_length(rng, 70), _length(rng, 70))
        batch = int(rng.integers(1, 4))
        k = [int(_pick(rng, 1, 1, 2, 3, 3, 5)) for _ in range(axes)]
        strides = [int(_pick(rng, 1, 1, 2, 3)) for _ in range(axes)]
        dilations = [int(_pick(rng, 1, 1, 2)) for _ in range(axes)]
        begin, end = ([int(rng.integers(0, 4)) for _ in range(axes)] for _ in range(2))
        if axes == 2 and rng.random() < 0.4:  # by Winograd's tiles
            k, strides, dilations, groups = [3, 3], [1, 1], [1, 1], int(_pick(rng, 1, 1, 2))
            d, s = int(rng.integers(15, 40)), int(rng.integers(15, 40))
        if axes == 2 and d == s == 1 and groups > 3 and rng.random() < 0.6:  # slid over planes
            k, strides, dilations = [int(_pick(rng, 3, 5))] * 2, [1, 1], [1, int(_pick(rng, 1, 1, 2, 9))]
        if rng.random() < 0.1:  # no tap shifts: copied tile by tile
            k = strides = [int(_pick(rng, 1, 2, 2, 3)) for _ in range(axes)]
            begin, dilations = [n * int(_pick(rng, 0, 0, 0, 1)) for n in k], [1] * axes
        outs = [_length(rng, 70 if axes == 1 else 40 if axes == 2 else 12) for _ in range(axes)]
        longs = []
        for axis, out in enumerate(outs):
            natural = strides[axis] * (out - 1) + (k[axis] - 1) * dilations[axis] + 1
            if natural - begin[axis] - end[axis] < 1:
                begin[axis] = end[axis] = 0
            longs.append(natural - begin[axis] - end[axis] + int(rng.integers(0, strides[axis])))
        x, y, w = [batch, groups * s, *longs], [batch, groups * d, *outs], [groups * d, s, *k]
        if _fits(x, y, w):
            break
    seed = int(rng.integers(2**31))
    source, destination, weights = (values(tuple(shape), seed + n) for n, shape in enumerate((x, y, w)))
    data = _pick(rng, "NCX", "NXC")
    attributes = {
        "strides": strides,
        "dilations": dilations,
        "pads_begin": begin,
        "pads_end": end,
        "groups": groups,
        "data_format": data,
    }
    source, destination = to_data(source, data), to_data(destination, data)
    name = "filter" if op == "ConvTransposeBackpropFilters" else "weights"
    transposed = op.startswith("ConvTranspose")
    layout = _pick(rng, *(CONV_TRANSPOSE_FORMATS if transposed else CONV_FORMATS))
    weights = to_weights(weights, conv_transpose_order(layout) if transposed else conv_order(layout))
    attributes[f"{name}_format"] = layout
    if op == "Convolution":
        bias = [values((groups * d,), seed + 3)] if rng.random() < 0.5 else []
        return Call(op, attributes, [source, weights, *bias], seed)
    stated = {"ConvolutionBackwardData": ("dst_shape", source.shape), "ConvTransposeBackwardData": None}
    shape = stated.get(op, (f"{name}_shape", weights.shape))
    inputs: list[np.ndarray | None] = [source, weights] if transposed else [destination, weights]
    if not op.endswith("Data"):
        inputs = [destination, source] if transposed else [source, destination]
    if shape is not None:
        if rng.random() < 0.5:
            attributes[shape[0]] = list(shape[1])
        else:
            inputs.append(np.array(shape[1], np.int32))
    return Call(op, attributes, inputs, seed)


def interpolation(rng: Rng, op: str) -> Call:
    while True:
        axes = int(rng.integers(1, 4))
        lengths, outs = ([_length(rng, 80 if axes < 3 else 20) for _ in range(axes)] for _ in range(2))
        head = [int(rng.integers(1, 3)), _length(rng, 40)]
        if _fits([*head, *lengths], [*head, *outs]):
            break
    seed = int(rng.integers(2**31))
    data = _pick(rng, "NCX", "NXC")
    attributes = {
        "mode": _pick(rng, "nearest", "linear"),
        "coordinate_transformation_mode": _pick(rng, "half_pixel", "align_corners"),
        "data_format": data,
    }
    inputs = [to_data(values((*head, *shape), seed + n), data) for n, shape in enumerate((lengths, outs))]
    return Call(op, attributes, [*inputs], seed)


def resample(rng: Rng, op: str) -> Call:
    while True:
        rank = int(rng.integers(1, 5))
        lengths, outs = ([_length(rng, 40) for _ in range(rank)] for _ in range(2))
        if _fits(lengths, outs):
            break
    seed = int(rng.integers(2**31))
    attributes = {
        "interpolation_mode": _pick(rng, "NEAREST_NEIGHBOR", "LINEAR"),
        "scales": _pick(rng, [], [float(v) / 4 for v in rng.integers(1, 12, rank)]),
        "input_pixel_offsets": _pick(rng, [], [float(v) / 4 for v in rng.integers(-6, 7, rank)]),
        "output_pixel_offsets": [],
    }
    return Call(op, attributes, [values(tuple(outs), seed), np.array(lengths, np.int32)], seed)


def resize(rng: Rng, op: str) -> Call:
    while True:
        shape = [int(rng.integers(1, 4)), _length(rng, 40), _length(rng, 70), _length(rng, 70)]
        axes = _pick(rng, [2, 3], [1, 2], [3], [2], [0, 2, 3])
        outs = [int(n) for n in shape]
        for axis in axes:
            outs[axis] = _length(rng, 80)
        if _fits(shape, outs):
            break
    seed = int(rng.integers(2**31))
    mode = _pick(rng, "nearest", "linear", "cubic")
    attributes = {
        "mode": mode,
        "coordinate_transformation_mode": _pick(rng, "half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize"),
        "axes": axes,
        "antialias": 0 if mode == "nearest" else int(rng.integers(2)),
    }
    roi = None
    if attributes["coordinate_transformation_mode"] == "tf_crop_and_resize":
        roi = np.array([0.8] * len(axes) + [0.125] * len(axes), np.float32)  # turned round
        attributes["antialias"] = 0
    sizes = np.array([outs[a] for a in axes], np.int64)
    return Call(op, attributes, [values(tuple(outs), seed), values(tuple(shape), seed), roi, None, sizes], seed)


def bias(rng: Rng, op: str) -> Call:
    shape = [_length(rng, 70) for _ in range(int(rng.integers(2, 4)))]
    seed = int(rng.integers(2**31))
    return Call(op, {"data_format": _pick(rng, "NCX", "NXC")}, [values(tuple(shape), seed)], seed)


def pool(rng: Rng, op: str) -> Call:
    while True:
        axes = int(rng.integers(1, 4))
        kernel = [int(_pick(rng, 1, 2, 2, 3, 3, 5)) for _ in range(axes)]
        strides = [int(_pick(rng, 1, 1, 2, 2, 3)) for _ in range(axes)]
        dilations = [1 if op == "AvgPoolBackward" else int(_pick(rng, 1, 1, 1, 2, 7)) for _ in range(axes)]
        begin, end = ([int(rng.integers(0, k)) for k in kernel] for _ in range(2))
        lengths = [_length(rng, 80 if axes == 1 else 40 if axes == 2 else 12) for _ in range(axes)]
        rooms = [
            length + p + e - (k - 1) * d - 1
            for length, k, d, p, e in zip(lengths, kernel, dilations, begin, end, strict=True)
        ]
        outs = [max(room // stride + 1, 0) for room, stride in zip(rooms, strides, strict=True)]
        head = [int(rng.integers(1, 3)), _length(rng, 150)]
        if _fits([*head, *lengths], [*head, *outs]):
            break
    seed = int(rng.integers(2**31))
    data = _pick(rng, "NCX", "NXC")
    attributes = {
        "kernel": kernel,
        "strides": strides,
        "dilations": dilations,
        "pads_begin": begin,
        "pads_end": end,
        "data_format": data,
    }
    x, dy = (to_data(values((*head, *shape), seed + n), data) for n, shape in enumerate((lengths, outs)))
    if op == "AvgPoolBackward":
        del attributes["dilations"]
        shape = np.array(x.shape, np.int64)
        return Call(op, attributes | {"exclude_pad": int(rng.integers(2))}, [dy, shape], seed)
    return Call(op, attributes, [x, dy], seed)


def elementwise(rng: Rng, op: str) -> Call:
    shape = tuple(_length(rng, 70) for _ in range(int(rng.integers(1, 4))))
    seed = int(rng.integers(2**31))
    attributes = {"axis": int(rng.integers(-len(shape), len(shape)))} if op == "SoftMaxBackward" else {}
    return Call(op, attributes, [values(shape, seed), values(shape, seed + 1)], seed)


def batch_norm(rng: Rng, op: str) -> Call:
    shape = [int(rng.integers(1, 4)), _length(rng, 150), *(_length(rng, 70) for _ in range(int(rng.integers(0, 3))))]
    if not _fits(shape):
        shape = shape[:2]
    seed, channels, data = int(rng.integers(2**31)), shape[1], _pick(rng, "NCX", "NXC")
    x, dy = (to_data(values(tuple(shape), seed + n), data) for n in range(2))
    given = [values((channels,), seed + 2), np.abs(values((channels,), seed + 3)) + 1, values((channels,), seed + 4)]
    parameters = [array if rng.random() < 0.5 else None for array in given]
    while parameters and parameters[-1] is None:
        parameters.pop()
    return Call(op, {"epsilon": 0.5, "data_format": data}, [x, dy, *parameters], seed)


def batch_norm_forward(rng: Rng, op: str) -> Call:
    shape = [int(rng.integers(1, 4)), _length(rng, 150), *(_length(rng, 70) for _ in range(int(rng.integers(0, 3))))]
    if not _fits(shape):
        shape = shape[:2]
    seed, channels, data = int(rng.integers(2**31)), shape[1], _pick(rng, "NCX", "NXC")
    parameters = [values((channels,), seed + n) for n in range(1, 5)]
    given = [array if rng.random() < 0.5 else None for array in parameters[2:]]
    while given and given[-1] is None:
        given.pop()
    attributes = {"epsilon": 0.5, "momentum": _pick(rng, 0.75, 0.875), "data_format": data}
    return Call(op, attributes, [to_data(values(tuple(shape), seed), data), *parameters[:2], *given], seed)


def layer_norm(rng: Rng, op: str) -> Call:
    while True:
        shape = tuple(_length(rng, 300) for _ in range(int(rng.integers(1, 5))))
        if _fits(shape):
            break
    seed, axis = int(rng.integers(2**31)), int(rng.integers(-len(shape), len(shape)))
    x, dy, gamma, beta, mean, variance = layer_norm_arrays(shape, axis, seed)
    inputs = [x, dy, *(array if rng.random() < 0.5 else None for array in (mean, variance))]
    affine = int(rng.random() < 0.7)
    if affine:
        inputs += [gamma, beta] if rng.random() < 0.5 else [gamma]
    while inputs[-1] is None:
        inputs.pop()
    return Call(op, {"epsilon": 0.5, "begin_norm_axis": axis, "use_affine": affine}, inputs, seed)


MAKERS = {
    "Convolution": convolution,
    "ConvolutionBackwardData": convolution,
    "ConvolutionBackwardWeights": convolution,
    "ConvTransposeBackwardData": convolution,
    "ConvTransposeBackwardWeights": convolution,
    "ConvTransposeBackpropFilters": convolution,
    "InterpolateBackward": interpolation,
    "InterpolateBackprop": interpolation,
    "ResampleGrad": resample,
    "ResizeGrad": resize,
    "BiasAddBackward": bias,
    "MaxPoolBackward": pool,
    "AvgPoolBackward": pool,
    "ReLUBackward": elementwise,
    "SoftMaxBackward": elementwise,
    "BatchNormForwardTraining": batch_norm_forward,
    "BatchNormTrainingBackward": batch_norm,
    "LayerNormBackward": layer_norm,
}


def random_call(rng: Rng) -> Call:
    op = _pick(rng, *MAKERS)
    return MAKERS[op](rng, op)
