"""GroupQueryAttention of com.microsoft, written out, against onnxruntime's own, in forms drawn at random."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

import onnx_backprop as ob
from onnx_backprop.opset.core.errors import UnsupportedError
from tests.support.adjoint import Feeds, forward_session, run
from tests.support.batch import check_each
from tests.support.forms import Form, answers_of, close, feeds_of, forwards, gradients, same, slopes
from tests.support.fused_checks import Fused, check_all_gradients, check_fused, expanded, one_node
from tests.support.renamed import STYLES, joined, renamed

NAMES = ["q", "k", "v", "past_k", "past_v", "lengths", "total", "cos", "sin", "ids", "bias", "sink", "12", "13", "14",
         "15", "chunks"]  # fmt: skip
FORMS = ["prompt", "empty cache", "prompt in buffer", "continued", "buffer", "token", "shared", "chunks", "sliding"]
SEEDS = range(27)


def random_case(seed: int) -> Form:
    rng = np.random.default_rng(seed)
    form = FORMS[seed % len(FORMS)]
    one = form in ("continued", "buffer") or (form == "shared" and rng.random() < 0.5)
    batch, shared, groups = 1 if one else int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(1, 4))
    new = 1 if form == "token" else int(rng.integers(1, 6))
    turned, smooth = rng.random() < 0.7, rng.random()
    size = int(rng.choice([16, 32, 48] if turned else [8, 16, 24]))
    heads, window = groups * shared, int(rng.choice([-1, 0, 1, 3, 50], p=[0.5, 0.05, 0.15, 0.2, 0.1]))
    attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": shared}
    capacity, tokens = int(rng.integers(new, new + 5)), np.full(batch, new)  # of the cache; of each row in the end
    added = tokens
    total = new
    if form in ("prompt", "empty cache", "prompt in buffer"):
        tokens = rng.integers(1, new + 1, batch)
        capacity = {"prompt": -1, "empty cache": 0}.get(form, capacity)
    elif form in ("continued", "token"):
        total, tokens = capacity + new, rng.integers(new, capacity + new + 1, batch)
        tokens[0] = total
    elif form in ("buffer", "shared"):
        total = int(rng.integers(new, capacity + 1)) if one else new
        tokens = rng.integers(new, total + 1, batch) if one else rng.integers(1, new + 1, batch)
        added = np.zeros(batch, int) if form == "shared" else added
    elif form == "chunks":
        added = rng.integers(0, new + 1, batch)
        before = rng.integers(1, 5, batch)
        tokens, capacity = before + added, int(before.max()) + new + int(rng.integers(0, 3))
        total = max(int(tokens.max()) + int(rng.integers(0, 3)), new)
    elif form == "sliding":
        window = int(rng.integers(1, 4))
        capacity = window + int(rng.integers(0, 4))
        new = new if one or batch == 1 else 1
        added = np.full(batch, new)
        tokens = new + rng.integers(1, 12, batch)
        total = int(tokens.max())
        attributes["sliding_window_cache"] = 1
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    keys = 0 if form == "shared" else new
    if keys and rng.random() < 0.5:
        feeds = {"q": draw(batch, new, (heads + 2 * shared) * size)}
    else:
        feeds = {"q": draw(batch, new, heads * size)}
        feeds |= {name: draw(batch, keys, shared * size) for name in "kv"}
    if capacity >= 0:
        feeds |= {f"past_{name}": draw(batch, shared, capacity, size) for name in "kv"}
    feeds["lengths"] = (tokens - 1).astype(np.int32)
    feeds["total"] = np.array(total if rng.random() < 0.5 else [total], np.int32)
    if form == "chunks":
        feeds["chunks"] = added.astype(np.int32)
    if turned:
        rows = total + new + 4
        pairs = int(rng.choice(range(8, size // 2 + 1, 8)))
        angles = rng.uniform(-3, 3, (rows, pairs))
        feeds |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
        attributes |= {"do_rotary": 1, "rotary_interleaved": int(rng.integers(0, 2))}
        if rng.random() < 0.4:
            feeds["ids"] = rng.integers(0, rows - new, (batch, new))
    if rng.random() < 0.3:
        feeds["bias"] = draw(int(rng.choice([1, batch])), int(rng.choice([1, heads])), new, total)
    if smooth < 0.25:
        feeds["sink"] = draw(heads)
    attributes |= {"smooth_softmax": 1} if 0.15 < smooth < 0.4 else {}
    attributes |= {"softcap": 0.8} if rng.random() < 0.3 else {}
    attributes |= {"scale": float(rng.uniform(0.1, 0.6))} if rng.random() < 0.3 else {}
    if form not in ("chunks", "sliding") and rng.random() < 0.15:
        attributes["causal"], window = 0, -1
    if window >= 0:
        attributes["local_window_size"] = window
    specified = _specified(form, feeds, attributes, tokens, added, new, total, rng)
    inputs = {name: feeds.get(name) for name in NAMES}
    unread = ("bias", "sink") if window == 0 else ()
    return Form(f"seed {seed}, {form}", "GroupQueryAttention", inputs, attributes, specified, unread)


def _specified(
    form: str,
    feeds: Feeds,
    attributes: dict[str, Any],
    tokens: np.ndarray,
    added: np.ndarray,
    new: int,
    total: int,
    rng: np.random.Generator,
) -> list[np.ndarray | None]:
    """Where onnxruntime writes; sets qk_output where the scores are read."""
    heads, shared = attributes["num_heads"], attributes["kv_num_heads"]
    packed = "k" not in feeds
    size = feeds["q"].shape[2] // (heads + 2 * shared if packed else heads)
    batch, length = len(tokens), total
    if "past_k" in feeds:
        length = feeds["past_k"].shape[2]
        length = length if form == "sliding" else max(total, length)
    y = np.ones((batch, new, heads * size), bool)
    present = np.ones((batch, shared, length, size), bool)
    if form == "chunks":
        y &= np.arange(new)[:, None] < added.reshape(-1, 1, 1)
        present &= (np.arange(length) < tokens[:, None])[:, None, :, None]
    if form == "sliding":
        step = length - attributes["local_window_size"] + 1
        kept = tokens + (length - tokens) // step * step * (tokens > length)
        present &= (np.arange(length) < kept[:, None])[:, None, :, None]
    scored = rng.random()
    if form == "prompt" and scored < 0.2:
        return [y]
    if form == "sliding" or scored < 0.6:
        return [y, present, present]
    attributes["qk_output"] = int(rng.integers(1, 3))
    s = np.ones((batch, heads, new, total), bool)
    s &= np.arange(total) < tokens.reshape(-1, 1, 1, 1)
    return [y, present, present, s & y[:, None, :, :1]]


def padding(more: dict[str, Any]) -> Form:
    """Padding of which some queries have tokens of their row in their window."""
    rng = np.random.default_rng(0)
    feeds = {
        "q": rng.standard_normal((3, 6, 8 * 8), np.float32),
        "lengths": np.int32([1, 3, 5]),
        "total": np.int32([6]),
    }
    specified: list[np.ndarray | None] = [np.ones((3, 6, 32), bool), *2 * [np.ones((3, 2, 6, 8), bool)]]
    inputs = {name: feeds.get(name) for name in NAMES}
    attributes = {"num_heads": 4, "kv_num_heads": 2, "local_window_size": 3, **more}
    return Form(f"padding {more}", "GroupQueryAttention", inputs, attributes, specified)


PADDING = [padding({}), padding({"softcap": 0.7}), padding({"smooth_softmax": 1})]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
def test_forward(dynamic: bool, half: bool) -> None:
    cases = [*PADDING, *map(random_case, SEEDS)]
    cases = [case.cast(np.float32, np.float16) for case in cases] if half else cases
    check_each(cases, partial(forwards, dynamic=dynamic), same)


@pytest.mark.parametrize(
    ("kernels", "dynamic", "seeds"),
    [("onnx", False, range(18)), ("native", True, range(18, 36)), ("numpy", True, range(36, 54))],
    ids=["onnx", "native", "numpy"],
)
def test_gradients(kernels: str, dynamic: bool, seeds: range) -> None:
    cases = [*PADDING, *map(random_case, seeds)]
    check_each(cases, partial(slopes, routes=[kernels], dynamic=dynamic), close)


def test_gradients_in_float64() -> None:
    """Of what is written out, against its own differences."""
    cases = map(random_case, range(81, 90))
    check_all_gradients([Fused(str(case), case.model(dynamic=True), case.feeds, case.wrt) for case in cases])


def test_gradients_in_float16() -> None:
    cases = [random_case(seed) for seed in range(90, 99)]
    halves = [case.cast(np.float32, np.float16) for case in cases]
    again = [case.cast(np.float16, np.float32) for case in halves]
    for case, half, single in zip(cases, *(gradients(c, ["native"])[0][0] for c in (halves, again)), strict=True):
        reach = case.attributes.get("local_window_size", -1)
        for name in case.wrt if reach < 0 else ():  # padding sees other keys with a window
            error = np.linalg.norm(half[name].astype(np.float32) - single[name])
            assert error <= 1e-2 * np.linalg.norm(single[name]) + 1e-2, f"{case}: {name}"


@pytest.mark.parametrize("style", STYLES)
def test_names(style: str) -> None:
    cases = [random_case(seed) for seed in range(9)]
    model = joined([case.model(dynamic=True) for case in cases])
    other, names = renamed(model, style)
    feeds = feeds_of(cases)
    pairs = (feeds, {names[name]: array for name, array in feeds.items()})
    answers = (
        answers_of(cases, run(forward_session(expanded(m)), fed)) for m, fed in zip((model, other), pairs, strict=True)
    )
    for one, two in zip(*answers, strict=True):
        for a, b in zip(one, two, strict=True):
            np.testing.assert_array_equal(a, b)


PROMPT = {"q": np.zeros((2, 5, 64), np.float32), "k": np.zeros((2, 5, 32), np.float32),
          "v": np.zeros((2, 5, 32), np.float32), "lengths": np.zeros(2, np.int32), "total": np.int32([5])}  # fmt: skip
CACHE = {f"past_{name}": np.zeros((2, 2, 7, 16), np.float32) for name in "kv"}
TURNS = {name: np.zeros((9, 8), np.float32) for name in ("cos", "sin")}
ONES = {name: np.ones(16, np.float32) for name in ("12", "13", "14", "15")}


@pytest.mark.parametrize(
    ("more", "attributes", "words"),
    [
        ({}, {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}, "quantised cache"),
        ({"12": ONES["12"], "13": ONES["13"]}, {}, "quantised cache"),
        ({"14": ONES["14"], "15": ONES["15"]}, {}, "SimplifiedLayerNormalization"),
        ({}, {"num_heads": 3}, "multiple of kv_num_heads"),
        ({}, {"num_heads": 6}, "of 6 heads of 8, 16, ... numbers, got a width of 64"),
        ({}, {"num_heads": 16}, "of 16 heads of 8, 16, ... numbers, got a width of 64"),
        ({}, {"num_heads": 0}, "num_heads"),
        ({"k": None}, {}, "both or neither"),
        ({"past_k": CACHE["past_k"]}, {}, "both or neither"),
        ({"cos": TURNS["cos"]}, {"do_rotary": 1}, "both cos_cache and sin_cache"),
        ({name: array[:, :4] for name, array in TURNS.items()}, {"do_rotary": 1}, "8, 16, ... pairs"),
        ({}, {"causal": 2}, "expected causal 1"),
        ({}, {"causal": 0, "local_window_size": 2}, "without local_window_size"),
        ({}, {"qk_output": 3}, "qk_output 1 or 2"),
        ({}, {"sliding_window_cache": 1, "local_window_size": 2}, "past_key and past_value"),
        (CACHE, {"sliding_window_cache": 1}, "local_window_size of 1 or more"),
        ({"chunks": np.int32([5, 5])}, {}, "past_key and past_value"),
        (CACHE | {"chunks": np.int32([5, 5])}, {"causal": 0}, "query_seqlens needs causal = 1"),
        ({}, {"future": 1}, "the attribute 'future' is not handled"),
    ],
)
def test_refused(more: dict[str, Any], attributes: dict[str, Any], words: str) -> None:
    feeds = {name: (PROMPT | more).get(name) for name in NAMES}
    model = one_node("GroupQueryAttention", feeds, 3, **({"num_heads": 4, "kv_num_heads": 2} | attributes))
    with pytest.raises(UnsupportedError, match=rf"GroupQueryAttention \(.*{words}.*'node'"):
        ob.backward(model, wrt=["q"])


def test_an_empty_cache_of_which_one_half_is_a_constant() -> None:
    feeds = PROMPT | {name: np.zeros((2, 2, 0, 16), np.float32) for name in ("past_k", "past_v")}
    given = {name: feeds.get(name) for name in NAMES}
    check_fused("GroupQueryAttention", given, (), 3, constants=["past_v"], num_heads=4, kv_num_heads=2)


def test_scores_that_nobody_writes() -> None:
    model = one_node("GroupQueryAttention", PROMPT, [0, 3], num_heads=4, kv_num_heads=2, unread=3)
    with pytest.raises(UnsupportedError, match="expected qk_output 1 or 2, got 0"):
        ob.backward(model, wrt=["q"], of=["y0"])


def test_more_tokens_than_the_cache_holds() -> None:
    feeds = PROMPT | CACHE | {"lengths": np.int32([14, 14]), "total": np.int32([15])}
    case = Form("", "GroupQueryAttention", {n: feeds.get(n) for n in NAMES}, {"num_heads": 4, "kv_num_heads": 2},
                [np.ones(1, bool)])  # fmt: skip
    for model in (case.model(), expanded(case.model())):
        with pytest.raises(InvalidArgument):
            run(forward_session(model), case.feeds)
