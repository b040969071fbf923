"""onnx-backprop finetune: what it writes, going on, and what it refuses before any long work."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from safetensors import numpy as safetensors

from onnx_backprop import text
from onnx_backprop.__main__ import main
from onnx_backprop.training.reports.history import read_log

pytest.importorskip("tokenizers")
MODEL = Path(__file__).parents[2] / "data" / "text"
TEXTS = [f"{n} and {n + 1} make {2 * n + 1}." for n in range(20)]
pytestmark = pytest.mark.filterwarnings("ignore::onnx_backprop.OnnxBackpropWarning")  # that it is a decoder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return tmp_path


def finetune(*more: str, model: Path = MODEL, out: str = "out", epochs: int = 2) -> int:
    given = ["--text", "data.jsonl", "--epochs", str(epochs), "--learning-rate", "1e-2", "--batch-size", "5"]
    return main(["finetune", str(model), "-o", out, *given, *more])


def test_writes_a_folder_an_adapter_and_what_it_did(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--split", "0.2", "--name", "sums", "--log", "log.csv", "--report", "report.html", "--accumulate", "2"]
    assert finetune(*options, "--memory", "80%", "--warmup", "2", "--schedule", "linear", epochs=6) == 0
    names = {file.name for file in (folder / "out").iterdir()}
    assert {"sums.onnx_adapter", "checkpoint.safetensors", "model.onnx", "genai_config.json", "tokenizer.json"} <= names
    printed = capsys.readouterr().out
    assert "rank 8, 5 adapters" in printed
    assert "data: 16 rows, " in printed
    assert "evaluation: 4 rows, " in printed
    match = re.search(r"perplexity: ([\d.]+) -> ([\d.]+) on the texts held out", printed)
    assert match is not None
    records = read_log(folder / "log.csv")
    assert len(records) == 24
    assert records[-1].loss < records[0].loss
    assert records[-1].perplexity is not None
    assert float(match[2]) == pytest.approx(records[-1].perplexity, rel=1e-3)
    assert float(match[2]) < float(match[1])
    assert "<html" in (folder / "report.html").read_text("utf-8")
    adapter = onnxruntime.AdapterFormat.read_adapter(str(folder / "out" / "sums.onnx_adapter"))
    state = safetensors.load_file(folder / "out" / "checkpoint.safetensors")
    for name, value in adapter.get_parameters().items():
        np.testing.assert_array_equal(value.numpy(), state[name])


def test_what_is_watched(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--split", "0.2", "--metrics", "accuracy,perplexity", "--keep-best", "--patience", "2", "--find-rate"]
    report = ["--report", "report.html"]
    assert finetune(*options, *report, "--log", "log.csv", epochs=3) == 0
    printed = capsys.readouterr().out
    records = [record for record in read_log(folder / "log.csv") if record.metrics]
    for record in records:  # each measured in its own way
        assert record.metrics["perplexity"] == pytest.approx(np.exp(record.evaluation or 0), rel=1e-5)
        assert 0 <= record.metrics["accuracy"] <= 1
    best = max(record.metrics["accuracy"] for record in records)
    assert f"best accuracy: {best:.4g}, whose weights are written" in printed
    assert "learning rate to be found (cosine)" in printed
    assert re.search(r"learning rate: [\d.e-]+ of 1e-", printed)
    assert (folder / "out" / "best.safetensors").is_file()
    assert "Learning rates that were tried" in (folder / "report.html").read_text("utf-8")
    assert finetune(*options, *report, "--resume", epochs=4) == 0  # the report is written anew
    (folder / "report.html").write_text("somebody's own")
    assert finetune(*options, *report, "--resume", epochs=4) == 2
    assert "report.html exists" in capsys.readouterr().err


def test_going_on_is_the_same_as_going_through(folder: Path) -> None:
    constant = ("--schedule", "constant")
    assert finetune(*constant, out="whole", epochs=4) == 0
    assert finetune(*constant, out="parts", epochs=2) == 0
    first = (folder / "parts" / "adapter.onnx_adapter").read_bytes()
    assert finetune(*constant, out="parts", epochs=4) == 2, "it is not empty"
    assert finetune(*constant, "--resume", out="parts", epochs=4) == 0
    actual, expected = ((folder / part / "adapter.onnx_adapter").read_bytes() for part in ("parts", "whole"))
    assert actual == expected != first
    assert finetune(*constant, "--force", out="parts", epochs=2) == 0
    assert (folder / "parts" / "adapter.onnx_adapter").read_bytes() == first


def test_merged_folders_are_of_the_kind_of_the_model(folder: Path) -> None:
    assert finetune("--merged", "merged") == 0
    assert finetune("--merged", "floats", "--floats", "--force", "--pack") == 0
    sizes = {name: (folder / name / "model.onnx").stat().st_size for name in ("merged", "floats")}
    assert sizes["merged"] < 0.7 * sizes["floats"]
    for name in sizes:
        assert {v.name for v in onnxruntime.InferenceSession(folder / name / "model.onnx").get_inputs()} == {
            *("input_ids", "attention_mask", "past_key_values.0.key", "past_key_values.0.value")
        }


def test_an_onnx_file_with_a_tokenizer_elsewhere(folder: Path) -> None:
    (folder / "alone").mkdir()
    for name in ("model.onnx", "model.onnx.data", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder / "alone")
    (folder / "alone" / "thesis.pdf").write_text("")
    given = ["--tokenizer", str(MODEL / "tokenizer.json"), "--targets", "*qkv*", "--rank", "2"]
    assert finetune(*given, model=folder / "alone" / "model.onnx") == 0
    assert {file.name for file in (folder / "out").iterdir()} == {
        *("model.onnx", "adapter.onnx_adapter", "checkpoint.safetensors", "tokenizer_config.json")
    }


@pytest.fixture
def pairs(folder: Path) -> Path:
    lines = [{"prompt": f"{n} and {n} make", "chosen": f" {2 * n}.", "rejected": f" {n} {n}."} for n in range(12)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def prefer(*more: str, epochs: int = 4) -> int:
    given = ["--preferences", "pairs.jsonl", "--epochs", str(epochs), "--learning-rate", "1e-2", "--batch-size", "5"]
    return main(["finetune", str(MODEL), "-o", "out", *given, "--schedule", "constant", *more])


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


def test_preferences(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first loss is log 2, that of a model that is as before; --resume has the same model for its reference."""
    options = ["--log", "log.csv", "--split", "0.2", "--beta", "0.5"]
    assert prefer(*options, "--memory", "80%") == 0
    printed = capsys.readouterr().out
    assert "data: 9 pairs, " in printed
    assert "evaluation: 3 pairs, " in printed
    assert "preferences between answers, beta 0.5" in printed
    records = read_log(pairs / "log.csv")
    assert len(records) == 8
    assert records[0].loss == pytest.approx(np.log(2), rel=1e-4)
    assert records[-1].loss < 0.7 * records[0].loss
    assert {"adapter.onnx_adapter", "model.onnx"} <= {file.name for file in (pairs / "out").iterdir()}
    whole = (pairs / "out" / "adapter.onnx_adapter").read_bytes()
    assert prefer(*options, "--force", epochs=2) == 0
    assert prefer(*options, "--resume", epochs=4) == 0
    assert (pairs / "out" / "adapter.onnx_adapter").read_bytes() == whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "data.jsonl"], "--text: expected this or --preferences, one of both"),
        (["--pack"], "--pack: pairs of --preferences are not packed"),
        (["--beta", "0"], "--beta: expected a number above 0, got 0.0"),
        (["--preferences", "data.jsonl"], 'data.jsonl, line 1: expected {"prompt": …, "chosen"'),
        (["--preferences", "none.jsonl"], "none.jsonl cannot be read: "),
        (["--preferences", "empty.jsonl"], "empty.jsonl holds no pair"),
        (["--length", "4"], "is longer than 4 tokens"),
        (["--metrics", "accuracy"], "--metrics: are of --text"),
    ],
)
def test_what_is_refused_of_preferences(
    pairs: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    (pairs / "empty.jsonl").write_text("\n")
    assert prefer(*options) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--split", "1"], "--split: expected a share from 0 to below 1, got 1.0"),
        (["--split", "0.99"], "--split: 0.99 of 20 rows leaves none to train on"),
        (["--split", "0.1", "--evaluation", "data.jsonl"], "--split: --evaluation names the texts"),
        (["--floats"], "--floats: goes with --merged"),
        (["--patience", "2"], "--patience: goes with --evaluation or --split"),
        (["--split", "0.1", "--metrics", "acuracy"], "Did you mean 'accuracy'"),
        (["--targets", "*qvk_proj*"], "matches no initializer. Did you mean 'qkv_proj'"),
        (["--merged", "out"], "--merged: it is the folder of -o"),
        (["--merged", "data.jsonl"], "--merged: data.jsonl is a file. Name a folder"),
        (["--merged", "none/m"], "--merged: there is no folder"),
        (["--merged", str(MODEL)], "is the folder of the model"),
        (["--tokenizer", "none.json"], "--tokenizer: there is no file none.json"),
        (["--text", "bad.jsonl"], "bad.jsonl, line 2: expected {"),
        (["--length", "1"], "--length: expected 2 or more, got 1"),
        (["--length", "0"], "--length: expected 2 or more, got 0"),
        (["--length", "129"], "--length: the model reads at most 128 tokens, got 129"),
        (["--rank", "0"], "--rank: expected 1 or more, got 0"),
        (["--targets", "nothing"], "--targets: expected the name of an initializer, got 'nothing'"),
        (["-o", "data.jsonl"], "-o: data.jsonl is a file. Name a folder"),
        (["--template", "alpaca"], "invalid choice: 'alpaca'"),
        (
            ["--template", "llama3"],
            "--template: 'llama3' writes <|start_header_id|>, <|end_header_id|>, <|eot_id|>, which",
        ),
        (["--name", "a/b"], "--name: expected the name of a file, without a folder, got 'a/b'"),
        (["--name", ""], "--name: expected the name of a file, without a folder, got ''"),
        (["--beta", "0.5"], "--beta: goes with --preferences"),
    ],
)
def test_invalid_use_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    (folder / "bad.jsonl").write_text('{"text": "x"}\n{"txt": "x"}\n')
    assert finetune(*options) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert message in error
    assert not (folder / "out").exists() or not any((folder / "out").iterdir()), "so that it can be tried again"


def test_the_template_that_was_trained_is_written(folder: Path) -> None:
    """Which is another one than that of the folder, chatml."""
    (folder / "chat.jsonl").write_text(json.dumps({"messages": CHAT}))
    assert finetune("--text", "chat.jsonl", "--template", "mistral", "--merged", "merged") == 0
    ((ids, labels),) = text.read_examples("chat.jsonl", text.ModelFolder(MODEL).tokenizer(), template="mistral")
    for name in ("out", "merged"):
        ((same_ids, same_labels),) = text.read_examples("chat.jsonl", text.ModelFolder(name).tokenizer())
        np.testing.assert_array_equal(same_ids, ids)
        np.testing.assert_array_equal(same_labels, labels)


@pytest.mark.usefixtures("limited")
def test_on_a_device(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The losses of the CPU; rows of few different lengths, each of which is a session there."""
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"text": "and " * (3 * n + 1)}) for n in range(20)))
    options = ("--length", "64", "--log")
    assert finetune(*options, "ours.csv") == 0
    assert finetune(*options, "there.csv", "--force", "--device", "webgpu", "--read-every", "3") == 0
    assert re.search(r"device: \d+ of \d+ nodes on CPU", capsys.readouterr().out)
    ours, there = ([record.loss for record in read_log(folder / name)] for name in ("ours.csv", "there.csv"))
    np.testing.assert_allclose(there, ours, rtol=1e-4)
    given = text.TextBatches(
        text.read_examples(["data.jsonl"], text.ModelFolder(MODEL).tokenizer()), 5, length=64, step=16
    )
    assert {batch["input_ids"].shape[1] for batch in given} <= {16, 32, 48, 64}


def test_a_device_that_is_not_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(onnxruntime, "get_ep_devices", list)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert finetune("--device", "cuda") == 2
    assert "--device: 'cuda' is not there: " in (printed := " ".join(capsys.readouterr().err.split()))
    assert "`pip install 'onnxruntime-gpu[cuda,cudnn]'`" in printed
    assert not (folder / "out").exists(), "before any long work"


def test_a_tokenizer_of_another_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text("utf-8"))
    tokenizer["added_tokens"].append(dict(tokenizer["added_tokens"][0], id=320, content="make"))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    assert finetune("--tokenizer", "tokenizer.json") == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "--tokenizer: its token 320 is none of the 320 of the model (321 tokens in all)" in error


def test_a_folder_without_a_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "empty").mkdir()
    assert finetune(model=folder / "empty") == 2
    assert "expected genai_config.json or one .onnx file" in " ".join(capsys.readouterr().err.split())
    assert finetune("--tokenizer", str(MODEL / "tokenizer.json"), model=folder / "none.onnx") == 2
    assert "no such file: " in " ".join(capsys.readouterr().err.split())
