"""50 steps of four models against PyTorch's losses and weights, stored by tests/data/torch_parity.py."""

from __future__ import annotations

import numpy as np
import pytest

import onnx_backprop as ob
from tests.support.parity_cases import MODELS, RECIPES, STEPS, VALUES, batches

TOLERANCE = 1e-4  # relative: of every loss, and of every tensor of weights in the Euclidean norm


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", MODELS)
def test_losses_and_weights_after_50_steps(model: str, recipe: str) -> None:
    case, how = MODELS[model], RECIPES[recipe]
    with np.load(VALUES, allow_pickle=False) as file:
        stored = {key.split("/", 2)[2]: file[key] for key in file.files if key.startswith(f"{model}/{recipe}/")}
    graph = ob.training_graph(case.build(), loss=case.loss, optimizer=how.ours)
    trainer = ob.Trainer(graph, learning_rate=how.rate)
    data = batches(case)
    losses = [trainer.step(dict(zip(graph.inputs, data[step % len(data)], strict=True))) for step in range(STEPS)]
    np.testing.assert_allclose(losses, stored["losses"], rtol=TOLERANCE)
    assert losses[-1] < losses[0]
    weights = trainer.parameters()
    assert set(weights) == set(stored) - {"losses"}
    for name, value in weights.items():
        error = np.linalg.norm(value - stored[name].astype(np.float64)) / np.linalg.norm(stored[name])
        assert error < TOLERANCE, f"{name}: {error:.1e}"
