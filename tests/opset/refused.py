"""Bad calls and the sentence each is refused with: one valid call per operator, and changes to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

import onnx_backprop as ob

Value = np.ndarray | tuple[int, ...] | None

_CONV = {"strides": [2], "pads_begin": [1], "pads_end": [1], "dilations": [1], "data_format": "NCX"}
_POOL = {"kernel": [3], "strides": [2], "pads_begin": [1], "pads_end": [1], "data_format": "NCX"}
_RESAMPLE = {
    "interpolation_mode": "LINEAR",
    "scales": [2.0, 2.0],
    "input_pixel_offsets": [0.5, 0.5],
    "output_pixel_offsets": [-0.5, -0.5],
}
# One valid call of each operator: attributes, the shapes of its tensors and what else it needs.
VALID: dict[str, tuple[dict[str, Any], list[Value]]] = {
    "InterpolateBackward": ({"mode": "linear", "data_format": "NCX"}, [(1, 2, 4), (1, 2, 7)]),
    "InterpolateBackprop": ({"mode": "nearest", "data_format": "NCX"}, [(1, 2, 4), (1, 2, 7)]),
    "ResampleGrad": (_RESAMPLE | {"output_sizes": [2, 3]}, [(4, 6)]),
    "ResizeGrad": ({"mode": "linear"}, [(2, 7), (2, 4), None, None, np.array([2, 7], np.int64)]),
    "Convolution": (_CONV | {"weights_format": "OIX"}, [(1, 4, 5), (6, 4, 3), (6,)]),
    "ConvolutionBackwardData": (_CONV | {"weights_format": "OIX", "dst_shape": [1, 4, 5]}, [(1, 6, 3), (6, 4, 3)]),
    "ConvolutionBackwardWeights": (
        _CONV | {"weights_format": "OIX", "weights_shape": [6, 4, 3]},
        [(1, 4, 5), (1, 6, 3)],
    ),
    "ConvTransposeBackwardData": (_CONV | {"weights_format": "IOX"}, [(1, 4, 5), (6, 4, 3)]),
    "ConvTransposeBackwardWeights": (
        _CONV | {"weights_format": "IOX", "weights_shape": [6, 4, 3]},
        [(1, 6, 3), (1, 4, 5)],
    ),
    "ConvTransposeBackpropFilters": (
        _CONV | {"filter_format": "OIX", "filter_shape": [4, 6, 3]},
        [(1, 6, 3), (1, 4, 5)],
    ),
    "BiasAddBackward": ({"data_format": "NCX"}, [(1, 2, 3)]),
    "ReLUBackward": ({}, [(2, 3), (2, 3)]),
    "SoftMaxBackward": ({}, [(2, 3), (2, 3)]),
    "BatchNormTrainingBackward": (
        {"epsilon": 1e-5, "data_format": "NCX"},
        [(2, 3, 4), (2, 3, 4), (3,), (3,), (3,)],
    ),
    "LayerNormBackward": ({"begin_norm_axis": 1}, [(2, 3, 4), (2, 3, 4), (2,), (2,), (3, 4), (3, 4)]),
    "MaxPoolBackward": (_POOL, [(1, 2, 7), (1, 2, 4)]),
    "AvgPoolBackward": (_POOL | {"exclude_pad": 1, "src_shape": [1, 2, 7]}, [(1, 2, 4)]),
}

IB, IBP, RG, BIAS = "InterpolateBackward", "InterpolateBackprop", "ResampleGrad", "BiasAddBackward"
RZ = "ResizeGrad"
CD, CW = "ConvolutionBackwardData", "ConvolutionBackwardWeights"
TD, TW, TF = "ConvTransposeBackwardData", "ConvTransposeBackwardWeights", "ConvTransposeBackpropFilters"
SM = "SoftMaxBackward"
MP, RELU, BN = "MaxPoolBackward", "ReLUBackward", "BatchNormTrainingBackward"
LN, AP = "LayerNormBackward", "AvgPoolBackward"
POOL_OPS = (MP, AP)
CV = "Convolution"
CONVOLUTION_OPS = (CV, CD, CW, TD, TW, TF)


@dataclass(frozen=True)
class Bad:
    """A change of the valid call and the whole sentence behind the operator's name. None removes."""

    op: str
    message: str
    attributes: dict[str, Any] = field(default_factory=dict)
    inputs: dict[int, Value] = field(default_factory=dict)
    error: type[Exception] = ob.ShapeError
    model_shows_it: bool = True

    @property
    def id(self) -> str:
        return f"{self.op}-{self.attributes or ''}{self.inputs or ''}"[:90]

    def call(self) -> tuple[dict[str, Any], list[Value]]:
        attributes, inputs = VALID[self.op]
        changed = {k: v for k, v in (attributes | self.attributes).items() if v is not None}
        given = dict(enumerate(inputs)) | self.inputs
        return changed, [given.get(n) for n in range(max(given) + 1)]


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def longs(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def invalid(op: str, message: str, attributes: dict[str, Any], *, model_shows_it: bool = True) -> Bad:
    return Bad(op, message, attributes, error=ob.InvalidModelError, model_shows_it=model_shows_it)


ATTRIBUTES = [
    # values that are not among the choices: case matters, auto_pad excepted
    invalid(
        IB, "attribute mode: expected one of nearest, linear, bilinear, trilinear, got 'cubic'", {"mode": "cubic"}
    ),
    invalid(
        IBP, "attribute mode: expected one of nearest, linear, bilinear, trilinear, got 'Linear'", {"mode": "Linear"}
    ),
    invalid(
        IB,
        "attribute coordinate_transformation_mode: expected one of half_pixel, align_corners, got 'asymmetric'",
        {"coordinate_transformation_mode": "asymmetric"},
    ),
    invalid(
        RG,
        "attribute interpolation_mode: expected one of NEAREST_NEIGHBOR, LINEAR, got 'CUBIC'",
        {"interpolation_mode": "CUBIC"},
    ),
    *(
        invalid(op, "attribute data_format: expected one of NXC, NCX, got 'NHWC'", {"data_format": "NHWC"})
        for op in VALID
        if op not in (RG, RZ, RELU, SM, LN)
    ),
    *(
        invalid(
            op,
            "attribute auto_pad: expected one of None, SAME_UPPER, SAME_LOWER, VALID, got 'SAME'",
            {"auto_pad": "SAME"},
        )
        for op in (*CONVOLUTION_OPS, *POOL_OPS)
    ),
    *(
        invalid(op, "attribute weights_format: expected one of XIO, OIX, got 'IOX'", {"weights_format": "IOX"})
        for op in (CV, CD, CW)
    ),
    *(
        invalid(
            op, "attribute weights_format: expected one of XOI, IOX, XIO, OIX, got 'OIHW'", {"weights_format": "OIHW"}
        )
        for op in (TD, TW)
    ),
    invalid(TF, "attribute filter_format: expected one of XOI, IOX, XIO, OIX, got 'xio'", {"filter_format": "xio"}),
    # kinds
    invalid(CD, "attribute groups: expected int, got 1.5", {"groups": 1.5}),
    invalid(CD, "attribute groups: expected int, got True", {"groups": True}, model_shows_it=False),
    invalid(CD, "attribute strides: expected ints, got 2", {"strides": 2}),
    invalid(CD, "attribute strides: expected ints, got [1.5]", {"strides": [1.5]}),
    invalid(IB, "attribute mode: expected string, got 3", {"mode": 3}),
    invalid(IB, "attribute scales: expected floats, got '1.75'", {"scales": "1.75"}, model_shows_it=False),
    invalid(IB, "attribute scales: expected floats, got ['1.75']", {"scales": ["1.75"]}, model_shows_it=False),
    invalid(RG, "attribute dimension_count: expected int, got [2]", {"dimension_count": [2]}),
    # names
    invalid(
        IB,
        "unknown attribute axes; it takes mode, coordinate_transformation_mode, sizes, scales, data_format",
        {"axes": [2]},
        model_shows_it=False,
    ),
    invalid(BIAS, "unknown attribute axis, keepdims; it takes data_format", {"keepdims": 0, "axis": 1}, model_shows_it=False),
    invalid(
        CW,
        "unknown attribute output_padding; it takes strides, pads_begin, pads_end, dilations, auto_pad, groups, "
        "data_format, weights_format, weights_shape",
        {"output_padding": [0]},
        model_shows_it=False,
    ),
]  # fmt: skip

CONVOLUTIONS = [
    *(
        bad
        for op in CONVOLUTION_OPS
        for bad in (
            Bad(op, "attribute strides: expected values >= 1, got [0]", {"strides": [0]}),
            Bad(op, "attribute strides: expected values >= 1, got [-2]", {"strides": [-2]}),
            Bad(op, "attribute dilations: expected values >= 1, got [0]", {"dilations": [0]}),
            Bad(op, "attribute pads_begin: expected values >= 0, got [-1]", {"pads_begin": [-1]}),
            Bad(op, "attribute pads_end: expected values >= 0, got [-1]", {"pads_end": [-1]}),
            # ignored, and checked all the same
            Bad(
                op,
                "attribute pads_end: expected values >= 0, got [-1]",
                {"pads_end": [-1], "auto_pad": "SAME_UPPER"},
            ),
            Bad(op, "attribute groups: expected values >= 1, got [0]", {"groups": 0}),
            *(
                Bad(
                    op,
                    f"attribute {name} (one per spatial axis): expected 1 entries, got 2 in [1, 1]",
                    {name: [1, 1]},
                )
                for name in ("strides", "dilations", "pads_begin", "pads_end")
            ),
            Bad(
                op,
                "attribute strides (one per spatial axis): expected 1 entries, got 0 in []",
                {"strides": []},
            ),
        )
    ),
    *(
        Bad(op, "attribute output_padding: expected values >= 0, got [-1]", {"output_padding": [-1]})
        for op in (CD, TD, TW, TF)
    ),
    # the shape that the lengths leave open
    Bad(CD, "expected dst_shape as attribute or input, got neither", {"dst_shape": None}),
    Bad(CW, "expected weights_shape as attribute or input, got neither", {"weights_shape": None}),
    Bad(TW, "expected weights_shape as attribute or input, got neither", {"weights_shape": None}),
    Bad(TF, "expected filter_shape as attribute or input, got neither", {"filter_shape": None}),
    Bad(CD, "expected dst_shape as attribute or input, got neither", {"dst_shape": []}),
    Bad(CD, "attribute dst_shape: expected 3 to 5 entries, got 1", {"dst_shape": [5]}),  # spatial only
    Bad(CD, "input dst_shape: expected 3 to 5 entries, got 1", inputs={2: ints(5)}),
    Bad(CD, "dst_shape: expected rank 3, got 4 with shape (1, 4, 5, 5)", {"dst_shape": [1, 4, 5, 5]}),
    Bad(CD, "attribute dst_shape: expected values >= 0, got [1, 4, -1]", {"dst_shape": [1, 4, -1]}),
    Bad(CD, "input dst_shape: expected values >= 0, got [1, 4, -1]", inputs={2: ints(1, 4, -1)}),
    Bad(CD, "input dst_shape: expected 3 to 5 entries, got 0", inputs={2: ints()}),
    # batch, channels, groups
    Bad(CD, "batch sizes of dst_shape and diff_dst must agree, got 2 and 1", {"dst_shape": [2, 4, 5]}),
    Bad(
        CD,
        "channels of dst_shape and groups (1) × channels per group of weights must agree, got 5 and 4",
        {"dst_shape": [1, 5, 5]},
    ),
    Bad(CD, "channels of diff_dst and of weights must agree, got 7 and 6", inputs={0: (1, 7, 3)}),
    Bad(
        CD,
        "channels of dst_shape and groups (2) × channels per group of weights must agree, got 4 and 8",
        {"groups": 2},
    ),
    Bad(
        CD,
        "channels of diff_dst: expected a multiple of groups 4, got 6",
        {"groups": 4},
        {1: (6, 1, 3)},
    ),
    # a forgotten layout turns channels into lengths
    Bad(CD, "batch sizes of dst_shape and diff_dst must agree, got 4 and 1", {"dst_shape": [4, 1, 5]}),
    Bad(CD, "channels of diff_dst and of weights must agree, got 3 and 6", {"data_format": "NXC"}),
    Bad(CW, "batch sizes of src and diff_dst must agree, got 1 and 2", inputs={1: (2, 6, 3)}),
    Bad(CW, "channels of diff_dst and of weights_shape must agree, got 6 and 5", {"weights_shape": [5, 4, 3]}),
    Bad(
        CW,
        "channels of src and groups (1) × channels per group of weights_shape must agree, got 4 and 2",
        {"weights_shape": [6, 2, 3]},
    ),
    Bad(
        TD,
        "channels of diff_dst and groups (2) × channels per group of weights must agree, got 4 and 8",
        {"groups": 2},
    ),
    Bad(TD, "channels of diff_src: expected a multiple of groups 4, got 6", {"groups": 4}, {1: (6, 1, 3)}),
    Bad(TW, "batch sizes of diff_dst and src must agree, got 2 and 1", inputs={1: (2, 4, 5)}),
    # O is what the groups divide, not I: (2, 4, 3) is refused where (4, 2, 3) is right
    Bad(
        TW,
        "channels of src and of weights_shape must agree, got 4 and 2",
        {"groups": 2, "weights_shape": [2, 4, 3]},
        {0: (1, 4, 3)},
    ),
    Bad(
        TF,
        "channels of input_forward and of filter_shape must agree, got 6 and 4",
        {"filter_shape": [6, 4, 3]},
    ),
    Bad(CV, "channels of src and groups (1) × channels per group of weights must agree, got 5 and 4", inputs={0: (1, 5, 5)}),
    Bad(CV, "channels of src and groups (2) × channels per group of weights must agree, got 4 and 8", {"groups": 2}),
    Bad(CV, "channels of dst: expected a multiple of groups 4, got 6", {"groups": 4}, {1: (6, 1, 3)}),
    # a bias of one entry is no bias for all channels
    Bad(CV, "lengths of bias and channels of weights must agree, got 1 and 6", inputs={2: (1,)}),
    Bad(CV, "lengths of bias and channels of weights must agree, got 7 and 6", inputs={2: (7,)}),
    Bad(CV, "bias: expected rank 1, got 3 with shape (6, 1, 1)", inputs={2: (6, 1, 1)}),
    Bad(
        CV,
        "spatial axis 0: the kernel (3, dilation 4) covers 9 cells, expected at most the padded src, got 5 + 1 + 1",
        {"dilations": [4]},
    ),
    Bad(CV, "weights, spatial axis 0: expected a kernel length >= 1, got 0", inputs={1: (6, 4, 0)}),
    # geometry
    *(
        Bad(
            CD,
            f"spatial axis 0: dst_shape length {length} with kernel 3, stride 2, dilation 1, pads 1 and 1 expects "
            f"diff_dst length {natural}, got 3",
            {"dst_shape": [1, 4, length]},
        )
        for length, natural in ((4, 2), (7, 4))
    ),
    Bad(
        CD,
        "spatial axis 0: the kernel (3, dilation 4) covers 9 cells, expected at most the padded dst_shape, got 5 + 1 + 1",
        {"dilations": [4]},
    ),
    # a division that truncates toward zero would let this through with one destination cell
    Bad(
        CD,
        "spatial axis 0: the kernel (3, dilation 1) covers 3 cells, expected at most the padded dst_shape, got 2 + 0 + 0",
        {"dst_shape": [1, 4, 2], "pads_begin": [0], "pads_end": [0]},
        {0: (1, 6, 1)},
    ),
    Bad(CD, "weights, spatial axis 0: expected a kernel length >= 1, got 0", inputs={1: (6, 4, 0)}),
    Bad(
        CW,
        "spatial axis 0: src length 8 with kernel 3, stride 2, dilation 1, pads 1 and 1 expects diff_dst length 4, got 3",
        inputs={0: (1, 4, 8)},
    ),
    Bad(
        CW,
        "spatial axis 0: src length 5 with kernel 3, stride 2, dilation 1, pads 0 and 0 expects diff_dst length 2, got 3",
        {"auto_pad": "valid"},
    ),
    Bad(CW, "weights_shape, spatial axis 0: expected a kernel length >= 1, got 0", {"weights_shape": [6, 4, 0]}),
    Bad(
        TW,
        "spatial axis 0: diff_dst length 7 with kernel 3, stride 2, dilation 1, pads 1 and 1 expects src length 4, got 3",
        inputs={1: (1, 4, 7)},
    ),
    # an output_padding of a whole stride is another input cell
    Bad(
        TW,
        "spatial axis 0: diff_dst length 7 with kernel 3, stride 2, dilation 1, pads 1 and 1 expects src length 4, got 3",
        {"output_padding": [2]},
        {1: (1, 4, 7)},
    ),
    Bad(
        TF,
        "spatial axis 0: output_delta length 7 with kernel 3, stride 2, dilation 1, pads 1 and 1 expects input_forward "
        "length 4, got 3",
        inputs={1: (1, 4, 7)},
    ),
    Bad(
        TD,
        "spatial axis 0: the kernel (3, dilation 4) covers 9 cells, expected at most the padded diff_dst, got 5 + 1 + 1",
        {"dilations": [4]},
    ),
    # output_padding that the lengths do not bear out
    Bad(
        CD,
        "attribute output_padding, spatial axis 0: expected 0 (dst_shape length 5 minus 5), got 1",
        {"output_padding": [1]},
    ),
    Bad(
        TD,
        "attribute output_padding, spatial axis 0: expected 0 (diff_dst length 5 minus 5), got 1",
        {"output_padding": [1]},
    ),
    Bad(
        TW,
        "attribute output_padding, spatial axis 0: expected 1 (diff_dst length 6 minus 5), got 0",
        {"output_padding": [0]},
        {1: (1, 4, 6)},
    ),
    Bad(
        TF,
        "attribute output_padding, spatial axis 0: expected 1 (output_delta length 6 minus 5), got 0",
        {"output_padding": [0]},
        {1: (1, 4, 6)},
    ),
    # ranks
    Bad(CD, "diff_dst: expected rank 3 to 5, got 2 with shape (6, 3)", inputs={0: (6, 3)}),
    Bad(CD, "weights: expected rank 3, got 4 with shape (6, 4, 3, 3)", inputs={1: (6, 4, 3, 3)}),
    Bad(CV, "src: expected rank 3 to 5, got 2 with shape (4, 5)", inputs={0: (4, 5)}),
    Bad(CW, "src: expected rank 3 to 5, got 6 with shape (1, 4, 5, 5, 5, 5)", inputs={0: (1, 4, 5, 5, 5, 5)}),
    Bad(TD, "diff_dst: expected rank 3 to 5, got 2 with shape (4, 5)", inputs={0: (4, 5)}),
    Bad(BIAS, "diff_dst: expected rank 2 to 64, got 1 with shape (3)", inputs={0: (3,)}),
]  # fmt: skip

INTERPOLATION = [
    Bad(IB, "expected sizes or scales, got both. Remove one", {"sizes": [7], "scales": [1.75]}),
    Bad(IBP, "expected sizes or scales, got both. Remove one", {"sizes": [7], "scales": [1.75]}),
    # sizes is the destination's shape; the source's is the classical mistake
    Bad(IB, "the spatial shape of diff_dst and attribute sizes must agree, got 7 and 4", {"sizes": [4]}),
    Bad(IBP, "the spatial shape of output_delta and attribute sizes must agree, got 7 and 4", {"sizes": [4]}),
    Bad(IB, "the spatial shape of diff_dst and input sizes must agree, got 7 and 4", inputs={2: ints(4)}),
    Bad(
        IB, "the spatial shape of diff_dst and input sizes must agree, got 7 and 8", {"sizes": [7]}, inputs={2: ints(8)}
    ),
    Bad(IB, "attribute sizes: expected 1 entries, got 3 in [1, 2, 7]", {"sizes": [1, 2, 7]}),
    Bad(IB, "input sizes: expected 1 entries, got 3 in [1, 2, 7]", inputs={2: ints(1, 2, 7)}),
    Bad(IB, "attribute sizes: expected values >= 1, got [0]", {"sizes": [0]}, {1: (1, 2, 0)}),
    Bad(IB, "attribute sizes: expected values >= 1, got [-7]", {"sizes": [-7]}),
    Bad(IB, "input sizes: expected values >= 0, got [-7]", inputs={2: ints(-7)}),
    Bad(IB, "attribute scales: expected 1 entries, got 2 in [1.75, 1.75]", {"scales": [1.75, 1.75]}),
    *(
        Bad(IB, f"attribute scales: expected positive numbers, got [{scale}]", {"scales": [scale]})
        for scale in (0.0, -1.75, float("inf"), float("nan"))
    ),
    Bad(IB, "attribute scales, spatial axis 0: 4 × 1.5 expects diff_dst length 6, got 7", {"scales": [1.5]}),
    Bad(IB, "attribute scales, spatial axis 0: 4 × 2.0 expects diff_dst length 8, got 7", {"scales": [2.0]}),
    Bad(IB, "batch sizes of src and diff_dst must agree, got 1 and 3", inputs={1: (3, 2, 7)}),
    Bad(IB, "channels of src and diff_dst must agree, got 2 and 3", inputs={1: (1, 3, 7)}),
    Bad(IBP, "channels of input_forward and output_delta must agree, got 2 and 3", inputs={1: (1, 3, 7)}),
    # a forgotten data_format
    Bad(IB, "channels of src and diff_dst must agree, got 4 and 7", {"data_format": None}),
    Bad(IB, "diff_dst: expected rank 3, got 4 with shape (1, 2, 7, 7)", inputs={1: (1, 2, 7, 7)}),
    Bad(IB, "src: expected rank 3 to 5, got 2 with shape (2, 4)", inputs={0: (2, 4)}),
    Bad(IB, "diff_dst: expected rank 3 to 5, got 6 with shape (1, 2, 1, 1, 1, 7)", inputs={1: (1, 2, 1, 1, 1, 7)}),
    Bad(IB, "src: expected spatial lengths >= 1, got [0]", inputs={0: (1, 2, 0)}),
    Bad(RG, "expected output_sizes as attribute or input, got neither", {"output_sizes": None}),
    Bad(RG, "expected output_sizes as attribute or input, got neither", {"output_sizes": []}),
    Bad(RG, "attribute and input output_sizes must agree, got 3 and 4", inputs={1: ints(2, 4)}),
    Bad(RG, "input output_sizes: expected 2 entries, got 1 in [2]", inputs={1: ints(2)}),
    Bad(RG, "output_sizes (one per axis): expected 2 entries, got 1 in [3]", {"output_sizes": [3]}),
    Bad(RG, "output_sizes: expected values >= 0, got [2, -3]", {"output_sizes": [2, -3]}),
    Bad(RG, "output_sizes: expected values >= 1, got [2, 0]", {"output_sizes": [2, 0]}),
    Bad(RG, "attribute dimension_count: expected 2, got 4", {"dimension_count": 4}),
    *(
        Bad(RG, f"attribute {name} (one per axis): expected 2 entries, got 3 in [1.0, 1.0, 1.0]", {name: [1.0] * 3})
        for name in ("scales", "input_pixel_offsets", "output_pixel_offsets")
    ),
    *(
        Bad(RG, f"attribute scales: expected positive numbers, got [2.0, {scale}]", {"scales": [2.0, scale]})
        for scale in (0.0, -0.5, float("inf"), float("nan"))
    ),
    *(
        Bad(RG, f"attribute {name}: expected finite numbers, got [0.5, {offset}]", {name: [0.5, offset]})
        for name in ("input_pixel_offsets", "output_pixel_offsets")
        for offset in (float("inf"), float("nan"))
    ),
    Bad(RG, "input_gradient: expected rank 1 to 32, got 0 with shape ()", inputs={0: ()}),
]  # fmt: skip

CROP = {"coordinate_transformation_mode": "tf_crop_and_resize"}
RESIZE = [
    Bad(RZ, "expected scales or sizes, got neither", inputs={4: None}),
    Bad(RZ, "expected scales or sizes, got neither", inputs={4: longs()}),
    Bad(RZ, "expected scales or sizes, got both. Leave one out, or empty", inputs={3: floats(1, 1.75)}),
    Bad(RZ, "input sizes: expected 2 entries, one per listed axis, got 1", inputs={4: longs(7)}),
    Bad(RZ, "input sizes: expected 1 entries, one per listed axis, got 2", {"axes": [1]}),
    Bad(RZ, "input scales: expected 2 entries, one per listed axis, got 3", inputs={3: floats(1, 1, 1), 4: None}),
    *(
        Bad(RZ, f"input scales: expected positive numbers, got [1.0, {scale}]", inputs={3: floats(1, scale), 4: None})
        for scale in (0.0, -1.75, float("inf"), float("nan"))
    ),
    Bad(RZ, "input sizes: expected values >= 0, got [2, -7]", inputs={4: longs(2, -7)}),
    # dY is not what the forward makes; a scale may be read in two ways
    Bad(RZ, "axis 1 of dY: expected length 8, got 7", inputs={4: longs(2, 8)}),
    Bad(RZ, "axis 1 of dY: expected length 8, got 7", inputs={3: floats(1, 2), 4: None}),
    Bad(RZ, "axis 1 of dY: expected length 6, got 7", {"axes": [-1]}, {3: floats(1.7), 4: None}),
    Bad(RZ, "axis 1 of dY: expected length 4 or 5, got 7", inputs={1: (2, 3), 3: floats(1, 5 / 3), 4: None}),
    Bad(RZ, "axis 0 of dY: expected length 4, got 2", {"keep_aspect_ratio_policy": "not_larger"}, {4: longs(4, 7)}),
    Bad(
        RZ,
        "lengths of axis 0 of X and dY, which is not resized, must agree, got 2 and 3",
        {"axes": [1]},
        {0: (3, 7), 4: longs(7)},
    ),
    Bad(RZ, "axis 1 of X: expected a length >= 1 to make 7 of it, got 0", inputs={1: (2, 0)}),
    Bad(RZ, "axes: expected values from -2 to 1, got [0, 2]", {"axes": [0, 2]}),
    Bad(RZ, "axes: expected values from -2 to 1, got [-3, 1]", {"axes": [-3, 1]}),
    Bad(RZ, "axes: expected every axis once, got [1, -1]", {"axes": [1, -1]}),
    Bad(
        RZ,
        "keep_aspect_ratio_policy not_smaller: expected sizes, got scales. Scales say the aspect ratio already",
        {"keep_aspect_ratio_policy": "not_smaller"},
        {3: floats(1, 1.75), 4: None},
    ),
    Bad(RZ, "input roi: expected 4 entries, starts and ends, got 3", CROP, {2: floats(0, 0, 1)}),
    Bad(RZ, "input roi: expected 4 entries, starts and ends, got 0", CROP, {2: floats()}),
    Bad(RZ, "input roi: expected finite numbers, got [0.0, nan, 1.0, 1.0]", CROP, {2: floats(0, float("nan"), 1, 1)}),
    Bad(RZ, "antialias: expected mode linear or cubic, got nearest", {"mode": "nearest", "antialias": 1}),
    Bad(RZ, "attribute antialias: expected 0 or 1, got 2", {"antialias": 2}),
    Bad(RZ, "attribute exclude_outside: expected 0 or 1, got -1", {"exclude_outside": -1}),
    *(
        Bad(RZ, f"attribute cubic_coeff_a: expected a finite number, got {a}", {"mode": "cubic", "cubic_coeff_a": a})
        for a in (float("inf"), float("nan"))
    ),
    Bad(RZ, "dY: expected rank 1 to 32, got 0 with shape ()", inputs={0: ()}),
    Bad(RZ, "X: expected rank 1 to 32, got 0 with shape ()", inputs={1: ()}),
    Bad(RZ, "dY: expected rank 2, got 3 with shape (1, 2, 7)", inputs={0: (1, 2, 7)}),
    invalid(RZ, "attribute mode: expected one of nearest, linear, cubic, got 'bilinear'", {"mode": "bilinear"}),
    invalid(
        RZ,
        "attribute keep_aspect_ratio_policy: expected one of stretch, not_larger, not_smaller, got 'NOT_LARGER'",
        {"keep_aspect_ratio_policy": "NOT_LARGER"},
    ),
]  # fmt: skip

POOLS = [
    bad
    for op in POOL_OPS
    for bad in (
        Bad(op, "attribute kernel: expected values >= 1, got [0]", {"kernel": [0]}),
        Bad(op, "attribute strides: expected values >= 1, got [0]", {"strides": [0]}),
        Bad(op, "attribute pads_begin: expected values >= 0, got [-1]", {"pads_begin": [-1]}),
        Bad(op, "attribute pads_end: expected values >= 0, got [-1]", {"pads_end": [-1]}),
        Bad(op, "attribute kernel (one per spatial axis): expected 1 entries, got 2 in [3, 3]", {"kernel": [3, 3]}),
        Bad(op, "attribute strides (one per spatial axis): expected 1 entries, got 0 in []", {"strides": []}),
        Bad(op, "attribute pads_end (one per spatial axis): expected 1 entries, got 2 in [1, 1]", {"pads_end": [1, 1]}),
        Bad(op, "attribute pads_begin: expected fewer cells than the kernel's [3], got [3]", {"pads_begin": [3]}),
        Bad(op, "attribute pads_end: expected fewer cells than the kernel's [3], got [4]", {"pads_end": [4]}),
    )
]
AVERAGE_POOLS = [
    Bad(AP, "attribute exclude_pad: expected 0 or 1, got 2", {"exclude_pad": 2}),
    Bad(AP, "expected src_shape as attribute or input, got neither", {"src_shape": None}),
    Bad(AP, "batch sizes of src and diff_dst must agree, got 2 and 1", {"src_shape": [2, 2, 7]}),
    Bad(AP, "channels of src and diff_dst must agree, got 3 and 2", {"src_shape": [1, 3, 7]}),
    # the input wins
    Bad(AP, "channels of src and diff_dst must agree, got 3 and 2", inputs={1: longs(1, 3, 7)}),
    Bad(AP, "channels of src and diff_dst must agree, got 7 and 4", {"data_format": None}),
    Bad(AP, "spatial lengths of src: expected values >= 1, got [0]", {"src_shape": [1, 2, 0]}),
    Bad(AP, "attribute src_shape: expected values >= 0, got [1, 2, -7]", {"src_shape": [1, 2, -7]}),
    Bad(AP, "attribute src_shape: expected 3 to 5 entries, got 1", {"src_shape": [7]}),
    Bad(AP, "input src_shape: expected 3 to 5 entries, got 6", inputs={1: longs(1, 2, 7, 1, 1, 1)}),
    Bad(AP, "src: expected rank 3, got 4 with shape (1, 2, 7, 7)", {"src_shape": [1, 2, 7, 7]}),
    Bad(AP, "diff_dst: expected rank 3 to 5, got 2 with shape (2, 4)", inputs={0: (2, 4)}),
    Bad(
        AP,
        "spatial axis 0: src length 9 with kernel 3, stride 2, dilation 1, pads 1 and 1 expects diff_dst length 5, got 4",
        {"src_shape": [1, 2, 9]},
    ),
    Bad(
        AP,
        "spatial axis 0: src length 6 with kernel 3, stride 2, dilation 1, pads 1 and 1 expects diff_dst length 3 or 4, "
        "got 5",
        inputs={0: (1, 2, 5), 1: longs(1, 2, 6)},
    ),
]
MAX_POOLS = [
    Bad(MP, "attribute dilations: expected values >= 1, got [0]", {"dilations": [0]}),
    Bad(
        MP,
        "attribute auto_pad: expected None or VALID beside dilations [2], got SAME_LOWER; state the pads",
        {"auto_pad": "same_lower", "dilations": [2]},
    ),
    Bad(MP, "batch sizes of src and diff_dst must agree, got 1 and 2", inputs={1: (2, 2, 4)}),
    Bad(MP, "channels of src and diff_dst must agree, got 2 and 3", inputs={1: (1, 3, 4)}),
    # a forgotten data_format
    Bad(MP, "channels of src and diff_dst must agree, got 7 and 4", {"data_format": None}),
    Bad(MP, "spatial lengths of src: expected values >= 1, got [0]", inputs={0: (1, 2, 0)}),
    Bad(
        MP,
        "spatial axis 0: src length 7 with kernel 3, stride 2, dilation 1, pads 1 and 1 expects diff_dst length 4, got 3",
        inputs={1: (1, 2, 3)},
    ),
    Bad(
        MP,
        "spatial axis 0: src length 6 with kernel 3, stride 2, dilation 1, pads 1 and 1 expects diff_dst length 3 or 4, "
        "got 5",
        inputs={0: (1, 2, 6), 1: (1, 2, 5)},
    ),
    # rounded up there would be a window that begins behind src
    Bad(
        MP,
        "spatial axis 0: src length 2 with kernel 2, stride 2, dilation 1, pads 0 and 1 expects diff_dst length 1, got 2",
        {"kernel": [2], "pads_begin": [0]},
        inputs={0: (1, 2, 2), 1: (1, 2, 2)},
    ),
    Bad(
        MP,
        "spatial axis 0: src length 7 with kernel 3, stride 2, dilation 1, pads 1 and 1 expects diff_dst length 4, got 5",
        {"auto_pad": "SAME_UPPER"},
        inputs={1: (1, 2, 5)},
    ),
    Bad(MP, "src: expected rank 3 to 5, got 2 with shape (2, 7)", inputs={0: (2, 7)}),
    Bad(MP, "diff_dst: expected rank 3 to 5, got 6 with shape (1, 2, 4, 1, 1, 1)", inputs={1: (1, 2, 4, 1, 1, 1)}),
    Bad(MP, "src: expected rank 4, got 3 with shape (1, 2, 7)", inputs={1: (1, 2, 4, 4)}),
]

ELEMENTWISE = [
    Bad(RELU, "lengths of axis 1 of src and diff_dst must agree, got 3 and 4", inputs={1: (2, 4)}),
    Bad(RELU, "lengths of axis 0 of src and diff_dst must agree, got 2 and 1", inputs={1: (1, 3)}),
    Bad(RELU, "diff_dst: expected rank 2, got 1 with shape (3)", inputs={1: (3,)}),
    Bad(SM, "lengths of axis 1 of diff_dst and dst must agree, got 3 and 4", inputs={1: (2, 4)}),
    Bad(SM, "dst: expected rank 2, got 1 with shape (3)", inputs={1: (3,)}),
    Bad(SM, "diff_dst: expected rank 1 to 64, got 0 with shape ()", inputs={0: (), 1: ()}),
    *(Bad(SM, f"attribute axis: expected -2 to 1 for rank 2, got {axis}", {"axis": axis}) for axis in (2, -3)),
    Bad(RELU, "attribute use_dst: expected 0 or 1, got 2", {"use_dst": 2}),
]

NORMALISATIONS = [
    Bad(BN, "lengths of axis 0 of src and diff_dst must agree, got 2 and 1", inputs={1: (1, 3, 4)}),
    Bad(BN, "diff_dst: expected rank 3, got 4 with shape (2, 3, 4, 1)", inputs={1: (2, 3, 4, 1)}),
    Bad(BN, "src: expected rank 2 to 64, got 1 with shape (3)", inputs={0: (3,), 1: (3,)}),
    Bad(BN, "channels of src and mean must agree, got 3 and 4", inputs={2: (4,)}),
    Bad(BN, "channels of src and variance must agree, got 3 and 1", inputs={3: (1,)}),
    Bad(BN, "channels of src and gamma must agree, got 3 and 4", inputs={4: (4,)}),
    Bad(BN, "gamma: expected rank 1, got 2 with shape (3, 1)", inputs={4: (3, 1)}),
    # a forgotten data_format
    Bad(BN, "channels of src and mean must agree, got 4 and 3", {"data_format": None}),
    *(
        Bad(BN, f"attribute epsilon: expected a number >= 0, got {epsilon}", {"epsilon": epsilon})
        for epsilon in (-0.5, float("inf"), float("nan"))
    ),
    Bad(LN, "lengths of axis 2 of src and diff_dst must agree, got 4 and 1", inputs={1: (2, 3, 1)}),
    Bad(LN, "diff_dst: expected rank 3, got 2 with shape (2, 12)", inputs={1: (2, 12)}),
    Bad(LN, "src: expected rank 1 to 64, got 0 with shape ()", inputs={0: (), 1: ()}),
    *(
        Bad(LN, f"attribute begin_norm_axis: expected -3 to 2 for rank 3, got {axis}", {"begin_norm_axis": axis})
        for axis in (3, -4)
    ),
    # statistics that keep the normalised axes, as ONNX's do, and parameters of another begin_norm_axis
    Bad(LN, "mean: expected rank 1, got 3 with shape (2, 1, 1)", inputs={2: (2, 1, 1)}),
    Bad(LN, "variance: expected rank 1, got 2 with shape (2, 3)", inputs={3: (2, 3)}),
    Bad(LN, "lengths of axis 0 before the normalised ones of src and mean must agree, got 2 and 3", inputs={2: (3,)}),
    Bad(LN, "lengths of axis 0 before the normalised ones of src and variance must agree, got 2 and 1", inputs={3: (1,)}),
    Bad(LN, "lengths of normalised axis 1 of src and gamma must agree, got 4 and 1", inputs={4: (3, 1)}),
    Bad(LN, "lengths of normalised axis 0 of src and beta must agree, got 3 and 1", inputs={5: (1, 4)}),
    Bad(LN, "gamma: expected rank 2, got 1 with shape (4)", inputs={4: (4,)}),
    Bad(LN, "beta: expected rank 2, got 1 with shape (12)", inputs={5: (12,)}),
    Bad(LN, "mean: expected rank 2, got 1 with shape (2)", {"begin_norm_axis": None}),
    Bad(LN, "attribute use_affine: expected 0 or 1, got 2", {"use_affine": 2}),
    Bad(LN, "use_affine is 1: expected gamma, got none; set use_affine to 0", inputs={4: None}),
    Bad(LN, "use_affine is 0: expected neither gamma nor beta; set use_affine to 1", {"use_affine": 0}),
    Bad(LN, "use_affine is 0: expected neither gamma nor beta; set use_affine to 1", {"use_affine": 0}, {4: None}),
    *(
        Bad(LN, f"attribute epsilon: expected a number >= 0, got {epsilon}", {"epsilon": epsilon})
        for epsilon in (-0.5, float("inf"), float("nan"))
    ),
]  # fmt: skip

REFUSED = (
    *NORMALISATIONS,
    *ELEMENTWISE,
    *POOLS,
    *MAX_POOLS,
    *AVERAGE_POOLS,
    *ATTRIBUTES,
    *CONVOLUTIONS,
    *INTERPOLATION,
    *RESIZE,
)
