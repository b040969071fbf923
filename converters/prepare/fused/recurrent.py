"""Linear attention with a state, and what stands around it: convolutions, gates, norms, positions of three kinds.

Letters of shapes: batch B, time T, heads of queries Q, heads of values N, sizes D of a key and H of a value.
"""

from math import sqrt

import numpy as np
from onnx import GraphProto, TensorProto, helper

from onnx_backprop.converters.prepare.fused.composer import Composer
from onnx_backprop.converters.prepare.fused.normalization import root_mean_square


def causal_conv_with_state(op: Composer) -> list[str | None]:
    """y = activation(x * w + bias) along time, each channel by itself, behind the past or zeros; the last of both.

    x is (B, C, T), w (C, 1, K), the past (B, C, (K - 1) · dilation); with `channels_last` time comes before channels.
    """
    if op.attribute("ndim", 1) != 1 or op.attribute("state_window", 0):
        raise op.refuse("ndim=1 and state_window=0 are handled, as onnxruntime's CPU does. Export with these")
    x, weight, past = op.input(0), op.input(1), op.input(3)
    last, dilation = op.attribute("channels_last", 0), op.attribute("dilation", 1)
    channels, size = (op.known.length(weight, axis) for axis in (0, 2))
    if not channels or not size:
        raise op.refuse(f"the lengths of {weight!r} must be known. Declare its shape")
    before = (size - 1) * dilation
    rows = [op.Transpose(op.Reshape(a, [0, 0, -1]), perm=[0, 2, 1]) if last and a else a for a in (x, past)]
    padded = op.Concat(rows[1], rows[0], axis=2) if past else op.Pad(rows[0], [0, 0, before, 0, 0, 0])
    y = op.Conv(padded, weight, op.input(2), group=channels, dilations=[dilation], kernel_shape=[size])
    activation = op.attribute("activation", "none")
    if activation not in ("none", "silu", "swish"):
        raise op.refuse(f"the activations none, silu and swish are handled, got {activation!r}")
    y = y if activation == "none" else op.Mul(y, op.Sigmoid(y))
    present = op.Slice(padded, op.length(rows[0], 2), [2**62], [2]) if op.wants(1) else None
    if not last:
        return [y, present]
    end = op.Shape(x, start=2)
    return [
        a and op.Reshape(op.Transpose(a, perm=[0, 2, 1]), op.Concat(op.constant(np.array([0, -1])), end, axis=0))
        for a in (y, present)
    ]


def gated_rms_norm(op: Composer) -> str:
    """y = x/√(mean(x²) + ε) · scale · activation(gate) over each C numbers, scale (C), in float32."""
    x, scale, gate = op.input(0), op.as_float32(op.input(1)), op.as_float32(op.input(2))
    groups = op.Reshape(op.as_float32(x), op.joined(-1, op.length(scale, 0)))
    normed, _ = root_mean_square(op, groups, scale, op.attribute("epsilon", 1e-5), [-1])
    activation = op.attribute("activation", "silu")
    if activation not in ("silu", "swish", "sigmoid"):
        raise op.refuse(f"the activations silu, swish and sigmoid are handled, got {activation!r}")
    open_ = op.Sigmoid(gate)
    y = op.Mul(op.Reshape(normed, op.Shape(x)), open_ if activation == "sigmoid" else op.Mul(gate, open_))
    return op.typed_as(x, y)


def gated_add(op: Composer) -> str:
    """y = a + b · gate."""
    return op.Add(op.input(0), op.Mul(op.input(1), op.input(2)))


def linear_attention_gate(op: Composer) -> list[str | None]:
    """decay = scale · softplus(a + bias) in float32, and sigmoid(b)."""
    a, b = op.input(0), op.input(3)
    soft = op.Softplus(op.Add(op.as_float32(a), op.input(1)))
    return [op.typed_as(a, op.Mul(soft, op.input(2))), op.Sigmoid(b) if b else None]


def linear_attention(op: Composer) -> list[str]:
    """S = exp(g)·S + k·uᵀ and y = scale · qᵀ·S, from step to step; y (B, T, max(Q, N)·H), and the last S (B, N, D, H).

    `update_rule`: linear and delta are without exp(g); u = v, or for the delta rules β · (v - exp(g)·Sᵀ·k).
    The steps are those of a Scan. Half types are computed in float32, as onnxruntime does.
    """
    wide = [name and op.as_float32(name) for name in map(op.input, range(6))]
    query, key, value, past, decay, beta = wide
    rule, queries, heads = op.attribute("update_rule", "gated_delta"), op.count("q_num_heads"), op.count("kv_num_heads")
    op.attribute("chunk_size")
    if op.attribute("state_window", 0):
        raise op.refuse("state_window=0 is handled, as onnxruntime's CPU does. Export without a window")
    if rule not in ("linear", "gated", "delta", "gated_delta"):
        raise op.refuse(f"the rules linear, gated, delta and gated_delta are handled, got {rule!r}")
    if (not decay and "gated" in rule) or (not beta and "delta" in rule):
        raise op.refuse(f"the rule {rule} reads decay, beta or both. Export them")
    q, size = op.Reshape(query, [0, 0, queries, -1]), op.Div(op.length(query, 2), [queries])
    scale = op.attribute("scale", 0.0)
    known = op.known.length(query, 2)
    by = scale or (sqrt(queries / known) if known else op.Reciprocal(op.Sqrt(op.typed_as(query, size))))
    q = _repeated(op, op.Mul(q, by), heads)
    q = op.Reshape(q, [0, 0, heads, max(1, queries // heads), -1])
    k = _repeated(op, op.Reshape(key, op.joined(0, 0, -1, size)), heads)
    v = op.Reshape(value, [0, 0, heads, 1, -1])
    steps = {"q": q, "k": op.Unsqueeze(k, [3]), "v": v}
    if "gated" in rule:
        steps["decay"] = op.Exp(op.Reshape(decay, [0, 0, heads, -1, 1]))
    if "delta" in rule:
        steps["beta"] = op.Reshape(beta, [0, 0, -1, 1, 1])
    shape = op.joined(op.length(query, 0), heads, size, op.length(v, 4))
    state = past or op.Expand(op.number(0.0, query), shape)
    along, body = [1] * len(steps), _step(op, list(steps))
    scan = {"body": body, "num_scan_inputs": len(steps), "scan_input_axes": along, "scan_output_axes": [1]}
    last, y = op.several("Scan", 2, state, *steps.values(), **scan)
    likes = op.input(0), op.input(3) or op.input(0)
    results = op.Reshape(y, [0, 0, -1]), last
    return [op.typed_as(like, x) if op.is_half(like) else x for like, x in zip(likes, results, strict=True)]


def m_rotary_embedding(op: Composer) -> str:
    """RotaryEmbedding with three positions of a token, (3, B, S): each column of the tables is read at one of them.

    Columns in a row, as many as `mrope_section` says; or with `mrope_layout` 1 every third at the second and third.
    """
    ids, sections = op.input(1), list(op.attribute("mrope_section", [0, 0, 0]))
    at = np.repeat([0, 1, 2], sections)
    if op.attribute("mrope_layout", 0):
        at[:] = 0
        for n in (1, 2):
            at[n : 3 * sections[n] : 3] = n
    chosen = (at == np.arange(3)[:, None]).astype(np.float32).reshape(3, 1, 1, -1)
    tables = []
    for cache in (op.input(2), op.input(3)):
        gathered = op.defined_by(op.Gather(cache, ids), 0, "rotation")
        one = op.ReduceSum(op.Mul(gathered, op.typed_as(cache, op.constant(chosen))), [0], keepdims=0)
        tables.append(op.Reshape(one, [-1, at.size]))
    count = op.Squeeze(op.length(tables[0], 0))
    rows = op.Range(op.constant(np.array(0)), count, op.constant(np.array(1)))
    places = op.Reshape(rows, op.Shape(ids, start=1))
    names = ("num_heads", "rotary_embedding_dim", "interleaved", "is_packed_batching", "scale")
    given = {name: op.attribute(name) for name in names}
    return op.RotaryEmbedding(op.input(0), places, *tables, domain="com.microsoft", **given)


def _repeated(op: Composer, x: str, heads: int) -> str:
    """(B, T, n, D) -> (B, T, max(n, heads), D), each head as often as there are more of the others."""
    times = op.Max(op.Div(op.constant(np.array([heads])), op.length(x, 2)), op.constant(np.array([1])))
    wide = op.Expand(op.Unsqueeze(x, [3]), op.joined(1, 1, 1, times, 1))
    return op.Reshape(wide, op.joined(0, 0, -1, op.length(x, 3)))


def _step(op: Composer, names: list[str]) -> GraphProto:
    """S (B, N, D, H), q (B, N, Q/N, D), k (B, N, 1, D), v (B, N, 1, H), decay (B, N, D, 1), beta (B, N, 1, 1)."""
    outside, op.nodes = op.nodes, []
    state = op.fresh("state")
    given = {name: op.fresh(name) for name in names}
    decayed = op.Mul(state, given["decay"]) if "decay" in given else state
    new = given["v"]
    if "beta" in given:
        new = op.Mul(given["beta"], op.Sub(new, op.MatMul(given["k"], decayed)))
    after = op.Add(decayed, op.Mul(op.Transpose(given["k"], perm=[0, 1, 3, 2]), new))
    y = op.MatMul(given["q"], after)
    inputs, outputs = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]
        for names in ((state, *given.values()), (after, y))
    )
    body = helper.make_graph(op.nodes, "step", inputs, outputs)
    op.nodes = outside
    return body
