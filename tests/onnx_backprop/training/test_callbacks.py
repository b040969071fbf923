"""Ready callbacks: what they do, and that a resumed training does the same."""

from __future__ import annotations

import itertools
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_backprop as ob
from onnx_backprop.converters.training.optimizers import SGD, AdamW
from onnx_backprop.training.checkpoint import read_checkpoint
from onnx_backprop.training.reports.history import Record
from tests.support.metric_cases import trainer as plain_trainer
from tests.support.training_models import batches, data, training

callbacks = ob.callbacks


def scripted(values: list[float], better: str | None = "lower") -> Any:
    """A metric that has these values, epoch after epoch."""
    script = iter(values)
    return {"told": ob.metrics.Function(function=lambda *_: next(script), better=better)}


def fitted(values: list[float], *calls: Any, epochs: int = 9, trainer: ob.Trainer | None = None, **options: Any) -> Any:
    x = np.ones((4, 3), np.float32)
    loader = [{"x": x, "target": x + n} for n in range(2)]
    trainer = trainer or plain_trainer("N, 3", "mse", learning_rate=0.01)
    options = {"evaluation": loader, "metrics": scripted(values), "progress": False} | options
    return trainer, trainer.fit(loader, epochs, callbacks=calls, **options)


VALUES = [5.0, 4.0, 4.5, 3.0, 3.5, 3.0, 3.1, 3.2, 3.3]  # the best so far at 0, 1, 3


@pytest.mark.parametrize(("patience", "epochs"), [(1, 3), (2, 6), (3, 7), (9, 9)])
def test_training_ends_when_nothing_becomes_better(patience: int, epochs: int) -> None:
    trainer, _ = fitted(VALUES, callbacks.EarlyStopping("told", patience=patience))
    assert trainer.epoch == epochs


def test_more_may_be_better_and_by_how_much() -> None:
    up = callbacks.EarlyStopping("told", patience=2, mode="max", min_delta=0.2)
    assert fitted([1.0, 1.1, 1.3, 1.4, 1.45, 9.0], up)[0].epoch == 5
    assert up.best == 1.3
    nan = callbacks.EarlyStopping("told", patience=2)
    assert fitted([float("nan"), 1.0, float("nan"), float("nan")], nan)[0].epoch == 4


def test_the_loss_of_an_epoch_is_the_mean_of_its_steps() -> None:
    watched = callbacks.EarlyStopping("loss", patience=9)
    _, records = fitted(VALUES, watched)
    losses = np.array([r.loss for r in records]).reshape(9, 2).mean(axis=1)
    assert watched.best == pytest.approx(losses.min(), rel=1e-12)
    assert watched.waited == 8 - losses.argmin()


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_a_resumed_training_counts_on(tmp_path: Path, stop: int) -> None:
    def calls(name: str) -> list[Any]:
        return [
            callbacks.EarlyStopping("told", patience=4),
            callbacks.KeepBest(tmp_path / name, "told", restore=False),
            callbacks.ReduceLROnPlateau("told", patience=1, factor=0.5, least=0.004),
            callbacks.ReduceLROnPlateau("loss", patience=3),
        ]

    whole, expected = fitted(VALUES, *calls("whole"))
    rates = [r.learning_rate for r in expected]
    assert len(set(rates)) > 2
    path = tmp_path / "c"
    fitted(VALUES, *calls("resumed"), checkpoint=path, every=1, epochs=stop)
    resumed = plain_trainer("N, 3", "mse", learning_rate=0.9).load(path)
    again = calls("resumed")
    _, rest = fitted(VALUES[stop:], *again, trainer=resumed)
    assert [r.learning_rate for r in rest] == rates[2 * stop :]
    assert resumed.steps == whole.steps
    assert again[0].waited == 4
    np.testing.assert_equal(resumed.state(), whole.state())
    for name in ("resumed", "whole"):
        assert read_checkpoint(tmp_path / name)[1]["epoch"] == 4  # 3.0 was the best


def test_a_training_that_has_been_stopped_says_so(tmp_path: Path) -> None:
    fitted(VALUES, callbacks.EarlyStopping("told", patience=2), checkpoint=tmp_path / "c")
    trainer = plain_trainer("N, 3", "mse").load(tmp_path / "c")
    with pytest.warns(ob.OnnxBackpropWarning, match="not better than 3 in 2 epochs before the checkpoint"):
        _, records = fitted([], callbacks.EarlyStopping("told", patience=2), trainer=trainer)
    assert list(records) == []
    trainer.load(tmp_path / "c")
    assert len(fitted([9.0, 9.0], callbacks.EarlyStopping("told", patience=4), trainer=trainer)[1]) == 4


def test_the_best_checkpoint_is_gone_back_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "best"
    seen: dict[int, np.ndarray] = {}

    def remember(trainer: Any, record: Record) -> None:
        seen[record.step + 1] = trainer.parameters()["s"]

    with caplog.at_level(logging.INFO, "onnx_backprop"):
        trainer, _ = fitted(VALUES[:6], callbacks.KeepBest(path, "told"), remember, epochs=6, checkpoint=tmp_path / "c")
    assert "went back to step 8, whose told is the best: 3" in caplog.text
    assert (trainer.steps, trainer.epoch) == (8, 4)
    np.testing.assert_array_equal(trainer.parameters()["s"], seen[8])
    assert read_checkpoint(tmp_path / "c")[1]["steps"] == 12
    last, _ = fitted([3.0, 2.0], callbacks.KeepBest(path, "told"), epochs=2)
    assert last.steps == 4  # it is the last that is the best
    cut, _ = fitted([3.0, 2.0], callbacks.KeepBest(path, "told"), lambda t, _: t.steps == 5)
    assert cut.steps == 4  # a step behind the best epoch is not part of it


def test_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(100.0, 10.0)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    limit = callbacks.TimeLimit(minutes=1, seconds=5)
    monkeypatch.setattr("onnx_backprop.training.callbacks.stopping.time.monotonic", lambda: next(clock))
    limit.start(callbacks.Run(plain_trainer("N, 3", "mse"), [], 1, {}))
    ended = [limit(None, Record(n, 0, 1.0, 0.1, 0.1)) for n in range(7)]
    assert ended == [None, None, None, None, None, True, True]  # behind 60 s, the next 10 would be too much
    assert limit.reason == "behind step 6: the 65 seconds are over"


def test_the_search_for_a_rate_leaves_no_trace(tmp_path: Path) -> None:
    """Dropout, running statistics, moments, means, accumulation: the steps afterwards are those without a search."""
    plain, searched = ob.Trainer(training(), seed=4), ob.Trainer(training(), seed=4)
    for trainer in (plain, searched):
        trainer.fit(batches(), 1, progress=False)
    before = searched.state()
    search = searched.find_learning_rate(batches(), 1e-5, 10.0, steps=30, plot=tmp_path / "rates.png")
    np.testing.assert_equal(searched.state(), before)
    assert (searched.steps, searched.losses.points) == (plain.steps, plain.losses.points)
    assert (searched.learning_rate, searched.epoch, searched.batch, searched.read) == (1e-3, 1, 0, plain.read)
    one, other = (trainer.fit(batches(), 2, progress=False) for trainer in (plain, searched))
    assert [r.loss for r in one] == [r.loss for r in other]
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
    assert "learning rate (logarithmic)" in search._repr_html_()
    ratios = [b[0] / a[0] for a, b in itertools.pairwise(search.points)]
    np.testing.assert_allclose(ratios, (10 / 1e-5) ** (1 / 29))
    assert 1e-5 < search.suggestion < 10


def test_the_suggested_rate_is_where_the_loss_falls() -> None:
    """Of (s · x - t)², x = 1: rates that move s to t in some steps are between those that do nothing and too large."""
    x = np.ones((4, 3), np.float32)
    trainer = plain_trainer("N, 3", "mse")
    search = trainer.find_learning_rate([{"x": x, "target": 3 * x}], 1e-6, 100.0, steps=60)
    assert 1e-2 < search.suggestion < 1.0
    assert search.points[-1][0] < 100.0  # it ended where the loss grew
    with pytest.raises(ob.InvalidArgumentError, match="Begin lower"):
        trainer.find_learning_rate([{"x": x, "target": 3 * x}], 1e30, 1e37)
    for arguments, message in (((1.0, 0.1), "expected 0 < lowest < highest"), ((0.0, 0.1), "expected 0 < lowest")):
        with pytest.raises(ob.InvalidArgumentError, match=message):
            trainer.find_learning_rate([{"x": x, "target": x}], *arguments)
    with pytest.raises(ob.InvalidArgumentError, match="steps: expected 5 or more, got 4"):
        trainer.find_learning_rate([{"x": x, "target": x}], steps=4)
    with pytest.raises(ob.InvalidArgumentError, match="the loader is empty"):
        trainer.find_learning_rate([])
    assert trainer.steps == 0


@pytest.mark.parametrize("precision", [None, "fp16"])
def test_histograms_are_of_weights_and_their_gradients(precision: str | None) -> None:
    """A step of SGD with the rate 1 subtracts the gradient."""
    from tests.support.training_models import classifier

    graph = ob.training_graph(classifier(), loss="softmax_cross_entropy", optimizer=SGD(), precision=precision)
    trainer = ob.Trainer(graph, learning_rate=1.0, kernels="onnx")
    batch = data(20)
    histograms = callbacks.Histograms(batch, every=1, bins=16)
    assert histograms.start(callbacks.Run(trainer, [], 1, {})) is None
    before, gradients = trainer.parameters(), histograms.gradients(trainer)
    assert histograms(trainer, Record(7, 0, 1.0, 0.1, 0.1)) is None
    trainer.step(batch)
    assert gradients.keys() == before.keys()
    for name, value in trainer.parameters().items():
        # a difference of float32 weights
        np.testing.assert_allclose(gradients[name], before[name] - value, atol=2e-7, err_msg=name)
        course = histograms.found[f"weights/{name}"]
        counts, edges = np.histogram(before[name].astype(np.float64), 16)
        np.testing.assert_array_equal(course.counts[0], counts)
        np.testing.assert_array_equal(course.edges[0], edges)
        assert course.steps == [7]
        assert course.quantiles[0][2] == pytest.approx(np.median(before[name]))
        assert histograms.found[f"gradients/{name}"].counts[0].sum() == value.size
    assert histograms._repr_html_().count("<svg") == 2 * len(before)


@pytest.mark.parametrize("resume", [False, True])
def test_the_mean_of_the_last_weights_with_statistics_of_its_own(tmp_path: Path, resume: bool) -> None:
    calls: Any = lambda: [callbacks.StochasticWeightAveraging(start=2)]  # noqa: E731
    epochs: dict[int, dict[str, np.ndarray]] = {}

    def remember(trainer: Any, record: Record) -> None:
        if not trainer.batch:
            epochs[record.epoch] = trainer.parameters()

    trainer = ob.Trainer(training(AdamW()), seed=1, learning_rate=0.02)
    loader = batches()
    trainer.fit(loader, 3 if resume else 5, callbacks=[*calls(), remember], checkpoint=tmp_path / "c", progress=False)
    if resume:
        trainer = ob.Trainer(training(AdamW())).load(tmp_path / "c")
        trainer.fit(loader, 5, callbacks=[*calls(), remember], checkpoint=tmp_path / "c", progress=False)
    got = trainer.state()
    for name, value in trainer.parameters().items():
        mean = np.mean([epochs[n][name].astype(np.float64) for n in (2, 3, 4)], axis=0)
        np.testing.assert_allclose(value, mean, rtol=1e-6, atol=1e-8, err_msg=name)
    rows, means, variances = 0, np.zeros(16), np.zeros(16)
    for batch in loader:
        hidden = batch["x"].astype(np.float64) @ got["w1"] + got["b1"]
        rows += len(hidden)
        means += len(hidden) * hidden.mean(axis=0)
        variances += len(hidden) * hidden.var(axis=0)
    np.testing.assert_allclose(got["mean"], means / rows, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(got["variance"], variances / rows, rtol=1e-4)
    assert trainer.steps == 45
    kept = ob.Trainer(training(AdamW())).load(tmp_path / "c")  # goes on without the mean
    np.testing.assert_array_equal(kept.parameters()["w1"], epochs[4]["w1"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: callbacks.EarlyStopping(patience=0), "EarlyStopping: patience: expected a whole number of 1 or more"),
        (lambda: callbacks.EarlyStopping(mode="least"), "mode: expected 'min', 'max' or None, got 'least'"),
        (lambda: callbacks.KeepBest("none/best"), "there is no folder"),
        (lambda: callbacks.ReduceLROnPlateau(factor=1.0), "factor: expected less than 1, got 1.0"),
        (lambda: callbacks.TimeLimit(), "TimeLimit: expected seconds, minutes or hours"),
        (lambda: callbacks.StochasticWeightAveraging(1.5), "start: expected an epoch, or a share"),
        (lambda: callbacks.Histograms(every=0), "every: expected a whole number of 1 or more"),
        (lambda: callbacks.Histograms(to=print), "to: expected a tracker"),
    ],
)
def test_arguments(make: Any, message: str) -> None:
    with pytest.raises(ob.InvalidArgumentError, match=message):
        make()


def test_what_does_not_go_together(tmp_path: Path) -> None:
    for call, options, message in (
        (
            callbacks.EarlyStopping("tolt"),
            {},
            "expected one of loss, evaluation, told, got 'tolt'. Did you mean 'told'",
        ),
        (callbacks.EarlyStopping(), {"evaluation": None, "metrics": None}, "Give fit evaluation="),
        (callbacks.EarlyStopping("told"), {"metrics": scripted([1.0], None)}, "Say 'min' or 'max'"),
        (callbacks.ReduceLROnPlateau(), {"schedule": ob.schedules.Constant(0.1)}, "goes without a schedule"),
        (callbacks.StochasticWeightAveraging(9), {}, "start: expected one of the 9 epochs"),
        (
            callbacks.EarlyStopping("each"),
            {"metrics": {"each": ob.metrics.Function(function=lambda *_: np.ones(3), better="lower")}},
            "expected a number, 'each' is an array",
        ),
        (None, {"log": [3]}, "log: expected a file, a function, or a list of these, got 3"),
    ):
        with pytest.raises(ob.InvalidArgumentError, match=message):
            fitted([1.0] * 9, *([call] if call else []), **options)
    fitted([2.0], callbacks.EarlyStopping("told"), epochs=1, checkpoint=tmp_path / "c")
    tensors, about = read_checkpoint(tmp_path / "c")
    from onnx_backprop.training.checkpoint import write_checkpoint

    for wrong, message in (
        ([], "expected their states by name"),
        ({"EarlyStopping": {}}, "the state of EarlyStopping is"),
    ):
        write_checkpoint(tmp_path / "c", tensors, about | {"callbacks": wrong})
        with pytest.raises(ob.CheckpointError, match=message):
            fitted([1.0], callbacks.EarlyStopping("told"), trainer=plain_trainer("N, 3", "mse").load(tmp_path / "c"))
