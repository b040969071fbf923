"""Training graphs as files, as they are by default and inlined, with batches and the losses that are expected."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto

import onnx_backprop as ob
from models import super_resolution, transformer, unet_conv_transpose, unet_resize
from onnx_backprop.converters.training.optimizers import Adam, AdamW
from onnx_backprop.opset.functions.half import NOTE
from tests.runtimes import runner
from tests.support.gradient_checks import retyped
from tests.support.training_models import classifier

STEPS = 20
RATE = 4e-3
FORMS = {"default": False, "inlined": True}  # the file's name -> inline
Feeds = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A forward model, how it is trained, and what it is fed: a batch for every step."""

    name: str
    build: Callable[[], ModelProto]
    settings: dict[str, Any]
    feeds: Callable[[np.random.Generator], Feeds]
    tolerance: float = 1e-4  # of a loss, relative

    def graph(self, *, inline: bool) -> ob.TrainingGraph:
        return ob.training_graph(self.build(), inline=inline, **self.settings)

    def write(self, folder: Path) -> None:
        """default.onnx, inlined.onnx, case.json and case.npz; the losses are those of the default file, here."""
        folder.mkdir(parents=True, exist_ok=True)
        for form, inline in FORMS.items():
            graph = self.graph(inline=inline)
            graph.save(folder / f"{form}.onnx")
            metadata = {entry.key: entry.value for entry in graph.model.metadata_props}
            (folder / f"{form}.disabled").write_text(metadata.get(NOTE, ""))
        graph = self.graph(inline=False)
        about = {
            "steps": STEPS,
            "rate": RATE,
            "loss": graph.loss,
            "inputs": graph.inputs,
            "updates": graph.updates,
            "learning_rate": graph.learning_rate,
            "tolerance": self.tolerance,
        }
        (folder / "case.json").write_text(json.dumps(about))
        stored = {f"feed/{name}": value for name, value in self.feeds(np.random.default_rng(5)).items()}
        stored |= {f"state/{name}": value for name, value in graph.initial_state().items()}
        session, _ = runner.load(str(folder / "default.onnx"))
        np.savez(folder / "case.npz", losses=runner.train(session, about, stored), **stored)


def _pictures(names: tuple[str, str], scale: int) -> Callable[[np.random.Generator], Feeds]:
    def drawn(rng: np.random.Generator) -> Feeds:
        small = rng.random((STEPS, 2, 1, 16, 16)).astype(np.float32)
        return {names[0]: small, names[1]: small.repeat(scale, 3).repeat(scale, 4)}

    return drawn


def _sequences(rng: np.random.Generator) -> Feeds:
    tokens = rng.standard_normal((STEPS, 4, 7, 6)).astype(np.float32)
    return {"tokens": tokens, "labels": rng.integers(0, 5, (STEPS, 4))}


def _half_transformer() -> ModelProto:
    return retyped(transformer.build(), TensorProto.FLOAT16)


def _half_sequences(rng: np.random.Generator) -> Feeds:
    feeds = _sequences(rng)
    return feeds | {"tokens": feeds["tokens"].astype(np.float16)}


def _points(rng: np.random.Generator) -> Feeds:
    return {"x": rng.standard_normal((STEPS, 8, 4)).astype(np.float32), "labels": rng.integers(0, 3, (STEPS, 8))}


_SEGMENTATION = {"loss": "bce_with_logits", "optimizer": "adamw"}
_CLASSES = "softmax_cross_entropy"
CASES = (
    Case(
        "the demo, `models/super_resolution.py`",
        super_resolution.build,
        {"loss": "mse", "optimizer": Adam(beta2=0.99)},
        _pictures(("low", "target"), super_resolution.SCALE),
    ),
    Case(
        "U-Net with Resize, `models/unet_resize.py`",
        unet_resize.build,
        _SEGMENTATION,
        _pictures(("image", "target"), 1),
    ),
    Case(
        "U-Net with ConvTranspose, `models/unet_conv_transpose.py`",
        unet_conv_transpose.build,
        _SEGMENTATION,
        _pictures(("image", "target"), 1),
    ),
    Case(
        "transformer, `models/transformer.py`", transformer.build, {"loss": _CLASSES, "optimizer": "adamw"}, _sequences
    ),
    Case(
        "the transformer in float16, lengths symbolic",
        _half_transformer,
        {"loss": _CLASSES, "optimizer": "adamw"},
        _half_sequences,
        tolerance=2e-2,
    ),
    Case(
        "classifier with BatchNormalization and Dropout, two batches an update",
        classifier,
        {"loss": _CLASSES, "optimizer": AdamW(accumulate=2, ema=0.9, clip_norm=1.0), "training_mode": True},
        _points,
    ),
)
