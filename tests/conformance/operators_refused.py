"""Graphs through operators that let no gradient through, and through those that are refused.

(nodes in ONNX text from a float tensor x of shape (3, 4) to a float y, opset) by operator.
"""

from __future__ import annotations

Graphs = dict[str, list[tuple[str, int]]]

_DYNAMIC = "q, s, z = DynamicQuantizeLinear(x)"
_ZERO = "zero = Constant <value_int = 0> ()"

STOPS: Graphs = {
    **{op: [(f"y = {op}(x)", 18), (f"y = {op}(x)", 26)] for op in ("Ceil", "Floor", "Round", "Sign", "Hardmax")},
    **{op: [(f"y = {op}(x)", 18)] for op in ("EyeLike", "RandomNormalLike", "RandomUniformLike")},
    **{
        op: [
            (
                f"z = {op}(x, one) y = Cast <to = 1> (z)".replace(
                    "z =", "one = Constant <value_float = 1.0> () z =", 1
                ),
                18,
            )
        ]
        for op in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
    },
    **{op: [(f"z = {op}(x) y = Cast <to = 1> (z)", 26)] for op in ("IsInf", "IsNaN", "ArgMax", "ArgMin", "NonZero")},
    **{op: [(f"z = {op}(x) y = Cast <to = 1> (z)", 26)] for op in ("Shape", "Size")},
    "Bernoulli": [("u = Sigmoid(x) y = Bernoulli <seed = 1.0> (u)", 18)],
    "Multinomial": [("z = Multinomial <seed = 1.0> (x) y = Cast <to = 1> (z)", 18)],
    "NonMaxSuppression": [
        (
            "first = Constant <value_ints = [0]> () boxes = Unsqueeze(x, first) "
            "scores = Constant <value = float[1,1,3] {0.9, 0.8, 0.7}> () most = Constant <value_int = 2> () "
            "z = NonMaxSuppression(boxes, scores, most) y = Cast <to = 1> (z)",
            18,
        )
    ],
    "BitCast": [("z = BitCast <to = 6> (x) y = BitCast <to = 1> (z)", 26)],
    "MelWeightMatrix": [
        (
            "bins = Constant <value_int = 4> () n = Constant <value_int = 32> () rate = Constant <value_int = 100> () "
            "low = ReduceMax <keepdims = 0> (x) high = Constant <value_float = 40.0> () y = MelWeightMatrix(bins, n, rate, low, high)",
            18,
        )
    ],
    "SequenceLength": [("s = SequenceConstruct(x, x) z = SequenceLength(s) y = Cast <to = 1> (z)", 18)],
    "OptionalHasElement": [("z = OptionalHasElement(x) y = Cast <to = 1> (z)", 18)],
}

_BODY = "(int64 i, bool go, float[3,4] s) => (bool on, float[3,4] t) { on = Identity(go) t = Mul(s, s) }"

REFUSED: Graphs = {
    "Loop": [
        (
            f"n = Constant <value_int = 2> () go = Constant <value = bool {{1}}> () y = Loop (n, go, x) <body: graph = b {_BODY}>",
            opset,
        )
        for opset in (18, 26)
    ],
    "Scan": [
        ("y = Scan (x) <num_scan_inputs = 1, body: graph = b (float[4] s) => (float[4] t) { t = Mul(s, s) }>", opset)
        for opset in (18, 26)
    ],
    "SequenceConstruct": [(f"{_ZERO} s = SequenceConstruct(x, x) y = SequenceAt(s, zero)", 18)],
    "SequenceAt": [(f"{_ZERO} s = SequenceConstruct(x, x) y = SequenceAt(s, zero)", 18)],
    "SequenceInsert": [(f"{_ZERO} e = SequenceEmpty() s = SequenceInsert(e, x) y = SequenceAt(s, zero)", 18)],
    "SequenceErase": [(f"{_ZERO} s = SequenceConstruct(x, x) t = SequenceErase(s) y = SequenceAt(t, zero)", 18)],
    "ConcatFromSequence": [("s = SequenceConstruct(x, x) y = ConcatFromSequence <axis = 0> (s)", 18)],
    "SplitToSequence": [(f"{_ZERO} s = SplitToSequence <axis = 0> (x) y = SequenceAt(s, zero)", 18)],
    "SequenceMap": [
        (
            f"{_ZERO} s = SequenceConstruct(x, x) "
            "t = SequenceMap (s) <body: graph = b (float[3,4] a) => (float[3,4] c) { c = Mul(a, a) }> y = SequenceAt(t, zero)",
            18,
        )
    ],
    "Optional": [("o = Optional(x) y = OptionalGetElement(o)", 18)],
    "OptionalGetElement": [("z = OptionalGetElement(x) y = Mul(z, x)", 18)],
    "QuantizeLinear": [("s = Constant <value_float = 0.1> () q = QuantizeLinear(x, s) y = DequantizeLinear(q, s)", 18)],
    "QLinearMatMul": [
        (
            "s0 = Constant <value_ints = [0]> () s = ReduceMax <keepdims = 0> (x) q = Constant <value = uint8[2,2] {1, 2, 3, 4}> () "
            "z = Constant <value = uint8 {0}> () m = QLinearMatMul(q, s, z, q, s, z, s, z) y = Cast <to = 1> (m)",
            18,
        )
    ],
    "QLinearConv": [
        (
            "s = ReduceMax <keepdims = 0> (x) q = Constant <value = uint8[1,1,2,2] {1, 2, 3, 4}> () "
            "z = Constant <value = uint8 {0}> () m = QLinearConv(q, s, z, q, s, z, s, z) y = Cast <to = 1> (m)",
            18,
        )
    ],
    "MatMulInteger": [
        (
            f"{_DYNAMIC} b = Constant <value = int8[4,2] {{1, -2, 3, 4, 5, 6, -7, 8}}> () "
            "i = MatMulInteger(q, b, z) y = Cast <to = 1> (i)",
            18,
        )
    ],
    "ConvInteger": [
        (
            f"{_DYNAMIC} shape = Constant <value_ints = [1, 1, 3, 4]> () image = Reshape(q, shape) "
            "w = Constant <value = int8[1,1,2,2] {1, -2, 3, 4}> () i = ConvInteger(image, w, z) y = Cast <to = 1> (i)",
            18,
        )
    ],
    "MaxRoiPool": [
        (
            "shape = Constant <value_ints = [1, 1, 3, 4]> () image = Reshape(x, shape) "
            "rois = Constant <value = float[1,5] {0, 0, 0, 3, 2}> () y = MaxRoiPool <pooled_shape = [2, 2]> (image, rois)",
            18,
        )
    ],
}
