"""A language model of some kB as onnxruntime-genai's builder writes it, and its tokenizer: tests/data/text.

python -m tests.data.language_model, with torch, transformers and onnxruntime-genai; writes the same weights each time.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

tokenizers, torch, transformers = map(import_module, ("tokenizers", "torch", "transformers"))
FOLDER = Path(__file__).parent / "text"
SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEXT = json.__doc__ or ""
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer() -> Any:
    """Bytes and some pairs of them, with a beginning in front of a text."""
    result = tokenizers.Tokenizer(tokenizers.models.BPE())
    result.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    result.train_from_iterator(
        [TEXT], tokenizers.trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    result.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=result, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=CHAT
    )


def main() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=[2, 4],
        pad_token_id=0,
    )
    with tempfile.TemporaryDirectory() as source:
        model = transformers.LlamaForCausalLM(config)
        model.generation_config.pad_token_id = 0
        model.save_pretrained(source)
        tokenizer().save_pretrained(source)
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", "int4", "-e", "cpu"]
        shutil.rmtree(FOLDER, ignore_errors=True)
        subprocess.run([*builder, "-i", source, "-m", source, "-o", FOLDER, "-c", f"{source}/cache"], check=True)


if __name__ == "__main__":
    main()
