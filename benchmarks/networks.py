"""The networks of `benchmarks.training_steps`: those of `models/`, and modules of PyTorch's packages, exported.

What draws random numbers (Dropout, stochastic depth) is taken out, so that all contenders have the same losses.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from onnx import ModelProto

from models import resnet, unet_conv_transpose, unet_resize


class Source(Protocol):
    """Where a network comes from: a module of PyTorch and the same as a file."""

    def module(self) -> Any: ...

    def write(self, path: Path, x: np.ndarray, /) -> None: ...


@dataclass(frozen=True)
class Built:
    """A network of `models/`; its module runs it node by node."""

    build: Callable[[], ModelProto]

    def module(self) -> Any:
        from benchmarks.torch_twin import Twin

        return Twin(self.build())

    def write(self, path: Path, _: np.ndarray, /) -> None:
        path.write_bytes(self.build().SerializeToString())


@dataclass(frozen=True)
class Exported:
    """A module of PyTorch, in training mode."""

    build: Callable[[], Any]

    def module(self) -> Any:
        torch = import_module("torch")
        torch.manual_seed(0)
        module = self.build().train()
        for inner in module.modules():
            if "Drop" in type(inner).__name__ or "StochasticDepth" in type(inner).__name__:
                setattr(inner, "p" if hasattr(inner, "p") else "drop_prob", 0.0)
        return module

    def write(self, path: Path, x: np.ndarray, /) -> None:
        onnx: Any = import_module("torch.onnx")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            onnx.export(
                self.module(),
                (import_module("torch").from_numpy(x),),
                str(path),
                dynamo=False,
                training=onnx.TrainingMode.TRAINING,
                do_constant_folding=False,
                opset_version=18,
                input_names=["x"],
                output_names=["y"],
                dynamic_axes={"x": {0: "batch"}},
            )


@dataclass(frozen=True)
class Network:
    """A network, the shape of its input, and its classes: as many, or None for a target of the output's shape.

    words: how many there are, where the input holds words.
    """

    source: Source
    shape: Sequence[int]
    classes: int | None = 10
    words: int | None = None

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Input and target."""
        rng = np.random.default_rng(1)
        x = rng.standard_normal(self.shape).astype(np.float32)
        if self.words:
            x = rng.integers(0, self.words, self.shape)
        if self.classes:
            return x, rng.integers(0, self.classes, self.shape[0])
        return x, rng.random((self.shape[0], 1, *self.shape[2:])).astype(np.float32)


def networks() -> dict[str, Network]:
    """Every network by its name, small ones first."""
    transposed = partial(unet_conv_transpose.build, features=32, levels=3)
    resized = partial(unet_resize.build, features=32, levels=3)
    image, segmented = (8, 3, 64, 64), (4, 1, 128, 128)
    return {
        "MLP 64-64": Network(Exported(_mlp), (64, 64)),
        "ResNet-18 width 16": Network(Built(partial(resnet.build, features=16)), image),
        "ResNet-18 width 64": Network(Built(partial(resnet.build, features=64)), image),
        "U-Net ConvTranspose": Network(Built(transposed), segmented, None),
        "U-Net linear Resize": Network(Built(resized), segmented, None),
        "U-Net nearest Resize": Network(Built(partial(resized, mode="nearest")), segmented, None),
        "U-Net smp resnet34": Network(Exported(_smp), (2, 3, 128, 128), None),
        "MobileNetV3 large": Network(Exported(partial(_torchvision, "mobilenet_v3_large")), (8, 3, 128, 128)),
        "EfficientNet-B0": Network(Exported(partial(_torchvision, "efficientnet_b0")), (8, 3, 128, 128)),
        "ResNet-50": Network(Exported(partial(_torchvision, "resnet50")), (8, 3, 128, 128)),
        "ViT-S": Network(Exported(partial(_timm, "vit_small_patch16_224")), (4, 3, 224, 224)),
        "BERT-base": Network(Exported(_bert), (2, 128), 2, 30522),
    }


def _mlp() -> Any:
    nn: Any = import_module("torch.nn")
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def _torchvision(name: str) -> Any:
    from tests.field.torch_sources import torchvision

    return torchvision().models.get_model(name, weights=None, num_classes=10)


def _timm(name: str) -> Any:
    from tests.field.torch_sources import torchvision

    torchvision()
    return import_module("timm").create_model(name, num_classes=10)


def _smp() -> Any:
    from tests.field.torch_sources import torchvision

    torchvision()
    return import_module("segmentation_models_pytorch").Unet("resnet34", encoder_weights=None, classes=1)


def _bert() -> Any:
    from tests.field.torch_sources import torchvision

    torchvision()
    transformers = import_module("transformers")
    config = transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2)
    bert = transformers.BertForSequenceClassification(config)

    class Logits(import_module("torch").nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, x: Any) -> Any:
            return self.bert(input_ids=x).logits

    return Logits()
