"""Progress bars: for people alone, imported when there is one to show."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import onnx_backprop as ob
from onnx_backprop.opset.core import progress
from tests.support.training_models import classifier, data, training


def test_nobody_watching(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress.shown([1, 2])) == [1, 2]
    with progress.bar(total=2) as bar:
        bar.update()
        bar.set_postfix_str("x", False)
        assert bar.n == 1
    progress.note("waiting")
    assert capsys.readouterr().err == ""


def test_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bar: Any = progress.shown([1, 2], what="looking")
    for _ in bar:
        bar.refresh()
    assert "looking" in capsys.readouterr().err
    progress.note("waiting")
    assert capsys.readouterr().err == "waiting …\n"
    with progress.hidden():
        assert not progress.watched()
        with progress.hidden(really=False):
            assert not progress.watched()
        progress.note("waiting")
    assert progress.watched()
    assert capsys.readouterr().err == ""


def test_a_notebook_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    class OutStream:
        def isatty(self) -> bool:
            return False

    OutStream.__module__ = "ipykernel.iostream"
    assert not progress.watched()
    monkeypatch.setattr(sys, "stderr", OutStream())
    assert progress.watched()
    monkeypatch.setattr(sys, "stderr", None)
    assert not progress.watched()


def test_every_stage_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversion, check, explanation, training and evaluation, where they take longer than half a second."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    seen: list[str] = []

    class Bar(progress._Unseen):
        def __init__(self, items: Any = None, *, desc: str, **_: Any) -> None:
            seen.append(desc)
            self.items = items

        def __iter__(self) -> Any:
            return iter(self.items)

    monkeypatch.setattr(progress, "_tqdm", lambda: Bar)
    ob.training_graph(classifier(), loss="softmax_cross_entropy")
    ob.explain_gradients(classifier())
    assert set(seen) == {"differentiating", "explaining"}
    trainer, batches = ob.Trainer(training()), ob.Batches(data(), 30)
    seen.clear()
    trainer.fit(batches, 1, evaluation=batches)
    assert [name for name in seen if name != "compiling kernels, once"] == ["training", "evaluating"]
    seen.clear()
    trainer.fit(batches, 2, evaluation=batches, progress=False)
    assert seen == []

    assert ob.check_gradients(classifier(), nodes=True).ok
    assert seen == ["checking", "checking"]  # variables, then nodes


NOTEBOOK_WITHOUT_WIDGETS = """
import sys
from types import SimpleNamespace

sys.modules["IPython"] = SimpleNamespace(get_ipython=lambda: SimpleNamespace(config={"IPKernelApp": {}}))
sys.modules["ipywidgets"] = None
from onnx_backprop.opset.core import progress

for _ in progress._tqdm()([1], desc="text"):
    pass
"""


def test_a_notebook_without_widgets_gets_text_and_no_warning() -> None:
    done = subprocess.run([sys.executable, "-c", NOTEBOOK_WITHOUT_WIDGETS], capture_output=True, text=True, check=True)
    assert "text: 100%" in done.stderr
    assert "IProgress" not in done.stderr


def test_importing_does_not_import_it() -> None:
    code = "import sys, onnx_backprop as ob; ob.Trainer; print('tqdm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
