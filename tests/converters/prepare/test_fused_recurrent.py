"""Linear attention of com.microsoft and what stands around it, written out, against onnxruntime's own."""

from __future__ import annotations

import numpy as np
import pytest

import onnx_backprop as ob
from onnx_backprop.opset.core.errors import UnsupportedError
from tests.support.fused_checks import check_fused, check_kernel_gradient, one_node

RNG = np.random.default_rng(8)
B, T = 2, 5


def draw(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def float_inputs(feeds) -> list[str]:
    return [name for name, array in feeds.items() if array is not None and array.dtype.kind == "f"]


@pytest.mark.parametrize("more", [{}, {"activation": "silu"}, {"activation": "swish", "dilation": 2}])
@pytest.mark.parametrize(("past", "bias", "last"), [(0, 0, 0), (1, 1, 0), (0, 1, 1), (1, 0, 1)])
@pytest.mark.parametrize("time", [T, 2])
def test_causal_convolution(more, past: int, bias: int, last: int, time: int) -> None:
    before = 3 * more.get("dilation", 1)
    feeds = {"x": draw(B, 3, time), "w": draw(3, 1, 4), "b": draw(3) if bias else None}
    feeds["past"] = draw(B, 3, before) if past else None
    if last:
        feeds |= {n: feeds[n].transpose(0, 2, 1).copy() for n in ("x", "past") if feeds[n] is not None}
    settings = {"channels_last": last, "constants": ["w"], **more}
    check_fused("CausalConvWithState", feeds, outputs=2, **settings)
    if time == T:
        wrt = [name for name in float_inputs(feeds) if name != "w"]
        check_kernel_gradient("CausalConvWithState", feeds, wrt, outputs=2, half=True, **settings)


def test_causal_convolution_of_channels_on_two_axes() -> None:
    feeds = {"x": draw(B, T, 3, 2), "w": draw(6, 1, 4), "b": None, "past": draw(B, 3, 3, 2)}
    check_fused("CausalConvWithState", feeds, ["x", "past"], 2, channels_last=1, constants=["w"])


@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_gated_rms_norm(activation: str, dtype: type) -> None:
    feeds = {"x": draw(B, T, 8, dtype=dtype), "scale": draw(4, dtype=dtype), "gate": draw(B, T, 8, dtype=dtype)}
    check_fused("GatedRMSNorm", feeds, activation=activation, epsilon=1e-3)
    if dtype == np.float32:
        check_kernel_gradient("GatedRMSNorm", feeds, list(feeds), half=True, activation=activation, epsilon=1e-3)


def test_gates() -> None:
    feeds = {"x": draw(B, T, 8), "y": draw(B, T, 8), "gate": draw(B, T, 1)}
    check_fused("GatedAdd", feeds)
    check_kernel_gradient("GatedAdd", feeds, list(feeds), half=True)
    feeds = {"a": 3 * draw(B, T, 4), "bias": draw(4), "scale": draw(4), "b": draw(B, T, 4)}
    check_fused("LinearAttentionGate", feeds, ["a", "bias", "scale", "b"], 2)
    check_kernel_gradient("LinearAttentionGate", feeds, ["a", "bias", "scale"], outputs=2)
    feeds |= {name: feeds[name].astype(np.float16) for name in "ab"}
    check_fused("LinearAttentionGate", feeds, outputs=2)


SECTIONS = [(0, [2, 3, 3], 0), (1, [4, 2, 2], 0), (1, [2, 2, 4], 0), (0, [2, 1, 1], 8), (1, [2, 1, 1], 8)]


@pytest.mark.parametrize(("layout", "sections", "part"), SECTIONS)
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_rotary_embedding_of_three_positions(layout, sections, part, interleaved, joined, dtype) -> None:
    feeds = {"x": draw(B, T, 32, dtype=dtype) if joined else draw(B, 2, T, 16, dtype=dtype)}
    feeds |= {"ids": RNG.integers(0, 20, (3, B, T)), "cos": draw(20, sum(sections), dtype=dtype)}
    feeds["sin"] = draw(20, sum(sections), dtype=dtype)
    settings = {"mrope_layout": layout, "mrope_section": sections, "rotary_embedding_dim": part, "num_heads": 2}
    check_fused("MRotaryEmbedding", feeds, interleaved=interleaved, **settings)
    if dtype == np.float32:
        wrt = ["x", "cos", "sin"]
        check_kernel_gradient("MRotaryEmbedding", feeds, wrt, interleaved=interleaved, half=True, **settings)


HEADS = [(2, 2, 2, False), (4, 2, 2, True), (2, 4, 4, True), (2, 4, 2, False)]


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize(("queries", "heads", "keys", "past"), HEADS)
def test_linear_attention(rule: str, queries: int, heads: int, keys: int, past: bool) -> None:
    each, common = past and "gated" in rule, queries == heads
    feeds = {"q": draw(B, T, queries * 4), "k": draw(B, T, keys * 4) / 2, "v": draw(B, T, heads * 3)}
    feeds["past"] = draw(B, heads, 4, 3) if past else None
    feeds["decay"] = -np.abs(draw(B, T, heads * (4 if each else 1))) if "gated" in rule else None
    feeds["beta"] = 1 / (1 + np.exp(-draw(B, T, 1 if common else heads))) if "delta" in rule else None
    settings = {"update_rule": rule, "q_num_heads": queries, "kv_num_heads": heads, "scale": 0.3 if common else 0.0}
    check_fused("LinearAttention", feeds, outputs=2, **settings)
    check_kernel_gradient("LinearAttention", feeds, float_inputs(feeds), outputs=2, half=past, **settings)
    coarse = {name: None if x is None else x.astype(np.float16) for name, x in feeds.items()}
    check_fused("LinearAttention", coarse, outputs=2, **settings)


REFUSED = [
    ("CausalConvWithState", {"ndim": 2}, "ndim=1 and state_window=0 are handled"),
    ("CausalConvWithState", {"activation": "relu"}, "none, silu and swish are handled, got 'relu'"),
    ("CausalConvWithState", {"state_length": 3}, "'state_length' is not handled"),
    ("LinearAttention", {"state_window": 2}, "state_window=0 is handled"),
    ("LinearAttention", {"update_rule": "delta"}, "reads decay, beta or both"),
    ("LinearAttention", {"update_rule": "other"}, "got 'other'"),
    ("GatedRMSNorm", {"activation": "relu"}, "silu, swish and sigmoid are handled, got 'relu'"),
    ("GatedAdd", {}, "input 3, 'd', is not handled"),
    ("GatedDeltaNet", {}, "it works on packed batches"),
    ("VarlenCausalConvWithState", {}, "it works on packed batches"),
]


@pytest.mark.parametrize(("op_type", "more", "sentence"), REFUSED)
def test_what_is_refused(op_type: str, more, sentence: str) -> None:
    feeds = {name: draw(2, 2, 4) for name in ("abcd" if op_type == "GatedAdd" else "abc")}
    heads = {"q_num_heads": 2, "kv_num_heads": 2} if op_type == "LinearAttention" else {}
    model = one_node(op_type, feeds, **{**heads, **more})
    model.graph.output[0].type.tensor_type.elem_type = 1
    with pytest.raises(UnsupportedError, match=f"com.microsoft::{op_type} .*{sentence}"):
        ob.backward(model, wrt=["a"])
