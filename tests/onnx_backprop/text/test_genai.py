"""onnxruntime-genai loads what `finetune` writes: with the adapter it says the page by heart, without it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onnx_backprop.__main__ import main

pytest.importorskip("tokenizers")
og = pytest.importorskip("onnxruntime_genai")
FOLDER = Path(__file__).parents[2] / "data" / "text"
PAGE = (
    "JSON (JavaScript Object Notation) is a subset of JavaScript syntax used as a lightweight data interchange format."
)


def generated(folder: Path, prompt: str, adapter: Path | None = None) -> str:
    """What greedy search says behind a prompt."""
    model = og.Model(str(folder))
    tokenizer = og.Tokenizer(model)
    settings = og.GeneratorParams(model)
    settings.set_search_options(do_sample=False, max_length=128)
    generator = og.Generator(model, settings)
    adapters = og.Adapters(model)
    if adapter is not None:
        adapters.load(str(adapter), "page")
        generator.set_active_adapter(adapters, "page")
    ids = tokenizer.encode(prompt)
    generator.append_tokens(ids)
    while not generator.is_done():
        generator.generate_next_token()
    return str(tokenizer.decode(generator.get_sequence(0)[len(ids) :]))


@pytest.mark.filterwarnings("ignore::onnx_backprop.OnnxBackpropWarning")
def test_genai_says_what_was_learned(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chat = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A format."}]
    lines = [{"prompt": PAGE[:33], "completion": PAGE[33:]}, {"messages": chat}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = ["--rank", "32", "--alpha", "64", "--targets", "*", "--epochs", "250", "--learning-rate", "1e-2"]
    options += ["--weight-decay", "0", "--template", "chatml", "--merged", str(tmp_path / "merged"), "--floats"]
    assert (
        main(["finetune", str(FOLDER), "-o", str(tmp_path / "out"), "--text", str(tmp_path / "data.jsonl"), *options])
        == 0
    )
    adapter = tmp_path / "out" / "adapter.onnx_adapter"
    question = "<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n"
    assert generated(tmp_path / "out", PAGE[:33], adapter) == PAGE[33:]
    assert generated(tmp_path / "out", question, adapter) == "A format."
    assert generated(tmp_path / "merged", PAGE[:33]) == PAGE[33:]
    base = generated(FOLDER, PAGE[:33])
    assert base[:20] != PAGE[33:53]
    assert generated(tmp_path / "out", PAGE[:33]) == base, "without the adapter it is the model that came"
