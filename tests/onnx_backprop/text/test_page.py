"""The blocks of docs/language_models.md run, in the order in which somebody who follows the page runs them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import ROOT, Block, blocks, run
from tests.docs.test_blocks import OF_GENAI, PAGE_OF_TEXT

pytest.importorskip("tokenizers")
FOLDER = Path(__file__).parents[2] / "data" / "text"


@pytest.mark.filterwarnings("ignore::onnx_backprop.OnnxBackpropWarning")  # that the file is a decoder
def test_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FOLDER, tmp_path / "llama-int4")
    code: list[Block] = [block for block in blocks(ROOT / "docs" / "language_models.md") if block.language]
    assert [block.not_run for block in code] == [PAGE_OF_TEXT, OF_GENAI, *[PAGE_OF_TEXT] * 5]
    command, genai, *others = code
    names: dict[str, Any] = {"__name__": "language_models"}
    for block in sorted(others, key=lambda block: block.language == "bash"):
        run(block, names)
    assert "It is 6. |  It is 6." in capsys.readouterr().out
    assert (tmp_path / "answers" / "answers.onnx_adapter").is_file()
    assert (tmp_path / "preferring" / "adapter.onnx_adapter").is_file()
    run(command, names)
    pytest.importorskip("onnxruntime_genai")
    run(genai, names)
