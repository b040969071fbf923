"""Files of a training: checkpoints, logs, plots, an export."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import safetensors.numpy
from onnx import numpy_helper, parser

import onnx_backprop as ob
import onnx_backprop.training.trainer
from onnx_backprop.converters.training.optimizers import SGD
from onnx_backprop.training.checkpoint import read_checkpoint, write_checkpoint
from onnx_backprop.training.reports.history import Records, read_log
from onnx_backprop.training.schedules import Cosine, Step, Warmup
from tests.support.training_models import batches, data, fitted, training

SCHEDULE = Warmup(Cosine(0.05, steps=12), steps=3)


@pytest.mark.filterwarnings("ignore:no update was made")
@pytest.mark.parametrize("stop", [1, 4, 9, 13, 26])
def test_resumed_training_is_the_same_bit_for_bit(tmp_path: Path, stop: int) -> None:
    whole, expected = fitted(3, schedule=SCHEDULE)
    fitted(3, schedule=SCHEDULE, checkpoint=tmp_path / "c", callbacks=[lambda t, _: t.steps == stop])
    resumed = ob.Trainer(training()).load(tmp_path / "c")
    assert resumed.steps == stop
    _, rest = fitted(3, resumed)
    assert [(r.step, r.epoch, r.loss, r.learning_rate) for r in rest] == [
        (r.step, r.epoch, r.loss, r.learning_rate) for r in expected[stop:]
    ]
    for name, value in whole.state().items():
        np.testing.assert_array_equal(resumed.state()[name], value, err_msg=name)


def test_checkpoints_are_safetensors(tmp_path: Path) -> None:
    trainer, _ = fitted(1)
    trainer.schedule = Step(0.1, every=2)
    trainer.save(tmp_path / "state.safetensors")
    arrays = safetensors.numpy.load_file(tmp_path / "state.safetensors")
    for name, value in trainer.state().items():
        np.testing.assert_array_equal(arrays[name], value, strict=True)
    with safetensors.safe_open(tmp_path / "state.safetensors", "np") as file:
        about = json.loads(file.metadata()["onnx_backprop"])
    assert (about["steps"], about["epoch"], about["batch"]) == (9, 1, 0)
    assert about["schedule"] == {"name": "Step", "rate": 0.1, "every": 2, "factor": 0.1}
    assert about["settings"]["optimizer"]["name"] == "AdamW"
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


def test_files_that_are_no_checkpoint_of_this_graph(tmp_path: Path) -> None:
    trainer = ob.Trainer(training())
    with pytest.raises(ob.InvalidArgumentError, match="cannot read the checkpoint"):
        trainer.load(tmp_path / "missing")
    np.savez(tmp_path / "arrays.npz", **data())
    with pytest.raises(ob.CheckpointError, match="arrays.npz is no checkpoint of onnx-backprop: it is no safetensors"):
        trainer.load(tmp_path / "arrays.npz")
    (tmp_path / "text").write_text("no tensors at all")
    with pytest.raises(ob.InvalidArgumentError, match="is no checkpoint of onnx-backprop"):
        trainer.load(tmp_path / "text")
    ob.Trainer(training(SGD())).save(tmp_path / "sgd")
    with pytest.raises(
        ob.InvalidArgumentError, match=r"another training graph: 'micro_step' is missing in it|'w1.mean'"
    ):
        trainer.load(tmp_path / "sgd")
    trainer.save(tmp_path / "adamw")
    content = (tmp_path / "adamw").read_bytes()
    (tmp_path / "cut").write_bytes(content[: len(content) // 2])
    with pytest.raises(ob.InvalidArgumentError, match="is no checkpoint"):
        trainer.load(tmp_path / "cut")
    with pytest.raises(ob.InvalidArgumentError, match="cannot write the checkpoint"):
        trainer.save(tmp_path / "no folder" / "c")


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl"])
def test_metrics_stand_in_records_and_logs(tmp_path: Path, name: str) -> None:
    """Each has a column; a log that is resumed keeps those of before."""
    log, checkpoint = tmp_path / name, tmp_path / "c"
    asked = {"accuracy": "accuracy", "each": ob.metrics.IoU(average=None)}
    trainer, records = fitted(1, log=log, checkpoint=checkpoint, evaluation=batches(), metrics=asked)
    measured = trainer.evaluate(batches(), metrics=asked)
    assert {r.step for r in records if r.metrics} == {8}
    assert records[-1].metrics == {"accuracy": measured.metrics["accuracy"], "each": measured.metrics["each"].tolist()}
    assert read_log(log) == records
    _, more = fitted(2, ob.Trainer(training()).load(checkpoint), log=log, evaluation=batches(), metrics="f1")
    assert read_log(log) == [*records, *more]
    assert list(more[-1].metrics) == ["f1"]
    for shown in (records, more):
        assert isinstance(shown, Records)
        assert "evaluation" in shown._repr_html_()
    with pytest.raises(ob.InvalidArgumentError, match="metrics: goes with evaluation"):
        fitted(1, metrics="accuracy")


def test_a_log_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text(
        "step,epoch,loss,learning_rate,seconds,evaluation,skipped,perplexity\n0,0,1.5,0.1,0.2,,,\n1,0,1.0,0.1,0.2,2.0,,7.5\n"
    )
    one, other = read_log(tmp_path / "l.csv")
    assert (one.evaluation, one.perplexity, one.metrics) == (None, None, {})
    assert (other.evaluation, other.perplexity, other.skipped) == (2.0, 7.5, None)


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl"])
def test_log_and_plot(tmp_path: Path, name: str) -> None:
    log = tmp_path / name
    _, records = fitted(2, schedule=SCHEDULE, log=log, evaluation=batches(), plot=tmp_path / "loss.png")
    assert read_log(log) == records
    assert [r.step for r in records] == list(range(18))
    assert [r.step for r in records if r.evaluation is not None] == [8, 17]
    assert [r.learning_rate for r in records] == [SCHEDULE(t // 2) for t in range(18)]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_function_as_log() -> None:
    """It gets what a line of a .jsonl has, as loggers take it."""
    logs: list[dict[str, Any]] = []
    _, records = fitted(2, log=logs.append, evaluation=batches())
    plain = [{k: v for k, v in asdict(r).items() if v is not None and k != "metrics"} for r in records]
    assert [{**values} for values in logs] == plain
    assert {name: "evaluation" in logs[n] for n, name in ((7, "inside"), (8, "end"))} == {"inside": False, "end": True}
    assert all(isinstance(value, int | float) for value in logs[-1].values())


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"plot": "loss.png"}, "the plot needs matplotlib"),
        ({"plot": "loss.xyz"}, r"plot: expected a name that ends in .*png, .*loss\.xyz"),
        ({"plot": "none/loss.png"}, "cannot write .*there is no folder"),
        ({"plot": ""}, "it is a folder"),
        ({"checkpoint": "none/c"}, "cannot write .*there is no folder"),
        ({"checkpoint": "n" * 300}, "File name too long"),
        ({"log": "none/log.csv"}, "cannot write .*there is no folder"),
        ({"log": "n" * 300 + ".csv"}, "File name too long"),
        ({"log": "a\0b.csv"}, "cannot write 'a.x00b.csv': .*embedded null"),
    ],
)
def test_files_that_cannot_be_written_are_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if "matplotlib" in message:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    trainer = ob.Trainer(training())
    with pytest.raises((ob.InvalidArgumentError, ob.KernelError), match=message):
        fitted(1, trainer, **files)
    assert trainer.steps == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl"])
def test_a_resumed_log_has_every_step_once(tmp_path: Path, name: str) -> None:
    log, checkpoint = tmp_path / name, tmp_path / "c"
    fitted(2, checkpoint=checkpoint, every=4, log=log, callbacks=[lambda t, _: t.steps == 8])
    trainer = ob.Trainer(training())
    trainer.load(checkpoint)
    for extra in (8, 9):  # steps behind the checkpoint, which a killed process had logged, and half a line
        with log.open("a") as file:
            file.write(f"{extra},0,9.0,0.1,0.1,,\n" if name.endswith("csv") else "")
    with log.open("a") as file:
        file.write('{"step": 8, "epo' if name.endswith("jsonl") else "8,0,0.")
    fitted(2, trainer, log=log)
    assert [r.step for r in read_log(log)] == list(range(18))


@pytest.mark.parametrize("ema", [False, True])
def test_export_is_the_plain_model_with_the_trained_weights(tmp_path: Path, ema: bool) -> None:
    trainer, _ = fitted(3)
    trainer.export(tmp_path / "trained.onnx", ema=ema)
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    assert [v.name for v in session.get_inputs()] == ["x"]
    assert [v.name for v in session.get_outputs()] == ["y"]
    y = np.asarray(session.run(None, {"x": data()["x"]})[0])
    np.testing.assert_allclose(y, trainer.predict(data(), ema=ema)["y"], rtol=1e-5, atol=1e-6)
    assert not np.allclose(y, trainer.predict(data(), ema=not ema)["y"])


def test_a_plot_that_fails_leaves_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.warns(ob.OnnxBackpropWarning, match=r"cannot write the plot .*loss\.png: .*No space left"):
        _, records = fitted(1, plot=tmp_path / "loss.png")
    assert records
    assert not [*tmp_path.iterdir()]


def _product(activation: str = "Tanh", loss: str = "mse", optimizer: Any = "adam") -> ob.Trainer:
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]>
        g (float[N, 2] x) => (float[N, 2] y) {{ a = MatMul (x, w) y = {activation} (a) }}""")
    model.graph.initializer.append(numpy_helper.from_array(np.eye(2, dtype=np.float32), "w"))
    return ob.Trainer(ob.training_graph(model, loss=loss, optimizer=optimizer))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"activation": "Relu"}, "it has 0 Relu, the graph 1; it has 1 Tanh, the graph 0"),
        ({"loss": "l1"}, "its loss is mse, the graph's l1"),
        ({"optimizer": "adamw"}, "its optimizer is Adam, the graph's AdamW"),
    ],
)
def test_a_checkpoint_of_another_graph_whose_tensors_fit(tmp_path: Path, other: Any, words: str) -> None:
    _product().save(tmp_path / "c")
    with pytest.warns(ob.OnnxBackpropWarning, match=f"c is of another training graph: {words}. The training goes on"):
        _product(**other).load(tmp_path / "c")


def test_settings_that_may_differ_from_a_checkpoint(tmp_path: Path) -> None:
    trainer = _product()
    trainer.save(tmp_path / "c")
    _product(optimizer=ob.optimizers.Adam(beta1=0.1)).load(tmp_path / "c")
    tensors, about = read_checkpoint(tmp_path / "c")
    del about["operators"], about["settings"]  # as an earlier version
    write_checkpoint(tmp_path / "earlier", tensors, about)
    _product("Relu", "l1").load(tmp_path / "earlier")
