"""Attention and rotary embeddings of com.microsoft, written out, against onnxruntime's own."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tests.support.fused_checks import check_all_fused, check_fused, fused

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


def floats(feeds) -> list[str]:
    return [n for n, array in feeds.items() if array is not None and array.dtype == np.float32]


def test_attention() -> None:
    cases = []
    masks = ["none", "rows", "matrices", "ends", "ends and starts"]
    for mask, (past, bias), more in product(masks, [(False, False), (False, True), (True, False)], MORE):
        total = S + 2 * past  # past and bias: onnxruntime has no kernel for both
        feeds = {"x": draw(B, S, 5), "w": draw(5, 3 * N * H), "b": draw(3 * N * H), "mask": mask_of(mask, total)}
        feeds |= {"past": draw(2, B, N, 2, H) if past else None, "bias": draw(1, N, S, total) if bias else None}
        cases.append(fused("Attention", feeds, floats(feeds), 2 if past else 1, num_heads=N, **more))
    check_all_fused(cases)


def test_rows_where_no_key_counts() -> None:
    cases = []
    matrices = np.repeat([[[0, 0, 1], [0, 0, 0], [1, 0, 1]]], B, 0)
    for mask, unidirectional in product([[[0, 0, 0], [0, 1, 0]], [0, 1], [3, 2, 2, 2], matrices], [0, 1]):
        feeds = {"x": draw(B, S, 5), "w": draw(5, 3 * N * H), "b": draw(3 * N * H), "mask": np.int32(mask)}
        settings = {"num_heads": N, "mask_filter_value": -3.0, "unidirectional": unidirectional}
        cases.append(fused("Attention", feeds, **settings))
    check_all_fused(cases)


def test_attention_with_values_of_another_size_and_without_bias() -> None:
    feeds = {"x": draw(B, S, 5), "w": draw(5, 2 * N * H + 6), "b": draw(2 * N * H + 6)}
    check_fused("Attention", feeds, ["x", "w", "b"], num_heads=N, qkv_hidden_sizes=[N * H, N * H, 6])
    del feeds["b"]
    check_fused("Attention", feeds, ["x", "w"], num_heads=N, qkv_hidden_sizes=[N * H, N * H, 6])


@pytest.mark.parametrize("keys", ["joined", "by heads", "past"])
def test_multi_head_attention(keys: str) -> None:
    cases = []
    for mask, bias, more in product(["none", "rows", "matrices", "ends"], [False, True], MORE):
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
        outputs = 3 if keys == "past" else 1
        cases.append(fused("MultiHeadAttention", feeds, floats(feeds), outputs, num_heads=N, **more))
    check_all_fused(cases)


CACHES = {"cos": draw(7, H // 2), "sin": draw(7, H // 2)}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_rotary_embedding(dtype: type) -> None:
    cases = []
    each = np.int64([[0, 4, 2], [6, 6, 1]])
    for interleaved, ids, form in product([0, 1], [np.int64([2]), each], ["joined", "by heads", "part"]):
        size = 6 if form == "part" else H
        x = draw(B, N, S, H, dtype=dtype) if form == "by heads" else draw(B, S, N * size, dtype=dtype)
        more = {"num_heads": N, "rotary_embedding_dim": H} if form == "part" else {}
        feeds = {"x": x, "ids": ids, **{name: cache.astype(dtype) for name, cache in CACHES.items()}}
        wrt = ["x", "cos", "sin"] if dtype == np.float32 else []
        cases.append(fused("RotaryEmbedding", feeds, wrt, interleaved=interleaved, **more))
    check_all_fused(cases)


def test_part_of_a_head_by_heads() -> None:
    """`scale` changes nothing, in onnxruntime neither."""
    cases = []
    for interleaved, ids in product([0, 1], [np.array(2), np.int64([[0, 4, 2], [6, 6, 1]])]):
        feeds = {"x": draw(B, N, S, 6), "ids": ids, **CACHES}
        more = {"num_heads": N, "rotary_embedding_dim": H, "scale": 0.5}
        cases.append(fused("RotaryEmbedding", feeds, ["x", "cos", "sin"], interleaved=interleaved, **more))
    check_all_fused(cases)


def test_more_positions_than_the_cache_has_may_be_allowed() -> None:
    feeds = {"x": draw(B, 9, N * H), "ids": RNG.integers(0, 7, (B, 9)), **CACHES}
    check_fused("RotaryEmbedding", feeds, ["x"], is_packed_batching=1)


def test_causal_with_other_numbers_of_keys() -> None:
    """onnxruntime hides no key from the last query."""
    cases = []
    for queries, keys in [(4, 4), (4, 5), (5, 4), (1, 3), (3, 7)]:
        feeds = {"q": draw(2, queries, 8), "k": draw(2, keys, 8), "v": draw(2, keys, 8)}
        cases.append(fused("MultiHeadAttention", feeds, num_heads=2, unidirectional=1))
    check_all_fused(cases)


def test_packed_lengths() -> None:
    """(3B + 2) of them: the numbers of keys, and where each query and key begins, which onnxruntime does not read."""
    cases = []
    for batch in (1, 2, 3):
        feeds = {"q": draw(batch, 4, 8), "k": draw(batch, 4, 8), "v": draw(batch, 4, 8), "bias": None}
        begins = 4 * np.arange(batch + 1)
        feeds["mask"] = np.concatenate([np.full(batch, 2), begins, begins]).astype(np.int32)
        cases.append(fused("MultiHeadAttention", feeds, ["q", "k", "v"], num_heads=2))
    check_all_fused(cases)
