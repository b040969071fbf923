"""What a notebook shows of a training: batches, the trainer, its records."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_backprop as ob
from onnx_backprop.training.reports.history import Losses, Record, Records
from onnx_backprop.training.reports.profiling import profile
from tests.support.training_models import data, training


def test_a_training_at_a_glance() -> None:
    batches, trainer = ob.Batches(data(60), 25), ob.Trainer(training())
    shape = "×".join(map(str, data(60)["x"].shape))
    assert repr(batches) == (
        f"<Batches of x float32 {shape}, labels int64 60: 60 rows, 3 batches of 25, shuffled, seed 0>"
    )
    assert "<svg" not in trainer._repr_html_()
    assert re.search(r"AdamW, \d+ nodes>: 0 steps, learning rate 0.001>", repr(trainer))
    records = trainer.fit(batches, 2, evaluation=batches)
    assert re.search(rf"6 steps, loss {records[-1].loss:.4g}, learning rate 0.001>", repr(trainer))
    assert repr(records) == f"<Records: steps 0 … 5, loss {records[0].loss:.4g} -> {records[-1].loss:.4g}>"
    assert records == list(records)
    assert trainer.losses.points == [(n + 1, r.loss) for n, r in enumerate(records)]
    for shown, words in ((batches, "float32"), (trainer, "<svg"), (records, "evaluation")):
        assert words in shown._repr_html_()
    assert re.fullmatch(r"<Losses: 6 points, the last loss [\d.]+>", repr(trainer.losses))
    assert repr(Records()) == "<Records: no steps>"
    assert "nothing was measured" in Records()._repr_html_()


def test_an_evaluation_shows_its_metrics() -> None:
    metrics = {"accuracy": "accuracy", "each": ob.metrics.F1(average=None), "matrix": ob.metrics.ConfusionMatrix()}
    measured = ob.Trainer(training()).evaluate(data(60), metrics=metrics)
    assert re.fullmatch(
        r"[\d.]+ \(accuracy [\d.]+, each \[[\d.]+(, [\d.]+)*\], matrix of shape \[\d, \d\]\)", repr(measured)
    )
    assert str(measured) == repr(measured)
    assert f"{measured:.3f}" == f"{float(measured):.3f}"
    plain = ob.Trainer(training()).evaluate(data(60))
    assert repr(plain) == repr(float(plain))


class _Stream(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("schedule", [ob.schedules.Constant(0.01), ob.schedules.Step(0.01, every=2, factor=0.5)])
def test_the_bar_tells_epoch_loss_and_what_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, schedule: Any
) -> None:
    stream = _Stream()
    monkeypatch.setattr("sys.stderr", stream)
    trainer = ob.Trainer(training())
    records = trainer.fit(ob.Batches(data(60), 25), 2, schedule=schedule, checkpoint=tmp_path / "c")
    last = re.split(r"[\r\n]+", stream.getvalue().rstrip())[-1]
    mean = records[0].loss
    for record in records[1:]:
        mean = 0.98 * mean + 0.02 * record.loss
    rate = ", η 0.005" if isinstance(schedule, ob.schedules.Step) else ""
    assert last.startswith("epoch 2/2: 100%|")
    assert last.endswith(f"loss {mean:.4g}{rate}]")


def test_losses_are_bounded_and_right(rng: np.random.Generator) -> None:
    losses, values = Losses(), rng.standard_normal(5000)
    for step, value in enumerate(values):
        losses.add(step, float(value))
    assert losses.last == values[-1]
    assert 512 <= len(losses.points) <= 1024
    size = 8  # the smallest power of two of which there are 1024 at most
    means = values[: len(losses.points) * size].reshape(-1, size).mean(axis=1)
    np.testing.assert_allclose([y for _, y in losses.points], means)
    np.testing.assert_allclose([x for x, _ in losses.points], np.arange(len(means)) * size + (size - 1) / 2)


def test_a_profile_has_the_names_of_the_graph() -> None:
    """Bodies that onnxruntime writes out, `_inlfunc_…`, count for the nodes that call them."""
    graph = training()
    trainer = ob.Trainer(graph, kernels="onnx")
    report = profile(trainer, data(20), steps=2)
    named = {node.name for node in graph.model.graph.node}
    assert not any("_inlfunc_" in t.name for t in report.nodes)
    functions = {node.name for node in graph.model.graph.node if node.domain}
    assert functions & {t.name for t in report.nodes} == functions
    assert sum(t.name in named for t in report.nodes) >= 0.9 * len(report.nodes)  # all but what onnxruntime writes out
    for timings in (report.nodes, report.operators):
        assert sum(t.share for t in timings) == 1 or abs(sum(t.share for t in timings) - 1) < 1e-9
        assert all(t.milliseconds >= 0 for t in timings)


def test_records_are_a_list() -> None:
    record = Record(0, 0, 1.0, 0.1, 0.01)
    assert Records([record]) == [record]
