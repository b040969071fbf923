"""Computes PyTorch's values for `tests/training_cases.py` and stores them: python -m tests.data.torch_values

Everything is float64. Needs torch, which the tests do not.
"""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import numpy as np

from tests.support.training_cases import (
    LOSS_VALUES,
    LOSSES,
    OPTIMIZER_VALUES,
    OPTIMIZERS,
    RATES,
    SCHEDULE_VALUES,
    SCHEDULES,
    STEPS,
    OptimizerCase,
)

torch: Any = import_module("torch")
SEED = 20261121


def optimizer_values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(SEED)
    stored = {
        "x": rng.standard_normal((STEPS, 5, 2)),
        "target": rng.standard_normal((STEPS, 5, 3)),
        "weight": rng.standard_normal((3, 2)),
        "bias": rng.standard_normal(3),
    }
    for name, case in OPTIMIZERS.items():
        for key, value in trained(case, stored).items():
            stored[f"{name}/{key}"] = value
    return stored


def trained(case: OptimizerCase, data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Loss, parameters and their running means after every run of y = x·Wᵀ + b under the mean squared error."""
    parameters = {name: torch.tensor(data[name], requires_grad=True) for name in ("weight", "bias")}
    decay = case.torch.get("weight_decay", 0.0)
    groups = [
        {
            "params": [p],
            "factor": case.groups.get(name, {}).get("rate", 1.0),
            "weight_decay": case.groups.get(name, {}).get("weight_decay", decay),
        }
        for name, p in parameters.items()
    ]
    optimizer = (
        lion(groups, **case.torch)
        if case.torch_name == "Lion"
        else (getattr(torch.optim, case.torch_name)(groups, lr=1.0, **case.torch))
    )
    history: dict[str, list[np.ndarray]] = {"loss": [], "weight": [], "bias": [], "weight.ema": [], "bias.ema": []}
    means = {name: p.detach().clone() for name, p in parameters.items()}
    for run in range(STEPS):
        x, target = torch.tensor(data["x"][run]), torch.tensor(data["target"][run])
        loss = torch.nn.functional.mse_loss(x @ parameters["weight"].T + parameters["bias"], target)
        (loss / case.ours.accumulate).backward()
        if (run + 1) % case.ours.accumulate == 0:
            if case.ours.clip_value is not None:
                torch.nn.utils.clip_grad_value_(parameters.values(), case.ours.clip_value)
            if case.ours.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters.values(), case.ours.clip_norm)
            for group in optimizer.param_groups:
                group["lr"] = RATES[run] * group["factor"]
            optimizer.step()
            optimizer.zero_grad()
            for name, p in parameters.items():
                if case.ours.ema is not None:
                    means[name].lerp_(p.detach(), 1 - case.ours.ema)
        history["loss"].append(loss.detach().numpy().copy())
        for name, p in parameters.items():
            history[name].append(p.detach().numpy().copy())
            history[f"{name}.ema"].append(means[name].numpy().copy())
    return {name: np.stack(values) for name, values in history.items() if case.ours.ema or not name.endswith(".ema")}


def lion(groups: list[dict[str, Any]], *, betas: tuple[float, float], weight_decay: float) -> Any:
    """Program 2 of Chen et al. 2023, which torch.optim does not have."""

    class Lion(torch.optim.Optimizer):
        def step(self) -> None:
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        m = self.state[p].setdefault("m", torch.zeros_like(p))
                        update = p.grad * (1 - betas[0]) + m * betas[0]
                        p.sub_(group["lr"] * (torch.sign(update) + p * group["weight_decay"]))
                        m.copy_(p.grad * (1 - betas[1]) + m * betas[1])

    return Lion(groups, {"lr": 1.0, "weight_decay": weight_decay})


def loss_values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(SEED + 1)
    stored: dict[str, np.ndarray] = {}
    for name, case in LOSSES.items():
        y = rng.standard_normal(case.shape)
        if case.torch_name == "cross_entropy":
            target = rng.integers(0, case.shape[1], (case.shape[0], *case.shape[2:]))
            if case.ignored is not None:
                target.flat[::3] = case.ignored
        elif "binary" in case.torch_name:
            target = rng.random(case.shape)
        else:
            target = rng.standard_normal(case.shape)
        arguments = {
            k: torch.tensor(v, dtype=torch.float64) if isinstance(v, list) else v for k, v in case.torch.items()
        }
        at = torch.tensor(y, requires_grad=True)
        loss = getattr(torch.nn.functional, case.torch_name)(at, torch.tensor(target), **arguments)
        loss.backward()
        stored |= {
            f"{name}/y": y,
            f"{name}/target": target,
            f"{name}/loss": loss.detach().numpy(),
            f"{name}/gradient": at.grad.numpy(),
        }
    return stored


def schedule_values() -> dict[str, np.ndarray]:
    stored: dict[str, np.ndarray] = {}
    for name, case in SCHEDULES.items():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=case.rate)
        schedule = getattr(torch.optim.lr_scheduler, case.torch_name)(optimizer, **case.torch)
        rates = []
        for _ in range(case.steps):
            rates.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        stored[name] = np.array(rates)
    return stored


def main() -> None:
    about = np.array(json.dumps({"torch": torch.__version__, "seed": SEED}))
    np.savez_compressed(OPTIMIZER_VALUES, about=about, **optimizer_values())
    np.savez_compressed(LOSS_VALUES, about=about, **loss_values())
    np.savez_compressed(SCHEDULE_VALUES, about=about, **schedule_values())
    print(f"torch {torch.__version__}: {OPTIMIZER_VALUES.name}, {LOSS_VALUES.name}, {SCHEDULE_VALUES.name}")


if __name__ == "__main__":
    main()
