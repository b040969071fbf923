"""A loss that is no finite number because of the data is told as that: which array, which row, or that no label counts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.__main__ import main
from onnx_backprop.artifacts import CheckpointState, LossType, Module, OptimType, generate_artifacts
from onnx_backprop.converters.training.optimizers import SGD

ROWS = 12


def model() -> ModelProto:
    result = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]> g (float[N, 3] x) => (float[N, 4] y) { y = MatMul(x, w) }""")
    weights = np.random.default_rng(0).standard_normal((3, 4), np.float32)
    result.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    return result


def data(**more: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {"x": rng.standard_normal((ROWS, 3), np.float32), "labels": rng.integers(0, 4, ROWS)} | more


def with_nan() -> dict[str, np.ndarray]:
    batch = data()
    batch["x"][7, 2] = np.nan
    return batch


IGNORED = {"labels": np.full(ROWS, 255)}
FAULTS: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "nan": (with_nan(), "'x' holds nan at (7, 2). The data are at fault, not the training: put a number there, or"),
    "ignored": (
        data(**IGNORED),
        "every label in 'labels' is 255, which is ignored, so that there is nothing to average",
    ),
    "inf": (
        data(x=np.where(np.arange(ROWS)[:, None] == 5, np.float32(np.inf), data()["x"])),
        "'x' holds inf at (5, 0). If that is not meant, put a number there. If it is, lower the learning rate",
    ),
}
LOSS = ob.losses.SoftmaxCrossEntropy(ignore_index=255)


def trainer(**more: Any) -> ob.Trainer:
    return ob.Trainer(ob.training_graph(model(), loss=LOSS, optimizer=SGD(), **more), learning_rate=0.1)


@pytest.mark.parametrize("precision", [None, "fp16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_step_and_evaluate(fault: str, precision: str | None) -> None:
    (batch, message), it = FAULTS[fault], trainer(precision=precision)
    before = it.state()
    with pytest.raises(FloatingPointError, match=re.escape("in step 1: " + message)) as raised:
        it.step(batch)
    assert str(raised.value).startswith("the loss is nan")
    with pytest.raises(FloatingPointError, match=re.escape("the loss is nan: " + message)):
        it.evaluate(batch)
    if fault == "ignored":  # it weighs nothing among others
        assert it.evaluate([data(), batch]) == it.evaluate([data()])
    else:
        with pytest.raises(
            FloatingPointError, match=re.escape("in batch 1 of the evaluation the loss is nan: " + message)
        ):
            it.evaluate([data(), batch])
    after = it.state()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert it.step(data()) > 0


def test_some_labels_count() -> None:
    labels = np.full(ROWS, 255)
    labels[3] = 2
    assert trainer().step(data(labels=labels)) > 0


def test_labels_of_every_shape_and_type_are_looked_at() -> None:
    image = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]> g (float[N, 4, H] x) => (float[N, 4, H] y) <float w = {1}>
        { y = Mul(x, w) }""")
    graph = ob.training_graph(image, loss=LOSS, optimizer=SGD(), trainable=["w"])
    feeds = {"x": np.zeros((2, 4, 3), np.float32), "labels": np.full((2, 3), 255, np.uint8)}
    with pytest.raises(FloatingPointError, match="every label in 'labels' is 255"):
        ob.Trainer(graph).step(feeds)


@pytest.mark.parametrize("where", ["data", "evaluation"])
def test_fit_says_the_row_of_the_data(tmp_path: Path, where: str) -> None:
    batches = ob.Batches(with_nan(), 5, seed=3)
    message = rf"'x' holds nan at \((\d), 2\), row 7 of the data{'' if where == 'data' else ' of the evaluation'}\. The"
    it, good = trainer(), ob.Batches(data(), 5)
    loader, evaluation = (batches, good) if where == "data" else (good, batches)
    with pytest.raises(FloatingPointError, match=message):
        it.fit(loader, 2, evaluation=evaluation, checkpoint=tmp_path / "c", progress=False)
    if where == "evaluation":  # what was trained is not lost
        assert trainer().load(tmp_path / "c").steps == 3


def test_what_a_model_is_made_for_is_no_fault() -> None:
    """NaN that an Imputer takes away."""
    text = "g (float[N, 3] x) => (float[N, 4] y) { i = Where(m, z, x) y = MatMul(i, w) m = IsNaN(x) }"
    text = text.replace("{ i", "{ m = IsNaN(x) i").replace(" m = IsNaN(x) }", " }")
    filled = parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {text}')
    filled.graph.initializer.extend(
        [*model().graph.initializer, numpy_helper.from_array(np.zeros((), np.float32), "z")]
    )
    graph = ob.training_graph(filled, loss=LOSS, optimizer=SGD(), trainable=["w"])
    assert ob.Trainer(graph).step(with_nan()) > 0


@pytest.mark.parametrize("option", ["--data", "--evaluation"])
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    onnx.save(model(), tmp_path / "model.onnx")
    np.savez(tmp_path / "bad.npz", **with_nan())
    np.savez(tmp_path / "good.npz", **data())
    given = ["train", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "out.onnx"), "--quiet", "--epochs", "1"]
    given += ["--loss", "softmax_cross_entropy", "--data", str(tmp_path / "good.npz")]
    assert main([*given, option, str(tmp_path / "bad.npz")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("onnx-backprop: error: the training has failed: ")
    assert re.search(r"'x' holds nan at \(\d+, 2\), row 7 of the data", err)
    assert "learning rate" not in err


@pytest.mark.parametrize("training", [True, False])
def test_artifacts(tmp_path: Path, training: bool) -> None:
    generate_artifacts(model(), loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW, artifact_directory=tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state).train(training)
    with pytest.raises(ob.InvalidArgumentError, match=r"the loss is nan: 'x' holds nan at \(7, 2\)\. The data"):
        module(*with_nan().values())
    gradient = state.parameters["w"].grad
    assert gradient is None or np.isfinite(gradient).all()
    assert np.isfinite(module(*data().values()))
