"""Values, kinds and names of attributes."""

from __future__ import annotations

from tests.opset.refusals.bad import (
    BIAS,
    CD,
    CONVOLUTION_OPS,
    CV,
    CW,
    IB,
    IBP,
    LN,
    POOL_OPS,
    RELU,
    RG,
    RZ,
    SM,
    TD,
    TF,
    TW,
    VALID,
    invalid,
)

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
