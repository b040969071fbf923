"""Attention over several heads, and rotary position embeddings.

Letters of shapes: batch B, heads N, length S of the queries and T of all keys, size H of a head.
"""

from collections.abc import Sequence
from math import inf, sqrt

import numpy as np
from onnx import TensorProto, helper

from onnx_backprop.converters.prepare.fused.composer import Composer
from onnx_backprop.opset import DOMAIN
from onnx_backprop.opset.maths.attention import TOP_LEFT

MASK_FILTER = -10000.0


def attention(op: Composer) -> list[str | None]:
    """`attend` of q, k, v = x·w + b by heads, masked, (B, S, N·H); and the present keys and values, (2, B, N, T, H)."""
    heads, sizes, past = op.count("num_heads"), op.attribute("qkv_hidden_sizes"), op.input(4)
    op.attribute("rotary_embedding_dim")
    op.input(6)  # the length of a past that shares its buffer: no more than a name on the CPU
    if op.attribute("do_rotary", 0):
        raise op.refuse("do_rotary is not handled, nor has onnxruntime's CPU a kernel. Export a RotaryEmbedding")
    if op.attribute("past_present_share_buffer", 0) and past:
        raise op.refuse(
            "past_present_share_buffer with a past is not handled, nor has onnxruntime's CPU a kernel. Leave it out"
        )
    if sizes and op.wants(1) and len(set(sizes)) > 1:
        raise op.refuse(f"the output 'present' needs values as wide as keys, got qkv_hidden_sizes {list(sizes)}")
    projected = op.MatMul(op.input(0), op.input(1))
    projected = op.Add(projected, op.input(2)) if op.input(2) else projected
    split = {"num_outputs": None if sizes else 3, "axis": -1}
    q, k, v = (_heads(op, x, heads) for x in op.several("Split", 3, projected, list(sizes) if sizes else None, **split))
    before = 0
    if past:
        before = op.length(past, 3)
        k, v = (op.Concat(op.Gather(past, op.constant(np.array(n)), axis=0), x, axis=2) for n, x in enumerate((k, v)))
    bias = _bias(op, q, k, mask=op.input(3), bias=op.input(5))
    offset = before if op.attribute("unidirectional", 0) else None
    y = merge_heads(op, attend(op, q, k, v, scale=op.attribute("scale", 0.0), bias=bias, offset=offset))
    present = op.Concat(*(op.Unsqueeze(x, [0]) for x in (k, v)), axis=0) if op.wants(1) else None
    return [y, present]


def multi_head_attention(op: Composer) -> list[str | None]:
    """`attend` of q, k, v, masked, (B, S, N·H); the present keys and values, (B, N, T, H); and the scores.

    Keys and values are (B, T, N·H), or (B, N, T, H), to which no input bias is added. With past_sequence_length P the
    past is a buffer: of its keys P are read, and the present is that buffer with the new ones from P on.
    """
    heads, query, key, value, bias = op.count("num_heads"), *(op.input(n) for n in range(4))
    if not key or not value or op.rank(query, "by MultiHeadAttention") != 3:
        raise op.refuse(
            "packed queries, keys and values are not handled, nor has onnxruntime a kernel. Export them apart"
        )
    if op.input(9):
        raise op.refuse("cache_indirection is not handled. Export without beam search")
    split_already = op.rank(key, "by MultiHeadAttention") == 4
    q, k, v = query, key, value
    if bias:
        total, end = op.length(q, 2), op.constant(np.array([2**62]))
        q = op.Add(q, op.Slice(bias, [0], total))
        if not split_already:
            more = op.Add(total, op.length(k, 2))
            k, v = op.Add(k, op.Slice(bias, total, more)), op.Add(v, op.Slice(bias, more, end))
    q, filled, before = _heads(op, q, heads), op.input(8), 0
    past = [name for name in (op.input(6), op.input(7)) if name]
    k, v = (x if split_already else _heads(op, x, heads) for x in (k, v))
    present = [k, v]
    if past:
        before, read, rest = op.length(past[0], 2), past, []
        if filled:
            before = op.Reshape(op.Cast(filled, to=TensorProto.INT64), [1])
            read = [op.Slice(x, [0], before, [2]) for x in past]
            rest = [op.Slice(x, op.Add(before, op.length(k, 2)), [2**62], [2]) for x in past]
        k, v = (op.Concat(a, b, axis=2) for a, b in zip(read, (k, v), strict=True))
        present = [op.Concat(a, b, axis=2) for a, b in zip((k, v), rest, strict=False)] or [k, v]
    bias = _bias(op, q, k, mask=op.input(4), bias=op.input(5))
    scale, later = op.attribute("scale", 0.0), _later(op, q, k, before) if op.attribute("unidirectional", 0) else ""
    s = scores(op, q, k, scale=scale, bias=bias) if op.wants(3) else None
    if later:
        lowest = -inf if op.is_half(q) else float(np.finfo(np.float32).min)
        s = s and op.Where(later, op.number(lowest, s), s)
        hidden = op.Where(later, op.number(-inf, q), op.number(0.0, q))
        bias = op.Add(bias, hidden) if bias else hidden
    return [merge_heads(op, attend(op, q, k, v, scale=scale, bias=bias)), *present, s]


def rotary_embedding(op: Composer) -> str:
    """(a, b) -> (a·cos - b·sin, b·cos + a·sin) at each position, a and b being the halves of a head, or alternating.

    x is (B, S, N·H) or (B, N, S, H). Of a head the first `rotary_embedding_dim` numbers, else all, are turned.
    """
    x, positions, caches = op.input(0), op.input(1), (op.input(2), op.input(3))
    heads, part = op.attribute("num_heads", 0), op.attribute("rotary_embedding_dim", 0)
    op.attribute("is_packed_batching")  # allows longer sequences, changes nothing
    op.attribute("scale")  # onnxruntime's CPU ignores it
    joined = op.rank(x, "by RotaryEmbedding") == 3
    if joined:
        size = op.Mul(op.length(caches[0], 1), [2])
        x = op.Reshape(x, [0, 0, heads, -1] if heads else op.joined(0, 0, -1, size))
    if op.rank(positions, "by RotaryEmbedding") < 2:
        positions = op.Add(arange(op, op.length(x, 1 if joined else 2)), positions)
        axes = [1] if joined else []
    else:
        axes = [2 if joined else 1]
    cos, sin = (op.Unsqueeze(c, axes) if axes else c for c in at_positions(op, caches, positions))
    y = rotated(op, x, cos, sin, op.attribute("interleaved", 0), [part] if part else None)
    return op.Reshape(y, [0, 0, -1]) if joined else y


def at_positions(op: Composer, caches: Sequence[str], positions: str) -> list[str]:
    """The rows of cosines and sines for positions; no parameters to train."""
    return [op.defined_by(op.Gather(cache, positions), 0, "rotation") for cache in caches]


def rotated(op: Composer, x: str, cos: str, sin: str, interleaved: int, part: str | Sequence[int] | None = None) -> str:
    """x (B, N, S, H) or (B, S, N, H) turned by cosines and sines that broadcast to it; of H the first `part` alone."""
    if part is not None:
        first, rest = op.Slice(x, [0], part, [3]), op.Slice(x, part, [2**62], [3])
        return op.Concat(rotated(op, first, cos, sin, interleaved), rest, axis=3)
    if interleaved:
        a, b = (op.Slice(x, [n], [2**62], [3], [2]) for n in (0, 1))
    else:
        a, b = op.several("Split", 2, x, axis=3, num_outputs=2)
    both = op.Sub(op.Mul(a, cos), op.Mul(b, sin)), op.Add(op.Mul(b, cos), op.Mul(a, sin))
    if interleaved:
        return op.Reshape(op.Concat(*(op.Unsqueeze(t, [4]) for t in both), axis=4), op.Shape(x))
    return op.Concat(*both, axis=3)


def _heads(op: Composer, x: str, heads: int) -> str:
    """(B, S, N·H) -> (B, N, S, H)."""
    return op.Transpose(op.Reshape(x, [0, 0, heads, -1]), perm=[0, 2, 1, 3])


def attend(
    op: Composer,
    q: str,
    k: str,
    v: str,
    *,
    scale: float = 0.0,
    bias: str = "",
    lengths: str = "",
    offset: str | int | None = None,
    window: int = -1,
    clipped: bool = False,
    softcap: float = 0.0,
    sink: str = "",
) -> str:
    """softmax(s)·v, (B, N, S, Hv), s being softcap·tanh(q·kᵀ·scale / softcap) + bias where a key is seen, else -inf.

    q: (B, N, S, H). k, v: (B, M, T, H) and (B, M, T, Hv); N / M heads of q in a row share one of them.
    scale: 1 / sqrt(H) where it is 0. bias: broadcast to (B, N, S, T). softcap: none where it is not above 0.
    lengths, offset, window, clipped: which keys are seen, see `hidden_keys`.
    sink: (N), the logit of one more key whose value is 0.

    With lengths, softcap or sink in float32 it is the operator AttentionForwardTraining, where that knows the window; a
    query that sees no key gets 0 then.
    """
    seen = {"lengths": lengths, "offset": offset, "window": window, "clipped": clipped}
    known = op.known.element(q) == TensorProto.FLOAT and (not bias or op.known.rank(bias) == 4)
    # a window whose place lengths decide is none that the operator has
    plain = window < 0 or (offset is not None and not (clipped and lengths))
    if known and plain and (lengths or softcap > 0 or sink):
        before = op.Reshape(offset, [-1]) if isinstance(offset, str) else ""
        given = [q, k, v, bias, op.Reshape(lengths, [-1]) if lengths else "", sink, before]
        numbers = {"scale": scale, "softcap": max(softcap, 0.0), "is_causal": int(offset is not None)}
        numbers["window_left"] = max(window - 1, -1)
        numbers |= {"diagonal_alignment": TOP_LEFT, "domain": DOMAIN}
        return op.several("AttentionForwardTraining", 2, *given, **numbers)[0]  # the gradient reads the other one
    s, hidden = scores(op, q, k, scale=scale, bias=bias, softcap=softcap), hidden_keys(op, q, k, **seen)
    return _shared(op, weights(op, s, hidden, sink), v)


def scores(op: Composer, q: str, k: str, *, scale: float = 0.0, bias: str = "", softcap: float = 0.0) -> str:
    """softcap·tanh(q·kᵀ·scale / softcap) + bias, (B, N, S, T), for the arguments of `attend`."""
    s = op.Mul(_shared(op, q, op.Transpose(k, perm=[0, 1, 3, 2])), scale or _default_scale(op, q))
    s = op.Mul(op.Tanh(op.Div(s, softcap)), softcap) if softcap > 0 else s
    return op.Add(s, bias) if bias else s


def hidden_keys(
    op: Composer,
    q: str,
    k: str,
    *,
    lengths: str = "",
    offset: str | int | None = None,
    window: int = -1,
    clipped: bool = False,
) -> str:
    """Whether a query does not see a key, broadcast to (B, N, S, T); "" where each sees all.

    Query s, at e = s + offset + 1, sees the keys before min(e, lengths), and of them those from e - window on, or the
    last if there are none; if the window is clipped, those from min(e, lengths) - window on. Without an offset it sees
    what follows too. offset, the number of keys before the first query, and lengths, that of all keys: a number, or
    (B, 1, 1, 1) of int64. window: none where it is negative.
    """
    if offset is None and not lengths:
        return ""
    end = at = lengths
    if offset is not None:
        one_more = op.Add(offset, [1]) if isinstance(offset, str) else [offset + 1]
        at = op.Add(op.Unsqueeze(arange(op, op.length(q, 2)), [1]), one_more)
        end = op.Min(at, lengths) if lengths else at
    keys = arange(op, op.length(k, 2))
    hidden = op.GreaterOrEqual(keys, end)
    if window < 0:
        return hidden
    start = op.Sub(end if clipped else at, [window])
    start = op.Min(start, op.Sub(lengths, [1])) if lengths and not clipped else start
    return op.Or(hidden, op.Less(keys, start))


def weights(op: Composer, s: str, hidden: str, sink: str = "") -> str:
    """The softmax of scores (B, N, S, T) where a key is seen, and of the sink (N)."""
    s = op.Where(hidden, op.number(-inf, s), s) if hidden else s
    if not sink:
        return op.Softmax(s, axis=-1)
    shape = op.Concat(op.Shape(s, end=3), op.constant(np.array([1])), axis=0)
    column = op.Expand(op.Unsqueeze(sink, [1, 2]), shape)
    return op.Slice(op.Softmax(op.Concat(s, column, axis=3), axis=-1), [0], [-1], [3])


def _shared(op: Composer, a: str, b: str) -> str:
    """a·b of (B, N, S, K) and (B, M, K, L): N / M matrices in a row are one, longer one, to each of b."""
    n, m = (op.known.length(x, 1) for x in (a, b))
    if n is not None and n == m:
        return op.MatMul(a, b)
    rows = op.MatMul(op.Reshape(a, op.joined(0, op.length(b, 1), -1, op.length(a, 3))), b)
    return op.Reshape(rows, op.Concat(op.Shape(a, end=3), op.length(b, 3), axis=0))


def merge_heads(op: Composer, y: str) -> str:
    """(B, N, S, H) -> (B, S, N·H)."""
    return op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, -1])


def _default_scale(op: Composer, q: str) -> float | str:
    size = op.known.length(q, 3)
    return 1 / sqrt(size) if size else op.Reciprocal(op.Sqrt(op.typed_as(q, op.length(q, 3))))


def _bias(op: Composer, q: str, k: str, *, mask: str, bias: str) -> str:
    """What a mask and a bias add to the scores of queries and keys by heads, "" if there is neither."""
    value = op.attribute("mask_filter_value", MASK_FILTER)
    masked = _masked(op, mask, q, k, value) if mask else ""
    return op.Add(masked, bias) if masked and bias else masked or bias


def _masked(op: Composer, mask: str, q: str, k: str, value: float) -> str:
    """`value` where a key is masked, else 0, to be added to scores (B, N, S, T).

    mask: (B, T) or (B, S, T), above 0 where a key counts; or the number of keys that count, (B), and behind them
    the first that counts, (2B), or what is not read, (3B + 2).
    """
    rank = op.rank(mask, "because it says what it means")
    zero = op.number(0.0, q)
    masked = op.number(value, q)
    if rank in (2, 3):
        counts = op.Unsqueeze(op.Greater(mask, 0), [1, 2] if rank == 2 else [1])
        return op.Where(counts, zero, masked)
    if rank != 1:
        raise op.refuse(f"masks of 1, 2 and 3 axes are handled, got {rank}. Export another form")
    batch = op.length(q, 0)
    twice = op.Mul(batch, [2])
    none = op.ConstantOfShape(batch, value=helper.make_tensor("", TensorProto.INT32, [1], [0]))
    end, start = op.Slice(mask, [0], batch), op.Slice(op.Concat(mask, none, axis=0), batch, twice)
    start = op.Where(op.Equal(op.Shape(mask), twice), start, none)
    end, start = (op.Unsqueeze(x, [1]) for x in (end, start))
    keys = op.Cast(arange(op, op.length(k, 2)), to=TensorProto.INT32)
    outside = op.Or(op.GreaterOrEqual(keys, end), op.Less(keys, start))
    return op.Where(op.Unsqueeze(outside, [1, 2]), masked, zero)


def _later(op: Composer, q: str, k: str, past: str | int) -> str:
    """Whether a key comes after a query, (S, T). onnxruntime hides none from the last query, however many there are."""
    queries, keys = (arange(op, op.length(x, 2)) for x in (q, k))
    last = op.Equal(queries, op.Sub(op.length(q, 2), op.constant(np.array([1]))))
    at = op.Add(queries, past) if isinstance(past, str) else queries
    later = op.Greater(op.Unsqueeze(keys, [0]), op.Unsqueeze(at, [1]))
    return op.And(later, op.Unsqueeze(op.Not(last), [1]))


def arange(op: Composer, count: str) -> str:
    """0, 1, ... to before `count`, a list of one int64."""
    return op.Range(op.constant(np.array(0)), op.Squeeze(count, [0]), op.constant(np.array(1)))
