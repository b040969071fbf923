"""Normalisations of com.microsoft, written out, against onnxruntime's own."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from tests.support.fused_checks import check_fused, expanded, one_node

RNG = np.random.default_rng(1)
DTYPES = [np.float32, np.float64, np.float16]


def draw(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [-1, 1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_layer_normalization_before_opset_17(dtype: type, axis: int, bias: bool) -> None:
    shape = (3, 4) if axis == 1 else (4,)
    feeds = {"x": draw(2, 3, 4, dtype=dtype), "scale": draw(*shape, dtype=dtype)}
    if bias:
        feeds["b"] = draw(*shape, dtype=dtype)
    wrt = list(feeds) if dtype == np.float32 else []
    check_fused("LayerNormalization", feeds, wrt, domain="", opset=16, axis=axis, epsilon=1e-3)


def test_statistics_of_layer_normalization() -> None:
    feeds = {"x": draw(2, 3, 4), "scale": draw(4)}
    check_fused("LayerNormalization", feeds, ["x"], 3, domain="", opset=16)


@pytest.mark.parametrize("opset", [15, 18])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [-1, 1, 2])
def test_simplified_layer_normalization(dtype: type, axis: int, opset: int) -> None:
    feeds = {"x": draw(2, 3, 4, dtype=dtype), "scale": draw(*((3, 4) if axis == 1 else (4,)), dtype=dtype)}
    wrt = list(feeds) if dtype == np.float32 else []
    check_fused("SimplifiedLayerNormalization", feeds, wrt, domain="", opset=opset, axis=axis)


def test_large_float16_is_normalised_in_float32() -> None:
    feeds = {"x": 1000 * draw(2, 3, 4, dtype=np.float16), "scale": draw(4, dtype=np.float16)}
    check_fused("SimplifiedLayerNormalization", feeds, domain="")
    written_out = expanded(one_node("SimplifiedLayerNormalization", feeds, domain=""))
    (mean,) = [node.output[0] for node in written_out.graph.node if node.op_type == "ReduceMean"]
    (info,) = [value for value in written_out.graph.value_info if value.name == mean]
    assert info.type.tensor_type.elem_type == TensorProto.FLOAT  # onnxruntime's CPU computes all of it so anyhow


SKIPS = [(2, 3, 4), (3, 4), (1, 3, 4)]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("outputs", [(0,), (0, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize(("beta", "bias"), [(False, False), (True, True), (False, True)])
def test_skip_layer_normalization(dtype: type, skip, outputs, beta: bool, bias: bool) -> None:
    feeds = {"x": draw(2, 3, 4), "skip": draw(*skip), "gamma": draw(4)}
    feeds |= {"beta": draw(4) if beta else None, "bias": draw(4) if bias else None}
    feeds = {n: None if a is None else a.astype(dtype) for n, a in feeds.items()}
    wrt = [n for n, a in feeds.items() if a is not None] if dtype == np.float32 else []
    check_fused("SkipLayerNormalization", feeds, wrt, outputs, epsilon=1e-3)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("outputs", [(0,), (0, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("bias", [False, True])
def test_skip_simplified_layer_normalization(dtype: type, skip, outputs, bias: bool) -> None:
    feeds = {"x": draw(2, 3, 4), "skip": draw(*skip), "gamma": draw(4), "bias": draw(4) if bias else None}
    feeds = {n: None if a is None else a.astype(dtype) for n, a in feeds.items()}
    wrt = [n for n, a in feeds.items() if a is not None] if dtype == np.float32 else []
    check_fused("SkipSimplifiedLayerNormalization", feeds, wrt, outputs, epsilon=1e-3)


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("positions", [None, (2, 3), (1, 3)])
@pytest.mark.parametrize("outputs", [(0,), (0, 1), (0, 2)])
def test_embed_layer_normalization(segments: bool, mask: bool, positions, outputs) -> None:
    ids = RNG.integers(0, 5, (2, 3)).astype(np.int32)
    feeds = {
        "ids": ids,
        "segments": RNG.integers(0, 2, (2, 3)).astype(np.int32) if segments else None,
        "word": draw(5, 4),
        "position": draw(6, 4),
        "segment": draw(2, 4) if segments else None,
        "gamma": draw(4),
        "beta": draw(4),
        "mask": np.int32([[1, 1, 0], [1, 1, 1]]) if mask else None,
        "position_ids": RNG.integers(0, 6, positions).astype(np.int32) if positions else None,
    }
    wrt = ["word", "position", "gamma", "beta", *(["segment"] if segments else [])]
    check_fused("EmbedLayerNormalization", feeds, wrt, outputs, unread=2, epsilon=1e-3)
