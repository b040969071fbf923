"""GroupQueryAttention, written out, against onnxruntime's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.fused_checks import check_fused

RNG = np.random.default_rng(39)
NAMES = ["q", "k", "v", "pk", "pv", "lengths", "total", "cos", "sin", "ids", "bias", "sink"]
B, S, N, M, H = 2, 5, 4, 2, 16
HEADS = {"num_heads": N, "kv_num_heads": M}


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def i32(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def check(feeds: dict[str, np.ndarray], outputs: int = 3, **attributes: Any) -> None:
    wrt = [n for n, a in feeds.items() if a.dtype == np.float32 and n not in ("cos", "sin")]
    check_fused("GroupQueryAttention", {n: feeds.get(n) for n in NAMES}, wrt, outputs, **HEADS, **attributes)


APART = {"q": draw(B, S, N * H), "k": draw(B, S, M * H), "v": draw(B, S, M * H), "lengths": i32(4, 2), "total": i32(5)}
PACKED = {"q": draw(B, S, (N + 2 * M) * H), "lengths": i32(4, 2), "total": i32(5)}
CACHES = {"cos": draw(12, 8), "sin": draw(12, 8)}
ONE = {name: array[:1] for name, array in APART.items()} | {"lengths": i32(6), "total": i32(7)}


@pytest.mark.parametrize(
    ("feeds", "attributes"),
    [
        (APART, {}),
        (PACKED, {}),
        (APART | CACHES, {"do_rotary": 1}),
        (PACKED | CACHES, {"do_rotary": 1, "rotary_interleaved": 1}),
        (APART | CACHES | {"ids": np.full((B, S), 3)}, {"do_rotary": 1}),
        (APART | {"bias": draw(1, N, S, S), "sink": draw(N)}, {"softcap": 0.7, "local_window_size": 2, "scale": 0.4}),
        (APART, {"smooth_softmax": 1}),
        (APART, {"causal": 0}),
        (ONE | CACHES | {"pk": draw(1, M, 2, H), "pv": draw(1, M, 2, H)}, {"do_rotary": 1, "local_window_size": 3}),
        (ONE | {"pk": draw(1, M, 9, H), "pv": draw(1, M, 9, H)}, {}),
    ],
)
def test_forms(feeds: dict[str, np.ndarray], attributes: dict[str, Any]) -> None:
    check(feeds, **attributes)
