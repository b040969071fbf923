"""AttentionForwardTraining and AttentionBackward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from onnx_backprop.opset.operators.registry import BY_NAME
from tests.declarations.calls import Call, Draws, values, without_end
from tests.declarations.declaration import FLOAT, INT, STRING, Bad, Declaration, Example, Schema, longs

FORWARD, BACKWARD = "AttentionForwardTraining", "AttentionBackward"


def calls(draws: Draws) -> Call:
    """Scores are not too large; every third call has a row that sees nothing."""
    while True:
        batch, group, shared = (draws.length(3, small=3) for _ in range(3))
        queries, keys = draws.length(150), draws.length(150)
        size, width = draws.length(70), draws.length(70)
        if draws.fits(
            [batch, group * shared, queries, keys], [batch, shared * group, max(queries, keys), max(size, width)]
        ):
            break
    seed, heads = draws.seed(), group * shared
    q = values((batch, heads, queries, size), seed)
    k = values((batch, shared, keys, size), seed + 1)
    v = values((batch, shared, keys, width), seed + 2)
    full = (batch, heads, queries, keys)
    bias = values([n if draws.flag() else 1 for n in full], seed + 3) if draws.flag() else None
    if bias is not None and draws.flag():
        bias[np.random.default_rng(seed).random(bias.shape) < 0.25] = -np.inf
    rng = np.random.default_rng(seed)
    lengths = rng.integers(-1, keys + 2, batch) if draws.flag() else None
    sinks = values((heads,), seed + 4) if draws.flag() else None
    offsets = rng.integers(-3, max(keys, queries) + 3, batch) if draws.pick(False, False, True) else None
    attributes: dict[str, Any] = {
        "is_causal": draws.integer(0, 1),
        "window_left": draws.pick(-1, -1, 0, 1, 5, 40),
        "window_right": draws.pick(-1, -1, 0, 2, 40),
        "softcap": draws.pick(0.0, 0.0, 2.0),
        "diagonal_alignment": draws.pick("TOP_LEFT", "BOTTOM_RIGHT"),
    }
    if draws.flag():
        attributes["scale"] = draws.pick(0.25, 0.125, -0.5)
    return Call(FORWARD, attributes, without_end([q, k, v, bias, lengths, sinks, offsets]), seed)


def backward_calls(draws: Draws) -> Call:
    """With the log_sum_exp of the forward; the output, in which all is linear, need not be its own."""
    forward = calls(draws)
    q, k, v, *rest = forward.inputs
    assert q is not None
    assert v is not None
    _, logarithm = BY_NAME[FORWARD].evaluate_all(forward.inputs, forward.attributes)
    shape = (*q.shape[:3], v.shape[3])
    dy, y = (values(shape, forward.seed + n) for n in (5, 6))
    return Call(BACKWARD, forward.attributes, [dy, q, k, v, y, logarithm, *rest], forward.seed)


def smooth(call: Call) -> bool:
    """-inf has no differences, and those of powers are wrong where scores change fast."""
    query = call.inputs[0 if call.op == FORWARD else 1]
    assert query is not None
    size = query.shape[3]
    steep = size * abs(call.attributes.get("scale", 0) or size**-0.5)
    return steep <= 4 and all(array is None or np.isfinite(array).all() for array in call.inputs)


def _refused(op: str, first: int) -> list[Bad]:
    """Changes of the valid call; `first`: where the query stands."""
    q, k, v = first, first + 1, first + 2
    bias = 3 if op == FORWARD else 6
    extra = [
        Bad(op, f"attribute {name}: expected a number >= -1, got -2", {name: -2})
        for name in ("window_left", "window_right")
    ]
    return [
        *extra,
        Bad(op, "key: expected rank 4, got 3 with shape (2, 2, 5)", inputs={k: (2, 2, 5)}),
        Bad(op, "batches of query and key must agree, got 2 and 3", inputs={k: (3, 2, 5, 6)}),
        Bad(op, "sizes of heads of query and key must agree, got 6 and 7", inputs={k: (2, 2, 5, 7)}),
        Bad(op, "heads of key and value must agree, got 2 and 4", inputs={v: (2, 4, 5, 3)}),
        Bad(op, "numbers of keys of key and value must agree, got 5 and 4", inputs={v: (2, 2, 4, 3)}),
        Bad(op, "query: expected a multiple of the 3 heads of key, got 4", inputs={k: (2, 3, 5, 6), v: (2, 3, 5, 3)}),
        Bad(op, "key: expected one key or more, got none", inputs={k: (2, 2, 0, 6), v: (2, 2, 0, 3), bias: (1, 1, 1, 1)}),
        Bad(op, "query: expected one column or more, got none", inputs={q: (2, 4, 3, 0), k: (2, 2, 5, 0)}),
        Bad(op, "bias: expected rank 4, got 2 with shape (3, 5)", inputs={bias: (3, 5)}),
        Bad(op, "bias: expected lengths of (2, 4, 3, 5) or 1, got (1, 2, 3, 5)", inputs={bias: (1, 2, 3, 5)}),
        Bad(op, "batches of query and lengths must agree, got 2 and 3", inputs={bias + 1: longs(1, 2, 3)}),
        Bad(op, "heads of query and sinks must agree, got 4 and 2", inputs={bias + 2: (2,)}),
        Bad(op, "batches of query and offsets must agree, got 2 and 1", inputs={bias + 3: longs(1)}),
        Bad(op, "lengths: expected rank 1, got 2 with shape (1, 2)", inputs={bias + 1: longs(1, 2).reshape(1, 2)}),
        Bad(op, "attribute is_causal: expected 0 or 1, got 2", {"is_causal": 2}),
        Bad(op, "attribute softcap: expected a number >= 0, got -1.0", {"softcap": -1.0}),
        Bad(op, "attribute scale: expected a finite number, got inf", {"scale": float("inf")}),
        *([] if q == 0 else _refused_backward()),
    ]  # fmt: skip


def _refused_backward() -> list[Bad]:
    return [
        Bad(BACKWARD, "numbers of queries of query and diff_out must agree, got 3 and 2", inputs={0: (2, 4, 2, 3)}),
        Bad(BACKWARD, "sizes of heads of value and out must agree, got 3 and 6", inputs={4: (2, 4, 3, 6)}),
        Bad(BACKWARD, "log_sum_exp: expected rank 3, got 4 with shape (2, 4, 3, 1)", inputs={5: (2, 4, 3, 1)}),
    ]


def examples() -> Iterator[Example]:
    """Scores of 0 and of log 2 and log 3 weigh values by whole parts."""
    q, k, v = [[[[0.0], [0.0]]]], [[[[1.0], [1.0]]]], [[[[2.0], [6.0]]]]
    log2 = float(np.log(2))
    yield Example(f"{FORWARD}-mean", FORWARD, {}, (q, k, v), [[[[4], [4]]]], ([[[log2, log2]]],))
    causal = {"is_causal": 1}
    yield Example(f"{FORWARD}-causal", FORWARD, causal, (q, k, v), [[[[2], [4]]]], ([[[0, log2]]],))
    # one query at the last of two keys, or at the first
    one = [[[[0.0]]]]
    yield Example(f"{FORWARD}-bottom", FORWARD, causal, (one, k, v), [[[[4]]]], ([[[log2]]],))
    top = causal | {"diagonal_alignment": "TOP_LEFT"}
    yield Example(f"{FORWARD}-top", FORWARD, top, (one, k, v), [[[[2]]]], ([[[0]]],))
    # of two keys one counts: the first of two queries stands before it
    below = float("-inf")
    given = (q, k, v, None, (1,))
    yield Example(f"{FORWARD}-lengths", FORWARD, causal, given, [[[[0], [2]]]], ([[[below, 0]]],))
    yield Example(f"{FORWARD}-sinks", FORWARD, {}, (q, k, v, None, None, [log2]), [[[[2], [2]]]], ([[[2 * log2] * 2]],))
    given = (one, k, v, None, None, None, (0,))
    yield Example(f"{FORWARD}-offsets", FORWARD, causal, given, [[[[2]]]], ([[[0]]],))
    bias = [[[[0.0, below]]]]
    yield Example(f"{FORWARD}-bias", FORWARD, {}, (q, k, v, bias), [[[[2], [2]]]], ([[[0, 0]]],))
    yield Example(f"{FORWARD}-window", FORWARD, {"window_left": 0}, (q, k, v), [[[[4], [6]]]], ([[[log2, 0]]],))
    # two heads of queries read one of keys
    heads, first = [[[[0.0]], [[0.0]]]], [[[[0.0, 0.0]], [[0.0, below]]]]
    given = (heads, [[[[1.0], [0.0]]]], [[[[3.0], [6.0]]]], first)
    yield Example(f"{FORWARD}-group", FORWARD, {}, given, [[[[4.5]], [[3]]]], ([[[log2], [0]]],))
    # p = ½, ½; dy·v - δ = 2 - 4, 6 - 4; ds = -1, 1
    y, logarithm = [[[[4.0]]]], [[[log2]]]
    nothing = [[[[0.0], [0.0]]]]
    given = ([[[[1.0]]]], [[[[5.0]]]], nothing, v, y, logarithm)
    answers = ([[[[-5], [5]]]], [[[[0.5], [0.5]]]], [], [])
    yield Example(f"{BACKWARD}-keys", BACKWARD, {"scale": 1.0}, given, [[[[0]]]], answers)
    apart = [[[[1.0], [3.0]]]]
    given = ([[[[1.0]]]], [[[[0.0]]]], apart, v, y, logarithm, [[[[0.0, 0.0]]]])
    yield Example(
        f"{BACKWARD}-bias", BACKWARD, {"scale": 2.0}, given, [[[[4]]]],
        ([[[[0], [0]]]], [[[[0.5], [0.5]]]], [[[[-1, 1]]]], []),
    )  # fmt: skip
    # a sink as heavy as both keys: p = ¼, ¼, and ½ of the sink; δ = 2
    given = ([[[[1.0]]]], [[[[0.0]]]], apart, v, [[[[2.0]]]], [[[2 * log2]]], None, None, [log2])
    yield Example(
        f"{BACKWARD}-sinks", BACKWARD, {"scale": 1.0}, given, [[[[3]]]],
        ([[[[0], [0]]]], [[[[0.25], [0.25]]]], [], [-1]),
    )  # fmt: skip


ATTRIBUTES = {
    "scale": (FLOAT, 0.0),
    "softcap": (FLOAT, 0.0),
    "is_causal": (INT, 0),
    "window_left": (INT, -1),
    "window_right": (INT, -1),
    "diagonal_alignment": (STRING, "BOTTOM_RIGHT", ("TOP_LEFT", "BOTTOM_RIGHT")),
}
TENSORS = {"query": "T1", "key": "T1", "value": "T1"}
OPTIONAL = {"bias": "T1?", "lengths": "T7?", "sinks": "T5?", "offsets": "T7?"}
Q, K, V = (2, 4, 3, 6), (2, 2, 5, 6), (2, 2, 5, 3)

OPERATORS = [
    Declaration(
        op=FORWARD,
        schema=Schema(ATTRIBUTES, TENSORS | OPTIONAL, {"out": "T1", "log_sum_exp": "T5"}),
        gradient_of=("Attention",),
        calls=calls,
        valid=({}, [Q, K, V, (1, 4, 3, 5), longs(5, 4), (4,), longs(1, 2)]),
        refused=_refused(FORWARD, 0),
        examples=[e for e in examples() if e.op == FORWARD],
        inferred=[
            ({}, [None, None, None], [[None, None, None, None], [None, None, None]]),
            ({}, [["N", 4, "S", 8], None, [None, 2, "T", 6]], [["N", 4, "S", 6], ["N", 4, "S"]]),
        ],
        smooth=smooth,
    ),
    Declaration(
        op=BACKWARD,
        schema=Schema(
            ATTRIBUTES,
            {"diff_out": "T1"} | TENSORS | {"out": "T1", "log_sum_exp": "T5"} | OPTIONAL,
            {"diff_query": "T1", "diff_key": "T1", "diff_value": "T1", "diff_bias": "T1", "diff_sinks": "T5"},
        ),
        gradient_of=("Attention",),
        calls=backward_calls,
        valid=({}, [(2, 4, 3, 3), Q, K, V, (2, 4, 3, 3), (2, 4, 3), (1, 4, 3, 5), longs(5, 4), (4,), longs(1, 2)]),
        refused=_refused(BACKWARD, 1),
        examples=[e for e in examples() if e.op == BACKWARD],
        inferred=[
            (
                {},
                [None, None, ["N", 2, 5, 8], ["N", 2, 5, 4], None, None],
                [["N", None, None, 8], ["N", 2, 5, 8], ["N", 2, 5, 4], [0], [0]],
            )
        ],
        smooth=smooth,
    ),
]
