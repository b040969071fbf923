"""Files that earlier versions have written: they load, go on as they would have, and export.

format1: written by the code before FORMAT 2: a classifier with all kinds of state, half a one whose own tensors have the
names of the state, each with a checkpoint of three steps, and artifacts with a checkpoint of three updates. format2: by
1.0.0rc1: the classifier, low-rank adapters of it, these as files of their own, and a model with a Jacobian.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from safetensors.numpy import load_file

import onnx_backprop as ob
from onnx_backprop import artifacts
from onnx_backprop.converters.training.metadata import FORMAT
from tests.support.training_models import data

DATA = Path(__file__).parents[2] / "data"
FOLDER = DATA / "format1"
ROWS = data(48)
BATCHES = [(ROWS["x"][n : n + 8], ROWS["labels"][n : n + 8]) for n in range(0, 48, 8)]
assert_close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


def expected_of(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "expected.npz") as arrays:
        return dict(arrays)


def of(expected: dict[str, np.ndarray], start: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(start): value for name, value in expected.items() if name.startswith(start)}


@pytest.mark.parametrize("path", ["format1/everything", "format1/half", "format2/everything", "format2/adapted"])
@pytest.mark.parametrize("written_again", [False, True])
def test_a_training_goes_on(path: str, written_again: bool, tmp_path: Path) -> None:
    folder, name = (DATA / path).parent, (DATA / path).name
    expected = expected_of(folder)
    graph = ob.TrainingGraph.load(folder / f"{name}.onnx")
    if written_again:
        graph.describe()
        graph.save(tmp_path / "again.onnx")
        text = (tmp_path / "again.onnx").read_bytes()
        assert f'"format": {FORMAT}'.encode() in text
        graph = ob.TrainingGraph.load(tmp_path / "again.onnx")
    trainer = ob.Trainer(graph, kernels="onnx", seed=7).load(folder / f"{name}.safetensors")
    losses = [trainer.step(*batch) for batch in BATCHES[3:]]
    assert_close(losses, expected[f"{name}/losses"])
    state, wanted = trainer.state(), of(expected, f"{name}/state/")
    assert state.keys() == wanted.keys()
    for key, value in wanted.items():
        assert_close(state[key], value, err_msg=key)
    assert [trainer.steps, trainer.updates, trainer.skipped_steps] == expected[f"{name}/counts"].tolist()
    predicted = expected[f"{name}/predicted"]
    assert_close(trainer.predict(*BATCHES[0])["y"], predicted)
    trainer.export(tmp_path / "trained.onnx")
    exported = ob.session(onnx.load(tmp_path / "trained.onnx")).run(["y"], {"x": BATCHES[0][0]})[0]
    assert_close(np.asarray(exported), predicted)
    other = ob.TrainingGraph.load(ob.to_training_info(graph))
    assert (other.updates, other.fill, other.copies) == (graph.updates, graph.fill, graph.copies)


def test_the_seed_is_that_of_the_random_numbers() -> None:
    graph = ob.TrainingGraph.load(FOLDER / "half.onnx")
    first = ob.Trainer(graph, kernels="onnx", seed=7).state()
    assert first["random_state_2"].tolist() == [7, 0]
    assert first["random_state"].dtype == np.float32


def test_artifacts_go_on(tmp_path: Path) -> None:
    expected = expected_of(FOLDER)
    folder = shutil.copytree(FOLDER / "artifacts", tmp_path / "artifacts")
    state = artifacts.CheckpointState.load_checkpoint(folder / "checkpoint")
    module = artifacts.Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = artifacts.Optimizer(folder / "optimizer_model.onnx", module)
    losses = []
    for batch in BATCHES[3:]:
        losses.append(float(module(*batch)))
        optimizer.step()
        module.lazy_reset_grad()
    assert_close(losses, expected["artifacts/losses"])
    assert optimizer.steps == int(expected["artifacts/steps"])
    for key, value in of(expected, "artifacts/state/").items():
        assert_close(state.parameters[key].data, value, err_msg=key)
    module.export_model_for_inferencing(folder / "trained.onnx", ["y"])
    (y,) = ob.session(folder / "trained.onnx").run(None, {"x": BATCHES[0][0]})
    assert np.asarray(y).shape == (8, 3)


def test_adapters_are_read() -> None:
    """By stock onnxruntime beside their base, and as safetensors: both are what the checkpoint holds."""
    folder = DATA / "format2"
    graph = ob.TrainingGraph.load(folder / "adapted.onnx")
    trainer = ob.Trainer(graph, kernels="onnx", seed=7).load(folder / "adapted.safetensors")
    values = load_file(folder / "task.safetensors")
    assert values.keys() == trainer.parameters().keys()
    for name, value in trainer.parameters().items():
        np.testing.assert_array_equal(values[name], value, err_msg=name)
    adapter, options = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
    adapter.Load(str(folder / "task.onnx_adapter"))
    options.add_active_adapter(adapter)
    session = onnxruntime.InferenceSession(folder / "base.onnx", providers=["CPUExecutionProvider"])
    x = BATCHES[0][0]
    y, base = (np.asarray(session.run(None, {"x": x}, chosen)[0]) for chosen in (options, None))
    assert_close(y, trainer.predict(*BATCHES[0])["y"])
    assert abs(y - base).max() > 1e-3


def test_derivatives_of_format_2_are_read() -> None:
    (derivative,) = ob.derivatives(DATA / "format2" / "jacobian.onnx")
    assert derivative == ob.Derivative(mode="jacobian", seeds={}, results={"y": {"x": "y_jacobian_x"}}, batched=False)
