"""Survivors that no test could kill: what changes is no result. By the function or the name, and what was changed."""

REASONS: dict[tuple[str, str], str] = {
    ("opset/bodies/convolution_weights.py:_Factors.folds_batch", "`>` -> `>=`"): (
        "speed: either form is right, and for equal sizes neither is faster"
    ),
    ("opset/bodies/convolution_weights.py:_Factors._sliced", "`-1` -> `1`, number 2"): (
        "the entries are those of the one or two last axes"
    ),
    ("opset/bodies/interpolation/lengths.py:positive_or_empty", "0 -> 1"): (
        "speed: a length of 1 is proven once more, which folds or adds 0"
    ),
    ("onnx_backprop/distributed/replica.py:_SALT", "0x9E3779B97F4A7C15 -> 5700357409661599242"): (
        "ranks draw other numbers, which differ among fewer than 2⁶³ ranks"
    ),
    ("opset/bodies/convolution_weights.py:_Factors.shifts", "`<=` -> `<`"): (
        "speed: kernels of exactly that many cells are copied by slices, which is right too"
    ),
    ("opset/functions/onnx.py:_MOST_BODIES", "16 -> 8"): "speed: larger bodies are generated again",
    ("ort_ops/convolution/gather/bands.py:copy_of", "`>` -> `>=`, number 2"): (
        "speed: a band of exactly the limit has fewer channels, with the same sums"
    ),
    ("ort_ops/attention/attention_backward.py:_plan", "max -> min, number 2"): (
        "speed: the sums of few heads get more parts than two threads need"
    ),
    ("ort_ops/weights.py:_LINE", "64 -> 32"): "speed: weights may begin in the middle of a cache line",
    ("onnx_backprop/training/reports/plots.py:_draw", "50 -> 25"): "appearance: whether points of a curve have markers",
    ("opset/bodies/expressions.py:_NEUTRAL", "without 0, number 2"): "speed: a difference from 0 is a node",
    ("ort_ops/convolution/gather/bands.py:_block", "ceil -> floor"): "speed: how many channels an item has",
    ("converters/check/differences.py:_along", "`+` -> `-`"): (
        "right gradients give the same; for wrong ones the reference size changes by less than a factor of two"
    ),
    ("onnx_backprop/training/reports/report.py:write_report", "`>` -> `>=`"): "words: 12 of 12 layers are all of them",
    ("converters/check/check_model.py:FAST", "without 'Split'"): (
        "reach: above 50,000 numbers a model with a Split is compared with onnxruntime in float32"
    ),
    ("opset/bodies/convolution.py:backward_data", "`<=` -> `<`"): "speed: either form is right",
    ("opset/bodies/interpolation/forms.py:_windows", "`<=` -> `<`"): "speed: either form of the indices is right",
    ("opset/operators/p_relu_backward.py:_view", "axis 1 -> other"): "the Where behind it broadcasts the scalar",
    ("ort_ops/compiler/values.py:_RANKS", "4 -> 5"): "only the order of the ranks counts",
    ("ort_ops/convolution/gather/bands.py:Copy.arrays", "min -> max"): (
        "speed: the copy is thought larger than it is, so bands are shorter"
    ),
    ("ort_ops/normalization/layer_norm_backward.py:Offsets.totals", "0 -> 1"): "read only where a place is planned",
    ("ort_ops/rewrites/fuse_updates.py:_Fusion._formula.operand", "never refused"): (
        "a formula with any other operator is refused by the parser of programs"
    ),
    ("ort_ops/vector/registers.py:blend_even", "`not` dropped"): "speed: either way of writing even elements is right",
    ("converters/prepare/fused/pairwise.py:_LEAST", "100 -> 50"): (
        "a limit that no row reaches: 15,000 random ones took 4 rounds at most"
    ),
    ("onnx_backprop/distributed/mpi.py:_ON_ONE_MACHINE", "300.0 -> 600.0"): (
        "time: how long ranks on several machines wait before they give up"
    ),
}
