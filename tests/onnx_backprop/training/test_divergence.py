"""A diverged training is written nowhere, the last good checkpoint stays; learning rates that are none."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.__main__ import main
from onnx_backprop.artifacts import CheckpointState, LossType, Module, Optimizer, OptimType, generate_artifacts
from onnx_backprop.converters.training.optimizers import SGD
from onnx_backprop.training.checkpoint import read_checkpoint, write_checkpoint
from onnx_backprop.training.schedules import Constant

# With w = 0 and these rates the first step gives w = -1.5e38, the second an overflow; both losses are finite.
RATE = 3e38
BATCH = {"x": np.ones((1, 1), np.float32), "target": np.full((1, 1), -3.4e38, np.float32)}
NAN = BATCH | {"x": np.full((1, 1), np.nan, np.float32)}
FAR = {"x": np.full((1, 1), 2, np.float32), "target": np.full((1, 1), 3e38, np.float32)}  # with w = -1.5e38
MODEL = """
    <ir_version: 10, opset_import: ["": 18]> line (float[N, 1] x) => (float[N, 1] y) <float[1] w = {0.0}>
    { y = Mul(x, w) }
"""


def line() -> ModelProto:
    return parser.parse_model(MODEL)


def trainer(optimizer: SGD | None = None) -> ob.Trainer:
    return ob.Trainer(ob.training_graph(line(), loss="l1", optimizer=optimizer or SGD()), learning_rate=RATE / 2)


def faster(it: ob.Trainer, _: object) -> None:
    it.learning_rate = RATE


@pytest.mark.parametrize("every", [0, 1])
def test_the_last_good_checkpoint_stays(tmp_path: Path, every: int) -> None:
    path, it = tmp_path / "c", trainer()
    message = (
        f"'w' holds -inf at (0,) after step 2, nothing is written. The checkpoint {path} of step 1 is still good. Lo"
    )
    with pytest.raises(FloatingPointError, match=re.escape(message)):
        it.fit([BATCH], 2, checkpoint=path, every=every, callbacks=[faster], progress=False)
    assert ob.Trainer(it.graph).load(path).parameters() == {"w": np.float32(-1.5e38)}
    with pytest.raises(FloatingPointError, match=re.escape(message)):
        it.export(tmp_path / "out.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["c"]


def test_a_loss_that_is_not_finite_names_it_too(tmp_path: Path) -> None:
    it = trainer()
    it.step(BATCH)
    it.save(tmp_path / "c")
    with pytest.raises(FloatingPointError, match="the loss is inf in step 2 .*c of step 1 is still good"):
        it.fit([FAR], 1, progress=False)
    with pytest.raises(FloatingPointError, match="the loss is inf in step 2.*Lower the learning rate"):
        it.step(FAR)
    assert (it.steps, it.parameters()) == (1, {"w": np.float32(-1.5e38)})
    it.save(tmp_path / "c")


def test_a_loss_that_is_not_finite_before_any_update() -> None:
    """No learning rate is to blame for it: 0/0 of the model itself."""
    model = parser.parse_model(MODEL.replace("y = Mul(x, w)", "a = Mul(x, w) y = Div(a, w)"))
    for accumulate in (1, 2):
        graph = ob.training_graph(model, loss="l1", optimizer=SGD(accumulate=accumulate), trainable=["w"])
        it = ob.Trainer(graph, learning_rate=0.1)
        with pytest.raises(FloatingPointError, match="the loss is nan in step 1. No step has changed a weight yet"):
            it.step({"x": BATCH["x"], "target": BATCH["x"]})


def test_weights_that_no_loss_shows_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    model = parser.parse_model(MODEL.replace("y = Mul(x, w)", "a = Mul(x, w) y = Relu(a)").replace("{0.0}", "{1e38}"))
    graph = ob.training_graph(model, loss="l1", optimizer="sgd", trainable=["w"])
    it = ob.Trainer(graph, learning_rate=RATE)
    monkeypatch.setattr("onnx_backprop.training.trainer.LOOKED_AT", 5)
    over = {"x": np.full((1, 1), 2, np.float32), "target": np.zeros((1, 1), np.float32)}
    losses = [it.step(over) for _ in range(4)]  # with w = -inf from the first on, which Relu hides
    assert all(map(math.isfinite, losses))
    with pytest.raises(FloatingPointError, match=r"'w' holds -inf at \(0,\) after step 5\. Lower the learning rate"):
        it.step(over)
    it.set_state({"w": [-np.inf]})  # on purpose
    for _ in range(6):
        it.step(over)


def test_running_means(tmp_path: Path) -> None:
    it = trainer(SGD(ema=0.5))
    it.step(BATCH)
    it.export(tmp_path / "good.onnx", ema=True)
    it.learning_rate = RATE
    it.step(BATCH)
    with pytest.raises(FloatingPointError, match="'w' holds -inf"):
        it.export(tmp_path / "out.onnx", ema=True)
    assert [file.name for file in tmp_path.iterdir()] == ["good.onnx"]


def test_what_was_not_finite_at_the_start_may_stay_so(tmp_path: Path) -> None:
    model = parser.parse_model(
        MODEL.replace("w = {0.0}", "w = {0.0}, float[2] m = {0.0, 0.0}")
        .replace(
            "y = Mul(x, w)",
            """
        a = Mul(x, w) b = Max(a, m) y = ReduceMax<keepdims=1, axes=[1]>(b)
    """,
        )
        .replace('"": 18', '"": 17')
    )
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.array([-np.inf, -9], np.float32), "m"))
    graph = ob.training_graph(model, loss="l1", optimizer=SGD(), trainable=["w", "m"])
    it = ob.Trainer(graph, learning_rate=RATE / 2)
    it.step(x=-BATCH["x"], target=BATCH["target"])
    it.save(tmp_path / "c")
    it.export(tmp_path / "out.onnx")
    again = ob.Trainer(graph, learning_rate=RATE).load(tmp_path / "c")
    again.save(tmp_path / "c")
    again.set_state({"w": [np.inf]})  # on purpose
    again.save(tmp_path / "c")
    again.set_state({"w": [0], "m": [-np.inf, -9]})
    again.learning_rate = RATE
    for _ in range(2):
        again.step(x=BATCH["x"], target=-BATCH["target"])
    with pytest.raises(FloatingPointError, match="'w' holds inf"):
        again.save(tmp_path / "c")


@pytest.mark.parametrize("rate", [None, math.nan, math.inf, -1e-3, "0.1", 1e39, 10**400, [0.1, 0.2]])
def test_learning_rates_that_are_none(rate: Any) -> None:
    message = "learning_rate: expected a finite number of 0 or more in float32, got"
    with pytest.raises(ob.InvalidArgumentError, match=message):
        ob.Trainer(trainer().graph, learning_rate=rate)
    it = trainer()
    with pytest.raises(ob.InvalidArgumentError, match=message):
        it.learning_rate = rate
    before = it.state()
    with pytest.raises(ob.InvalidArgumentError, match=message):
        it.fit([BATCH], 1, schedule=lambda _: rate, progress=False)
    assert (it.learning_rate, it.steps, it.state()) == (RATE / 2, 0, before)
    it.learning_rate = np.float32(0.5)  # pyright: ignore[reportAttributeAccessIssue]
    assert it.learning_rate == 0.5


def test_a_checkpoint_with_a_rate_that_is_none(tmp_path: Path) -> None:
    it = trainer()
    it.save(tmp_path / "c")
    tensors, about = read_checkpoint(tmp_path / "c")
    write_checkpoint(
        tmp_path / "c", tensors | {"w": np.ones(1, np.float32)}, about | {"learning_rate": -1.0, "steps": 3}
    )
    with pytest.raises(ob.InvalidArgumentError, match="learning_rate: expected a finite number of 0 or more"):
        it.load(tmp_path / "c")
    assert (it.learning_rate, it.steps, it.parameters()) == (RATE / 2, 0, {"w": np.float32(0)})


def test_a_schedule_needs_a_rate() -> None:
    none: Any = None
    with pytest.raises(ob.InvalidArgumentError, match="Constant: rate: expected 0 or more, got None"):
        Constant(none)


@pytest.mark.parametrize("every", ["0", "1"])
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], every: str) -> None:
    onnx.save(line(), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", **BATCH)
    out, checkpoint = tmp_path / "out.onnx", tmp_path / "out.onnx.checkpoint.safetensors"
    given = ["train", str(tmp_path / "model.onnx"), "--data", str(tmp_path / "data.npz"), "-o", str(out), "--quiet"]
    given += ["--loss", "l1", "--optimizer", "sgd", "--warmup", "2", "--every", every]
    assert main([*given, "--epochs", "2", "--learning-rate", str(RATE)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("onnx-backprop: error: the training has failed: 'w' holds -inf at (0,) after step 2, nothing")
    assert f"The checkpoint {checkpoint} of step 1 is still good" in err
    assert not out.exists()
    assert ob.Trainer(trainer().graph).load(checkpoint).parameters() == {"w": np.float32(-1.5e38)}
    assert main([*given, "--learning-rate", "nan", "--force"]) == 2
    assert "expected" in capsys.readouterr().err


def test_artifacts(tmp_path: Path) -> None:
    generate_artifacts(line(), loss=LossType.L1Loss, optimizer=OptimType.SGD, artifact_directory=tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    rate: Any
    for rate in (math.nan, None, -1.0):
        with pytest.raises(ob.InvalidArgumentError, match="learning_rate: expected a finite number"):
            optimizer.set_learning_rate(rate)
    for rate in (RATE / 2, RATE):
        optimizer.set_learning_rate(rate)
        module(*BATCH.values())
        optimizer.step()
        module.lazy_reset_grad()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(FloatingPointError, match="'parameter/w' holds -inf at .*checkpoint is still good"):
        CheckpointState.save_checkpoint(state, tmp_path / "checkpoint")
    with pytest.raises(FloatingPointError, match="'w' holds -inf at"):
        module.export_model_for_inferencing(tmp_path / "out.onnx", ["y"])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    state.parameters["w"].data = np.array([-np.inf], np.float32)  # on purpose
    CheckpointState.save_checkpoint(state, tmp_path / "checkpoint")
