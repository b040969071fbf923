"""Graphs through operators that let no gradient through, and through those that are refused.

(nodes in ONNX text from a float tensor x of shape (3, 4) to a float y, opset) by operator.
"""

from __future__ import annotations

Graphs = dict[str, list[tuple[str, int]]]

_DYNAMIC = "q, s, z = DynamicQuantizeLinear(x)"

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

REFUSED: Graphs = {
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
