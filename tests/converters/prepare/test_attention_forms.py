"""Attention of com.microsoft and of ONNX in forms drawn at random, against differences of onnxruntime's own forward."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.support.batch import check_each
from tests.support.forms import Form, close, forwards, same, slopes


def draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def mask_of(rng: np.random.Generator, kinds: list[str], batch: int, new: int, total: int) -> np.ndarray | None:
    """A mask that hides no key from all; numbers of keys that count, or where they begin, for those that ask for them."""
    kind = rng.choice(kinds)
    matrix = rng.integers(0, 2, (batch, new, total)).astype(np.int32)
    matrix[..., 0] = 1
    ends = rng.integers(1, total + 1, batch).astype(np.int32)
    more = np.arange(2 * batch + 2, dtype=np.int32)
    return {
        "none": None,
        "rows": matrix[:, 0],
        "matrices": matrix,
        "ends": ends,
        "starts": np.concatenate([ends, ends - 1]),
        "packed": np.concatenate([ends, more]),
    }[kind]


def visible(mask: np.ndarray | None, batch: int, total: int) -> np.ndarray:
    """Whether a mask of `mask_of` lets a key be seen, broadcast to (B, N, S, T)."""
    if mask is None:
        return np.ones((1, 1, 1, 1), bool)
    if mask.ndim == 1:
        return (np.arange(total) < mask[:batch, None])[:, None, None]
    return mask[:, None, None] > 0 if mask.ndim == 2 else mask[:, None] > 0


def multi_head(seed: int) -> Form:
    rng = np.random.default_rng(seed)
    kind = ["keys", "heads", "past", "buffer", "cross"][seed % 5]
    batch, heads, size, new = (int(n) for n in rng.integers(1, 4, 4))
    size, other = 4 * size, 4 * size
    keys = int(rng.integers(1, 6)) if kind in ("cross", "heads") else new
    before, held = (int(rng.integers(0, 4)), int(rng.integers(0, 3))) if kind in ("past", "buffer") else (0, 0)
    total = before + keys
    if kind in ("keys", "cross") and rng.random() < 0.3:
        other = 3
    inputs: dict[str, Any] = {"q": draw(rng, batch, new, heads * size)}
    for name, width in (("k", size), ("v", other)):
        shape = (batch, heads, keys, width) if kind == "heads" else (batch, keys, heads * width)
        inputs[name] = draw(rng, *shape)
    inputs["b"] = draw(rng, heads * (2 * size + other)) if rng.random() < 0.5 else None
    inputs["mask"] = mask_of(rng, ["none", "rows", "matrices", "ends", "packed"], batch, new, total)
    ones = rng.integers(0, 2, 2)
    inputs["bias"] = (
        draw(rng, batch if ones[0] else 1, heads if ones[1] else 1, new, total) if rng.random() < 0.4 else None
    )
    length = total
    if kind in ("past", "buffer"):
        length = before + (keys + held if kind == "buffer" else 0)
        inputs |= {name: draw(rng, batch, heads, length, size) for name in ("past_k", "past_v")}
        length = max(length, total)
    if kind == "buffer":
        inputs["filled"] = np.int32([before])
    attributes: dict[str, Any] = {"num_heads": heads}
    attributes |= {"unidirectional": 1} if rng.random() < 0.4 else {}
    attributes |= {"scale": 0.4, "mask_filter_value": -50.0} if rng.random() < 0.3 else {}
    specified: list[np.ndarray | None] = [np.ones((batch, new, heads * other), bool)]
    if kind in ("past", "buffer") or rng.random() < 0.6:  # onnxruntime reads past the end where it writes no present
        specified += [np.ones((batch, heads, length, width), bool) for width in (size, other)]
    if rng.random() < 0.3:  # without the numbers of -10000, in which directions are lost
        seen = np.ones((batch, heads, new, total), bool) & visible(inputs["mask"], batch, total)
        if "unidirectional" in attributes:
            seen &= np.arange(total) <= np.arange(new)[:, None] + before
        specified += [None] * (3 - len(specified)) + [seen]
    return Form(f"seed {seed}, {kind}", "MultiHeadAttention", inputs, attributes, specified)


def joint(seed: int) -> Form:
    """Attention of com.microsoft."""
    rng = np.random.default_rng(seed)
    batch, heads, size, new = (int(n) for n in rng.integers(1, 4, 4))
    size, before = 4 * size, int(rng.integers(0, 4)) if seed % 2 else 0
    other = 3 if not seed % 2 and rng.random() < 0.4 else size
    inputs: dict[str, Any] = {"x": draw(rng, batch, new, 5), "w": 0.3 * draw(rng, 5, heads * (2 * size + other))}
    inputs["b"] = draw(rng, heads * (2 * size + other)) if rng.random() < 0.7 else None
    inputs["mask"] = mask_of(rng, ["none", "rows", "matrices", "ends", "starts", "packed"], batch, new, before + new)
    inputs["past"] = draw(rng, 2, batch, heads, before, size) if seed % 2 else None
    inputs["bias"] = draw(rng, batch, heads, new, new) if not seed % 2 and rng.random() < 0.5 else None
    inputs["length"] = np.int32([before]) if rng.random() < 0.2 else None
    attributes: dict[str, Any] = {"num_heads": heads}
    attributes |= {"qkv_hidden_sizes": [heads * size, heads * size, heads * other]} if other != size else {}
    attributes |= {"unidirectional": 1} if rng.random() < 0.4 else {}
    attributes |= {"scale": 0.4, "mask_filter_value": -50.0} if rng.random() < 0.3 else {}
    attributes |= {"past_present_share_buffer": 1} if not seed % 2 and rng.random() < 0.2 else {}
    specified: list[np.ndarray | None] = [np.ones((batch, new, heads * other), bool)]
    if seed % 2 or (other == size and rng.random() < 0.5):
        specified.append(np.ones((2, batch, heads, before + new, size), bool))
    return Form(f"seed {seed}", "Attention", inputs, attributes, specified)


def standard(seed: int, opset: int) -> Form:
    """Attention of ONNX."""
    rng = np.random.default_rng(seed)
    kind = ["plain", "past", "padded"][seed % (3 if opset > 23 else 2)]
    batch, shared, groups, new = (int(n) for n in rng.integers(1, 4, 4))
    heads, size, other = shared * groups, 8, int(rng.choice([8, 5]))
    keys, before = int(rng.integers(1, 6)), int(rng.integers(0, 4)) if kind == "past" else 0
    total, joined = before + keys, rng.random() < 0.5
    inputs: dict[str, Any] = {}
    for name, count, length, width in (("q", heads, new, size), ("k", shared, keys, size), ("v", shared, keys, other)):
        shape = (batch, length, count * width) if joined else (batch, count, length, width)
        inputs[name] = draw(rng, *shape)
    shape = [(new, total), (1, heads, new, total), (batch, 1, new, total), (batch, heads, new, total)][
        rng.integers(0, 4)
    ]
    mask = draw(rng, *shape)
    seen = rng.random(shape) < 0.7
    seen[..., 0] = True
    inputs["mask"] = [None, mask, seen, np.where(seen, mask, -np.inf).astype(np.float32)][rng.integers(0, 4)]
    if kind == "past":
        inputs |= {"past_k": draw(rng, batch, shared, before, size), "past_v": draw(rng, batch, shared, before, other)}
    if kind == "padded":
        inputs |= {"past_k": None, "past_v": None, "lengths": rng.integers(1, keys + 1, batch)}
    attributes: dict[str, Any] = {"q_num_heads": heads, "kv_num_heads": shared} if joined else {}
    attributes |= {"is_causal": 1} if rng.random() < 0.5 else {}
    attributes |= {"softcap": 0.8} if rng.random() < 0.4 else {}
    attributes |= {"scale": 0.3} if rng.random() < 0.3 else {}
    specified: list[np.ndarray | None] = [
        np.ones((batch, new, heads * other) if joined else (batch, heads, new, other), bool)
    ]
    if kind == "past":
        specified += [np.ones((batch, shared, total, width), bool) for width in (size, other)]
    if rng.random() < 0.5:
        attributes["qk_matmul_output_mode"] = mode = int(rng.integers(0, 4))
        finite = np.ones((batch, heads, new, total), bool)
        if mode == 2:
            finite[:] = False  # infinite where a key is hidden
        specified += [None] * (3 - len(specified)) + [finite]
    settings = {"domain": "", "opset": opset}
    return Form(f"seed {seed}, {kind}, opset {opset}", "Attention", inputs, attributes, specified, (), settings)


@pytest.mark.parametrize("draw_form", [multi_head, joint])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
def test_forward(draw_form: Any, dynamic: bool) -> None:
    check_each([draw_form(seed) for seed in range(60)], partial(forwards, dynamic=dynamic), same)


ROUTES = ("onnx", "native", "numpy")


@pytest.mark.parametrize("draw_form", [multi_head, joint])
def test_gradients(draw_form: Any) -> None:
    check_each([draw_form(seed) for seed in range(60, 90)], partial(slopes, routes=ROUTES, dynamic=True), close)


@pytest.mark.parametrize("opset", [23, 24, 26])
def test_gradients_of_the_standard_operator(opset: int) -> None:
    cases = [standard(seed, opset) for seed in range(opset, opset + 21)]  # others for each
    check_each(cases, partial(slopes, routes=ROUTES, dynamic=False), close)
