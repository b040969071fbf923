"""Standard operators that exporters of language models write, against differences of onnxruntime's own kernels."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.fused_checks import check_kernel_gradient

RNG = np.random.default_rng(7)
B, S, N, H = 2, 3, 2, 8


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("part", [0, 4])
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_rotary_embedding(interleaved: int, part: int, ids: bool, joined: bool) -> None:
    half = (part or H) // 2
    tables = (7, half) if ids else (B, S, half)
    feeds = {"x": draw(B, S, N * H) if joined else draw(B, N, S, H), "cos": draw(*tables), "sin": draw(*tables)}
    feeds |= {"ids": RNG.integers(0, 7, (B, S))} if ids else {}
    settings = {"interleaved": interleaved, "rotary_embedding_dim": part, **({"num_heads": N} if joined else {})}
    wrt = ["x", "cos", "sin"]
    check_kernel_gradient("RotaryEmbedding", feeds, wrt, domain="", opset=23, half=True, **settings)


@pytest.mark.parametrize(("axis", "scale"), [(-1, (4,)), (1, (3, 4)), (-2, (3, 1)), (0, (2, 3, 4)), (2, (1,))])
@pytest.mark.parametrize("stash", [1, 10])
def test_rms_normalization(axis: int, scale: tuple[int, ...], stash: int) -> None:
    feeds = {"x": draw(2, 3, 4), "scale": draw(*scale)}
    settings = {"axis": axis, "stash_type": stash, "epsilon": 1e-3}
    check_kernel_gradient("RMSNormalization", feeds, ["x", "scale"], domain="", opset=23, half=True, **settings)


@pytest.mark.parametrize(("axis", "scale"), [(-1, (4,)), (1, (3, 1)), (0, (2, 3, 4))])
@pytest.mark.parametrize("stash", [1, 10])
def test_layer_normalization(axis: int, scale: tuple[int, ...], stash: int) -> None:
    feeds = {"x": draw(2, 3, 4), "scale": draw(*scale), "b": draw(*scale)}
    settings = {"axis": axis, "stash_type": stash}
    check_kernel_gradient("LayerNormalization", feeds, list(feeds), domain="", opset=17, half=True, **settings)


@pytest.mark.parametrize("alpha", [1.0, -0.5, 1.702])
def test_swish(alpha: float) -> None:
    check_kernel_gradient("Swish", {"x": draw(2, 3, 4)}, ["x"], domain="", opset=24, half=True, alpha=alpha)
