"""The summary of a training: counted by hand; and the lines and the table that tell how it goes."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.training.reports import progress
from onnx_backprop.training.reports.history import Record
from tests.support.training_models import batches, fitted, training


def network() -> ob.TrainingGraph:
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        m (float[N, 2, H, W] x) => (float[N, 3] y) {
            a = Conv<pads = [1, 1, 1, 1]>(x, w1, b1) b = Relu(a) c = GlobalAveragePool(b) d = Flatten(c)
            y = Gemm<transB = 1>(d, w2, b2) }""")
    shapes = {"w1": (4, 2, 3, 3), "b1": (4,), "w2": (3, 4), "b2": (3,)}
    for name, shape in shapes.items():
        model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    return ob.training_graph(model, loss="mse", optimizer="adam", frozen=["w1", "b1"])


def test_a_summary_counts_layers(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = ob.Trainer(network(), kernels="onnx")
    x, target = np.ones((5, 2, 8, 6), np.float32), np.ones((5, 3), np.float32)
    summary = trainer.summary(x=x, target=target)
    conv, gemm = summary.layers.layers
    assert (conv.operator, conv.shape, conv.parameters, conv.trained) == ("Conv", (5, 4, 8, 6), 4 * 2 * 9 + 4, 0)
    assert (gemm.operator, gemm.shape, gemm.parameters, gemm.trained) == ("Gemm", (5, 3), 15, 15)
    assert conv.operations == 2 * (5 * 4 * 8 * 6) * (2 * 9)
    assert gemm.operations == 2 * (5 * 3) * 4
    assert summary.layers.weights == 4 * 15
    assert summary.layers.state == 2 * 4 * 15 + 8  # two moments, and the number of updates
    # of the head: its input, one view of the pool's output, and the difference that the loss squares
    assert summary.layers.activations == 4 * (5 * 4 + 5 * 3)
    text = str(summary)
    assert "76 (0 trained)" in text
    assert "parameters: 91, 15 trained" in text
    assert "batch: x 5×2×8×6, target 5×3" in text
    assert summary._repr_html_().count("<tr>") >= 3
    assert "… and 1 more" in summary.text(1)
    assert trainer.summary(x, target).facts == summary.facts
    trainer.step(x=x, target=target)
    assert "loss: " in str(trainer.summary())
    assert "batch: every length that is open is 1" in str(trainer.summary())
    print(trainer.summary())
    assert capsys.readouterr().out.startswith("layer")
    with pytest.raises(ob.InvalidArgumentError, match="'target' missing"):
        trainer.summary(x=x)


def test_a_line_an_epoch_and_one_a_minute(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with caplog.at_level(logging.INFO, "onnx_backprop"):
        display = progress.Progress(None, batches(), 2, SimpleNamespace(steps=0))
        for n in range(18):
            now[0] += 25.0
            metrics = {"accuracy": 0.5, "each": [0.1, 0.2]} if n % 9 == 8 else {}
            record = Record(n, n // 9, 2.0, 0.1, 25.0, 1.5 if metrics else None, None, metrics)
            display.show(record, ends_epoch=n % 9 == 8)
    inside = [f"epoch {e}/2, step {n} of 18: loss 2" for e, n in ((1, 3), (1, 6), (2, 12), (2, 15))]
    ends = [f"epoch {n}/2: loss 2, evaluation 1.5, accuracy 0.5, learning rate 0.1, 225 s" for n in (1, 2)]
    # behind the third step of an epoch 75 s are over
    assert [r.message for r in caplog.records] == [*inside[:2], ends[0], *inside[2:], ends[1]]
    assert {r.name for r in caplog.records} == {"onnx_backprop"}


def test_fit_logs_its_outcome(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level(logging.INFO, "onnx_backprop"):
        trainer = ob.Trainer(training())
        records = trainer.fit(batches(), 2, evaluation=batches(), metrics="accuracy", progress=True)
    messages = [r.message for r in caplog.records if not r.message.startswith("compil")]  # kernels, where none are kept
    assert [line.partition(":")[0] for line in messages] == ["epoch 1/2", "epoch 2/2", "trained"]
    assert capsys.readouterr().err.splitlines() == messages[:2]
    assert records.summary().splitlines()[0].startswith("steps: 18 in ")
    assert f"accuracy {records[-1].metrics['accuracy']:.4g}" in messages[1]
    fitted(1)
    assert capsys.readouterr().err == ""


def test_a_notebook_has_a_table_of_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    handle = SimpleNamespace(update=shown.append)

    def display(page: Any, display_id: bool) -> Any:
        assert display_id
        shown.append(page)
        return handle

    module = ModuleType("IPython.display")
    module.HTML, module.display = str, display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr(progress.bars, "in_notebook", lambda: True)
    ob.Trainer(training()).fit(batches(), 3, evaluation=batches(), metrics="accuracy")
    assert [page.count("<tr>") for page in shown] == [2, 3, 4]
    assert all(f">{name}</th>" in shown[-1] for name in ("epoch", "loss", "evaluation", "accuracy"))
    assert "learning rate" not in shown[-1]  # which is the same in all
    ob.Trainer(training()).fit(batches(), 3, schedule=ob.schedules.Linear(0.1, steps=9))
    assert ">learning rate</th>" in shown[-1]


def test_curves_name_their_scale() -> None:
    from onnx_backprop.converters.pages import chart, scale_of

    assert [scale_of(values) for values in ([1.0, 20.0], [1.0, 21.0], [0.0, 21.0], [-1.0, 5.0])] == [
        "linear",
        "logarithmic",
        "linear",
        "linear",
    ]
    page = chart({"a": [(1e-3, 1.0), (10.0, 30.0)]}, "rate", "loss", across="logarithmic")
    assert "loss (logarithmic)" in page
    assert "rate (logarithmic)" in page
    assert 'points="0.00,100.00 100.00,0.00"' in page
    assert ">0.001<" in page
    assert "loss (linear)" in chart({"a": [(0, 1.0), (1, 2.0)]}, "step", "loss")
