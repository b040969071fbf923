"""Shapes and attributes of pools, activations and normalisations."""

from __future__ import annotations

from tests.opset.refusals.bad import AP, BF, BN, LN, MP, POOL_OPS, RELU, SM, Bad, longs

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
        Bad(op, "attribute pads_begin: expected fewer pixels than the kernel's [3], got [3]", {"pads_begin": [3]}),
        Bad(op, "attribute pads_end: expected fewer pixels than the kernel's [3], got [4]", {"pads_end": [4]}),
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
    Bad(BF, "src: expected rank 2 to 64, got 1 with shape (3)", inputs={0: (3,)}),
    Bad(BF, "channels of src and mean must agree, got 3 and 4", inputs={1: (4,)}),
    Bad(BF, "channels of src and variance must agree, got 3 and 1", inputs={2: (1,)}),
    Bad(BF, "channels of src and gamma must agree, got 3 and 4", inputs={3: (4,)}),
    Bad(BF, "channels of src and beta must agree, got 3 and 2", inputs={4: (2,)}),
    Bad(BF, "variance: expected rank 1, got 2 with shape (3, 1)", inputs={2: (3, 1)}),
    Bad(BF, "channels of src and mean must agree, got 4 and 3", {"data_format": None}),
    *(
        Bad(BF, f"attribute epsilon: expected a number >= 0, got {epsilon}", {"epsilon": epsilon})
        for epsilon in (-0.5, float("inf"), float("nan"))
    ),
    *(
        Bad(BF, f"attribute momentum: expected a finite number, got {momentum}", {"momentum": momentum})
        for momentum in (float("-inf"), float("nan"))
    ),
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
