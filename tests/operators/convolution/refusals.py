"""What the convolutions refuse."""

from __future__ import annotations

from tests.declarations.declaration import Bad, ints, invalid

CV, CD, CW = "Convolution", "ConvolutionBackwardData", "ConvolutionBackwardWeights"
TD, TW, TF = "ConvTransposeBackwardData", "ConvTransposeBackwardWeights", "ConvTransposeBackpropFilters"
OPS = (CV, CD, CW, TD, TW, TF)

REFUSED = [
    *(
        bad
        for op in OPS
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
        "spatial axis 0: the kernel (3, dilation 4) covers 9 pixels, expected at most the padded src, got 5 + 1 + 1",
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
        "spatial axis 0: the kernel (3, dilation 4) covers 9 pixels, expected at most the padded dst_shape, got 5 + 1 + 1",
        {"dilations": [4]},
    ),
    # a division that truncates toward zero would let this through with one destination cell
    Bad(
        CD,
        "spatial axis 0: the kernel (3, dilation 1) covers 3 pixels, expected at most the padded dst_shape, got 2 + 0 + 0",
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
        "spatial axis 0: the kernel (3, dilation 4) covers 9 pixels, expected at most the padded diff_dst, got 5 + 1 + 1",
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
    # kinds and names
    invalid(CD, "attribute groups: expected int, got 1.5", {"groups": 1.5}),
    invalid(CD, "attribute groups: expected int, got True", {"groups": True}, model_shows_it=False),
    invalid(CD, "attribute strides: expected ints, got 2", {"strides": 2}),
    invalid(CD, "attribute strides: expected ints, got [1.5]", {"strides": [1.5]}),
    invalid(
        CW,
        "unknown attribute output_padding; it takes strides, pads_begin, pads_end, dilations, auto_pad, groups, "
        "data_format, weights_format, weights_shape",
        {"output_padding": [0]},
        model_shows_it=False,
    ),
]  # fmt: skip
