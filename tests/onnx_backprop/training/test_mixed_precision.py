"""Trainings in mixed precision: skipped steps, the scale of the loss, checkpoints, the command, and the loss reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, numpy_helper, parser, save_model

import onnx_backprop as ob
from models import unet_resize
from onnx_backprop.command.main import main
from onnx_backprop.converters.training.names import GOOD_STEPS, LOSS_SCALE, SKIPPED_STEPS
from onnx_backprop.converters.training.optimizers import SGD, AdamW
from onnx_backprop.converters.training.update.loss_scale import INITIAL, INTERVAL, LARGEST
from onnx_backprop.training.reports.history import read_log
from tests.support.training_models import classifier, data, training

ROUTES = ["native", None]
SCALING = {LOSS_SCALE, GOOD_STEPS, SKIPPED_STEPS}
FORWARD = {"mean", "variance", "random_state"}  # go on in a skipped step
OPTIMIZERS = {
    "AdamW": AdamW(weight_decay=0.1),
    "everything": AdamW(accumulate=2, ema=0.9, clip_norm=1.0),
    "momentum": SGD(momentum=0.9, clip_value=0.5, ema=0.9),
}


def graph(optimizer: Any, precision: str | None = "fp16") -> ob.TrainingGraph:
    return ob.training_graph(
        classifier(), loss="softmax_cross_entropy", optimizer=optimizer, training_mode=True, precision=precision
    )


def product(rest: str = "y = Identity(h)", **more: np.ndarray) -> ModelProto:
    """H = x·w with w = 0, and the rest."""
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        g (float[N,2] x) => (float[N,2] y) {{ h = MatMul(x, w) {rest} }}""")
    for name, value in {"w": np.zeros((2, 2)), **more}.items():
        model.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
    return model


def trained(trainer: ob.Trainer, steps: int) -> list[float]:
    batch = data()
    return [trainer.step(x=batch["x"], labels=batch["labels"]) for _ in range(steps)]


@pytest.mark.parametrize("kernels", ROUTES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_changes_nothing_but_the_scale(name: str, kernels: str | None) -> None:
    trainer = ob.Trainer(graph(OPTIMIZERS[name]), learning_rate=0.01, kernels=kernels)
    trained(trainer, 3)
    scale = np.float32(2.0**120)
    trainer.set_state({LOSS_SCALE: scale})
    before = trainer.state()
    assert np.isfinite(trained(trainer, 1))[0]
    after = trainer.state()
    changed = {n for n, value in after.items() if value.tobytes() != before[n].tobytes()}
    assert changed == SCALING | FORWARD
    assert (trainer.loss_scale, trainer.skipped_steps, after[GOOD_STEPS]) == (scale / 2, 1, 0)
    assert (trainer.steps, trainer.updates) == (4, 3 // OPTIMIZERS[name].accumulate)
    trainer.set_state({LOSS_SCALE: np.float32(INITIAL)})
    trained(trainer, 2)
    assert trainer.skipped_steps == 1
    assert not np.array_equal(trainer.state()["w1"], before["w1"])


def test_a_fit_of_skipped_steps_says_that_it_has_changed_nothing() -> None:
    trainer = ob.Trainer(graph(SGD()), learning_rate=0.01)
    trainer.set_state({LOSS_SCALE: np.float32(2.0**120)})
    with pytest.warns(ob.OnnxBackpropWarning, match="no update was made: steps skipped for gradients .*: 1"):
        trainer.fit([data()], 1, progress=False)


def test_updates_in_mixed_precision_still_lie_in_memory_once() -> None:
    for precision in ("bf16", "fp16"):
        trainer = ob.Trainer(graph(AdamW(), precision))
        state = trainer.state().keys() - {*SCALING, *FORWARD, "optimizer_step"}
        assert trainer._buffers.in_place == state


def test_the_file_alone_does_what_the_trainer_does() -> None:
    mixed = graph(AdamW())
    trainer = ob.Trainer(mixed, learning_rate=0.01, kernels=None)
    trainer.set_state({LOSS_SCALE: np.float32(2.0**120)})
    session = onnxruntime.InferenceSession(mixed.model.SerializeToString(), providers=["CPUExecutionProvider"])
    state, batch = trainer.state(), data()
    for _ in range(2):
        feeds = {**state, "x": batch["x"], "labels": batch["labels"], "learning_rate": np.array(0.01, np.float32)}
        copies = {name: np.array(value) for name, value in feeds.items()}
        state = dict(zip(state, session.run([mixed.updates[name] for name in state], copies), strict=True))
    trained(trainer, 2)
    for name, value in trainer.state().items():
        np.testing.assert_array_equal(state[name], value, err_msg=name)


def test_the_scale_doubles_after_enough_good_steps_and_has_limits() -> None:
    trainer = ob.Trainer(graph(SGD()), learning_rate=0.01)
    trainer.set_state({GOOD_STEPS: np.int64(INTERVAL - 2)})
    trained(trainer, 1)
    assert (trainer.loss_scale, trainer.state()[GOOD_STEPS]) == (INITIAL, INTERVAL - 1)
    trained(trainer, 1)
    assert (trainer.loss_scale, trainer.state()[GOOD_STEPS]) == (2 * INITIAL, 0)
    small = ob.training_graph(
        product(), loss=lambda op, y: op.Mul(op.ReduceMean(y["y"], keepdims=0), 1e-6), optimizer="sgd", precision="fp16"
    )
    trainer = ob.Trainer(small)
    trainer.set_state({GOOD_STEPS: np.int64(INTERVAL - 1), LOSS_SCALE: np.float32(LARGEST)})
    trainer.step(x=np.ones((3, 2), np.float32))
    assert (trainer.loss_scale, trainer.skipped_steps, trainer.state()[GOOD_STEPS]) == (LARGEST, 0, 0)


def test_a_loss_that_is_not_finite_is_no_skipped_step() -> None:
    trainer = ob.Trainer(graph(SGD()))
    before, batch = trainer.state(), data()
    with pytest.raises(FloatingPointError, match="the loss is nan in step 1"):
        trainer.step(x=np.full_like(batch["x"], np.nan), labels=batch["labels"])
    after = trainer.state()
    assert all(np.array_equal(after[name], before[name]) for name in before.keys() - FORWARD)
    assert trainer.skipped_steps == 0


def test_gradients_that_no_scale_keeps_finite_end_the_training() -> None:
    model = product("r = Sqrt(h) y = Mul(r, zero)", zero=np.zeros((1, 2)))  # 0 · ∞
    mixed = ob.training_graph(model, loss="mse", optimizer="sgd", precision="fp16", trainable=["w"])
    trainer = ob.Trainer(mixed)
    x = np.ones((3, 2), np.float32)
    for _ in range(28):
        trainer.step(x=x, target=x)
    with pytest.raises(FloatingPointError, match="no scale of the loss keeps the gradients finite in step 29"):
        trainer.step(x=x, target=x)
    assert trainer.skipped_steps == 29
    assert not trainer.parameters()["w"].any()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_checkpoint_resumes_bit_for_bit(tmp_path: Path, precision: str) -> None:
    def new() -> ob.Trainer:
        return ob.Trainer(graph(OPTIMIZERS["everything"], precision), learning_rate=0.01)

    trainer = new()
    trained(trainer, 1)
    if precision == "fp16":
        trainer.set_state({LOSS_SCALE: np.float32(2.0**120), GOOD_STEPS: np.int64(5)})
    trained(trainer, 2)
    trainer.save(tmp_path / "c")
    resumed = new().load(tmp_path / "c")
    assert resumed.skipped_steps == trainer.skipped_steps == (2 if precision == "fp16" else 0)
    assert trained(trainer, 4) == trained(resumed, 4)
    other = resumed.state()
    for name, value in trainer.state().items():
        np.testing.assert_array_equal(other[name], value, err_msg=name)
    if precision == "fp16":
        with pytest.raises(ob.CheckpointError, match="belongs to another training graph: 'loss_scale"):
            ob.Trainer(training()).load(tmp_path / "c")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_loss_reached_is_that_of_float32(precision: str, tmp_path: Path) -> None:
    losses: dict[str | None, float] = {}
    x = np.random.default_rng(4).standard_normal((4, 1, 16, 16)).astype(np.float32)
    for chosen in (None, precision):
        mixed = ob.training_graph(unet_resize.build(features=4), loss="mse", optimizer="adamw", precision=chosen)
        trainer = ob.Trainer(mixed, learning_rate=3e-3)
        for _ in range(60):
            trainer.step({mixed.inputs[0]: x, "target": np.tanh(x)})
        losses[chosen] = trainer.evaluate({mixed.inputs[0]: x, "target": np.tanh(x)})
        trainer.export(tmp_path / f"{chosen}.onnx")
    first = ob.Trainer(mixed).evaluate({mixed.inputs[0]: x, "target": np.tanh(x)})
    assert losses[None] < first / 3
    assert abs(losses[precision] - losses[None]) < 0.05 * losses[None]
    session = onnxruntime.InferenceSession(tmp_path / f"{precision}.onnx")
    y = np.asarray(session.run(None, {mixed.inputs[0]: x})[0])
    assert y.dtype == np.float32
    np.testing.assert_allclose(((y - np.tanh(x)) ** 2).mean(), losses[precision], rtol=1e-5)


def test_the_command_counts_skipped_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(classifier(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **data())
    arguments = ["--data", str(tmp_path / "d.npz"), "--loss", "softmax_cross_entropy", "--epochs", "2"]
    for precision, skipped in (("fp16", 0), ("bf16", None)):
        out = str(tmp_path / f"{precision}.onnx")
        log = tmp_path / f"{precision}.csv"
        options = ["--precision", precision, "--log", str(log), *arguments]
        assert main(["train", str(tmp_path / "m.onnx"), "-o", out, *options]) == 0
        assert ("skipped steps: 0 in all" in capsys.readouterr().out) == (precision == "fp16")
        assert {record.skipped for record in read_log(log)} == {skipped}
    model = str(tmp_path / "m.onnx")
    assert main(["convert", model, "-o", str(tmp_path / "t.onnx"), "--loss", "mse", "--precision", "bf16"]) == 0
    assert main(["convert", model, "-o", str(tmp_path / "g.onnx"), "--precision", "bf16"]) == 2
    assert "--precision: goes with --loss" in capsys.readouterr().err
