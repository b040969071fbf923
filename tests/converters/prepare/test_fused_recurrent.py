"""Linear attention of com.microsoft and what stands around it, written out, against onnxruntime's own."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import onnx_backprop as ob
from onnx_backprop.opset.core.errors import UnsupportedError
from tests.support.fused_checks import (
    Kernel,
    check_all_fused,
    check_fused,
    check_kernel_gradient,
    check_kernel_gradients,
    fused,
    one_node,
)

RNG = np.random.default_rng(8)
B, T = 2, 5


def draw(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def float_inputs(feeds) -> list[str]:
    return [name for name, array in feeds.items() if array is not None and array.dtype.kind == "f"]


def test_causal_convolution() -> None:
    cases, kernels = [], []
    activations = [{}, {"activation": "silu"}, {"activation": "swish", "dilation": 2}]
    for more, (past, bias, last), time in product(activations, [(0, 0, 0), (1, 1, 0), (0, 1, 1), (1, 0, 1)], [T, 2]):
        before = 3 * more.get("dilation", 1)
        feeds = {"x": draw(B, 3, time), "w": draw(3, 1, 4), "b": draw(3) if bias else None}
        feeds["past"] = draw(B, 3, before) if past else None
        if last:
            feeds |= {n: feeds[n].transpose(0, 2, 1).copy() for n in ("x", "past") if feeds[n] is not None}
        settings = {"channels_last": last, "constants": ["w"], "outputs": 2, **more}
        cases.append(fused("CausalConvWithState", feeds, **settings))
        if time == T:
            wrt = [name for name in float_inputs(feeds) if name != "w"]
            kernels.append(Kernel("CausalConvWithState", feeds, wrt, settings, half=True))
    check_all_fused(cases)
    check_kernel_gradients(kernels)


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


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_rotary_embedding_of_three_positions(dtype: type) -> None:
    cases, kernels = [], []
    for (layout, sections, part), interleaved, joined in product(SECTIONS, [0, 1], [False, True]):
        feeds = {"x": draw(B, T, 32, dtype=dtype) if joined else draw(B, 2, T, 16, dtype=dtype)}
        feeds |= {"ids": RNG.integers(0, 20, (3, B, T)), "cos": draw(20, sum(sections), dtype=dtype)}
        feeds["sin"] = draw(20, sum(sections), dtype=dtype)
        settings = {"mrope_layout": layout, "mrope_section": sections, "rotary_embedding_dim": part, "num_heads": 2}
        settings["interleaved"] = interleaved
        cases.append(fused("MRotaryEmbedding", feeds, **settings))
        kernels.append(Kernel("MRotaryEmbedding", feeds, ["x", "cos", "sin"], settings, half=True))
    check_all_fused(cases)
    if dtype == np.float32:
        check_kernel_gradients(kernels)


HEADS = [(2, 2, 2, False), (4, 2, 2, True), (2, 4, 4, True), (2, 4, 2, False)]


def test_linear_attention() -> None:
    cases, kernels = [], []
    for rule, (queries, heads, keys, past) in product(["linear", "gated", "delta", "gated_delta"], HEADS):
        each, common = past and "gated" in rule, queries == heads
        feeds = {"q": draw(B, T, queries * 4), "k": draw(B, T, keys * 4) / 2, "v": draw(B, T, heads * 3)}
        feeds["past"] = draw(B, heads, 4, 3) if past else None
        feeds["decay"] = -np.abs(draw(B, T, heads * (4 if each else 1))) if "gated" in rule else None
        feeds["beta"] = 1 / (1 + np.exp(-draw(B, T, 1 if common else heads))) if "delta" in rule else None
        settings = {"update_rule": rule, "q_num_heads": queries, "kv_num_heads": heads, "outputs": 2}
        settings["scale"] = 0.3 if common else 0.0
        kernels.append(Kernel("LinearAttention", feeds, float_inputs(feeds), settings, half=past))
        coarse = {name: None if x is None else x.astype(np.float16) for name, x in feeds.items()}
        cases += [fused("LinearAttention", given, **settings) for given in (feeds, coarse)]
    check_all_fused(cases)
    check_kernel_gradients(kernels)


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
def test_invalid_use_is_refused(op_type: str, more, sentence: str) -> None:
    feeds = {name: draw(2, 2, 4) for name in ("abcd" if op_type == "GatedAdd" else "abc")}
    heads = {"q_num_heads": 2, "kv_num_heads": 2} if op_type == "LinearAttention" else {}
    model = one_node(op_type, feeds, **{**heads, **more})
    model.graph.output[0].type.tensor_type.elem_type = 1
    with pytest.raises(UnsupportedError, match=f"com.microsoft::{op_type} .*{sentence}"):
        ob.backward(model, wrt=["a"])
