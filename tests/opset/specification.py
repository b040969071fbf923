"""The schemas, written from the specification texts, not from the package: names, kinds, defaults, what is required."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from onnx.defs import OpSchema

REQUIRED = object()
T1 = {"tensor(float)", "tensor(float16)", "tensor(bfloat16)"}
T2 = {"tensor(int32)"}
NUMBERS = {"T5": {"tensor(float)"}, "T2": T2, "T3": {"tensor(float)"}, "T4": {"tensor(int64)"}}
INT, FLOAT, INTS, FLOATS, STRING = (
    OpSchema.AttrType.INT,
    OpSchema.AttrType.FLOAT,
    OpSchema.AttrType.INTS,
    OpSchema.AttrType.FLOATS,
    OpSchema.AttrType.STRING,
)


class Schema(NamedTuple):
    """Attributes {name: (kind, REQUIRED, a default or None)}; inputs {name: (type, optional)}; the output, a T1."""

    attributes: dict[str, tuple[OpSchema.AttrType, object]]
    inputs: dict[str, tuple[str, bool]]
    output: str
    more: dict[str, str] = {}  # noqa: RUF012 - further outputs and their types


def interpolate(src: str, diff_dst: str, diff_src: str) -> Schema:
    return Schema(
        {
            "mode": (STRING, REQUIRED),
            "coordinate_transformation_mode": (STRING, "half_pixel"),
            "sizes": (INTS, None),
            "scales": (FLOATS, None),
            "data_format": (STRING, "NXC"),
        },
        {src: ("T1", False), diff_dst: ("T1", False), "sizes": ("T2", True)},
        diff_src,
    )


CONVOLUTION: dict[str, tuple[OpSchema.AttrType, object]] = {
    "strides": (INTS, REQUIRED),
    "pads_begin": (INTS, REQUIRED),
    "pads_end": (INTS, REQUIRED),
    "dilations": (INTS, REQUIRED),
    "auto_pad": (STRING, "None"),
    "groups": (INT, 1),
    "data_format": (STRING, "NXC"),
}
SPECIFICATION: dict[str, Schema] = {
    "InterpolateBackprop": interpolate("input_forward", "output_delta", "input_delta"),
    "InterpolateBackward": interpolate("src", "diff_dst", "diff_src"),
    "ResampleGrad": Schema(
        {
            "interpolation_mode": (STRING, REQUIRED),
            "scales": (FLOATS, REQUIRED),
            "input_pixel_offsets": (FLOATS, REQUIRED),
            "output_pixel_offsets": (FLOATS, REQUIRED),
            "dimension_count": (INT, None),
            "output_sizes": (INTS, None),
        },
        {"input_gradient": ("T1", False), "output_sizes": ("T2", True)},
        "output_gradient",
    ),
    "ResizeGrad": Schema(
        {
            "antialias": (INT, 0),
            "axes": (INTS, None),
            "coordinate_transformation_mode": (STRING, "half_pixel"),
            "cubic_coeff_a": (FLOAT, -0.75),
            "exclude_outside": (INT, 0),
            "extrapolation_value": (FLOAT, 0.0),
            "keep_aspect_ratio_policy": (STRING, "stretch"),
            "mode": (STRING, "nearest"),
            "nearest_mode": (STRING, "round_prefer_floor"),
        },
        {"dY": ("T1", False), "X": ("T1", False), "roi": ("T3", True), "scales": ("T3", True), "sizes": ("T4", True)},
        "dX",
    ),
    "Convolution": Schema(
        CONVOLUTION | {"weights_format": (STRING, "XIO")},
        {"src": ("T1", False), "weights": ("T1", False), "bias": ("T1", True)},
        "dst",
    ),
    "ConvolutionBackwardData": Schema(
        CONVOLUTION | {"output_padding": (INTS, None), "weights_format": (STRING, "XIO"), "dst_shape": (INTS, None)},
        {"diff_dst": ("T1", False), "weights": ("T1", False), "dst_shape": ("T2", True)},
        "diff_src",
    ),
    "ConvolutionBackwardWeights": Schema(
        CONVOLUTION | {"weights_format": (STRING, "XIO"), "weights_shape": (INTS, None)},
        {"src": ("T1", False), "diff_dst": ("T1", False), "weights_shape": ("T2", True)},
        "diff_weights",
    ),
    "ConvTransposeBackwardData": Schema(
        CONVOLUTION | {"output_padding": (INTS, None), "weights_format": (STRING, "XOI")},
        {"diff_dst": ("T1", False), "weights": ("T1", False)},
        "diff_src",
    ),
    "ConvTransposeBackwardWeights": Schema(
        CONVOLUTION
        | {"output_padding": (INTS, None), "weights_format": (STRING, "XOI"), "weights_shape": (INTS, None)},
        {"src": ("T1", False), "diff_dst": ("T1", False), "weights_shape": ("T2", True)},
        "diff_weights",
    ),
    "ConvTransposeBackpropFilters": Schema(
        CONVOLUTION | {"output_padding": (INTS, None), "filter_format": (STRING, "XIO"), "filter_shape": (INTS, None)},
        {"input_forward": ("T1", False), "output_delta": ("T1", False), "filter_shape": ("T2", True)},
        "filter_delta",
    ),
    "MaxPoolBackward": Schema(
        {
            "strides": (INTS, REQUIRED),
            "pads_begin": (INTS, REQUIRED),
            "pads_end": (INTS, REQUIRED),
            "kernel": (INTS, REQUIRED),
            "auto_pad": (STRING, "None"),
            "dilations": (INTS, None),
            "data_format": (STRING, "NXC"),
        },
        {"src": ("T1", False), "diff_dst": ("T1", False)},
        "diff_src",
    ),
    "AvgPoolBackward": Schema(
        {
            "strides": (INTS, REQUIRED),
            "pads_begin": (INTS, REQUIRED),
            "pads_end": (INTS, REQUIRED),
            "kernel": (INTS, REQUIRED),
            "exclude_pad": (INT, REQUIRED),
            "auto_pad": (STRING, "None"),
            "data_format": (STRING, "NXC"),
            "src_shape": (INTS, None),
        },
        {"diff_dst": ("T1", False), "src_shape": ("T4", True)},
        "diff_src",
    ),
    "ReLUBackward": Schema({"use_dst": (INT, 1)}, {"src": ("T1", False), "diff_dst": ("T1", False)}, "diff_src"),
    "BatchNormForwardTraining": Schema(
        {"epsilon": (FLOAT, REQUIRED), "momentum": (FLOAT, REQUIRED), "data_format": (STRING, "NXC")},
        {
            "src": ("T1", False),
            "mean": ("T5", False),
            "variance": ("T5", False),
            "gamma": ("T5", True),
            "beta": ("T5", True),
        },
        "dst",
        {"running_mean": "T5", "running_variance": "T5", "batch_mean": "T5", "batch_variance": "T5"},
    ),
    "BatchNormTrainingBackward": Schema(
        {"epsilon": (FLOAT, REQUIRED), "data_format": (STRING, "NXC")},
        {
            "src": ("T1", False),
            "diff_dst": ("T1", False),
            "mean": ("T5", True),
            "variance": ("T5", True),
            "gamma": ("T5", True),
        },
        "diff_src",
        {"diff_gamma": "T5", "diff_beta": "T5"},
    ),
    "LayerNormBackward": Schema(
        {"begin_norm_axis": (INT, -1), "use_affine": (INT, 1), "epsilon": (FLOAT, float(np.float32(1e-5)))},
        {
            "src": ("T1", False),
            "diff_dst": ("T1", False),
            "mean": ("T5", True),
            "variance": ("T5", True),
            "gamma": ("T5", True),
            "beta": ("T5", True),
        },
        "diff_src",
        {"diff_gamma": "T5", "diff_beta": "T5"},
    ),
    "SoftMaxBackward": Schema({"axis": (INT, 1)}, {"diff_dst": ("T1", False), "dst": ("T1", False)}, "diff_src"),
    "BiasAddBackward": Schema({"data_format": (STRING, "NXC")}, {"diff_dst": ("T1", False)}, "diff_bias"),
}
# What each string attribute takes; auto_pad also in lower case, and NOTSET.
CHOICES = {
    "mode": {"nearest", "linear", "bilinear", "trilinear"},
    "coordinate_transformation_mode": {"half_pixel", "align_corners"},
    "interpolation_mode": {"NEAREST_NEIGHBOR", "LINEAR"},
    "data_format": {"NXC", "NCX"},
    "auto_pad": {"None", "SAME_UPPER", "SAME_LOWER", "VALID"},
    "weights_format": {"XIO", "OIX"},
    "filter_format": {"XIO", "OIX", "XOI", "IOX"},
}
OWN_CHOICES = {
    "ResizeGrad": {
        "coordinate_transformation_mode": {
            "half_pixel",
            "half_pixel_symmetric",
            "pytorch_half_pixel",
            "align_corners",
            "asymmetric",
            "tf_half_pixel_for_nn",
            "tf_crop_and_resize",
        },
        "keep_aspect_ratio_policy": {"stretch", "not_larger", "not_smaller"},
        "mode": {"nearest", "linear", "cubic"},
        "nearest_mode": {"round_prefer_floor", "round_prefer_ceil", "floor", "ceil"},
    }
}
CONV_TRANSPOSE_FORMATS = {"XIO", "OIX", "XOI", "IOX"}
