"""AttentionBackward: the gradient of AttentionForwardTraining, which computes the probabilities again."""

from collections.abc import Sequence

import numpy as np

from onnx_backprop.opset.bodies.attention import NEVER, Scores
from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.core.op import Arg, Attributes, Float64Array, Input, Op, Output
from onnx_backprop.opset.core.shapes import Dims
from onnx_backprop.opset.maths import attention

DOC = f"""
dq_i = scale·Σ_j ds_ij·t_ij·k_j,  dk_j = scale·Σ_i ds_ij·t_ij·q_i,  dv_j = Σ_i p_ij·dy_i,  ds_ij = p_ij·(dy_i·v_j - δ_i)

p_ij = e^(s_ij - L_i), δ_i = Σ dy_i·y_i, dbias_ij = ds_ij, dsink = -Σ_i e^(sink - L_i)·δ_i.
{attention.MASKS}
t_ij = 1 - tanh²(scale·q_i·k_j / softcap), 1 without softcap. y = out and L = log_sum_exp are those of
AttentionForwardTraining, whose attributes and other inputs are here the same; dy = diff_out.

Shapes: those of AttentionForwardTraining, diff_out as out -> each gradient as its input. diff_bias is summed over
the axes along which bias has length 1, diff_key and diff_value over the heads that read them. Without bias, diff_bias
has the shape (0), without sinks diff_sinks.

Edge cases: a query whose L is -inf has no gradient and gives none. Sums are taken in float32 or better.

Errors: those of AttentionForwardTraining; lengths of dy, y or L that contradict the others.
"""

INPUTS: tuple[str, ...] = (
    "diff_out",
    "query",
    "key",
    "value",
    "out",
    "log_sum_exp",
    "bias",
    "lengths",
    "sinks",
    "offsets",
)


def shape(attrs: Attributes, args: Sequence[Arg | None]) -> Sequence[Dims | None]:
    given = dict(zip(INPUTS, args, strict=True))
    lengths = attention.lengths_of(attrs, given)
    bias, sinks = given["bias"], given["sinks"]
    return (
        *(tuple(lengths[letter] for letter in attention.AXES[name]) for name in ("query", "key", "value")),
        (0,) if bias is None else bias.dims or (None,) * 4,
        (0,) if sinks is None else (lengths["H"],),
    )


def reference(
    attrs: Attributes,
    out: tuple[tuple[int, ...], ...],
    diff_out: Float64Array,
    query: Float64Array,
    key: Float64Array,
    value: Float64Array,
    output: Float64Array,
    log_sum_exp: Float64Array,
    bias: Float64Array | None,
    lengths: Float64Array | None,
    sinks: Float64Array | None,
    offsets: Float64Array | None,
) -> tuple[Float64Array, ...]:
    heads, shared = query.shape[1], key.shape[1]
    scores, bent = attention.scores(attrs, query, key, bias, lengths, offsets)
    nothing = log_sum_exp == -np.inf
    level = np.where(nothing, 0, log_sum_exp)[..., None]
    p = np.where(nothing[..., None], 0, np.exp(scores - level))
    delta = (diff_out * output).sum(axis=-1, keepdims=True)
    ds = p * (np.einsum("bhse,bhte->bhst", diff_out, attention.repeat_heads(value, heads)) - delta)
    dv = np.einsum("bhst,bhse->bhte", p, diff_out)
    dproducts = ds * attention.scale_of(attrs, query.shape[3]) * (1 if bent is None else 1 - bent * bent)
    dq = np.einsum("bhst,bhtd->bhsd", dproducts, attention.repeat_heads(key, heads))
    dk = np.einsum("bhst,bhsd->bhtd", dproducts, query)
    dbias, dsinks = np.zeros(0), np.zeros(0)
    if bias is not None:
        axes = tuple(n for n, (a, c) in enumerate(zip(bias.shape, ds.shape, strict=True)) if a != c)
        dbias = ds.sum(axis=axes, keepdims=True).reshape(out[3])
    if sinks is not None:
        share = np.where(nothing[..., None], 0, np.exp(sinks[:, None, None] - level))
        dsinks = -(share * delta).sum(axis=(0, 2, 3))
    return dq, attention.sum_heads(dk, shared), attention.sum_heads(dv, shared), dbias, dsinks


def body(
    b: Body,
    attrs: Attributes,
    diff_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    sinks: Tensor | None,
    offsets: Tensor | None,
) -> Sequence[str]:
    tensors = (diff_out, query, key, value, output, log_sum_exp, bias, lengths, sinks, offsets)
    a = Scores(b, attrs, dict(zip(INPUTS, tensors, strict=True)))
    zero, one, last = b.float_scalar(0), b.float_scalar(1), b.ints([-1])
    upright = b.Unsqueeze(log_sum_exp, last)
    nothing = b.Equal(upright, b.float_scalar(NEVER))
    level = b.Where(nothing, zero, upright)
    p = b.Where(nothing, zero, b.Exp(b.Sub(a.scores, level)))
    delta = b.ReduceSum(b.Mul(diff_out, output), last, keepdims=1)
    dy = a.grouped(diff_out.name, "E")
    dp = a.ungrouped(a.product("bgse,bgte->bgst", dy, value.name), "T")
    ds = b.Mul(p, b.Sub(dp, delta))
    dv = a.product("bgst,bgse->bgte", a.grouped(p, "T"), dy)
    dproducts = b.Mul(ds, a.scale)
    if a.bent:
        dproducts = b.Mul(dproducts, b.Sub(one, b.Mul(a.bent, a.bent)))
    dproducts = a.grouped(dproducts, "T")
    dq = a.product("bgst,bgtd->bgsd", dproducts, key.name)
    dk = a.product("bgst,bgsd->bgtd", dproducts, a.grouped(query.name, "D"))
    dbias = dsinks = b.constant(np.zeros(0, np.float32))
    if bias is not None:
        short = b.Equal(b.Shape(bias), b.ints([1]))
        axes = b.Squeeze(b.NonZero(short), b.ints([0]))
        dbias = b.ReduceSum(ds, axes, keepdims=1, noop_with_empty_axes=1)
        dbias = b.Reshape(dbias, b.Add(b.Shape(bias), a.zero.name), allowzero=1)
    if a.sink:
        share = b.Where(nothing, zero, b.Exp(b.Sub(a.sink, level)))
        dsinks = a.shaped(b.Neg(b.ReduceSum(b.Mul(share, delta), b.ints([0, 2, 3]), keepdims=0)), "H")
    return a.shaped(dq, "BHSD"), a.shaped(dk, "BGTD"), a.shaped(dv, "BGTE"), dbias, dsinks


OP = Op(
    name="AttentionBackward",
    doc=DOC,
    source="PyTorch's _scaled_dot_product_flash_attention_for_cpu_backward and cuDNN's SDPA backward",
    attributes=attention.ATTRIBUTES,
    inputs=(
        Input("diff_out", "T1", "Gradient with respect to out, (B, H, S, E)."),
        Input("query", "T1", "Queries, (B, H, S, D)."),
        Input("key", "T1", "Keys, (B, G, T, D)."),
        Input("value", "T1", "Values, (B, G, T, E)."),
        Input("out", "T1", "out of AttentionForwardTraining, (B, H, S, E)."),
        Input("log_sum_exp", "T5", "log_sum_exp of AttentionForwardTraining, (B, H, S)."),
        *attention.OPTIONAL,
    ),
    outputs=(
        Output("diff_query", "Gradient with respect to query."),
        Output("diff_key", "Gradient with respect to key."),
        Output("diff_value", "Gradient with respect to value."),
        Output("diff_bias", "Gradient with respect to bias."),
        Output("diff_sinks", "Gradient with respect to sinks.", "T5"),
    ),
    shape=shape,
    reference=reference,
    body=body,
)
