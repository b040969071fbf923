"""Answers of another package are dropped, and no others."""

from pathlib import Path

import pytest

from tests.support import kept_answers
from tests.support.kept_answers import drop_stale, package_digest


def test_answers_of_another_package_are_dropped(tmp_path: Path) -> None:
    folder = tmp_path / "answers"
    assert drop_stale(folder, "*/verdict.json", "first") == 0
    (folder / "relu").mkdir()
    answer, model = folder / "relu" / "verdict.json", folder / "relu" / "model.onnx"
    answer.write_text("{}")
    model.write_text("")
    assert drop_stale(folder, "*/verdict.json", "first") == 0
    assert answer.exists()
    assert drop_stale(folder, "*/verdict.json", "second") == 1
    assert not answer.exists()
    assert model.exists()


def test_every_file_of_the_package_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_answers, "ROOT", tmp_path)
    module = tmp_path / "opset" / "relu.py"
    module.parent.mkdir()
    module.write_text("a")
    digests = [package_digest()]
    module.write_text("b")
    digests.append(package_digest())
    module.rename(module.with_name("elu.py"))
    digests.append(package_digest())
    assert len(set(digests)) == 3
