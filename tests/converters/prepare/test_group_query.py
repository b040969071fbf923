"""GroupQueryAttention of com.microsoft, written out, against onnxruntime's own, in forms drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

import onnx_backprop as ob
from onnx_backprop.opset.core.errors import UnsupportedError
from tests.support.adjoint import Feeds, forward_session, run
from tests.support.batch import check_each
from tests.support.fused_checks import check_gradient, expanded, one_node
from tests.support.renamed import STYLES, joined, renamed
from tests.support.rule_checks import symbolic

NAMES = ["q", "k", "v", "past_k", "past_v", "lengths", "total", "cos", "sin", "ids", "bias", "sink", "12", "13", "14",
         "15", "chunks"]  # fmt: skip
STEP, TOLERANCE = 2.0**-5, 1e-3
FORWARD = {np.float16: 6e-3, np.float32: 3e-5}
FORMS = ["prompt", "empty cache", "prompt in buffer", "continued", "buffer", "token", "shared", "chunks", "sliding"]
SEEDS = range(45)


@dataclass
class Case:
    """A form of the operator; `specified` says, output by output, what onnxruntime writes."""

    label: str
    feeds: Feeds
    attributes: dict[str, Any]
    specified: list[np.ndarray]

    def model(self, *, dynamic: bool = False) -> ModelProto:
        feeds = {name: self.feeds.get(name) for name in NAMES}
        model = one_node("GroupQueryAttention", feeds, len(self.specified), **self.attributes)
        return symbolic(model) if dynamic else model

    @property
    def wrt(self) -> list[str]:
        unread = ("bias", "sink") if self.attributes.get("local_window_size") == 0 else ()
        return [n for n, array in self.feeds.items() if array.dtype.kind == "f" and array.size and n not in unread]

    def half(self) -> Case:
        feeds = {n: a.astype(np.float16) if a.dtype == np.float32 else a for n, a in self.feeds.items()}
        return Case(f"half {self.label}", feeds, self.attributes, self.specified)

    def __str__(self) -> str:
        shapes = {name: array.shape for name, array in self.feeds.items()}
        return f"{self.label} {self.attributes} {shapes}"


def random_case(seed: int) -> Case:
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
        total = int(tokens.max()) + int(rng.integers(0, 3))
        new_total = max(total, new)
        total = new_total
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
    return Case(
        f"seed {seed}, {form}", feeds, attributes, _specified(form, feeds, attributes, tokens, added, new, total, rng)
    )


def _specified(form, feeds, attributes, tokens, added, new, total, rng) -> list[np.ndarray]:
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
        y &= (np.arange(new) < added[:, None])[:, :, None]
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
    s = np.ones((batch, heads, new, total), bool) & (np.arange(total) < tokens[:, None])[:, None, None]
    return [y, present, present, s & y.any(2)[:, None, :, None]]


def feeds_of(cases: Sequence[Case]) -> Feeds:
    return {f"{n}/{name}": array for n, case in enumerate(cases) for name, array in case.feeds.items()}


def answers_of(cases: Sequence[Case], answers: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """The outputs of all, case by case; 0 where the kernel leaves what was there."""
    rest = iter(answers)
    return [[np.where(s, next(rest), 0) for s in case.specified] for case in cases]


def forwards(cases: Sequence[Case], *, dynamic: bool) -> list[tuple[list[np.ndarray], list[np.ndarray]]]:
    written_out = expanded(joined([case.model(dynamic=dynamic) for case in cases]))
    theirs = forward_session(joined([case.model() for case in cases]))
    results = (answers_of(cases, run(session, feeds_of(cases))) for session in (theirs, forward_session(written_out)))
    return list(zip(*results, strict=True))


def same(case: Case, answers: tuple[list[np.ndarray], list[np.ndarray]]) -> None:
    for theirs, ours in zip(*answers, strict=True):
        assert theirs.dtype == ours.dtype
        close = FORWARD[theirs.dtype.type]
        np.testing.assert_allclose(ours, theirs, rtol=close, atol=close, err_msg=str(case), strict=True)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
def test_forward(dynamic: bool, half: bool) -> None:
    cases = [random_case(seed).half() if half else random_case(seed) for seed in SEEDS]
    check_each(cases, partial(forwards, dynamic=dynamic), same)


def gradients(
    cases: Sequence[Case], *, kernels: Any, dynamic: bool = False
) -> tuple[list[Feeds], list[list[np.ndarray]]]:
    """What backward gives, case by case, and the random dy of each output, 0 where the kernel writes nothing."""
    rng = np.random.default_rng(1)
    model = joined([case.model(dynamic=dynamic) for case in cases])
    outputs = iter([value.name for value in model.graph.output])
    graph = ob.backward(model, wrt=[f"{n}/{x}" for n, case in enumerate(cases) for x in case.wrt], kernels=kernels)
    told, fed, seeds = ob.derivatives(graph)[-1], feeds_of(cases), []
    for case in cases:
        kind = case.feeds["q"].dtype
        seeds.append([(rng.standard_normal(s.shape) * s).astype(kind) for s in case.specified])
        fed |= {told.seeds[next(outputs)]: dy for dy in seeds[-1]}
    session = ob.session(graph, kernels=None)
    accepted = {value.name for value in session.get_inputs()}
    answers = run(session, {name: array for name, array in fed.items() if name in accepted})
    found = dict(zip([o.name for o in session.get_outputs()], answers, strict=True))
    return [{x: found[told.results[f"{n}/{x}"]] for x in case.wrt} for n, case in enumerate(cases)], seeds


def slopes(cases: Sequence[Case], *, kernels: Any, dynamic: bool) -> list[dict[str, tuple[float, float, float]]]:
    """By input: <dy, dF/dh(x + h·v)> of onnxruntime's own forward, <dx, v>, and the scale they are compared on."""
    found, seeds = gradients(cases, kernels=kernels, dynamic=dynamic)
    theirs, feeds, rng = (
        forward_session(joined([case.model() for case in cases])),
        feeds_of(cases),
        np.random.default_rng(2),
    )
    result: list[dict[str, tuple[float, float, float]]] = [{} for _ in cases]
    for turn in range(max(len(case.wrt) for case in cases)):
        moved = {n: case.wrt[turn] for n, case in enumerate(cases) if turn < len(case.wrt)}
        moves = {n: rng.standard_normal(cases[n].feeds[x].shape) for n, x in moved.items()}

        def at(step: float, moved: dict[int, str] = moved, moves: dict[int, np.ndarray] = moves) -> list[float]:
            changed = {f"{n}/{x}": (cases[n].feeds[x] + step * moves[n]).astype(np.float32) for n, x in moved.items()}
            answers = answers_of(cases, run(theirs, feeds | changed))
            return [
                sum(float(np.sum(y.astype(float) * dy)) for y, dy in zip(ys, dys, strict=True))
                for ys, dys in zip(answers, seeds, strict=True)
            ]

        near, far = (np.subtract(at(h), at(-h)) / (2 * h) for h in (STEP, 2 * STEP))
        expected = (4 * near - far) / 3
        for n, name in moved.items():
            gradient, v = found[n][name].astype(float), moves[n]
            size = float(np.linalg.norm(gradient) * np.linalg.norm(v)) / np.sqrt(v.size) + abs(expected[n])
            result[n][name] = float(expected[n]), float(np.sum(gradient * v)), size + 1e-2
    return result


def close(case: Case, answers: dict[str, tuple[float, float, float]]) -> None:
    for name, (expected, got, size) in answers.items():
        assert abs(expected - got) <= TOLERANCE * size, f"{case}: {name}: expected {expected:.6g}, got {got:.6g}"


@pytest.mark.parametrize(
    ("kernels", "dynamic", "seeds"),
    [("onnx", False, range(27)), ("native", True, range(27, 54)), ("numpy", True, range(54, 81))],
    ids=["onnx", "native", "numpy"],
)
def test_gradients(kernels: Any, dynamic: bool, seeds: range) -> None:
    check_each([random_case(seed) for seed in seeds], partial(slopes, kernels=kernels, dynamic=dynamic), close)


@pytest.mark.parametrize("seed", range(81, 90))
def test_gradients_in_float64(seed: int) -> None:
    """Of what is written out, against its own differences."""
    case = random_case(seed)
    check_gradient(case.model(dynamic=True), case.feeds, case.wrt)


def test_gradients_in_float16() -> None:
    cases = [random_case(seed) for seed in range(90, 108)]
    halves = [case.half() for case in cases]
    again = [Case(c.label, {n: a.astype(np.float32) if a.dtype == np.float16 else a for n, a in c.feeds.items()},
                  c.attributes, c.specified) for c in halves]  # fmt: skip
    for case, half, single in zip(cases, *(gradients(c, kernels="native")[0] for c in (halves, again)), strict=True):
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


def test_scores_that_nobody_writes() -> None:
    model = one_node("GroupQueryAttention", PROMPT, [0, 3], num_heads=4, kv_num_heads=2, unread=3)
    with pytest.raises(UnsupportedError, match="expected qk_output 1 or 2, got 0"):
        ob.backward(model, wrt=["q"], of=["y0"])
