"""Architectures of torchvision, timm and transformers with random weights, through both exporters of PyTorch.

Nothing heavy is imported before a model is built.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tests.field.sources import Feeds, Source

EXPORTERS = ("torchscript", "dynamo")


@dataclass(frozen=True)
class Net:
    """An architecture: build makes it, feeds one batch; axes are the dynamic ones of every input."""

    name: str
    package: str
    build: Callable[[], Any]
    feeds: Callable[[np.random.Generator], Feeds]
    axes: dict[str, dict[int, str]]
    loss: str = "mse"
    widely: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


def exports() -> list[Source]:
    return [
        _source(net, exporter) for net in (*_torchvision(), *_timm(), *transformers_nets()) for exporter in EXPORTERS
    ]


def _source(net: Net, exporter: str) -> Source:
    def module() -> Any:
        return _randomised(net.build)

    def write(path: Path) -> None:
        _export(net, module(), exporter, path)

    return Source(
        f"{net.name}/{exporter}",
        f"{net.package} {version(net.package)}",
        write,
        net.feeds,
        net.loss,
        "prediction",
        module,
        net.package,
        net.widely,
        net.settings,
    )


def _randomised(build: Callable[[], Any]) -> Any:
    """In inference mode, every parameter that is trained away from its first value, statistics as after some training."""
    torch = import_module("torch")
    torch.manual_seed(0)
    module = build().eval()
    for parameter in (p for p in module.parameters() if p.requires_grad):
        parameter.data += 0.02 * torch.randn_like(parameter)
    for name, buffer in module.named_buffers():
        if name.endswith("running_mean"):
            buffer += 0.1 * torch.randn_like(buffer)
        elif name.endswith("running_var"):
            buffer *= 0.5 + torch.rand_like(buffer)
    return module


def _export(net: Net, module: Any, exporter: str, path: Path) -> None:
    torch = import_module("torch")
    feeds = {name: torch.from_numpy(array) for name, array in net.feeds(np.random.default_rng(1)).items()}
    names = {"input_names": list(feeds), "output_names": ["prediction"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if exporter == "torchscript":
            dynamic = {**net.axes, "prediction": {0: "batch"}}
            torch.onnx.export(
                module, tuple(feeds.values()), str(path), dynamo=False, dynamic_axes=dynamic, opset_version=17, **names
            )
            return
        axes: Any = tuple(dict(net.axes.get(name, {})) for name in feeds)
        if net.package == "transformers":
            axes = {"xs": axes}  # see `named`
        program = torch.onnx.export(
            module, tuple(feeds.values()), dynamo=True, dynamic_shapes=axes, verbose=False, **names
        )
        program.save(str(path), external_data=False)


def torchvision() -> Any:
    """The package, or its Python half: the other half may be built for another torch; the models do without it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return import_module("torchvision")
        except RuntimeError:  # operators that the other half has are not there
            torch = import_module("torch")
            library = torch.library.Library("torchvision", "FRAGMENT")
            for name in ("nms", "qnms"):
                if not hasattr(torch.ops.torchvision, name):
                    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            return import_module("torchvision")


def _image(size: int, batch: int = 2) -> Callable[[np.random.Generator], Feeds]:
    return lambda rng: {"x": rng.standard_normal((batch, 3, size, size)).astype(np.float32)}


IMAGE = {"x": {0: "batch", 2: "height", 3: "width"}}
BATCH = {"x": {0: "batch"}}


def _torchvision() -> list[Net]:
    def net(name: str, size: int = 32, *, loss: str = "softmax_cross_entropy", **more: Any) -> Net:
        arguments = more.pop("arguments", {"num_classes": 10})
        axes = more.pop("axes", IMAGE)
        build = more.pop("build", lambda: torchvision().models.get_model(name, weights=None, **arguments))
        return Net(name, "torchvision", build, _image(size), axes, loss, **more)

    def segmentation(name: str) -> Net:
        def build() -> Any:
            network = torchvision().models.get_model(name, weights=None, weights_backbone=None, num_classes=5)
            return _picked(network, lambda outputs: outputs["out"])

        return net(name, build=build)

    def vit() -> Any:
        transformer = torchvision().models.vision_transformer.VisionTransformer
        return transformer(64, 16, 3, 4, 96, 192, num_classes=10)

    def swin() -> Any:
        transformer = torchvision().models.swin_transformer.SwinTransformer
        return transformer([4, 4], 24, [2, 2], [2, 4], [4, 4], num_classes=10)

    return [
        net("resnet18", widely=True),
        net("mobilenet_v3_small", widely=True),
        net("efficientnet_b0"),
        net("shufflenet_v2_x0_5"),
        net("squeezenet1_1"),
        net("densenet121"),
        net("regnet_y_400mf"),
        net("mnasnet0_5"),
        net("googlenet", 64, arguments={"num_classes": 10, "aux_logits": False, "init_weights": False}),
        net("convnext_tiny"),
        segmentation("lraspp_mobilenet_v3_large"),
        segmentation("deeplabv3_mobilenet_v3_large"),
        net("vision_transformer", 64, build=vit, axes=BATCH, widely=True),
        net("swin_transformer", build=swin, axes=BATCH),
    ]


def _timm() -> list[Net]:
    def net(name: str, size: int = 32, **more: Any) -> Net:
        arguments = more.pop("arguments", {})

        def build() -> Any:
            torchvision()
            return import_module("timm").create_model(name, num_classes=10, **arguments)

        return Net(name, "timm", build, _image(size), more.pop("axes", IMAGE), "softmax_cross_entropy", **more)

    return [
        net("convnextv2_atto", widely=True),
        net("mobilevit_xxs", axes=BATCH),
        net("ghostnet_100"),
        net("repvgg_a0"),
        net("efficientvit_b0", axes=BATCH),
        net("levit_128s", 224, axes=BATCH),
        net("mixer_s32_224", 224, axes=BATCH),
        net("poolformer_s12"),
        net("vit_tiny_patch16_224", 224, axes=BATCH, arguments={"depth": 4}),
    ]


def _picked(module: Any, pick: Callable[[Any], Any]) -> Any:
    """The module with one of its outputs."""
    torch = import_module("torch")

    class Picked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Any) -> Any:
            return pick(self.inner(x))

    return Picked()


def named(module: Any, names: list[str], output: str, fixed: dict[str, Any]) -> Any:
    """A model of transformers that takes its inputs in this order and gives one output."""
    torch = import_module("torch")

    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, *xs: Any) -> Any:
            return getattr(self.inner(**dict(zip(names, xs, strict=True)), **fixed), output)

    return Named()


VOCABULARY = 100


def _text(*names: str, length: int = 12) -> Callable[[np.random.Generator], Feeds]:
    """Ids in the vocabulary; in the mask the second sequence is shorter; types are those of two sentences."""

    def feeds(rng: np.random.Generator) -> Feeds:
        mask = np.ones((2, length), np.int64)
        mask[1, length - 4 :] = 0
        types = np.zeros((2, length), np.int64)
        types[:, length // 2 :] = 1
        fixed = {"attention_mask": mask, "token_type_ids": types}
        return {name: fixed.get(name, rng.integers(2, VOCABULARY, (2, length))) for name in names}

    return feeds


def transformers_nets() -> list[Net]:
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    words = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 0}
    rotary = {**small, **words, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1}
    text = ("input_ids", "attention_mask")

    def net(name: str, model: str, config: str, numbers: dict[str, Any], feeds: Any, output: str, **more: Any) -> Net:
        names = list(feeds(np.random.default_rng(0)))
        axes = more.pop("axes", {n: {0: "batch", 1: "length"} for n in names})
        fixed = more.pop("fixed", {})
        attention = more.pop("attention", "sdpa")

        def build() -> Any:
            torchvision()
            transformers = import_module("transformers")
            configuration = getattr(transformers, config)(**numbers)
            configuration._attn_implementation = attention
            configuration.use_cache = False
            return named(getattr(transformers, model)(configuration).eval(), names, output, fixed)

        return Net(name, "transformers", build, feeds, axes, settings=more.pop("settings", {}), **more)

    def pixels(size: int) -> Callable[[np.random.Generator], Feeds]:
        return lambda rng: {"pixel_values": rng.standard_normal((2, 3, size, size)).astype(np.float32)}

    def translation(rng: np.random.Generator) -> Feeds:
        return {
            "input_ids": rng.integers(2, VOCABULARY, (2, 9)),
            "decoder_input_ids": rng.integers(2, VOCABULARY, (2, 7)),
        }

    def sound(rng: np.random.Generator) -> Feeds:
        return {"input_values": rng.standard_normal((2, 1600)).astype(np.float32)}

    def spectrum(rng: np.random.Generator) -> Feeds:
        features = rng.standard_normal((2, 16, 40)).astype(np.float32)
        return {"input_features": features, "decoder_input_ids": rng.integers(2, VOCABULARY, (2, 7))}

    pairs = {"input_ids": {0: "batch", 1: "source"}, "decoder_input_ids": {0: "batch", 1: "target"}}
    t5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    gpt2 = {
        "vocab_size": VOCABULARY,
        "n_positions": 32,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    whisper = {
        "vocab_size": VOCABULARY, "num_mel_bins": 16, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "max_source_positions": 20, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1,
    }  # fmt: skip
    wav2vec2 = {**small, "vocab_size": 20, "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2),
                "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}  # fmt: skip
    segformer = {"hidden_sizes": [16, 32], "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1],
                 "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 32}  # fmt: skip
    bert_like = {**small, **words}
    return [
        net(
            "bert",
            "BertModel",
            "BertConfig",
            bert_like,
            _text(*text, "token_type_ids"),
            "last_hidden_state",
            widely=True,
            settings={"model_type": "bert", "num_heads": 4, "hidden_size": 32},
        ),
        net("bert_eager", "BertModel", "BertConfig", bert_like, _text(*text), "last_hidden_state", attention="eager"),
        net(
            "distilbert",
            "DistilBertModel",
            "DistilBertConfig",
            {
                "vocab_size": VOCABULARY,
                "dim": 32,
                "n_layers": 2,
                "n_heads": 4,
                "hidden_dim": 64,
                "max_position_embeddings": 32,
            },
            _text(*text),
            "last_hidden_state",
        ),
        net(
            "roberta",
            "RobertaModel",
            "RobertaConfig",
            {**bert_like, "pad_token_id": 1},
            _text(*text),
            "last_hidden_state",
        ),
        net(
            "albert",
            "AlbertModel",
            "AlbertConfig",
            {**bert_like, "embedding_size": 16},
            _text(*text),
            "last_hidden_state",
        ),
        net(
            "gpt2",
            "GPT2LMHeadModel",
            "GPT2Config",
            gpt2,
            _text(*text),
            "logits",
            widely=True,
            settings={"model_type": "gpt2", "num_heads": 4, "hidden_size": 32},
        ),
        net(
            "t5",
            "T5ForConditionalGeneration",
            "T5Config",
            {**t5, "pad_token_id": 0, "decoder_start_token_id": 0},
            translation,
            "logits",
            axes=pairs,
            attention="eager",
        ),
        net(
            "llama",
            "LlamaForCausalLM",
            "LlamaConfig",
            rotary,
            _text(*text),
            "logits",
            widely=True,
            settings={"model_type": "gpt2", "num_heads": 4, "hidden_size": 32},
        ),
        net("qwen2", "Qwen2ForCausalLM", "Qwen2Config", rotary, _text(*text), "logits"),
        net(
            "vit",
            "ViTModel",
            "ViTConfig",
            {**small, "image_size": 32, "patch_size": 8},
            pixels(32),
            "last_hidden_state",
            axes={"pixel_values": {0: "batch"}},
        ),
        net(
            "segformer",
            "SegformerForSemanticSegmentation",
            "SegformerConfig",
            {**segformer, "num_labels": 4},
            pixels(64),
            "logits",
            axes={"pixel_values": {0: "batch"}},
        ),
        net(
            "whisper",
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            whisper,
            spectrum,
            "logits",
            axes={"input_features": {0: "batch"}, "decoder_input_ids": {0: "batch", 1: "length"}},
        ),
        net(
            "wav2vec2",
            "Wav2Vec2Model",
            "Wav2Vec2Config",
            wav2vec2,
            sound,
            "last_hidden_state",
            axes={"input_values": {0: "batch", 1: "length"}},
        ),
    ]
