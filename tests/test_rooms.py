"""Every folder of the four rooms is a room: few files, and an `__init__` that says what it is for and may import."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST = 15
MANY = {"opset/operators", "converters/rules"}  # one file an operator, one a family
MANY.add("onnx_backprop/web")  # which npm packs as it lies


def rooms() -> list[str]:
    """All folders with Python files, links left out."""
    folders = []
    for name in ("opset", "ort_ops", "converters", "onnx_backprop"):
        for folder, inner, files in os.walk(ROOT / name):
            inner[:] = [one for one in inner if not Path(folder, one).is_symlink()]
            if any(file.endswith(".py") for file in files):
                folders.append(Path(folder).relative_to(ROOT).as_posix())
    return folders


@pytest.mark.parametrize("room", rooms())
def test_a_folder_is_a_room(room: str) -> None:
    files = [path for path in (ROOT / room).iterdir() if path.is_file()]
    assert room in MANY or len(files) <= MOST, sorted(path.name for path in files)
    text = (ROOT / room / "__init__.py").read_text("utf-8")
    says = "mport" in (ast.get_docstring(ast.parse(text)) or "") or "\n# May import " in text
    assert room == "onnx_backprop" or says, f"{room}: neither docstring nor comment says what the room may import"
