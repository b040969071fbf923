"""The folder that the command works in."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import parser

from tests.support.command import MODEL


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, holding small.onnx."""
    monkeypatch.chdir(tmp_path)
    onnx.save(parser.parse_model(MODEL), "small.onnx")
    return tmp_path
