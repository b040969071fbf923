"""Activations of com.microsoft, written out, against onnxruntime's own."""

from __future__ import annotations

from math import erf

import numpy as np
import pytest

from tests.support.adjoint import forward_session, run
from tests.support.fused_checks import check_fused, check_gradient, expanded, one_node
from tests.support.rule_checks import symbolic

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3, 4)).astype(np.float32)
B = RNG.standard_normal(4).astype(np.float32)


def test_gelu() -> None:
    check_fused("Gelu", {"x": X}, ["x"])


def test_bias_gelu() -> None:
    check_fused("BiasGelu", {"x": X, "b": B}, ["x", "b"])


@pytest.mark.parametrize("bias", [None, B])
def test_fast_gelu(bias: np.ndarray | None) -> None:
    check_fused("FastGelu", {"x": X, "b": bias}, ["x"] if bias is None else ["x", "b"])


@pytest.mark.parametrize("attributes", [{}, {"alpha": 1.0}, {"alpha": -0.5}])
def test_quick_gelu(attributes: dict[str, float]) -> None:
    check_fused("QuickGelu", {"x": X}, ["x"], **attributes)


W = RNG.standard_normal((4, 4)).astype(np.float32)
WITHOUT_A_KERNEL = [
    ("BiasAdd", {"x": X, "b": B, "skip": X[::-1].copy()}, lambda x, b, skip: x + b + skip, {}),
    ("BiasSoftmax", {"x": X, "b": X[:1].copy()}, lambda x, b: _softmax(x + b), {"axis": 2, "is_inner_broadcast": 0}),
    ("BiasSplitGelu", {"x": X, "b": B}, lambda x, b: (x + b)[..., :2] * _gelu((x + b)[..., 2:]), {}),
    ("GemmFastGelu", {"x": X, "w": W, "b": B}, lambda x, w, b: _fast_gelu(x @ w + b), {}),
    ("GemmFastGelu", {"x": X, "w": W}, lambda x, w: _fast_gelu(x @ w), {}),
    ("BiasDropout", {"x": X, "b": B, "r": X[::-1].copy()}, lambda x, b, r: x + b + r, {"seed": 7}),
    ("BiasDropout", {"x": X, "b": B}, lambda x, b: x + b, {}),
]


@pytest.mark.parametrize(("op_type", "feeds", "formula", "attributes"), WITHOUT_A_KERNEL)
def test_operators_that_onnxruntime_runs_on_other_processors_only(op_type, feeds, formula, attributes) -> None:
    for form in (model := one_node(op_type, feeds, **attributes), symbolic(model)):
        (y,) = run(forward_session(expanded(form)), feeds)
        np.testing.assert_allclose(y, formula(*feeds.values()), rtol=1e-5, atol=1e-5)
        check_gradient(form, feeds, list(feeds))


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.vectorize(erf)(x / np.sqrt(2))) / 2


def _fast_gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
