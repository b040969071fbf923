"""Trackers, read back by what they are for; each is skipped where it is not installed."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import onnx_backprop as ob
from tests.support.training_models import batches as some
from tests.support.training_models import data, fitted


def trained(*logs: Any, **options: Any) -> Any:
    asked = {"accuracy": "accuracy", "each": ob.metrics.IoU(average=None)}
    return fitted(2, evaluation=some(), metrics=asked, log=list(logs), **options)[1]


def test_tensorboard_shows_every_number_and_histogram(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed here")
    accumulator: Any = import_module("tensorboard.backend.event_processing.event_accumulator")
    board = ob.callbacks.TensorBoard(tmp_path / "runs")
    histograms = ob.callbacks.Histograms(data(10), every=9, to=board)
    logged: list[dict[str, Any]] = []
    records = trained(board, tmp_path / "log.csv", logged.append, callbacks=[histograms])
    read = accumulator.EventAccumulator(str(tmp_path / "runs"), {"scalars": 0, "histograms": 0})
    read.Reload()
    scalars = {name: [(event.step, event.value) for event in read.Scalars(name)] for name in read.Tags()["scalars"]}
    assert scalars.keys() >= {"loss", "learning_rate", "evaluation", "accuracy", "each/0", "each/2"}
    assert [step for step, _ in scalars["loss"]] == list(range(18))
    assert [value for _, value in scalars["loss"]] == pytest.approx([r.loss for r in records])
    assert scalars["each/2"] == [(r.step, pytest.approx(r.metrics["each"][2])) for r in records if r.metrics]
    counted = read.Histograms("gradients/w1")
    assert [event.step for event in counted] == [8, 17]
    assert counted[0].histogram_value.num == 4 * 16
    assert len(logged) == 18
    assert (tmp_path / "log.csv").is_file()


def test_mlflow_keeps_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed here")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # which MLflow 3 asks for
    tracking: Any = import_module("mlflow.tracking")
    uri = (tmp_path / "runs").as_uri()
    tracker = ob.callbacks.MLflow("digits", run="first", uri=uri, parameters={"optimizer": "adamw"})
    records = trained(tracker)
    client = tracking.MlflowClient(tracking_uri=uri)
    run = client.get_run(tracker.run_id)
    assert (run.data.params, run.info.status, run.info.run_name) == ({"optimizer": "adamw"}, "FINISHED", "first")
    history = client.get_metric_history(tracker.run_id, "loss")
    assert [(m.step, m.value) for m in sorted(history, key=lambda m: m.step)] == [(r.step, r.loss) for r in records]
    assert run.data.metrics["accuracy"] == records[-1].metrics["accuracy"]
    assert client.get_experiment_by_name("digits") is not None


def test_wandb_gets_numbers_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for its module: the package speaks to a server."""
    logged: list[tuple[int, dict[str, float]]] = []
    ended: list[bool] = []
    run = SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: ended.append(True))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **given: run if given else None))
    records = trained(ob.callbacks.WandB(project="digits"))
    assert [step for step, _ in logged] == list(range(18))
    assert logged[-1][1]["each/1"] == records[-1].metrics["each"][1]
    assert ended == [True]


def test_wandb_itself_without_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed here")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker = ob.callbacks.WandB(project="digits", mode="offline", dir=str(tmp_path))
    histograms = ob.callbacks.Histograms(data(10), every=9, to=tracker)
    records = trained(tracker, callbacks=[histograms])
    (path,) = tmp_path.rglob("run-*.wandb")
    stored = path.read_bytes()  # of records in blocks, whose borders may cut a number
    present = [json.dumps(r.loss).encode() in stored for r in records]
    assert sum(present) >= len(records) - 2
    assert all(name in stored for name in (b"each/2", b"accuracy", b"gradients/w1", b'"histogram"'))


@pytest.mark.parametrize("name", ["TensorBoard", "MLflow", "WandB"])
def test_without_its_package_a_tracker_says_what_to_install(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    package = name.lower()
    for module in [m for m in sys.modules if m.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ob.KernelError, match=f"callbacks.{name} needs {package}.*pip install {package}"):
        getattr(ob.callbacks, name)(*(["folder"] if name == "TensorBoard" else []))
