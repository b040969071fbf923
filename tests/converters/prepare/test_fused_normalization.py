"""Normalisations of com.microsoft, written out, against onnxruntime's own."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from onnx import TensorProto

from tests.support.fused_checks import check_all_fused, check_fused, expanded, fused, one_node

RNG = np.random.default_rng(1)
DTYPES = [np.float32, np.float64, np.float16]


def draw(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_normalization_before_opset_17(dtype: type) -> None:
    cases = []
    for axis, bias in product([-1, 1, 2], [False, True]):
        shape = (3, 4) if axis == 1 else (4,)
        feeds = {"x": draw(2, 3, 4, dtype=dtype), "scale": draw(*shape, dtype=dtype)}
        if bias:
            feeds["b"] = draw(*shape, dtype=dtype)
        wrt = list(feeds) if dtype == np.float32 else []
        cases.append(fused("LayerNormalization", feeds, wrt, domain="", opset=16, axis=axis, epsilon=1e-3))
    check_all_fused(cases)


def test_statistics_of_layer_normalization() -> None:
    feeds = {"x": draw(2, 3, 4), "scale": draw(4)}
    check_fused("LayerNormalization", feeds, ["x"], 3, domain="", opset=16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_simplified_layer_normalization(dtype: type) -> None:
    cases = []
    for axis, opset in product([-1, 1, 2], [15, 18]):
        feeds = {"x": draw(2, 3, 4, dtype=dtype), "scale": draw(*((3, 4) if axis == 1 else (4,)), dtype=dtype)}
        wrt = list(feeds) if dtype == np.float32 else []
        cases.append(fused("SimplifiedLayerNormalization", feeds, wrt, domain="", opset=opset, axis=axis))
    check_all_fused(cases)


def test_large_float16_is_normalised_in_float32() -> None:
    feeds = {"x": 1000 * draw(2, 3, 4, dtype=np.float16), "scale": draw(4, dtype=np.float16)}
    check_fused("SimplifiedLayerNormalization", feeds, domain="")
    written_out = expanded(one_node("SimplifiedLayerNormalization", feeds, domain=""))
    (mean,) = [node.output[0] for node in written_out.graph.node if node.op_type == "ReduceMean"]
    (info,) = [value for value in written_out.graph.value_info if value.name == mean]
    assert info.type.tensor_type.elem_type == TensorProto.FLOAT  # onnxruntime's CPU computes all of it so anyhow


SKIPS = [(2, 3, 4), (3, 4), (1, 3, 4)]
OUTPUTS = [(0,), (0, 3), (0, 1, 2, 3)]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_skip_layer_normalization(dtype: type) -> None:
    cases = []
    biases = [(False, False), (True, True), (False, True)]
    for skip, outputs, (beta, bias) in product(SKIPS, OUTPUTS, biases):
        feeds = {"x": draw(2, 3, 4), "skip": draw(*skip), "gamma": draw(4)}
        feeds |= {"beta": draw(4) if beta else None, "bias": draw(4) if bias else None}
        feeds = {n: None if a is None else a.astype(dtype) for n, a in feeds.items()}
        wrt = [n for n, a in feeds.items() if a is not None] if dtype == np.float32 else []
        cases.append(fused("SkipLayerNormalization", feeds, wrt, outputs, epsilon=1e-3))
    check_all_fused(cases)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_skip_simplified_layer_normalization(dtype: type) -> None:
    cases = []
    for skip, outputs, bias in product(SKIPS, OUTPUTS, [False, True]):
        feeds = {"x": draw(2, 3, 4), "skip": draw(*skip), "gamma": draw(4), "bias": draw(4) if bias else None}
        feeds = {n: None if a is None else a.astype(dtype) for n, a in feeds.items()}
        wrt = [n for n, a in feeds.items() if a is not None] if dtype == np.float32 else []
        cases.append(fused("SkipSimplifiedLayerNormalization", feeds, wrt, outputs, epsilon=1e-3))
    check_all_fused(cases)


@pytest.mark.parametrize("outputs", [(0,), (0, 1), (0, 2)])
def test_embed_layer_normalization(outputs) -> None:
    cases = []
    for segments, mask, positions in product([False, True], [False, True], [None, (2, 3), (1, 3)]):
        feeds = {
            "ids": RNG.integers(0, 5, (2, 3)).astype(np.int32),
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
        cases.append(fused("EmbedLayerNormalization", feeds, wrt, outputs, unread=2, epsilon=1e-3))
    check_all_fused(cases)
