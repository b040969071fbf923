"""Attention and rotary embeddings of com.microsoft, written out, against onnxruntime's own."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.fused_checks import check_fused

RNG = np.random.default_rng(4)
B, S, N, H = 2, 3, 2, 4


def draw(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


MORE = [{}, {"unidirectional": 1}, {"scale": 0.3, "mask_filter_value": -50.0}]


def mask_of(kind: str, total: int) -> np.ndarray | None:
    rows, matrices = (RNG.integers(0, 2, shape).astype(np.int32) for shape in ((B, total), (B, S, total)))
    rows[..., 0] = matrices[..., 0] = 1  # where nothing counts, -10000 leaves three digits of the scores
    return {
        "none": None,
        "rows": rows,
        "matrices": matrices,
        "ends": np.int32([total, 1]),
        "ends and starts": np.int32([total, total - 1, 0, 0]),
    }[kind]


@pytest.mark.parametrize("mask", ["none", "rows", "matrices", "ends", "ends and starts"])
@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("bias", [False, True])
def test_attention(mask: str, past: bool, more, bias: bool) -> None:
    if past and bias:
        return  # onnxruntime has no kernel for both
    total = S + 2 * past
    feeds = {"x": draw(B, S, 5), "w": draw(5, 3 * N * H), "b": draw(3 * N * H), "mask": mask_of(mask, total)}
    feeds |= {"past": draw(2, B, N, 2, H) if past else None, "bias": draw(1, N, S, total) if bias else None}
    wrt = [n for n, array in feeds.items() if array is not None and array.dtype == np.float32]
    check_fused("Attention", feeds, wrt, 2 if past else 1, num_heads=N, **more)


@pytest.mark.parametrize("mask", [np.int32([[0, 0, 0], [0, 1, 0]]), np.int32([0, 1]), np.int32([3, 2, 2, 2])])
@pytest.mark.parametrize("unidirectional", [0, 1])
def test_rows_where_no_key_counts(mask: np.ndarray, unidirectional: int) -> None:
    feeds = {"x": draw(B, S, 5), "w": draw(5, 3 * N * H), "b": draw(3 * N * H), "mask": mask}
    check_fused("Attention", feeds, num_heads=N, mask_filter_value=-3.0, unidirectional=unidirectional)
    feeds = {
        "x": feeds["x"],
        "w": feeds["w"],
        "b": feeds["b"],
        "mask": np.repeat([[[0, 0, 1], [0, 0, 0], [1, 0, 1]]], B, 0),
    }
    feeds["mask"] = feeds["mask"].astype(np.int32)
    check_fused("Attention", feeds, num_heads=N, mask_filter_value=-3.0, unidirectional=unidirectional)


def test_attention_with_values_of_another_size_and_without_bias() -> None:
    feeds = {"x": draw(B, S, 5), "w": draw(5, 2 * N * H + 6), "b": draw(2 * N * H + 6)}
    check_fused("Attention", feeds, ["x", "w", "b"], num_heads=N, qkv_hidden_sizes=[N * H, N * H, 6])
    del feeds["b"]
    check_fused("Attention", feeds, ["x", "w"], num_heads=N, qkv_hidden_sizes=[N * H, N * H, 6])


@pytest.mark.parametrize("keys", ["joined", "by heads", "past"])
@pytest.mark.parametrize("mask", ["none", "rows", "matrices", "ends"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("more", MORE)
def test_multi_head_attention(keys: str, mask: str, bias: bool, more) -> None:
    length = 3 if keys == "past" or "unidirectional" in more else 4
    total = length + 2 * (keys == "past")
    feeds = {"q": draw(B, S, N * H)}
    if keys == "by heads":
        feeds |= {"k": draw(B, N, length, H), "v": draw(B, N, length, H)}
    else:
        feeds |= {"k": draw(B, length, N * H), "v": draw(B, length, N * (H if keys == "past" else 3))}
    size = 2 * N * H + (N * 3 if keys == "joined" else N * H)
    feeds |= {"b": draw(size) if bias else None, "mask": mask_of(mask, total)}
    feeds |= {"bias": draw(B, 1, S, total) if bias else None}
    if keys == "past":
        feeds |= {"past_k": draw(B, N, 2, H), "past_v": draw(B, N, 2, H)}
    wrt = [n for n, array in feeds.items() if array is not None and array.dtype == np.float32]
    check_fused("MultiHeadAttention", feeds, wrt, 3 if keys == "past" else 1, num_heads=N, **more)


CACHES = {"cos": draw(7, H // 2), "sin": draw(7, H // 2)}


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("ids", [np.int64([2]), np.int64([[0, 4, 2], [6, 6, 1]])], ids=["offset", "each"])
@pytest.mark.parametrize("form", ["joined", "by heads", "part"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_rotary_embedding(interleaved: int, ids: np.ndarray, form: str, dtype: type) -> None:
    size = 6 if form == "part" else H
    x = draw(B, N, S, H, dtype=dtype) if form == "by heads" else draw(B, S, N * size, dtype=dtype)
    more = {"num_heads": N, "rotary_embedding_dim": H} if form == "part" else {}
    feeds = {"x": x, "ids": ids, **{name: cache.astype(dtype) for name, cache in CACHES.items()}}
    wrt = ["x", "cos", "sin"] if dtype == np.float32 else []
    check_fused("RotaryEmbedding", feeds, wrt, interleaved=interleaved, **more)


def test_more_positions_than_the_cache_has_may_be_allowed() -> None:
    feeds = {"x": draw(B, 9, N * H), "ids": RNG.integers(0, 7, (B, 9)), **CACHES}
    check_fused("RotaryEmbedding", feeds, ["x"], is_packed_batching=1)


@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (4, 5), (5, 4), (1, 3), (3, 7)])
def test_causal_with_other_numbers_of_keys(queries: int, keys: int) -> None:
    """onnxruntime hides no key from the last query."""
    feeds = {"q": draw(2, queries, 8), "k": draw(2, keys, 8), "v": draw(2, keys, 8)}
    check_fused("MultiHeadAttention", feeds, num_heads=2, unidirectional=1)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_packed_lengths(batch: int) -> None:
    """(3B + 2) of them: the numbers of keys, and where each query and key begins, which onnxruntime does not read."""
    feeds = {"q": draw(batch, 4, 8), "k": draw(batch, 4, 8), "v": draw(batch, 4, 8), "bias": None}
    mask = np.concatenate([np.full(batch, 2), 4 * np.arange(batch + 1), 4 * np.arange(batch + 1)]).astype(np.int32)
    check_fused("MultiHeadAttention", {**feeds, "mask": mask}, ["q", "k", "v"], num_heads=2)
