"""Products and convolutions with what is fused into them, written out, against onnxruntime's own."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tests.support.fused_checks import check_all_fused, check_fused, fused

RNG = np.random.default_rng(2)


def draw(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


PRODUCTS = [
    ((3, 4), (4, 5), {}),
    ((3, 4), (4, 5), {"alpha": 0.25}),
    ((4, 3), (4, 5), {"transA": 1}),
    ((3, 4), (5, 4), {"transB": 1, "alpha": -2.0}),
    ((2, 1, 4, 3), (6, 5, 4), {"transA": 1, "transB": 1}),
    ((4,), (4, 5), {"transA": 1}),
    ((3, 4), (4,), {"transB": 1}),
    ((3, 2, 4), (2, 4, 5), {"transBatchA": 1}),
    ((2, 3, 4), (5, 2, 4), {"transBatchB": 1, "transB": 1}),
    ((3, 2, 7, 4), (2, 7, 4, 5), {"transBatchA": 1}),
    ((4, 2, 7, 3), (5, 2, 7, 4), {"transBatchA": 1, "transA": 1, "transBatchB": 1, "transB": 1}),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fused_mat_mul(dtype: type) -> None:
    wrt = ["a", "b"] if dtype == np.float32 else []
    check_all_fused(
        [
            fused("FusedMatMul", {"a": draw(*a, dtype=dtype), "b": draw(*b, dtype=dtype)}, wrt, **attributes)
            for a, b, attributes in PRODUCTS
        ]
    )


def test_transpose_mat_mul() -> None:
    check_fused("TransposeMatMul", {"a": draw(4, 3), "b": draw(5, 4)}, ["a", "b"], transA=1, transB=1, alpha=0.5)


GEMM_ACTIVATIONS = [
    {"activation": "Relu"},
    {"activation": "Tanh"},
    {"activation": "Sigmoid"},
    {"activation": "LeakyRelu", "activation_alpha": 0.3},
    {"activation": "Elu", "activation_alpha": 0.7},
    {"activation": "HardSigmoid", "activation_alpha": 0.3, "activation_beta": 0.4},
    {"activation": "Selu", "activation_alpha": 1.5, "activation_gamma": 1.1},
    {"activation": "ThresholdedRelu", "activation_alpha": 0.2},
    {"activation": "Softplus"},
    {"activation": "Softsign"},
]


def test_fused_gemm() -> None:
    cases = []
    for activation, c in product(GEMM_ACTIVATIONS, [None, (5,), (3, 5)]):
        feeds = {"a": draw(4, 3), "b": draw(5, 4), "c": draw(*c) if c else None}
        wrt = ["a", "b", *(["c"] if c else [])]
        cases.append(fused("FusedGemm", feeds, wrt, transA=1, transB=1, alpha=0.5, beta=2.0, **activation))
    check_all_fused(cases)


CONV_ACTIVATIONS = [
    {},
    {"activation": "Relu"},
    {"activation": "Tanh"},
    {"activation": "Sigmoid"},
    {"activation": "LeakyRelu", "activation_params": [0.3]},
    {"activation": "Clip", "activation_params": [-0.5, 0.75]},
    {"activation": "HardSigmoid", "activation_params": [0.3, 0.4]},
]


def test_fused_conv() -> None:
    cases = []
    for activation, (bias, residual) in product(CONV_ACTIVATIONS, [(False, False), (True, False), (True, True)]):
        feeds = {"x": draw(2, 4, 5, 6), "w": draw(6, 2, 3, 3)}
        feeds |= {"b": draw(6) if bias else None, "z": draw(2, 6, 3, 4) if residual else None}
        wrt = [name for name, array in feeds.items() if array is not None]
        settings = {"group": 2, "strides": [2, 2], "pads": [1, 1, 1, 2], "kernel_shape": [3, 3], **activation}
        cases.append(fused("FusedConv", feeds, wrt, **settings))
    check_all_fused(cases)


def test_fused_conv_by_auto_pad_and_dilations() -> None:
    feeds = {"x": draw(1, 2, 5, 6), "w": draw(3, 2, 3, 3)}
    check_fused("FusedConv", feeds, ["x", "w"], auto_pad="SAME_UPPER", activation="Relu")
    check_fused("FusedConv", feeds, ["x", "w"], dilations=[2, 1], activation="Relu")
