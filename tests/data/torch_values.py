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
    WEIGHT,
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
                    count = (run + 1) // case.ours.accumulate
                    means[name].lerp_(p.detach(), (1 - case.ours.ema) / (1 - case.ours.ema**count))
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
        y = drawn(rng, case.y, case.shape)
        kind = {"cross_entropy": "classes", "binary_cross_entropy_with_logits": "unit"}.get(case.torch_name, case.t)
        target = drawn(rng, kind, case.shape)
        if case.ignored is not None:
            target.flat[::3] = case.ignored
        arguments = {
            k: torch.tensor(v, dtype=torch.float64) if isinstance(v, list) else v for k, v in case.torch.items()
        }
        more = {}
        if case.more:
            steps, rows, _ = case.shape
            counts = rng.integers(0, target.shape[1] + 1, rows)
            target[target == case.torch.get("blank", 0)] = 1
            more = dict(zip(case.more, (rng.integers(2 * counts.max(), steps + 1, rows), counts), strict=True))
            if case.torch.get("zero_infinity"):
                more = dict(zip(case.more, np.array([[4, 1, 3, 2, 4], [3, 2, 0, 3, 1]]), strict=True))  # too few in two
        at = torch.tensor(y, requires_grad=True)
        function = REFERENCES.get(case.torch_name) or getattr(torch.nn.functional, case.torch_name)
        loss = function(at, torch.tensor(target), *map(torch.tensor, more.values()), **arguments)
        loss.backward()
        stored |= {
            f"{name}/y": y,
            f"{name}/target": target,
            f"{name}/loss": loss.detach().numpy(),
            f"{name}/gradient": at.grad.numpy(),
            **{f"{name}/{key}": value for key, value in more.items()},
        }
    return stored


def drawn(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of a kind; shares and log: of axis 1."""
    if kind in ("classes", "one class"):
        labels = rng.integers(0, shape[1], (shape[0], *shape[2:]))
        return labels if kind == "classes" else np.eye(shape[1])[labels]
    if kind == "sequences":
        return rng.integers(0, shape[2], (shape[1], 3))
    if kind == "real":
        return rng.standard_normal(shape)
    if kind in ("unit", "binary"):
        numbers = rng.random(shape)
        return numbers if kind == "unit" else (numbers < 0.4).astype(float)
    powers = np.exp(rng.standard_normal(shape))
    shares = powers / powers.sum(axis=1, keepdims=True)
    return shares if kind == "shares" else np.log(shares)


def cosine_pairs() -> dict[str, np.ndarray]:
    """Of two predictions."""
    rng = np.random.default_rng(SEED + 2)
    one, two = (torch.tensor(rng.standard_normal((6, 3)), requires_grad=True) for _ in range(2))
    target = torch.tensor([1.0, -1, -1, 1, -1, 1], dtype=torch.float64)
    loss = torch.nn.functional.cosine_embedding_loss(one, two, target, margin=0.2)
    loss.backward()
    named = {"one": one, "two": two, "target": target, "loss": loss, "one_grad": one.grad, "two_grad": two.grad}
    return {f"cosine_pairs/{key}": value.detach().numpy() for key, value in named.items()}


def focal(y: Any, t: Any, *, alpha: float = 0.25, gamma: float = 2.0, reduction: str = "mean") -> Any:
    """torchvision.ops.sigmoid_focal_loss, line by line."""
    p = torch.sigmoid(y)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(y, t, reduction="none")
    loss = loss * (1 - (p * t + (1 - p) * (1 - t))) ** gamma
    if alpha >= 0:
        loss = (alpha * t + (1 - alpha) * (1 - t)) * loss
    return getattr(loss, reduction)()


def tversky(
    y: Any,
    t: Any,
    *,
    alpha: float = 0.3,
    beta: float = 0.7,
    smooth: float = 1.0,
    activation: str | None = None,
    reduction: str = "mean",
) -> Any:
    if activation == "softmax":
        y, t = torch.softmax(y, 1), torch.nn.functional.one_hot(t, y.shape[1]).movedim(-1, 1).to(y)
    p = torch.sigmoid(y) if activation == "sigmoid" else y
    p, t = (v.flatten(1) if v.dim() == 2 else v.flatten(2) for v in (p, t))
    hit, wrong, missed = (p * t).sum(-1), (p * (1 - t)).sum(-1), ((1 - p) * t).sum(-1)
    return getattr(1 - (hit + smooth) / (hit + alpha * wrong + beta * missed + smooth), reduction)()


def dice(y: Any, t: Any, *, smooth: float = 1.0, **more: Any) -> Any:
    return tversky(y, t, alpha=0.5, beta=0.5, smooth=smooth / 2, **more)


def mixture(y: Any, t: Any) -> Any:
    weight = torch.tensor(WEIGHT, dtype=torch.float64)
    return 0.5 * torch.nn.functional.cross_entropy(y, t, weight=weight) + 2 * dice(y, t, activation="softmax")


REFERENCES: dict[str, Any] = {
    "nll": lambda y, t, **more: torch.nn.functional.nll_loss(y.log(), t, **more),
    "focal": focal,
    "dice": dice,
    "tversky": tversky,
    "mixture": mixture,
    "kl_logits": lambda y, t: torch.nn.functional.kl_div(y.log_softmax(1), t, reduction="batchmean"),
    "kl_probabilities": lambda y, t: torch.nn.functional.kl_div(y.log(), t, reduction="batchmean"),
    "cosine": lambda y, t: torch.nn.functional.cosine_embedding_loss(y, t, torch.ones(len(y))),
    "ctc_logits": lambda y, *rest, **more: torch.nn.functional.ctc_loss(y.log_softmax(2), *rest, **more),
}


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
    np.savez_compressed(LOSS_VALUES, about=about, **loss_values(), **cosine_pairs())
    np.savez_compressed(SCHEDULE_VALUES, about=about, **schedule_values())
    print(f"torch {torch.__version__}: {OPTIMIZER_VALUES.name}, {LOSS_VALUES.name}, {SCHEDULE_VALUES.name}")


if __name__ == "__main__":
    main()
