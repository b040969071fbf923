"""Standard operators that exporters of language models write, against differences of onnxruntime's own kernels."""

from __future__ import annotations

from itertools import product

import numpy as np

from tests.support.fused_checks import Kernel, check_kernel_gradients

RNG = np.random.default_rng(7)
B, S, N, H = 2, 3, 2, 8


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def kernel(op_type: str, feeds, opset: int, **settings) -> Kernel:
    """By every float input."""
    wrt = [name for name, array in feeds.items() if array.dtype == np.float32]
    return Kernel(op_type, feeds, wrt, {"domain": "", "opset": opset, **settings}, half=True)


def test_rotary_embedding() -> None:
    kernels = []
    for interleaved, part, ids, joined in product([0, 1], [0, 4], [False, True], [False, True]):
        half = (part or H) // 2
        tables = (7, half) if ids else (B, S, half)
        feeds = {"x": draw(B, S, N * H) if joined else draw(B, N, S, H), "cos": draw(*tables), "sin": draw(*tables)}
        feeds |= {"ids": RNG.integers(0, 7, (B, S))} if ids else {}
        settings = {"interleaved": interleaved, "rotary_embedding_dim": part, **({"num_heads": N} if joined else {})}
        kernels.append(kernel("RotaryEmbedding", feeds, 23, **settings))
    check_kernel_gradients(kernels)


def test_rms_normalization() -> None:
    kernels = []
    forms = [(-1, (4,)), (1, (3, 4)), (-2, (3, 1)), (0, (2, 3, 4)), (2, (1,))]
    for (axis, scale), stash in product(forms, [1, 10]):
        feeds = {"x": draw(2, 3, 4), "scale": draw(*scale)}
        kernels.append(kernel("RMSNormalization", feeds, 23, axis=axis, stash_type=stash, epsilon=1e-3))
    check_kernel_gradients(kernels)


def test_layer_normalization() -> None:
    kernels = []
    for (axis, scale), stash in product([(-1, (4,)), (1, (3, 1)), (0, (2, 3, 4))], [1, 10]):
        feeds = {"x": draw(2, 3, 4), "scale": draw(*scale), "b": draw(*scale)}
        kernels.append(kernel("LayerNormalization", feeds, 17, axis=axis, stash_type=stash))
    check_kernel_gradients(kernels)


def test_swish() -> None:
    check_kernel_gradients([kernel("Swish", {"x": draw(2, 3, 4)}, 24, alpha=alpha) for alpha in (1.0, -0.5, 1.702)])
