"""Attention whose query heads share keys in groups, beside a cache of keys and values.

Letters of shapes: batch B, heads N of queries and M of keys, length S of the new tokens and T of all, size H of a head.
"""

from collections.abc import Sequence

from onnx import TensorProto

from onnx_backprop.converters.prepare.fused import attention
from onnx_backprop.converters.prepare.fused.composer import Composer

BEFORE_SOFTMAX, AFTER_SOFTMAX = 1, 2  # of qk_output


def group_query_attention(op: Composer) -> list[str | None]:
    """`attention.attend` of turned queries and keys, (B, S, N·H); present keys and values, (B, M, T, H); the scores.

    Row b holds seqlens_k[b] + 1 tokens, the new ones last, and T = total_sequence_length at most. With S = T all are
    new, and what the cache holds is not read. A query behind the last token of its row sees what the last token sees.
    With query_seqlens (B) only so many tokens of a row are new, T bounds the row alone, and the other queries give 0.
    A window reaches back from the place of a query; from the end of the row where onnxruntime computes all scores.
    """
    _check_form(op)
    q, k, v = _projected(op)
    past = [name for name in (op.input(3), op.input(4)) if name]
    past = [] if 0 in (op.known.length(name, 2) for name in past) else past
    tokens = _Tokens(op, op.length(q, 2), cached=bool(past))
    positions, caches = op.input(9), [op.input(7), op.input(8)]
    if op.attribute("do_rotary", 0) == 1:
        q, k = _turned(op, q, k, caches, tokens.positions(positions))
    present = [k, v]
    if past:
        sliding = bool(op.attribute("sliding_window_cache", 0))
        k, v, *present = tokens.after(past, k, v, op.attribute("local_window_size", -1) if sliding else 0)
    bias, sink = op.input(10), _sink(op, q)
    element, half = op.known.element(op.input(0)), op.is_half(op.input(0))
    q, k, v, bias, sink = (op.as_float32(x) if half and x else x for x in (q, k, v, bias, sink))
    scored = {"scale": op.attribute("scale", 0.0), "bias": bias, "softcap": op.attribute("softcap", 0.0)}
    window, naive = op.attribute("local_window_size", -1), half or bool(scored["softcap"] or sink) or not _is_plain(op)
    seen = {"lengths": op.Unsqueeze(tokens.ends, [2, 3]), "window": window, "clipped": naive}
    if op.attribute("causal", 1):
        seen["offset"] = op.Unsqueeze(tokens.starts, [2, 3]) if tokens.starts else 0
    y = op.Mul(q, 0.0) if window == 0 else attention.attend(op, q, k, v, **scored, **seen, sink=sink)
    real = tokens.real or (tokens.in_reach(window) if window > 0 and not naive else "")
    y = op.Where(op.Unsqueeze(real, [1, 3]), y, op.number(0.0, y)) if real else y
    results = [attention.merge_heads(op, y)]
    kind = op.attribute("qk_output", 0)
    if kind and op.wants(3):
        s, hidden = attention.scores(op, q, k, **scored), attention.hidden_keys(op, q, k, **seen)
        s = attention.weights(op, s, hidden, sink) if kind == AFTER_SOFTMAX and window else s
        results.append(op.Where(hidden, op.number(0.0, s), s))
    y, *s = (op.Cast(x, to=element) if half else x for x in results)
    return [y, *present, *s]


class _Tokens:
    """Where the tokens of each row lie: the new ones from `starts` on, all before `ends`, (B, 1) of int64.

    starts is "" where it is 0; real, whether a new one is no padding, (B, S), where query_seqlens says so, else "".
    """

    def __init__(self, op: Composer, count: str, *, cached: bool) -> None:
        self.op, self.count = op, count
        self.ends = op.Add(_column(op, op.input(5)), [1])
        self.total = op.Reshape(op.Cast(op.input(6), to=TensorProto.INT64), [1])
        self.prompt = op.Equal(count, self.total)
        self.real = self.starts = ""
        if op.input(16):
            new = _column(op, op.input(16))
            self.starts, self.real = op.Sub(self.ends, new), op.Less(attention.arange(op, count), new)
        elif cached:
            self.starts = op.Where(self.prompt, [0], op.Sub(self.ends, count))

    def positions(self, stated: str) -> str:
        """Positions of the new tokens, (B, S), or (1, S) where they are those of all rows; 0 of padding.

        Of those stated a prompt counts on from the first.
        """
        op, steps = self.op, attention.arange(self.op, self.count)
        if self.real:
            return op.Where(self.real, stated or op.Add(steps, self.starts), [0])
        if not stated:
            return op.Add(steps, self.starts or [[0]])
        counted = op.Add(steps, op.Slice(op.Reshape(stated, [1, -1]), [0], [1], [1]))
        return op.Where(self.prompt, counted, stated) if self.starts else counted

    def in_reach(self, window: int) -> str:
        """Whether a new token, or padding behind it, has a token of its row in its window, (B, S)."""
        op = self.op
        return op.Less(op.Add(attention.arange(op, self.count), self.starts or [[0]]), op.Add(self.ends, [window - 1]))

    def after(self, past: Sequence[str], k: str, v: str, window: int) -> list[str]:
        """Keys and values (B, M, T, H) at their places, then those of the caches (B, M, max(T, P), H) afterwards.

        past: caches (B, M, P, H) of the tokens before `starts`, all of them without a window, from place 0 on. With
        one, the last `kept` of them, and likewise afterwards. Without new ones, the keys of another layer being shared,
        `past` holds the tokens before `ends`. What lies behind `ends` is 0.
        """
        op, held, added = self.op, self.op.length(past[0], 2), self.op.length(k, 2)
        starts = op.Where(op.Equal(added, [0]), self.ends, self.starts)
        places = op.Unsqueeze(attention.arange(op, op.Max(self.total, held)), [0])
        kept = self._tokens_in_window(starts, held, window) if window else starts
        since = op.Sub(places, starts)
        index = op.Add(since, op.Where(op.Less(since, [0]), kept, held))  # of the past, then the new
        index = op.Where(op.Greater(kept, held), [2**40], index)  # fails in the run: rows that the cache lacks
        real = op.Less(places, self.ends if self.real else op.Add(starts, added))
        real = op.And(real, op.GreaterOrEqual(index, [0])) if window else real
        both = [_rows(op, op.Concat(before, x, axis=2), index, real) for before, x in zip(past, (k, v), strict=True)]
        present = both
        if window:
            kept = self._tokens_in_window(self.ends, held, window)
            places = op.Unsqueeze(attention.arange(op, held), [0])
            index = op.Add(places, op.Sub(self.ends, kept))
            present = [_rows(op, x, index, op.Less(places, kept)) for x in both]
        return [*(op.Slice(x, [0], self.total, [2]) for x in both), *present]

    def _tokens_in_window(self, tokens: str, capacity: str, window: int) -> str:
        """How many of so many tokens a cache with a window keeps: others go in steps of capacity - window + 1."""
        op = self.op
        step = op.Sub(capacity, [window - 1])
        over = op.Max(op.Sub(tokens, capacity), [0])
        return op.Sub(tokens, op.Mul(op.Div(op.Add(over, op.Sub(step, [1])), step), step))


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
    sliding, chunked = op.attribute("sliding_window_cache", 0), bool(op.input(16))
    causal, window, kind = (
        op.attribute("causal", 1),
        op.attribute("local_window_size", -1),
        op.attribute("qk_output", 0),
    )
    if causal not in (0, 1) or (not causal and window != -1):
        raise op.refuse(f"expected causal 1, or 0 without local_window_size, got {causal} and {window}")
    if (sliding or chunked) and not op.input(3):
        raise op.refuse("sliding_window_cache and query_seqlens need past_key and past_value. Name them")
    if sliding and (window < 1 or kind):
        raise op.refuse("sliding_window_cache needs a local_window_size of 1 or more, and no qk_output")
    if chunked and not causal:
        raise op.refuse("query_seqlens needs causal = 1")
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


def _turned(op: Composer, q: str, k: str, caches: list[str], positions: str) -> list[str]:
    """Queries and keys, of which as many numbers as the cosines and sines make are turned."""
    size, half = op.known.length(q, 3), op.known.length(caches[0], 1)
    if half is not None and (half % 8 or (size is not None and (size % 16 or 2 * half > size))):
        raise op.refuse(f"expected cosines for 8, 16, ... pairs of the {size} numbers of a head, got {half}")
    whole = size is not None and half is not None and size == 2 * half
    part = None if whole else op.Mul(op.length(caches[0], 1), [2])
    cos, sin = (op.Unsqueeze(c, [1]) for c in attention.at_positions(op, caches, positions))
    interleaved = int(op.attribute("rotary_interleaved", 0) == 1)
    q = attention.rotated(op, q, cos, sin, interleaved, part)
    if op.known.length(k, 2) == 0:
        return [q, k]
    if op.input(1) and op.input(3) and op.known.length(k, 2) is None:  # there may be none
        cos, sin = (op.Slice(c, [0], op.length(k, 2), [2]) for c in (cos, sin))
    return [q, attention.rotated(op, k, cos, sin, interleaved, part)]


def _rows(op: Composer, x: str, index: str, real: str) -> str:
    """x[b, m, index[b, t]] of x (B, M, L, H) where real[b, t], else 0: (B, M, T, H)."""
    row = op.Reshape(attention.arange(op, op.Mul(op.length(x, 0), op.length(x, 1))), op.Shape(x, end=2))
    first = op.Unsqueeze(op.Mul(row, op.length(x, 2)), [2])
    flat = op.Reshape(x, op.joined(-1, op.length(x, 3)))
    gathered = op.Gather(flat, op.Add(first, op.Unsqueeze(op.Where(real, index, [0]), [1])))
    return op.Where(op.Unsqueeze(real, [1, 3]), gathered, op.number(0.0, gathered))


def _column(op: Composer, counts: str) -> str:
    """Numbers of each row, int32, as (B, 1) of int64."""
    return op.Reshape(op.Cast(counts, to=TensorProto.INT64), [-1, 1])


def _is_plain(op: Composer) -> bool:
    """Whether a node puts out keys and values but no scores."""
    present, scores = op.node.output[1:3], op.node.output[3:]
    return len(present) == 2 and all(present) and not any(scores)


def _sink(op: Composer, q: str) -> str:
    """The logit of each head, 0 of all for a smooth softmax, "" without one."""
    smooth = op.attribute("smooth_softmax", 0) == 1
    zeros = op.Expand(op.number(0.0, q), op.length(q, 1)) if smooth else ""
    return op.input(11) or zeros
