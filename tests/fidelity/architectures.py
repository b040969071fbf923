"""Architectures of torchvision, timm, transformers and diffusers: random weights, few and narrow layers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np

from tests.fidelity.nets import Net, nn
from tests.fidelity.subject import CROSS_ENTROPY, Draw, Subject, floats, integers, true
from tests.field.torch_sources import named, torchvision, transformers_nets

WORDS, BATCH, LENGTH = 100, 2, 6
TEXT = (integers(WORDS, BATCH, LENGTH, low=2), true(BATCH, LENGTH))
PIXELS = (floats(BATCH, 3, 32, 32),)
IMAGES = (floats(4, 3, 32, 32),)
LARGER = (floats(4, 3, 64, 64),)
RATES = re.compile("p|(.*_)?drop(out|_prob|_path)?(_.*)?|(.*_)?layerdrop")


def architectures() -> Iterator[Subject]:
    for kind in (_torchvision, _timm, _field, _texts, _images, _diffusers):
        yield from kind()


def _without_dropout(build: Any) -> Any:
    """Its masks are random on both sides, so that no two trainings with one are equal."""

    def built() -> Any:
        torchvision()
        module = build()
        for part in module.modules():
            for owner in (part, getattr(part, "config", None)):
                rates = [
                    k for k, v in getattr(owner, "__dict__", {}).items() if RATES.fullmatch(k) and isinstance(v, float)
                ]
                for name in rates:
                    setattr(owner, name, 0.0)
            if hasattr(getattr(part, "config", None), "apply_spec_augment"):
                part.config.apply_spec_augment = False
        return module

    return built


def _case(name: str, kind: str, build: Any, inputs: tuple[Draw, ...], **more: Any) -> Subject:
    return Subject(name, kind, _without_dropout(build), inputs, **more)


def _torchvision() -> Iterator[Subject]:
    def case(name: str, build: Any, inputs: Any = IMAGES) -> Subject:
        return _case(name, "torchvision", build, inputs, loss=CROSS_ENTROPY)

    def models() -> Any:
        return torchvision().models

    def resnet(block: str, **more: Any) -> Any:
        """Its first two stages: at this size the others would have statistics of a few pixels."""
        net = models().resnet.ResNet(getattr(models().resnet, block), [1, 1, 1, 1], num_classes=5, **more)
        net.layer3, net.layer4 = nn.Identity(), nn.Identity()
        net.fc = nn.Linear(128 * getattr(models().resnet, block).expansion, 5)
        return net

    def mobilenet() -> Any:
        return models().MobileNetV2(num_classes=5, inverted_residual_setting=[[1, 8, 1, 1], [4, 12, 2, 2]])

    def densenet() -> Any:
        return models().DenseNet(8, (2, 2), 16, num_classes=5)

    def swin(**more: Any) -> Any:
        return models().swin_transformer.SwinTransformer(
            [4, 4], 16, [1, 1], [2, 4], [2, 2], stochastic_depth_prob=0.0, num_classes=5, **more
        )

    def convnext() -> Any:
        block = models().convnext.CNBlockConfig
        return models().ConvNeXt([block(16, 24, 1), block(24, None, 1)], stochastic_depth_prob=0.0, num_classes=5)

    yield case("resnet", lambda: resnet("BasicBlock"))
    yield case("resnext", lambda: resnet("Bottleneck", groups=4, width_per_group=4))
    yield case("resnet_zero_gamma", lambda: resnet("BasicBlock", zero_init_residual=True))
    yield case("mobilenet_v2", mobilenet)
    yield case("squeezenet", lambda: models().squeezenet1_1(num_classes=5, dropout=0.0))
    yield case("densenet", densenet)
    yield case("shufflenet", lambda: models().ShuffleNetV2([1, 1, 1], [8, 16, 32, 48, 64], num_classes=5), LARGER)
    yield case("vision_transformer", lambda: models().VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=5))
    yield case("swin_transformer", swin)
    yield case("convnext", convnext)


def _timm() -> Iterator[Subject]:
    def of(name: str, build: Any, inputs: Any = IMAGES) -> Subject:
        return _case(name, "timm", lambda: build(import_module("timm.models")), inputs, loss=CROSS_ENTROPY)

    def case(name: str, model: str, **more: Any) -> Subject:
        return of(name, lambda _: import_module("timm").create_model(model, num_classes=5, **more))

    def nfnet(models: Any) -> Any:
        config = models.nfnet.NfCfg(
            (1, 1),
            (16, 24),
            stem_type="3x3",
            attn_layer="se",
            attn_kwargs={"rd_ratio": 0.5},
            gamma_in_act=False,
            width_factor=1.0,
        )
        return models.nfnet.NormFreeNet(config, num_classes=5)

    def poolformer(models: Any) -> Any:
        norm, pooling = models.metaformer.GroupNorm1, models.metaformer.Pooling
        sizes = {"depths": (1, 1), "dims": (16, 24), "token_mixers": pooling, "norm_layers": norm}
        return models.metaformer.MetaFormer(num_classes=5, **sizes)

    vit = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    convnext = {"depths": (1, 1, 1, 1), "dims": (8, 12, 16, 24)}
    mixer = {"num_classes": 5, "img_size": 32, "patch_size": 8, "num_blocks": 2, "embed_dim": 32}
    narrow = {"channels": (8, 12, 16, 24), "stem_width": 8}
    yield case("timm_vit", "vit_tiny_patch16_224", **vit)
    yield case("timm_deit_distilled", "deit_tiny_distilled_patch16_224", **vit)
    yield case("timm_cait", "cait_xxs24_224", **vit)
    yield case("timm_beit", "beit_base_patch16_224", **vit)
    yield case("timm_convnext", "convnext_atto", **convnext)
    yield case("timm_convnextv2", "convnextv2_atto", **convnext)
    yield of("timm_nfnet", nfnet)
    yield of("timm_mixer", lambda models: models.mlp_mixer.MlpMixer(**mixer))
    yield of("timm_poolformer", poolformer)
    yield of("timm_resnet", lambda m: m.resnet.ResNet(m.resnet.BasicBlock, [1, 1, 1, 1], 5, **narrow), LARGER)
    yield of(
        "timm_seresnet",
        lambda m: m.resnet.ResNet(m.resnet.Bottleneck, [1, 1, 1, 1], 5, **narrow, block_args={"attn_layer": "se"}),
        LARGER,
    )
    yield of(
        "timm_repvgg",
        lambda m: m.byobnet.ByobNet(
            m.byobnet.ByoModelCfg(
                blocks=(m.byobnet.ByoBlockCfg("rep", d=1, c=16), m.byobnet.ByoBlockCfg("rep", d=1, c=24)),
                stem_type="rep",
                stem_chs=8,
            ),
            num_classes=5,
        ),
    )


def _field() -> Iterator[Subject]:
    """Those of `make field`, which are small."""
    for net in transformers_nets():
        names = list(net.feeds(np.random.default_rng(0)))

        def draw(name: str, net: Any = net) -> Draw:
            return lambda rng: net.feeds(rng)[name]

        yield _case(f"hf_{net.name}", "transformers", net.build, tuple(map(draw, names)))


def _hf(
    name: str, model: str, config: str, numbers: dict[str, Any], names: list[str], inputs: Any, output: str
) -> Subject:
    def build() -> Any:
        transformers = import_module("transformers")
        configuration = getattr(transformers, config)(**numbers)
        configuration.use_cache = False
        fixed = {"return_loss": False} if config == "CLIPConfig" else {}
        return named(getattr(transformers, model)(configuration), names, output, fixed)

    return _case(f"hf_{name}", "transformers", build, inputs)


_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
_IDS = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}


def _texts() -> Iterator[Subject]:
    text = ["input_ids", "attention_mask"]
    decoder = {**_SMALL, **_IDS, "num_key_value_heads": 2, "max_position_embeddings": 16}
    gemma = {**decoder, "head_dim": 16}
    opt = {
        "vocab_size": WORDS,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "ffn_dim": 48,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
        "word_embed_proj_dim": 32,
        "pad_token_id": 1,
    }
    bloom = {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 2}
    pair = {
        "vocab_size": WORDS,
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_position_embeddings": 16,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }
    mamba = {"vocab_size": WORDS, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1, "use_mambapy": False}
    t5 = {"vocab_size": WORDS, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
    both, pairs = ["input_ids", "decoder_input_ids"], (integers(WORDS, 2, 6, low=3), integers(WORDS, 2, 5, low=3))

    def causal(name: str, start: str, numbers: dict[str, Any]) -> Subject:
        return _hf(name, f"{start}ForCausalLM", f"{start}Config", numbers, text, TEXT, "logits")

    yield causal("opt", "OPT", opt)
    yield causal("bloom", "Bloom", bloom)
    yield causal("gemma", "Gemma", gemma)
    yield causal("mistral", "Mistral", decoder)
    yield causal("phi", "Phi", decoder)
    yield causal("gpt_neox", "GPTNeoX", {**_SMALL, **_IDS, "max_position_embeddings": 16})
    yield _hf("mamba", "MambaForCausalLM", "MambaConfig", mamba, ["input_ids"], TEXT[:1], "logits")
    yield _hf(
        "electra",
        "ElectraModel",
        "ElectraConfig",
        {**_SMALL, **_IDS, "embedding_size": 16, "max_position_embeddings": 16},
        text,
        TEXT,
        "last_hidden_state",
    )
    yield _hf("t5_encoder", "T5EncoderModel", "T5Config", t5, text, TEXT, "last_hidden_state")
    yield _hf(
        "bart", "BartForConditionalGeneration", "BartConfig", {**pair, "forced_eos_token_id": 2}, both, pairs, "logits"
    )
    yield _hf("marian", "MarianMTModel", "MarianConfig", {**pair, "forced_eos_token_id": 2}, both, pairs, "logits")


def _images() -> Iterator[Subject]:
    vit = {**_SMALL, "image_size": 32, "patch_size": 8}
    clip = {
        "text_config": {**_SMALL, **_IDS, "max_position_embeddings": 16, "projection_dim": 16},
        "vision_config": {**vit, "projection_dim": 16},
        "projection_dim": 16,
    }

    def case(name: str, model: str, config: str, numbers: dict[str, Any], output: str = "last_hidden_state") -> Subject:
        return _hf(name, model, config, numbers, ["pixel_values"], PIXELS, output)

    yield case("deit", "DeiTModel", "DeiTConfig", vit)
    yield case("dinov2", "Dinov2Model", "Dinov2Config", {**_SMALL, "image_size": 32, "patch_size": 8})
    yield case(
        "swin",
        "SwinModel",
        "SwinConfig",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
            "drop_path_rate": 0.0,
        },
    )
    yield case(
        "convnext", "ConvNextModel", "ConvNextConfig", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
    )
    yield case(
        "resnet",
        "ResNetModel",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [1, 1], "layer_type": "basic"},
    )
    yield _hf(
        "clip",
        "CLIPModel",
        "CLIPConfig",
        clip,
        ["input_ids", "pixel_values"],
        (integers(WORDS, 2, 6, low=2), *PIXELS),
        "logits_per_image",
    )


def _diffusers() -> Iterator[Subject]:
    def case(name: str, model: str, numbers: dict[str, Any], forward: Any, inputs: tuple[Draw, ...]) -> Subject:
        def build() -> Any:
            return Net(forward, inner=getattr(import_module("diffusers"), model)(**numbers))

        return _case(f"diffusers_{name}", "diffusers", build, inputs)

    image, steps = floats(BATCH, 3, 16, 16), integers(100, BATCH)
    unet = {"sample_size": 16, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
    plain = {
        **unet,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": 8,
    }
    crossed = {
        **unet,
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 8,
        "attention_head_dim": 2,
    }
    vae = {
        "block_out_channels": (8, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "norm_num_groups": 4,
        "latent_channels": 2,
    }
    dit = {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "in_channels": 3,
        "out_channels": 3,
        "num_layers": 1,
        "sample_size": 8,
        "patch_size": 2,
        "num_embeds_ada_norm": 10,
        "norm_num_groups": 1,
    }
    yield case("unet", "UNet2DModel", plain, lambda m, x, t: m.inner(x, t).sample, (image, steps))
    yield case(
        "unet_conditional",
        "UNet2DConditionModel",
        crossed,
        lambda m, x, t, c: m.inner(x, t, c).sample,
        (image, steps, floats(BATCH, 4, 8)),
    )
    yield case("autoencoder_kl", "AutoencoderKL", vae, lambda m, x: m.inner(x).sample, (image,))
    yield case(
        "dit",
        "DiTTransformer2DModel",
        dit,
        lambda m, x, t, y: m.inner(x, t, y).sample,
        (floats(BATCH, 3, 8, 8), steps, integers(10, BATCH)),
    )
