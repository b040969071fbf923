"""Code written against onnxruntime-training's Python API, with nothing but its imports changed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop import artifacts
from onnx_backprop.artifacts import CheckpointState, LinearLRScheduler, Module, Optimizer
from onnx_backprop.converters.training.optimizers import SGD, AdamW
from tests.support.training_models import classifier, data

SEED = 31


def cnn() -> ModelProto:
    """A small CNN, as an exporter would write it: opset 17, float32."""
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]>
        cnn (float[N, 1, 8, 8] input) => (float[N, 3] output)
        {
            c = Conv<pads = [1, 1, 1, 1]>(input, conv_weight, conv_bias)
            r = Relu(c)
            pooled = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r)
            flat = Flatten(pooled)
            output = Gemm<transB = 1>(flat, fc_weight, fc_bias)
        }
    """)
    rng = np.random.default_rng(SEED)
    for name, shape in {"conv_weight": (4, 1, 3, 3), "conv_bias": (4,), "fc_weight": (3, 64), "fc_bias": (3,)}.items():
        values = (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]) or 1)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    return model


def pictures(rows: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """Three kinds of pictures: bright left, bright top, bright middle, with noise."""
    rng = np.random.default_rng(SEED + 1)
    labels = rng.integers(0, 3, rows)
    shapes = np.zeros((3, 1, 8, 8))
    shapes[0, :, :, :3], shapes[1, :, :3, :], shapes[2, :, 3:5, 3:5] = 1, 1, 2
    return (shapes[labels] + 0.3 * rng.standard_normal((rows, 1, 8, 8))).astype(np.float32), labels


def test_the_loop_of_onnxruntime_training(tmp_path: Path) -> None:
    """The code of its documentation: artifacts, loop, evaluation, checkpoint, export."""
    path = tmp_path / "cnn.onnx"
    onnx.save(cnn(), path)
    artifacts.generate_artifacts(
        onnx.load(path),
        requires_grad=["conv_weight", "conv_bias", "fc_weight", "fc_bias"],
        frozen_params=[],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=str(tmp_path),
    )
    state = CheckpointState.load_checkpoint(str(tmp_path / "checkpoint"))
    model = Module(str(tmp_path / "training_model.onnx"), state, str(tmp_path / "eval_model.onnx"), device="cpu")
    optimizer = Optimizer(str(tmp_path / "optimizer_model.onnx"), model)
    scheduler = LinearLRScheduler(optimizer, 2, 40, 0.02)
    x, labels = pictures()
    losses = []
    for epoch in range(20):
        model.train()
        for start in (0, 12):
            loss = model(x[start : start + 12], labels[start : start + 12])
            optimizer.step()
            scheduler.step()
            model.lazy_reset_grad()
            losses.append(float(loss))
        state.properties["epoch"] = epoch
    assert losses[-1] < 0.3 * losses[0]
    assert optimizer.get_learning_rate() == 0.0
    model.eval()
    evaluation = float(model(x, labels))
    assert evaluation < 0.4
    CheckpointState.save_checkpoint(state, str(tmp_path / "trained"), include_optimizer_state=True)
    again = CheckpointState.load_checkpoint(str(tmp_path / "trained"))
    assert again.properties["epoch"] == 19
    resumed = Module(str(tmp_path / "training_model.onnx"), again, str(tmp_path / "eval_model.onnx"))
    assert float(resumed.eval()(x, labels)) == evaluation
    model.export_model_for_inferencing(str(tmp_path / "inference.onnx"), ["output"])
    session = onnxruntime.InferenceSession(tmp_path / "inference.onnx", providers=["CPUExecutionProvider"])
    assert [v.name for v in session.get_inputs()] == ["input"]
    assert np.mean(np.asarray(session.run(["output"], {"input": x})[0]).argmax(axis=1) == labels) > 0.9


def generated(folder: Path, model: ModelProto | str | None = None, **arguments: Any) -> tuple[Module, Optimizer]:
    given: dict[str, Any] = {"loss": artifacts.LossType.CrossEntropyLoss, "optimizer": artifacts.OptimType.SGD}
    artifacts.generate_artifacts(model or cnn(), artifact_directory=folder, **given | arguments)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state)
    return module, Optimizer(folder / "optimizer_model.onnx", module)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_steps_are_those_of_a_training_graph(tmp_path: Path, optimizer: str) -> None:
    module, rule = generated(tmp_path, optimizer=artifacts.OptimType[optimizer])
    same = AdamW(epsilon=1e-6, weight_decay=0.0) if optimizer == "AdamW" else SGD()
    trainer = ob.Trainer(ob.training_graph(cnn(), loss="softmax_cross_entropy", optimizer=same), learning_rate=0.05)
    rule.set_learning_rate(0.05)
    x, labels = pictures()
    for _ in range(5):
        loss = module(x, labels)
        rule.step()
        module.lazy_reset_grad()
        assert float(loss) == pytest.approx(trainer.step(input=x, labels=labels), rel=1e-6)
    for name, value in trainer.parameters().items():
        np.testing.assert_allclose(module._state.parameters[name].data, value, rtol=1e-5, atol=1e-7)


def test_gradients_accumulate_until_they_are_reset(tmp_path: Path) -> None:
    module, _ = generated(tmp_path)
    x, labels = pictures()
    parameter = module._state.parameters["fc_bias"]
    assert parameter.grad is None
    module(x[:12], labels[:12])
    first = parameter.grad
    module(x[12:], labels[12:])
    both = parameter.grad
    module.lazy_reset_grad()
    module(x[12:], labels[12:])
    second = parameter.grad
    assert first is not None
    assert both is not None
    assert second is not None
    assert np.abs(first).max() > 1e-3
    np.testing.assert_allclose(both, first + second, rtol=1e-5, atol=1e-7)


def test_names_in_the_files(tmp_path: Path) -> None:
    generated(tmp_path, additional_output_names=["output", "pooled"], prefix="", frozen_params=["conv_bias"])
    training = onnx.load(tmp_path / "training_model.onnx")
    onnx.checker.check_model(training, full_check=True)
    inputs, outputs = ([v.name for v in values] for values in (training.graph.input, training.graph.output))
    assert inputs[:2] == ["input", "labels"]
    parameters = ["conv_weight", "fc_weight", "fc_bias"]
    buffers = [f"{p}_grad.accumulation.buffer" for p in parameters]
    assert set(inputs[2:]) == {*parameters, "conv_bias", "lazy_reset_grad", *buffers}
    assert outputs[:3] == ["loss", "output", "pooled"]
    assert outputs[3:] == [f"{p}_grad" for p in parameters] + [f"{p}_grad.accumulation.out" for p in parameters]
    evaluation = onnx.load(tmp_path / "eval_model.onnx")
    assert [v.name for v in evaluation.graph.output] == ["loss", "output", "pooled"]
    optimizer = onnx.load(tmp_path / "optimizer_model.onnx")
    onnx.checker.check_model(optimizer, full_check=True)
    assert {"learning_rate", "conv_weight", "conv_weight_grad"} <= {v.name for v in optimizer.graph.input}


@pytest.mark.parametrize("kind", ["MSELoss", "BCEWithLogitsLoss", "L1Loss"])
def test_losses_of_a_target(tmp_path: Path, kind: str) -> None:
    module, optimizer = generated(tmp_path, loss=artifacts.LossType[kind])
    optimizer.set_learning_rate(0.05)
    assert module.input_names() == ["input", "target"]
    x, labels = pictures()
    target = np.eye(3, dtype=np.float32)[labels]
    losses = []
    for _ in range(10):
        losses.append(float(module(x, target)))
        optimizer.step()
        module.lazy_reset_grad()
    assert losses[-1] < losses[0]


def test_everything_is_trained_unless_something_is_said(tmp_path: Path) -> None:
    """There, requires_grad=None made a training model without gradients."""
    module, optimizer = generated(tmp_path)
    before = {name: parameter.data for name, parameter in module._state.parameters}
    module(*pictures())
    optimizer.step()
    assert set(before) == {"conv_weight", "conv_bias", "fc_weight", "fc_bias"}
    for name, parameter in module._state.parameters:
        assert parameter.requires_grad
        assert not np.array_equal(parameter.data, before[name]), name


def test_parameters_can_be_read_and_set(tmp_path: Path) -> None:
    module, _ = generated(tmp_path, frozen_params=["conv_*"])
    parameters = module._state.parameters
    assert [n for n, p in parameters if not p.requires_grad] == ["conv_weight", "conv_bias"]
    x, labels = pictures()
    module.eval()
    before = float(module(x, labels))
    parameters["conv_weight"].data = np.zeros((4, 1, 3, 3))
    assert float(module(x, labels)) != before
    module.train()
    assert float(module(x, labels)) == pytest.approx(float(module.eval()(x, labels)))
    with pytest.raises(KeyError, match="Did you mean 'fc_bias'"):
        parameters["fc_bia"]
    with pytest.raises(RuntimeError, match=r"'fc_bias' has shape \(3,\), got \(2,\)"):
        parameters["fc_bias"].data = np.zeros(2)
    with pytest.raises(RuntimeError, match="'conv_bias' is frozen"):
        parameters["conv_bias"].grad = np.zeros(4)


def test_contiguous_parameters(tmp_path: Path) -> None:
    module, _ = generated(tmp_path, frozen_params=["conv_bias"])
    assert module.get_parameters_size(trainable_only=False) == 36 + 4 + 192 + 3
    assert module.get_parameters_size() == 36 + 192 + 3
    buffer = module.get_contiguous_parameters(trainable_only=True)
    doubled = onnxruntime.OrtValue.ortvalue_from_numpy(2 * buffer.numpy())
    before = module._state.parameters["fc_weight"].data
    module.copy_buffer_to_parameters(doubled)
    np.testing.assert_array_equal(module._state.parameters["fc_weight"].data, 2 * before)
    np.testing.assert_array_equal(module.get_contiguous_parameters(trainable_only=True).numpy(), doubled.numpy())
    with pytest.raises(RuntimeError, match="expected 231 numbers, got 3"):
        module.copy_buffer_to_parameters(onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(3, np.float32)))


def test_nominal_checkpoint(tmp_path: Path) -> None:
    module, _ = generated(tmp_path, nominal_checkpoint=True)
    state = CheckpointState.load_checkpoint(tmp_path / "nominal_checkpoint")
    assert (tmp_path / "nominal_checkpoint").stat().st_size < (tmp_path / "checkpoint").stat().st_size
    fresh = Module(tmp_path / "training_model.onnx", state)
    x, labels = pictures()
    fresh.copy_buffer_to_parameters(module.get_contiguous_parameters(), trainable_only=False)
    assert float(fresh(x, labels)) == float(module(x, labels))


def test_running_statistics_and_dropout(tmp_path: Path) -> None:
    module, optimizer = generated(tmp_path, classifier(), training_mode=True)
    trainer = ob.Trainer(
        ob.training_graph(classifier(), loss="softmax_cross_entropy", optimizer=SGD(), training_mode=True),
        learning_rate=0.1,
    )
    optimizer.set_learning_rate(0.1)
    for _ in range(3):
        assert float(module(data()["x"], data()["labels"])) == pytest.approx(trainer.step(data()), rel=1e-5)
        optimizer.step()
        module.lazy_reset_grad()
    np.testing.assert_allclose(module._state.parameters["mean"].data, trainer.state()["mean"], rtol=1e-5, atol=1e-7)
    assert not module._state.parameters["mean"].requires_grad
    expected = trainer.evaluate(data())
    assert float(module.eval()(data()["x"], data()["labels"])) == pytest.approx(expected, rel=1e-5)


def test_several_outputs_are_a_tuple_and_ort_values_stay(tmp_path: Path) -> None:
    module, _ = generated(tmp_path, additional_output_names=["output"])
    x, labels = pictures()
    loss, output = module(x, labels)
    assert output.shape == (24, 3)
    assert module.output_names() == ["loss", "output"]
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(value) for value in (x, labels)]
    assert module(*values)[0].numpy() == loss


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "both": ({"requires_grad": ["fc_bias"], "frozen_params": ["fc_bias"]}, "'fc_bias' in both lists"),
    "unknown": ({"requires_grad": ["fc_bia"]}, "got 'fc_bia'. Did you mean 'fc_bias'"),
    "loss": ({"loss": "MSE"}, "loss: expected None or one of"),
    "optimizer": ({"optimizer": "AdamW"}, "optimizer: expected an OptimType"),
    "ort_format": ({"ort_format": True}, "ort_format, custom_op_library: not served"),
    "loss inputs": ({"loss_input_names": ["output", "pooled"]}, "loss_input_names: expected one name"),
    "additional": ({"additional_output_names": ["nothing"]}, "the model has no tensor 'nothing'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_as_runtime_errors(tmp_path: Path, case: str) -> None:
    arguments, message = REFUSED[case]
    with pytest.raises(RuntimeError, match=message):
        generated(tmp_path, **arguments)
    assert not list(tmp_path.iterdir())


def test_refused_in_the_loop(tmp_path: Path) -> None:
    module, optimizer = generated(tmp_path)
    with pytest.raises(RuntimeError, match="expected 2 inputs, input, labels; got 1"):
        module(pictures()[0])
    x, labels = pictures()
    for call in (module.train(), module.eval()):
        with pytest.raises(
            artifacts.ArtifactError, match=r"onnxruntime cannot run this batch, 'input' \(.*, 'labels' \("
        ):
            call(x[:, :, :5], labels)
    module.train()
    with pytest.raises(RuntimeError, match="Run a training step first"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="got 'outputs'. Did you mean 'output'"):
        module.export_model_for_inferencing(tmp_path / "x.onnx", ["outputs"])
    with pytest.raises(RuntimeError, match="is no optimizer model"):
        Optimizer(tmp_path / "eval_model.onnx", module)


def test_files_that_are_replaced_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    generated(tmp_path)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        generated(tmp_path)
    assert "replacing training_model.onnx, eval_model.onnx, optimizer_model.onnx, checkpoint" in caplog.text


@pytest.mark.parametrize("prefix", ["../x_", "sub/x_", "/", "a/../"])
def test_a_prefix_stays_in_the_folder(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "here" / "sub").mkdir(parents=True)
    with pytest.raises(artifacts.ArtifactError, match="prefix: expected what the names of files begin with, got"):
        generated(tmp_path / "here", prefix=prefix)
    assert [path.name for path in tmp_path.rglob("*")] == ["here", "sub"]


@pytest.mark.parametrize("name", ["training_model.onnx", "checkpoint", "weights.data"])
def test_artifacts_do_not_take_the_place_of_their_model(tmp_path: Path, name: str) -> None:
    model = tmp_path / ("model.onnx" if name == "weights.data" else name)
    location = "eval_model.onnx" if name == "weights.data" else None
    onnx.save(cnn(), model, save_as_external_data=location is not None, location=location, size_threshold=0)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(artifacts.ArtifactError, match=f"{location or name} is a file of the model"):
        generated(tmp_path, str(model))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_mixed_precision(tmp_path: Path) -> None:
    images, labels = pictures()
    losses = []
    for precision in (None, "bf16"):
        folder = tmp_path / str(precision)
        folder.mkdir()
        artifacts.generate_artifacts(
            cnn(),
            loss=artifacts.LossType.CrossEntropyLoss,
            optimizer=artifacts.OptimType.AdamW,
            artifact_directory=folder,
            precision=precision,
        )
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
        optimizer = Optimizer(folder / "optimizer_model.onnx", module)
        module.train()
        for _ in range(5):
            losses.append(float(module(images, labels)))
            optimizer.step()
            module.lazy_reset_grad()
    assert losses[:5] != losses[5:]
    np.testing.assert_allclose(losses[5:], losses[:5], rtol=0.02)
    with pytest.raises(artifacts.ArtifactError, match='precision: "fp16" needs a loss scale'):
        artifacts.generate_artifacts(cnn(), loss=artifacts.LossType.CrossEntropyLoss, precision="fp16")
