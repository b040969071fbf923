"""AttentionForwardTraining: scaled dot-product attention that keeps what its gradient needs, and no probabilities."""

from collections.abc import Sequence

import numpy as np

from onnx_backprop.opset.bodies.attention import NEVER, Scores
from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.core.op import Arg, Attributes, Float64Array, Input, Op, Output
from onnx_backprop.opset.core.shapes import Dims
from onnx_backprop.opset.maths import attention

DOC = f"""
y_i = Σ_j p_ij·v_j,  p_ij = e^(s_ij - L_i),  L_i = log(Σ_j e^s_ij + e^sink)
{attention.MASKS}
y = out, L = log_sum_exp, sink = sinks[h]; without sinks its term is 0. AttentionBackward computes p again from L.

Shapes: query (B, H, S, D), key (B, G, T, D), value (B, G, T, E), bias (B, H, S, T) with each length that or 1, lengths
and offsets (B), sinks (H) -> out (B, H, S, E), log_sum_exp (B, H, S). H is a multiple of G.

Edge cases: a query that sees no key, or only keys with a bias of -inf, outputs 0; its L is -inf, or the sink. Lengths
below 0 and above T count as these. No queries, batches or heads give empty outputs. Sums are taken in float32 or
better.

Errors: lengths that contradict each other; heads that are no multiple; no keys; no columns; a scale or softcap that is
not finite, a softcap below 0; window sizes below -1.
"""

INPUTS: tuple[str, ...] = ("query", "key", "value", "bias", "lengths", "sinks", "offsets")


def shape(attrs: Attributes, args: Sequence[Arg | None]) -> Sequence[Dims | None]:
    lengths = attention.lengths_of(attrs, dict(zip(INPUTS, args, strict=True)))
    return tuple(lengths[letter] for letter in "BHSE"), tuple(lengths[letter] for letter in "BHS")


def reference(
    attrs: Attributes,
    _out: tuple[tuple[int, ...], ...],
    query: Float64Array,
    key: Float64Array,
    value: Float64Array,
    bias: Float64Array | None,
    lengths: Float64Array | None,
    sinks: Float64Array | None,
    offsets: Float64Array | None,
) -> tuple[Float64Array, Float64Array]:
    scores, _ = attention.scores(attrs, query, key, bias, lengths, offsets)
    sink = np.float64(-np.inf) if sinks is None else sinks[:, None, None]
    most = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    most = np.where(most == -np.inf, 0, most)
    powers = np.exp(scores - most)
    total = powers.sum(axis=-1, keepdims=True) + np.exp(sink - most)
    divisor = np.where(total == 0, 1, total)
    output = np.einsum("bhst,bhte->bhse", powers / divisor, attention.repeat_heads(value, query.shape[1]))
    return output, np.where(total == 0, -np.inf, np.log(divisor) + most)[..., 0]


def body(
    b: Body,
    attrs: Attributes,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    sinks: Tensor | None,
    offsets: Tensor | None,
) -> Sequence[str]:
    given = dict(zip(INPUTS, (query, key, value, bias, lengths, sinks, offsets), strict=True))
    a = Scores(b, attrs, given)
    last, none = b.ints([-1]), b.float_scalar(NEVER)
    most = b.ReduceMax(a.scores, last, keepdims=1)
    most = b.Max(most, a.sink) if a.sink else most
    most = b.Where(b.Equal(most, none), b.float_scalar(0), most)
    powers = b.Exp(b.Sub(a.scores, most))
    total = b.ReduceSum(powers, last, keepdims=1)
    total = b.Add(total, b.Exp(b.Sub(a.sink, most))) if a.sink else total
    nothing = b.Equal(total, b.float_scalar(0))
    divisor = b.Where(nothing, b.float_scalar(1), total)
    logarithm = b.Where(nothing, none, b.Add(b.Log(divisor), most))
    output = a.product("bgst,bgte->bgse", a.grouped(b.Div(powers, divisor), "T"), value.name)
    return a.shaped(output, "BHSE"), a.shaped(logarithm, "BHS")


OP = Op(
    name="AttentionForwardTraining",
    doc=DOC,
    source="PyTorch's _scaled_dot_product_flash_attention_for_cpu and cuDNN's SDPA forward of training (its Stats), "
    "with the softcap, windows and sinks of onnxruntime's GroupQueryAttention",
    attributes=attention.ATTRIBUTES,
    inputs=(
        Input("query", "T1", "Queries, (B, H, S, D)."),
        Input("key", "T1", "Keys, (B, G, T, D)."),
        Input("value", "T1", "Values, (B, G, T, E)."),
        *attention.OPTIONAL,
    ),
    outputs=(
        Output("out", "Weighted sums of the values, (B, H, S, E)."),
        Output("log_sum_exp", "The logarithm of the sum of the powers of the scores, (B, H, S).", "T5"),
    ),
    shape=shape,
    reference=reference,
    body=body,
)
