"""Four models that are trained beside PyTorch for 50 steps; `tests/data/torch_parity.py` stores PyTorch's side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from models import resnet, transformer, unet_conv_transpose, unet_resize
from onnx_backprop.converters.training.optimizers import SGD, AdamW, Optimizer

VALUES = Path(__file__).parents[1] / "data" / "parity.npz"
STEPS = 50
BATCHES = 5  # gone through again and again
SEED = 99


@dataclass(frozen=True)
class Case:
    """shape, classes: of the input and of the labels; None for a target in 0 … 1 of the output's shape."""

    build: Callable[..., ModelProto]
    input: str
    shape: tuple[int, ...]
    loss: str
    classes: int | None = None


MODELS: dict[str, Case] = {
    "unet_conv_transpose": Case(
        partial(unet_conv_transpose.build, features=3, seed=1), "image", (2, 1, 16, 12), "bce_with_logits"
    ),
    "unet_resize": Case(partial(unet_resize.build, features=3, seed=2), "image", (2, 1, 16, 12), "bce_with_logits"),
    "resnet": Case(
        partial(resnet.build, features=4, blocks=(1, 1, 1), classes=5, seed=3),
        "image",
        (6, 3, 12, 12),
        "softmax_cross_entropy",
        5,
    ),
    "transformer": Case(partial(transformer.build, seed=4), "tokens", (4, 7, 6), "softmax_cross_entropy", 5),
}


@dataclass(frozen=True)
class Recipe:
    """An optimizer, torch's name for it and the learning rate."""

    ours: Optimizer
    torch_name: str
    rate: float
    torch: dict[str, Any]


RECIPES: dict[str, Recipe] = {
    "sgd_momentum": Recipe(SGD(momentum=0.9), "SGD", 0.01, {"momentum": 0.9}),
    "adamw": Recipe(AdamW(weight_decay=0.05), "AdamW", 1e-3, {"weight_decay": 0.05}),
}


def batches(case: Case) -> list[tuple[np.ndarray, np.ndarray]]:
    """Input and target of every batch."""
    rng = np.random.default_rng(SEED)
    result = []
    for _ in range(BATCHES):
        x = rng.standard_normal(case.shape).astype(np.float32)
        target = (
            rng.integers(0, case.classes, case.shape[0])
            if case.classes
            else (rng.random(case.shape).astype(np.float32))
        )
        result.append((x, target))
    return result
