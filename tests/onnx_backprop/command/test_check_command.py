"""The command `check`: its output, its files, its exit status."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnx_backprop.command import main as command
from tests.support.broken_rules import SMALL, break_rule, model_of, scaled


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, holding small.onnx."""
    monkeypatch.chdir(tmp_path)
    onnx.save(model_of(SMALL), "small.onnx")
    return tmp_path


def test_command_right(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["check", "small.onnx", "--save-repro", "repro.onnx"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("gradients: right")
    assert err == ""
    assert not Path("repro.onnx").exists()
    assert command.main(["check", "small.onnx", "--quiet", "--wrt", "gain", "--nodes"]) == 0
    assert capsys.readouterr().out == ""


def test_command_wrong(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    break_rule(monkeypatch, "Relu", scaled(0.5))
    assert command.main(["check", "small.onnx", "--save-repro", "repro.onnx"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("gradients: wrong")
    assert re.search(r"^Relu +relu +c +wrong", out, re.M)
    assert out.endswith("written: repro.onnx\n")
    assert {path.name for path in folder.iterdir()} == {"small.onnx", "repro.onnx"}
    assert command.main(["check", "repro.onnx", "--quiet"]) == 1
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    assert command.main(["check", "repro.onnx", "--quiet"]) == 0


@pytest.mark.parametrize("call", ["check", "explain"])
def test_a_page(folder: Path, capsys: pytest.CaptureFixture[str], call: str) -> None:
    assert command.main([call, "small.onnx", "--html", "page.html"]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("written: page.html\n")
    assert err == ""
    text = Path("page.html").read_text(encoding="utf-8")
    assert "small.onnx</h1>" in text
    for words in ("weight", "gain", "color-scheme"):
        assert words in text
    assert command.main([call, "small.onnx", "--html", "page.html"]) == 2
    assert "page.html exists" in capsys.readouterr().err
    assert command.main([call, "small.onnx", "--html", "page.html", "--force"]) == 0
    assert command.main([call, "small.onnx", "--html", "small.onnx", "--force"]) == 2


def test_command_feeds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "g (float[A, B] x, int64[2] s) => (float[C, D] y) { y = Reshape(x, s) }"
    onnx.save(model_of(text), "shape.onnx")
    np.savez("values.npz", s=np.array([-1, 3]))
    assert command.main(["check", "shape.onnx", "--feeds", "values.npz", "--quiet"]) == 0
    assert command.main(["check", "shape.onnx"]) == 2
    assert "--feeds FILE.npz" in capsys.readouterr().err


BAD = {
    "no such file": ("check none.onnx", "no such file"),
    "unknown variable": ("check small.onnx --wrt gian", "Did you mean 'gain'"),
    "no such feeds": ("check small.onnx --feeds none.npz", "--feeds: none.npz cannot be read"),
    "feeds of another kind": ("check small.onnx --feeds small.onnx", "--feeds: small.onnx cannot be read"),
    "repro over the model": (
        "check small.onnx --save-repro small.onnx --force",
        "--save-repro: small.onnx is the file of the model too",
    ),
    "repro over the feeds": ("check small.onnx --feeds a --save-repro ./a", "a is the file of --feeds too"),
    "repro exists": ("check small.onnx --save-repro strange.onnx", "strange.onnx exists"),
    "repro nowhere": ("check small.onnx --save-repro none/r.onnx", "no folder"),
    "seed": ("check small.onnx --seed -1", "--seed"),
    "kernels": ("check small.onnx --kernels nump", "kernels"),
    "not for onnxruntime": ("check strange.onnx", "onnxruntime does not load the model"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(folder: Path, capfd: pytest.CaptureFixture[str], case: str) -> None:
    model = model_of("g (bfloat16[3] x) => (bfloat16[3] y) { y = Exp(x) }")
    onnx.save(model, "strange.onnx")
    arguments, message = BAD[case]
    assert command.main(arguments.split()) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("onnx-backprop: error: ")
    assert err.count("\n") == 1, err
    assert message in err
