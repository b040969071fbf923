"""One layer of an encoder, as frameworks export it, in the forms that optimisers look for."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, numpy_helper, parser

WORDS, LENGTHS, SIZE, HEADS, INNER = 9, 7, 8, 2, 12

_TEXT = """
<ir_version: 8, opset_import: ["" : 17]>
transformer (int64[batch, length] ids, int64[batch, length] mask) => (float[batch, length, 8] y) {
    one = Constant<value = int64[1] {1}>()
    two = Constant<value = int64[1] {2}>()
    split = Constant<value = int64[4] {0, 0, 2, 4}>()
    joined = Constant<value = int64[3] {0, 0, 8}>()
    half = Constant<value = float {0.5}>()
    unit = Constant<value = float {1}>()
    root_size = Constant<value = float {2}>()
    root_two = Constant<value = float {1.4142135}>()
    lowest = Constant<value = float {-10000}>()
    words_found = Gather(words, ids)
    length_of = Shape<start = 1, end = 2>(ids)
    first = Constant<value = int64[1] {0}>()
    seen = Slice(places, first, length_of, first)
    embedded = Add(words_found, seen)
    x = LayerNormalization<axis = -1, epsilon = 1e-5>(embedded, gamma0, beta0)
    mask_higher = Unsqueeze(mask, one)
    mask_wide = Unsqueeze(mask_higher, two)
    mask_float = Cast<to = 1>(mask_wide)
    hidden = Sub(unit, mask_float)
    added = Mul(hidden, lowest)
    q_product = MatMul(x, w_q)
    q_sum = Add(b_q, q_product)
    q_heads = Reshape(q_sum, split)
    q = Transpose<perm = [0, 2, 1, 3]>(q_heads)
    k_product = MatMul(x, w_k)
    k_sum = Add(b_k, k_product)
    k_heads = Reshape(k_sum, split)
    k = Transpose<perm = [0, 2, 3, 1]>(k_heads)
    v_product = MatMul(x, w_v)
    v_sum = Add(b_v, v_product)
    v_heads = Reshape(v_sum, split)
    v = Transpose<perm = [0, 2, 1, 3]>(v_heads)
    products = MatMul(q, k)
    scaled = Div(products, root_size)
    scores = Add(scaled, added)
    weights = Softmax<axis = -1>(scores)
    mixed = MatMul(weights, v)
    mixed_heads = Transpose<perm = [0, 2, 1, 3]>(mixed)
    mixed_joined = Reshape(mixed_heads, joined)
    o_product = MatMul(mixed_joined, w_o)
    o_sum = Add(b_o, o_product)
    skip1 = Add(o_sum, x)
    x1 = LayerNormalization<axis = -1, epsilon = 1e-5>(skip1, gamma1, beta1)
    i_product = MatMul(x1, w_i)
    i_sum = Add(b_i, i_product)
    divided = Div(i_sum, root_two)
    error = Erf(divided)
    error1 = Add(error, unit)
    doubled = Mul(i_sum, error1)
    inner = Mul(doubled, half)
    f_product = MatMul(inner, w_f)
    f_sum = Add(b_f, f_product)
    skip2 = Add(f_sum, x1)
    y = LayerNormalization<axis = -1, epsilon = 1e-5>(skip2, gamma2, beta2)
}
"""


def transformer() -> ModelProto:
    """Inputs ids and mask of a batch and a length that are symbols; float output y."""
    rng = np.random.default_rng(0)
    shapes = {"words": (WORDS, SIZE), "places": (LENGTHS, SIZE), "w_i": (SIZE, INNER), "b_i": (INNER,)}
    shapes |= {"w_f": (INNER, SIZE), "b_f": (SIZE,)}
    shapes |= {f"w_{n}": (SIZE, SIZE) for n in "qkvo"} | {f"b_{n}": (SIZE,) for n in "qkvo"}
    shapes |= {f"{n}{i}": (SIZE,) for n in ("gamma", "beta") for i in range(3)}
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    model = parser.parse_model(_TEXT)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model
