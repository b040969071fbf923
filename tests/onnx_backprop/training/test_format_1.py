"""Files of FORMAT 1 on the native route and on several ranks; `tests/converters/training/test_format_1.py` has the rest."""

from __future__ import annotations

import numpy as np
import pytest

import onnx_backprop as ob
from tests.converters.training.test_format_1 import BATCHES, FOLDER, of
from tests.onnx_backprop.distributed.threads import Threads, on_ranks

NAMES = ["everything", "half"]


@pytest.mark.parametrize("name", NAMES)
def test_a_training_goes_on(name: str) -> None:
    with np.load(FOLDER / "expected.npz") as arrays:
        expected = dict(arrays)
    trainer = ob.Trainer(FOLDER / f"{name}.onnx", seed=7).load(FOLDER / f"{name}.safetensors")
    losses = [trainer.step(*batch) for batch in BATCHES[3:]]
    np.testing.assert_allclose(losses, expected[f"{name}/losses"], rtol=1e-5)
    rounding = 1e-3 if name == "half" else 1e-5  # of products of float16
    state = trainer.state()
    for key, value in of(expected, f"{name}/state/").items():
        np.testing.assert_allclose(state[key], value, err_msg=key, rtol=rounding, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"shard_update": True}, {"kernels": "onnx"}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_ranks_go_on(name: str, options: dict[str, bool | str]) -> None:
    """From one checkpoint; both keep the same state, and losses like those of one rank."""
    graph = ob.TrainingGraph.load(FOLDER / f"{name}.onnx")

    def work(communicator: Threads) -> tuple[list[float], dict[str, np.ndarray]]:
        trainer = ob.Trainer(graph, seed=7, communicator=communicator, **options)
        trainer.load(FOLDER / f"{name}.safetensors")
        return [trainer.step(*batch) for batch in BATCHES[3:]], trainer.state()

    (losses, state), (other, again) = on_ranks(2, work)
    assert losses == other
    assert all(np.isfinite(losses))
    for key, value in state.items():
        assert value.tobytes() == again[key].tobytes(), key
