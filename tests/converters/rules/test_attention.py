"""Gradients of Attention, RotaryEmbedding and Swish, against differences of onnxruntime's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import onnx_backprop as ob
from onnx_backprop.converters.reverse import expand
from tests.support.gradient_checks import Case, Oracle, build, case, check_cases, check_gradient, retyped

SMOOTH = Oracle("onnxruntime", 2.0**-6, 1e-3)
VARIANTS = ("static", "symbolic", "fed", "half")
SEED = 3
OLD = onnxruntime.__version__.startswith("1.31.")


def numbers(*shape: int, seed: int = SEED) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def attention(attributes: str = "", *, q: tuple[int, ...] = (2, 2, 3, 4), k: tuple[int, ...] = (2, 2, 5, 4),
              v: tuple[int, ...] | None = None, extra: str = "", outputs: str = "y", nodes: str = "",
              **given: Any) -> Case:  # fmt: skip
    text = f"{outputs} = Attention {f'<{attributes}>' if attributes else ''} (q, k, v{extra}) {nodes}"
    return case(
        text, op="Attention", q=numbers(*q), k=numbers(*k, seed=SEED + 1), v=numbers(*(v or k), seed=SEED + 2),
        since=given.pop("since", 23), oracle=SMOOTH, refuses=given.pop("refuses", ()), **given,
    )  # fmt: skip


HEADS = "q_num_heads = 2, kv_num_heads = 2"
CASES = [
    attention(),
    attention("is_causal = 1"),
    attention("scale = 0.3"),
    attention("softcap = 0.7"),
    attention(v=(2, 2, 5, 3)),
    attention(q=(2, 4, 3, 4)),  # groups of queries share keys
    # with the width a symbol, onnx's shape inference says that y has none
    attention(HEADS, q=(2, 3, 8), k=(2, 5, 8)),
    attention("q_num_heads = 4, kv_num_heads = 2, is_causal = 1", q=(2, 3, 8), k=(2, 5, 4)),
    attention(extra=", m", m=numbers(3, 5)),
    attention(extra=", m", m=numbers(2, 1, 3, 5)),
    attention("is_causal = 1", extra=", m", m=numbers(1, 2, 3, 5)),
    attention(extra=", m", constants={"m": np.array([[1, 1, 0, 1, 0], [0, 1, 0, 0, 0], [1, 1, 1, 1, 1]], bool)}),
    attention(extra=", m", constants={"m": np.arange(30).reshape(2, 3, 5) % 7 < 3}),
    attention("q_num_heads = 4, kv_num_heads = 2, scale = 0.3, is_causal = 1", q=(2, 3, 8), k=(2, 5, 4), extra=", m",
              constants={"m": np.array([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], bool)}, skips=["symbolic", "fed"]),
    attention(
        extra=', "", pk, pv', pk=numbers(2, 2, 2, 4, seed=8), pv=numbers(2, 2, 2, 4, seed=9),
        outputs="z, key, value", nodes="f = Constant<value_ints=[-1]>() a = Reshape(z, f) b = Reshape(key, f) "
        "c = Reshape(value, f) y = Concat<axis = 0>(a, b, c)",
    ),
    *(
        attention(f"qk_matmul_output_mode = {mode}, softcap = 0.8", extra=", m", m=numbers(3, 5), outputs='z, "", "", s',
                  nodes="f = Constant<value_ints=[-1]>() a = Reshape(z, f) b = Reshape(s, f) y = Concat<axis = 0>(a, b)")
        for mode in (0, 1, 2, 3)
    ),
]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention(variant: str) -> None:
    check_cases(CASES, variant)


def rotary(attributes: str, x: tuple[int, ...], cache: tuple[int, ...], ids: object = None, **given: Any) -> Case:
    constants = {} if ids is None else {"i": np.array(ids)}
    return case(
        f"y = RotaryEmbedding {attributes} (x, c, s{'' if ids is None else ', i'})", op="RotaryEmbedding", since=23,
        x=numbers(*x), c=numbers(*cache, seed=SEED + 1), s=numbers(*cache, seed=SEED + 2), oracle=SMOOTH,
        constants=constants, **given,
    )  # fmt: skip


ROTARY = [
    rotary("", (2, 2, 3, 4), (5, 2), [[0, 3, 1], [4, 4, 2]]),
    rotary("<interleaved = 1>", (2, 2, 3, 4), (5, 2), [[0, 3, 1], [4, 4, 2]]),
    rotary("", (2, 2, 3, 4), (2, 3, 2)),
    rotary("<num_heads = 2>", (2, 3, 8), (2, 3, 2)),
    rotary("<rotary_embedding_dim = 4>", (2, 2, 3, 6), (5, 2), [[0, 3, 1], [4, 4, 2]]),
    rotary("<rotary_embedding_dim = 2, interleaved = 1, num_heads = 2>", (2, 3, 8), (5, 1), [[0, 3, 1], [4, 4, 2]]),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_rotary_embedding(variant: str) -> None:
    check_cases(ROTARY, variant)


SWISH = [
    case(f"y = Swish {alpha} (x)", x=(3, 5), since=24, until=24, oracle=SMOOTH)
    for alpha in ("", "<alpha = 0.7>", "<alpha = -1.5>")
]


@pytest.mark.parametrize("variant", [*VARIANTS, "unranked"])
def test_swish(variant: str) -> None:
    """onnxruntime has no kernel, and inlines the body in models of opset 24 only."""
    check_cases(SWISH, variant)


MASKED = np.array([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], bool)


FLOOR = float(np.finfo(np.float32).min)


def masked_with(value: float) -> np.ndarray:
    return np.where(MASKED, 0, value).astype(np.float32)


@pytest.mark.parametrize("opset", [23, 24, 26])
@pytest.mark.parametrize("masked", [False, -np.inf, FLOOR, -20.0], ids=str)
@pytest.mark.parametrize("attributes", ["", "is_causal = 1", "softcap = 0.9"])
def test_queries_that_may_look_nowhere(attributes: str, masked: float, opset: int) -> None:
    """onnxruntime puts out 0 for them, and nothing comes back; not so with -20.

    With the lowest finite number they get the mean of the values where onnxruntime has no kernel: at opset 26 since
    1.32. In either case nothing is NaN.
    """
    mask = MASKED if masked is False else masked_with(masked)
    check_cases([attention(attributes, extra=", m", constants={"m": mask})], "static", opset=opset)


@pytest.mark.parametrize("variant", ["symbolic", "fed"])
@pytest.mark.parametrize("opset", [23, 26])
def test_queries_that_may_look_nowhere_by_a_mask_of_the_run(opset: int, variant: str) -> None:
    """Both masks at once: a causal row of which the first key is floored puts out 0, or the value of that key."""
    check_cases([attention("is_causal = 1", extra=", m", constants={"m": masked_with(FLOOR)})], variant, opset=opset)


@pytest.mark.parametrize("opset", [23, 26])
@pytest.mark.parametrize("masked", [-np.inf, float(np.finfo(np.float64).min)], ids=str)
@pytest.mark.parametrize("attributes", ["", "is_causal = 1"])
def test_queries_that_may_look_nowhere_in_float64(attributes: str, masked: float, opset: int) -> None:
    """onnxruntime has no kernel for float64, whatever the opset. The body in 1.31 is wrong: ill-typed, or NaN."""
    if OLD:
        pytest.skip("onnxruntime 1.31 does not run these models")
    single, feeds, wrt = build(attention(attributes, extra=", m", constants={"m": masked_with(-1)}), opset=opset)
    model = retyped(single, onnx.TensorProto.DOUBLE)
    (mask,) = model.graph.initializer
    mask.CopyFrom(numpy_helper.from_array(np.where(MASKED, 0, masked), mask.name))
    double = {name: array.astype(np.float64) for name, array in feeds.items()}
    check_gradient(model, double, wrt, oracle=replace(SMOOTH, step=1e-4, tolerance=1e-6))


@pytest.mark.parametrize("opset", [23, 26])
@pytest.mark.parametrize("masked", [-np.inf, float(np.finfo(np.float16).min)], ids=str)
def test_queries_that_may_look_nowhere_in_float16(masked: float, opset: int) -> None:
    """Against float32, whose lowest finite number says the same as that of float16."""
    half, single = (
        attention(extra=", m", constants={"m": masked_with(value)})
        for value in (masked, masked if np.isinf(masked) else FLOOR)
    )
    model, feeds, wrt = build(half, opset=opset, variant="half")
    check_gradient(model, feeds, wrt, oracle=SMOOTH, forward=build(single, opset=opset)[0])


@pytest.mark.parametrize("masked", [None, FLOOR], ids=str)
def test_keys_in_a_window(masked: float | None) -> None:
    """Attributes of opset 25, which onnxruntime knows since 1.32."""
    given = {"extra": ", m", "constants": {"m": masked_with(masked)}} if masked else {}
    sliding = attention("left_window_size = 1, right_window_size = 0, is_causal = 1", since=25, **given)
    if OLD:
        pytest.skip("onnxruntime 1.31 has no windows")
    for variant in ("static", "symbolic"):
        check_cases([sliding], variant)


def test_a_scale_of_zero() -> None:
    """Since 1.32 onnxruntime runs the body of opset 25, to which that is no default: all keys weigh the same."""
    if OLD:
        pytest.skip("onnxruntime 1.31 has a kernel for it")
    for variant in ("static", "symbolic"):
        check_cases([attention("scale = 0.0", since=25)], variant)


@pytest.mark.parametrize("attributes", ["", "is_causal = 1"])
def test_padded_keys(attributes: str) -> None:
    """nonpad_kv_seqlen, an input since opset 24."""
    given = attention(attributes, extra=', "", "", "", n', constants={"n": np.array([5, 2])}, since=24)
    for variant in ("static", "symbolic", "fed"):
        check_cases([given], variant)


def test_an_unknown_body_of_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, wrt = build(attention("softcap = 0.7"), opset=23)  # without, it has a rule
    monkeypatch.setattr(expand, "_written_body", lambda *_: onnx.FunctionProto(node=[onnx.NodeProto(output=["y"])]))
    with pytest.raises(ob.UnsupportedError, match="Attention 'attention_0': .*not one that this version knows"):
        ob.backward(model, wrt=wrt)
