"""Files of FORMAT 1, written before state had records, load, train on every route and resume a checkpoint.

`training.onnx`: `tests.support.training_models.classifier` with AdamW(accumulate=2, ema=0.9, clip_norm=1), fp16 and
norms; `checkpoint.safetensors`: after 3 steps of route "onnx", seed 3. `odd_names.onnx`, `ort_*`: a model whose
parameters have the names of an optimizer's state, for `Trainer` and for `artifacts`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import onnx_backprop as ob
from onnx_backprop import artifacts
from tests.onnx_backprop.distributed.threads import Threads, on_ranks
from tests.support.training_models import classifier, data

FILES = Path(__file__).parents[2] / "data" / "format_1"
LOSSES = [1.4502995014190674, 1.4091752767562866, 1.151028037071228]
LOSSES += [1.2283713817596436, 1.0467571020126343, 1.2856156826019287]
ODD_LOSSES = [0.7514749765396118, 3.456475019454956, 6.69548225402832, 12.86609935760498, 14.098417282104492]
ARTIFACT_LOSSES = [0.7514749765396118, 3.4464285373687744, 8.131423950195312, 14.806408882141113, 23.471229553222656]


def batches() -> list[dict[str, np.ndarray]]:
    return [{name: array[10 * n : 10 * n + 10] for name, array in data().items()} for n in range(6)]


def odd_batches() -> list[dict[str, np.ndarray]]:
    x = np.arange(12, dtype=np.float32).reshape(4, 3) / 10
    return [{"x": x, "target": x[:, :2] + 1 + n} for n in range(5)]


def of_today() -> ob.TrainingGraph:
    return ob.training_graph(
        classifier(),
        loss="softmax_cross_entropy",
        optimizer=ob.optimizers.AdamW(accumulate=2, ema=0.9, clip_norm=1.0),
        training_mode=True,
        precision="fp16",
        gradient_norms=True,
    )


@pytest.mark.parametrize("kernels", ["native", "onnx"])
def test_trains_as_a_graph_of_today(kernels: str) -> None:
    old, new = (
        ob.Trainer(graph, learning_rate=0.01, seed=3, kernels=kernels)
        for graph in (FILES / "training.onnx", of_today())
    )
    losses = [[trainer.step(batch) for batch in batches()] for trainer in (old, new)]
    assert losses[0] == losses[1]
    np.testing.assert_allclose(losses[0], LOSSES, rtol=1e-5)
    assert (old.updates, old.skipped_steps, old.loss_scale) == (3, 0, new.loss_scale)
    assert old.gradient_norms == new.gradient_norms
    assert len(old._buffers.in_place) == len(new._buffers.in_place)
    state = new.state()
    assert old.state().keys() == state.keys()
    for name, value in old.state().items():
        assert value.tobytes() == state[name].tobytes(), name


@pytest.mark.parametrize("kernels", ["native", "onnx"])
@pytest.mark.parametrize("graph", ["old", "new"])
def test_resumes_a_checkpoint(kernels: str, graph: str) -> None:
    trained = FILES / "training.onnx" if graph == "old" else of_today()
    trainer = ob.Trainer(trained, kernels=kernels).load(FILES / "checkpoint.safetensors")
    assert (trainer.steps, trainer.learning_rate) == (3, 0.01)
    np.testing.assert_allclose([trainer.step(batch) for batch in batches()[3:]], LOSSES[3:], rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"shard_update": True}, {"kernels": "onnx"}], ids=str)
@pytest.mark.parametrize("name", ["training", "odd_names"])
def test_trains_on_two_ranks(name: str, options: dict[str, bool | str]) -> None:
    graph = ob.TrainingGraph.load(FILES / f"{name}.onnx")
    fed = odd_batches() if name == "odd_names" else batches()

    def work(communicator: Threads) -> list[float]:
        trainer = ob.Trainer(graph, learning_rate=0.01, communicator=communicator, **options)
        return [trainer.step(batch) for batch in fed]

    first, second = on_ranks(2, work)
    assert first == second
    assert all(np.isfinite(first))


@pytest.mark.parametrize("kernels", ["native", "onnx"])
def test_parameters_with_the_names_of_state(kernels: str) -> None:
    trainer = ob.Trainer(FILES / "odd_names.onnx", learning_rate=0.1, kernels=kernels)
    np.testing.assert_allclose([trainer.step(batch) for batch in odd_batches()], ODD_LOSSES, rtol=1e-5)
    assert trainer.updates == 2
    assert trainer.state()["optimizer_step_2"] == 2
    assert trainer.state()["micro_step_2"] == 1


def test_artifacts() -> None:
    state = artifacts.CheckpointState.load_checkpoint(FILES / "ort_checkpoint")
    module = artifacts.Module(FILES / "ort_training_model.onnx", state, FILES / "ort_eval_model.onnx")
    optimizer = artifacts.Optimizer(FILES / "ort_optimizer_model.onnx", module)
    losses = []
    for batch in odd_batches():
        losses.append(float(module(batch["x"], batch["target"])))
        optimizer.step()
        module.lazy_reset_grad()
    np.testing.assert_allclose(losses, ARTIFACT_LOSSES, rtol=1e-5)
    assert optimizer.steps == 5
