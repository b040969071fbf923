"""Trains the models of `tests/parity_cases.py` in PyTorch and stores losses and weights: python -m tests.data.torch_parity

Everything is float64, so that what is stored is the answer and not one rounding of it; stored as float32. With
--check, nothing is stored: PyTorch in float32 is compared with what is, to show how far rounding alone leads.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

from benchmarks.torch_twin import Twin, functional, torch
from tests.support.parity_cases import MODELS, RECIPES, STEPS, VALUES, Case, Recipe, batches

LOSSES = {
    "bce_with_logits": functional.binary_cross_entropy_with_logits,
    "softmax_cross_entropy": functional.cross_entropy,
}


def train(case: Case, recipe: Recipe, dtype: Any) -> dict[str, np.ndarray]:
    twin = Twin(case.build(), dtype=dtype)
    optimizer = getattr(torch.optim, recipe.torch_name)(twin.parameters(), lr=recipe.rate, **recipe.torch)
    losses = []
    data = [(torch.tensor(x).to(dtype), torch.tensor(t)) for x, t in batches(case)]
    for step in range(STEPS):
        x, target = data[step % len(data)]
        target = target.to(dtype) if target.is_floating_point() else target
        loss = LOSSES[case.loss](twin(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    weights = {name: p.detach().numpy().astype(np.float64) for name, p in twin.weights.items()}
    return {"losses": np.array(losses), **weights}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stored: dict[str, np.ndarray] = {"about": np.array(json.dumps({"torch": torch.__version__}))}
    dtype = torch.float32 if check else torch.float64
    for model, case in MODELS.items():
        for name, recipe in RECIPES.items():
            for key, value in train(case, recipe, dtype).items():
                stored[f"{model}/{name}/{key}"] = value if key == "losses" else value.astype(np.float32)
    if not check:
        np.savez_compressed(VALUES, **stored)
        return
    with np.load(VALUES, allow_pickle=False) as file:
        for key in sorted(set(stored) - {"about"}):
            exact = file[key].astype(np.float64)
            error = np.linalg.norm(stored[key] - exact) / np.linalg.norm(exact)
            if error > 1e-5:
                print(f"{key}: {error:.1e}")


if __name__ == "__main__":
    main()
