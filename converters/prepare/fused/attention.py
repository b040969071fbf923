"""Attention over several heads, and rotary position embeddings.

Letters of shapes: batch B, heads N, length S of the queries and T of all keys, size H of a head.
"""

from math import inf, sqrt

import numpy as np
from onnx import TensorProto, helper

from onnx_backprop.converters.prepare.fused.composer import Composer

MASK_FILTER = -10000.0


def attention(op: Composer) -> list[str | None]:
    """softmax(q·kᵀ·scale + mask + bias)·v with q, k, v = x·w + b; and the present keys and values, (2, B, N, T, H)."""
    heads, sizes = op.count("num_heads"), op.attribute("qkv_hidden_sizes")
    op.attribute("rotary_embedding_dim")
    if op.attribute("do_rotary", 0):
        raise op.refuse("do_rotary is not handled. Export with a RotaryEmbedding of its own")
    if op.attribute("past_present_share_buffer", 0) or op.input(6):
        raise op.refuse("a buffer that past and present share is not handled. Export without it")
    projected = op.MatMul(op.input(0), op.input(1))
    projected = op.Add(projected, op.input(2)) if op.input(2) else projected
    split = {"num_outputs": None if sizes else 3, "axis": -1}
    q, k, v = (_heads(op, x, heads) for x in op.several("Split", 3, projected, list(sizes) if sizes else None, **split))
    past, added = op.input(4), 0
    if past:
        added = op.length(past, 3)
        k, v = (op.Concat(op.Gather(past, op.constant(np.array(n)), axis=0), x, axis=2) for n, x in enumerate((k, v)))
    y = _attend(op, q, k, v, mask=op.input(3), bias=op.input(5), past=added)
    present = op.Concat(*(op.Unsqueeze(x, [0]) for x in (k, v)), axis=0) if op.wants(1) else None
    return [y, present]


def multi_head_attention(op: Composer) -> list[str | None]:
    """softmax(q·kᵀ·scale + mask + bias)·v; and the present keys and values, (B, N, T, H).

    Keys and values are (B, T, N·H), or (B, N, T, H), to which no input bias is added.
    """
    heads, query, key, value, bias = op.count("num_heads"), *(op.input(n) for n in range(4))
    if not key or not value or op.rank(query, "by MultiHeadAttention") != 3:
        raise op.refuse(
            "packed queries, keys and values are not handled, nor has onnxruntime a kernel. Export them apart"
        )
    if op.input(8) or op.input(9):
        raise op.refuse("past_sequence_length and cache_indirection are not handled. Export without beam search")
    split_already = op.rank(key, "by MultiHeadAttention") == 4
    q, k, v = query, key, value
    if bias:
        total, end = op.length(q, 2), op.constant(np.array([2**62]))
        q = op.Add(q, op.Slice(bias, [0], total))
        if not split_already:
            more = op.Add(total, op.length(k, 2))
            k, v = op.Add(k, op.Slice(bias, total, more)), op.Add(v, op.Slice(bias, more, end))
    q, past_key, past_value, added = _heads(op, q, heads), op.input(6), op.input(7), 0
    k, v = (x if split_already else _heads(op, x, heads) for x in (k, v))
    if past_key:
        added = op.length(past_key, 2)
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    return [_attend(op, q, k, v, mask=op.input(4), bias=op.input(5), past=added), k, v]


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
        count = op.Squeeze(op.length(x, 1 if joined else 2), [0])
        positions = op.Add(_range(op, count), positions)
        axes = [1] if joined else []
    else:
        axes = [2 if joined else 1]
    found = (op.defined_by(op.Gather(cache, positions), 0, "rotation") for cache in caches)
    cos, sin = (op.Unsqueeze(c, axes) if axes else c for c in found)
    rest = op.Slice(x, [part], [2**62], [3]) if part else None
    turned = _turned(op, op.Slice(x, [0], [part], [3]) if part else x, cos, sin, bool(op.attribute("interleaved", 0)))
    y = op.Concat(turned, rest, axis=3) if rest else turned
    return op.Reshape(y, [0, 0, -1]) if joined else y


def _turned(op: Composer, x: str, cos: str, sin: str, interleaved: bool) -> str:
    if interleaved:
        pairs = op.Reshape(x, [0, 0, 0, -1, 2])
        a, b = (op.Gather(pairs, op.constant(np.array(n)), axis=4) for n in (0, 1))
    else:
        a, b = op.several("Split", 2, x, axis=3, num_outputs=2)
    turned = op.Sub(op.Mul(a, cos), op.Mul(b, sin)), op.Add(op.Mul(b, cos), op.Mul(a, sin))
    if interleaved:
        return op.Reshape(op.Concat(*(op.Unsqueeze(t, [4]) for t in turned), axis=4), [0, 0, 0, -1])
    return op.Concat(*turned, axis=3)


def _heads(op: Composer, x: str, heads: int) -> str:
    """(B, S, N·H) -> (B, N, S, H)."""
    return op.Transpose(op.Reshape(x, [0, 0, heads, -1]), perm=[0, 2, 1, 3])


def _attend(op: Composer, q: str, k: str, v: str, *, mask: str, bias: str, past: str | int) -> str:
    """softmax(q·kᵀ·scale + mask + bias)·v, with the heads joined again. `past`: length of the keys before the new."""
    scale = op.attribute("scale", 0.0) or _default_scale(op, q)
    scores = op.Mul(op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2])), scale)
    value = op.attribute("mask_filter_value", MASK_FILTER)
    if mask:
        scores = op.Add(scores, _masked(op, mask, scores, value))
    if op.attribute("unidirectional", 0):
        scores = op.Where(_later(op, scores, past), op.number(-inf, scores), scores)
    scores = op.Add(scores, bias) if bias else scores
    y = op.MatMul(op.Softmax(scores, axis=-1), v)
    return op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, -1])


def _default_scale(op: Composer, q: str) -> float | str:
    size = op.known.length(q, 3)
    return 1 / sqrt(size) if size else op.Reciprocal(op.Sqrt(op.typed_as(q, op.length(q, 3))))


def _masked(op: Composer, mask: str, scores: str, value: float) -> str:
    """`value` where a key is masked, else 0, to be added to scores (B, N, S, T).

    mask: (B, T) or (B, S, T), above 0 where a key counts; or the number of keys that count, (B), and behind them
    the first that counts, (2B).
    """
    rank = op.rank(mask, "because it says what it means")
    zero = op.number(0.0, scores)
    masked = op.number(value, scores)
    if rank in (2, 3):
        counts = op.Unsqueeze(op.Greater(mask, 0), [1, 2] if rank == 2 else [1])
        return op.Where(counts, zero, masked)
    if rank != 1:
        raise op.refuse(f"masks of 1, 2 and 3 axes are handled, got {rank}. Export another form")
    batch = op.length(scores, 0)
    # (B) or (2B); packed lengths, (3B + 2), fail in the run
    rows = op.Min(op.Div(op.Shape(mask), batch), op.constant(np.array([2])))
    mask = op.Reshape(op.Reshape(mask, op.joined(rows, batch)), [-1])
    none = op.ConstantOfShape(batch, value=helper.make_tensor("", TensorProto.INT32, [1], [0]))
    bounds = op.Reshape(op.Slice(op.Concat(mask, none, axis=0), [0], op.Mul(batch, [2])), op.joined(2, batch, 1))
    end, start = (op.Gather(bounds, op.constant(np.array(n)), axis=0) for n in (0, 1))
    keys = op.Cast(_range(op, op.Squeeze(op.length(scores, 3), [0])), to=TensorProto.INT32)
    outside = op.Or(op.GreaterOrEqual(keys, end), op.Less(keys, start))
    return op.Where(op.Unsqueeze(outside, [1, 2]), masked, zero)


def _later(op: Composer, scores: str, past: str | int) -> str:
    """Whether a key comes after a query, (S, T). onnxruntime hides none from the last query, however many there are."""
    queries, keys = (_range(op, op.Squeeze(op.length(scores, axis), [0])) for axis in (2, 3))
    last = op.Equal(queries, op.Sub(op.length(scores, 2), op.constant(np.array([1]))))
    at = op.Add(queries, past) if isinstance(past, str) else queries
    later = op.Greater(op.Unsqueeze(keys, [0]), op.Unsqueeze(at, [1]))
    return op.And(later, op.Unsqueeze(op.Not(last), [1]))


def _range(op: Composer, count: str) -> str:
    return op.Range(op.constant(np.array(0)), count, op.constant(np.array(1)))
