"""Attention whose query heads share keys in groups, beside a cache of keys and values.

Letters of shapes: batch B, heads N of queries and M of keys, length S of the new tokens and T of all, size H of a head.
"""

from onnx import TensorProto

from onnx_backprop.converters.prepare.fused import attention
from onnx_backprop.converters.prepare.fused.composer import Composer

BEFORE_SOFTMAX, AFTER_SOFTMAX = 1, 2  # of qk_output


def group_query_attention(op: Composer) -> list[str | None]:
    """`attention.attend` of turned queries and keys, (B, S, N·H); present keys and values, (B, M, T, H); the scores.

    Row b holds seqlens_k[b] + 1 tokens, the new ones last, and T = total_sequence_length at most. With S = T all are
    new, and what the cache holds is not read. A query behind the last token of its row sees what the last token sees.
    """
    _check_form(op)
    q, k, v = _projected(op)
    ends = op.Add(op.Reshape(op.Cast(op.input(5), to=TensorProto.INT64), [-1, 1]), [1])  # tokens of each row, (B, 1)
    total = op.Reshape(op.Cast(op.input(6), to=TensorProto.INT64), [1])
    past = [name for name in (op.input(3), op.input(4)) if name and op.known.length(name, 2) != 0]
    prompt = op.Equal(op.length(q, 2), total)
    starts = op.Where(prompt, [0], op.Sub(ends, op.length(q, 2))) if past else ""  # tokens before the new ones, (B, 1)
    positions, caches = op.input(9), [op.input(7), op.input(8)]
    if op.attribute("do_rotary", 0) == 1:
        q, k = _turned(op, q, k, caches, _positions(op, q, positions, starts, prompt))
    present = [_after(op, cache, x, starts, ends, total) for cache, x in zip(past, (k, v), strict=False)] or [k, v]
    k, v = (op.Slice(x, [0], total, [2]) for x in present) if past else (k, v)
    bias, sink = op.input(10), _sink(op, q)
    element, half = op.known.element(op.input(0)), op.is_half(op.input(0))
    q, k, v, bias, sink = (op.as_float32(x) if half and x else x for x in (q, k, v, bias, sink))
    scored = {"scale": op.attribute("scale", 0.0), "bias": bias, "softcap": op.attribute("softcap", 0.0)}
    causal = (op.Unsqueeze(starts, [2, 3]) if starts else 0) if op.attribute("causal", 1) else None
    seen = {"lengths": op.Unsqueeze(ends, [2, 3]), "offset": causal, "window": op.attribute("local_window_size", -1)}
    y = op.Mul(q, 0.0) if seen["window"] == 0 else attention.attend(op, q, k, v, **scored, **seen, sink=sink)
    results = [attention.together(op, y)]
    kind = op.attribute("qk_output", 0)
    if kind and op.wants(3):
        s, hidden = attention.scores(op, q, k, **scored), attention.hidden_keys(op, q, k, **seen)
        s = attention.weights(op, s, hidden, sink) if kind == AFTER_SOFTMAX else s
        results.append(op.Where(hidden, op.number(0.0, s), s))
    y, *s = (op.Cast(x, to=element) if half else x for x in results)
    return [y, *present, *s]


def _check_form(op: Composer) -> None:
    """Refuse what onnxruntime's kernel does not run, as far as it is known before the run, and quantised caches."""
    heads, shared = op.count("num_heads"), op.count("kv_num_heads")
    quantised = [op.attribute(f"{name}_quant_type", "NONE") for name in "kv"]
    op.attribute("kv_cache_bit_width")
    op.attribute("rotary_interleaved")
    for name in ("qk_norm_epsilon", "q_norm_epsilon", "k_norm_epsilon"):
        op.attribute(name)  # nothing without the weights
    if quantised != ["NONE", "NONE"] or op.input(12) or op.input(13):
        raise op.refuse(
            "a quantised cache (k_quant_type, v_quant_type, k_scale, v_scale) is not handled, for its rounding has no "
            "gradient. Export with a cache of floats"
        )
    if op.input(14) or op.input(15):
        raise op.refuse(
            "q_norm_weight and k_norm_weight are not handled, nor has onnxruntime's CPU a kernel. Export the norms as "
            "SimplifiedLayerNormalization"
        )
    if heads % shared:
        raise op.refuse(f"expected num_heads to be a multiple of kv_num_heads, got {heads} and {shared}")
    if bool(op.input(1)) != bool(op.input(2)) or bool(op.input(3)) != bool(op.input(4)):
        raise op.refuse("expected key and value both or neither, and likewise past_key and past_value")
    if op.attribute("do_rotary", 0) == 1 and not (op.input(7) and op.input(8)):
        raise op.refuse("do_rotary needs both cos_cache and sin_cache. Name them or leave it out")
    causal, window, kind = (
        op.attribute("causal", 1),
        op.attribute("local_window_size", -1),
        op.attribute("qk_output", 0),
    )
    if causal not in (0, 1) or (not causal and window != -1):
        raise op.refuse(f"expected causal 1, or 0 without local_window_size, got {causal} and {window}")
    if kind not in (0, BEFORE_SOFTMAX, AFTER_SOFTMAX) or (not kind and op.wants(3)):
        raise op.refuse(f"the scores are read: expected qk_output 1 or 2, got {kind}")


def _projected(op: Composer) -> list[str]:
    """Queries (B, N, S, H), keys and values (B, M, S, H)."""
    heads, shared, query = op.count("num_heads"), op.count("kv_num_heads"), op.input(0)
    packed = not op.input(1)
    count = heads + 2 * shared if packed else heads
    width = op.known.length(query, 2)
    if width is not None and (width % count or width // count % 8):
        raise op.refuse(
            f"expected {'queries, keys and values' if packed else 'queries'} of {count} heads of 8, 16, ... numbers, "
            f"got a width of {width}"
        )
    size = width // count if width else op.Div(op.length(query, 2), [count])
    q = _by_heads(op, query, count, size)
    if packed:
        return op.several("Split", 3, q, [heads, shared, shared], axis=1)
    return [q, *(_by_heads(op, x, shared, size) for x in (op.input(1), op.input(2)))]


def _by_heads(op: Composer, x: str, heads: int, size: int | str) -> str:
    """(B, S, N·H) -> (B, N, S, H), S possibly 0."""
    shape = [0, 0, heads, size] if isinstance(size, int) else op.joined(0, 0, heads, size)
    return op.Transpose(op.Reshape(x, shape), perm=[0, 2, 1, 3])


def _positions(op: Composer, q: str, stated: str, starts: str, prompt: str) -> str:
    """Positions of the new tokens, (B, S), or (1, S) where they are those of all rows.

    Of those stated a prompt counts on from the first.
    """
    tokens = attention.arange(op, op.length(q, 2))
    if not stated:
        return op.Add(tokens, starts or [[0]])
    first = op.Slice(op.Reshape(stated, [1, -1]), [0], [1], [1])
    counted = op.Add(tokens, first)
    return op.Where(prompt, counted, stated) if starts else counted


def _turned(op: Composer, q: str, k: str, caches: list[str], positions: str) -> list[str]:
    """Queries and keys, of which as many numbers as the cosines and sines make are turned."""
    size, half = op.known.length(q, 3), op.known.length(caches[0], 1)
    if half is not None and (half % 8 or (size is not None and (size % 16 or 2 * half > size))):
        raise op.refuse(f"expected cosines for 8, 16, ... pairs of the {size} numbers of a head, got {half}")
    whole = size is not None and half is not None and size == 2 * half
    part = None if whole else op.Mul(op.length(caches[0], 1), [2])
    cos, sin = (op.Unsqueeze(c, [1]) for c in attention.at_positions(op, caches, positions))
    interleaved = int(op.attribute("rotary_interleaved", 0) == 1)
    return [attention.turned(op, x, cos, sin, interleaved, part) for x in (q, k)]


def _after(op: Composer, past: str, new: str, starts: str, ends: str, total: str) -> str:
    """The tokens (B, M, T, H) of a cache (B, M, P, H), row by row those before `starts` (B, 1), then the new; then 0.

    Without new ones, the keys of another layer being shared, those before `ends` (B, 1).
    """
    held, added = op.length(past, 2), op.length(new, 2)
    length = op.Max(total, held)
    places = op.Unsqueeze(attention.arange(op, length), [0])
    starts = op.Where(op.Equal(added, [0]), ends, starts)
    index = op.Where(op.Less(places, starts), places, op.Add(op.Sub(places, starts), held))  # of the past, then the new
    real = op.Less(places, op.Add(starts, added))
    both = op.Concat(past, new, axis=2)
    row = op.Reshape(attention.arange(op, op.Mul(op.length(both, 0), op.length(both, 1))), op.Shape(both, end=2))
    first = op.Unsqueeze(op.Mul(row, op.length(both, 2)), [2])  # of each row and head
    flat = op.Reshape(both, op.joined(-1, op.length(both, 3)))
    found = op.Gather(flat, op.Add(first, op.Unsqueeze(op.Where(real, index, [0]), [1])))
    return op.Where(op.Unsqueeze(real, [1, 3]), found, op.number(0.0, found))


def _sink(op: Composer, q: str) -> str:
    """The logit of each head, 0 of all for a smooth softmax, "" without one."""
    smooth = op.attribute("smooth_softmax", 0) == 1
    zeros = op.Expand(op.number(0.0, q), op.length(q, 1)) if smooth else ""
    return op.input(11) or zeros
