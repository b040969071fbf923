"""The networks that compiled libraries are tried with, and batches for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from onnx import ModelProto

import onnx_backprop as ob
from models import resnet, super_resolution, unet_conv_transpose, unet_resize

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Network:
    """build: the model. shape: of its input. emulated: one that an emulated processor trains in a minute.

    lengths: by the symbols of the shape. classes: of its target, or 0.
    """

    build: Callable[[], ModelProto]
    loss: str
    shape: tuple[int, ...]
    emulated: tuple[int, ...]
    enlarged: int = 1
    classes: int = 0

    @property
    def lengths(self) -> Mapping[str, int]:
        return dict(zip("NHW", (self.shape[0], *self.shape[2:]), strict=True))

    def graph(self) -> ob.TrainingGraph:
        return ob.training_graph(self.build(), loss=self.loss, optimizer=ob.optimizers.AdamW(weight_decay=0.01))

    def batches(self, graph: ob.TrainingGraph, count: int, seed: int = 0) -> Batch:
        """So many batches along a first axis."""
        rng = np.random.default_rng(seed)
        batch, _, height, width = self.shape
        image = rng.random((count, *self.shape), np.float32)
        target = (
            rng.integers(0, self.classes, (count, batch))
            if self.classes
            else rng.random((count, batch, 1, self.enlarged * height, self.enlarged * width), np.float32)
        )
        return dict(zip(graph.inputs, (image, target), strict=True))


NETWORKS = {
    "demo": Network(super_resolution.build, "mse", (8, 1, 20, 20), (8, 1, 20, 20), enlarged=2),
    "resnet": Network(
        partial(resnet.build, features=64), "softmax_cross_entropy", (8, 3, 64, 64), (2, 3, 64, 64), classes=10
    ),
    "unet_transpose": Network(
        partial(unet_conv_transpose.build, features=32, levels=3), "bce_with_logits", (4, 1, 128, 128), (1, 1, 64, 64)
    ),
    "unet_resize": Network(
        partial(unet_resize.build, features=32, levels=3), "bce_with_logits", (4, 1, 128, 128), (1, 1, 64, 64)
    ),
}
