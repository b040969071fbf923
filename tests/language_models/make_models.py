"""Small language models with random weights, and what onnxruntime-genai's builder makes of them.

    python tests/language_models/make_models.py FOLDER [family ...]

writes FOLDER/FAMILY/hf, a folder of transformers, and FOLDER/FAMILY/fp32 and …/int4, without network.
"""

from __future__ import annotations

import json
import os
import pydoc
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
torch: Any = import_module("torch")
transformers: Any = import_module("transformers")
tokenizers: Any = import_module("tokenizers")

VOCABULARY = 1024
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
WINDOW = {"sliding_window": 8, "head_dim": 32}
# What each family has besides. Phi's heads are larger, since onnxruntime turns multiples of 16 numbers, and its eps is
# what the builder writes, whatever the model has.
FAMILIES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "llama": ("Llama", {}, []),
    "llama_apart": ("Llama", {}, ["fuse_qkv=false"]),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, []),
    "qwen3": ("Qwen3", {"head_dim": 32}, []),
    "mistral": ("Mistral", {"sliding_window": 8}, []),
    "gemma": ("Gemma", {"head_dim": 32, "tie_word_embeddings": True}, []),
    "gemma2": ("Gemma2", {**WINDOW, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}, []),
    "phi": ("Phi", {"hidden_size": 128, "num_key_value_heads": 4, "layer_norm_eps": 1e-6}, []),
    "phi3": (
        "Phi3",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 128,
            },
        },
        [],
    ),
    "gptoss": ("GptOss", {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}, []),
    "smollm3": ("SmolLM3", {"tie_word_embeddings": True}, []),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}, []),
}


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes that has learned from pages of the standard library."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<s>", "</s>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([pydoc.render_doc(name) for name in ("argparse", "json", "logging")], trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.save_pretrained(folder)


def _with_old_names(file: Path) -> None:
    """Give the kind of rotation the name that the builder asks for too."""
    config = json.loads(file.read_text())
    rotation = config.get("rope_parameters", {})
    if rotation.get("rope_type") == "longrope":
        rotation["type"] = "longrope"
        file.write_text(json.dumps(config))


def write(folder: Path, family: str) -> None:
    """The folder of transformers, and the files of the builder; what a file has already is kept."""
    name, more, options = FAMILIES[family]
    source = folder / family / "hf"
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **more})
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.float32)
    for tensor in model.parameters():  # the builder leaves out biases that are all zeros
        if not tensor.any():
            torch.nn.init.normal_(tensor, std=0.02)
    model.save_pretrained(source)
    _with_old_names(source / "config.json")
    write_tokenizer(source)
    for precision in ("fp32", "int4"):
        if family == "gptoss" and precision == "int4":
            continue  # of which the builder takes the published weights alone
        target = folder / family / precision
        if (target / "model.onnx").exists():
            continue
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", source, "-m", source, "-o", target]
        command += ["-p", precision, "-e", "cpu", "-c", folder / "cache"]
        command += ["--extra_options", *options] if options else []
        subprocess.run(list(map(str, command)), check=True, capture_output=True)


if __name__ == "__main__":
    for chosen in sys.argv[2:] or FAMILIES:
        write(Path(sys.argv[1]), chosen)
        print(chosen, flush=True)
