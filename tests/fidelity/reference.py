"""A training as PyTorch does it, in float32 and in float64: what the file is held against.

How far float32 may be off is measured: besides the module itself, others are trained whose parameters differ from its
by a few units in the last place. AdamW makes a whole step of a gradient that is rounding errors alone, and a Relu lets
through what is at 0 or does not; so the losses of two right trainings may differ by more than 1e-3 in a few steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np

from tests.fidelity.compare import gradient_slack, loss_gap, rms
from tests.fidelity.subject import CROSS_ENTROPY, Subject

STEPS, BATCHES, FACTOR = 20, 3, 0.1
RATES = {"sgd": (0.03, 0.003, 0.0003), "adamw": (0.001, 0.0001)}  # of AdamW, its default and less
SURE = 2e-5  # gap of PyTorch's float32 and float64 up to which a rate is taken at once
RUNS, OFF = 4, 2.0**-22  # further trainings in float32, and what their parameters differ by, relative
Batch = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Training:
    """losses before each update; own: how far float32 is from float64; initial and final values of what is trained,
    gradients of the first step in float64; live: which elements ever have a gradient; slack and gradient_slack: the
    root mean square that final values and gradients may be off by."""

    rate: float
    losses: list[float]
    own: float
    initial: dict[str, np.ndarray]
    final: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]
    live: dict[str, np.ndarray]
    slack: dict[str, float]
    gradient_slack: dict[str, float]


class _Run(NamedTuple):
    initial: dict[str, np.ndarray]
    final: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]  # of the first step
    losses: list[float]
    live: dict[str, np.ndarray]


@dataclass(frozen=True)
class Reference:
    """batches: inputs and, where the loss is outside, the target. parts: modules to freeze and to slow down."""

    module: Any
    loss: str | None
    batches: list[Batch]
    sgd: Training
    adamw: Training
    parts: tuple[str, str] | None
    grouped: Training | None


def reference(subject: Subject, mode: str) -> Reference:
    module = subject.module().train(mode == "train")
    batches = [_with_target(subject, module, seed) for seed in range(BATCHES)]
    first, again = (_loss(copy.deepcopy(module), subject.loss, batches[0], None).item() for _ in range(2))
    if first != again:
        raise ValueError(f"{subject.name} draws random numbers in {mode} mode: two losses are {first} and {again}")
    parts = _parts(module, subject, batches)
    return Reference(
        module,
        subject.loss,
        batches,
        _trained(module, subject.loss, batches, "sgd", None),
        _trained(module, subject.loss, batches, "adamw", None),
        parts,
        None if parts is None else _trained(module, subject.loss, batches, "adamw", parts),
    )


def _with_target(subject: Subject, module: Any, seed: int) -> Batch:
    batch = subject.batch(seed)
    if subject.loss is None:
        return batch
    torch = import_module("torch")
    with torch.no_grad():
        y = copy.deepcopy(module)(*map(torch.from_numpy, batch)).numpy()
    rng = np.random.default_rng(100 + seed)
    if subject.loss == CROSS_ENTROPY:
        return *batch, rng.integers(0, y.shape[1], (y.shape[0], *y.shape[2:]))
    return *batch, (y + (y.std() + 0.1) * rng.standard_normal(y.shape)).astype(np.float32)


def _loss(module: Any, kind: str | None, batch: Batch, dtype: Any) -> Any:
    torch = import_module("torch")
    tensors = [torch.from_numpy(np.asarray(a)) for a in batch]
    tensors = [t.to(dtype or t.dtype) if t.is_floating_point() else t for t in tensors]
    if kind is None:
        return module(*tensors)
    *inputs, target = tensors
    functional = torch.nn.functional
    return (functional.cross_entropy if kind == CROSS_ENTROPY else functional.mse_loss)(module(*inputs), target)


def gradients(module: Any, kind: str | None, batch: Batch) -> dict[str, np.ndarray]:
    """Gradients of the parameters that autograd has one for: that require it and influence the loss."""
    module = copy.deepcopy(module)
    _loss(module, kind, batch, import_module("torch").float32).backward()
    grads = ((name, p.grad) for name, p in module.named_parameters() if p.requires_grad)
    return {name: gradient.numpy() for name, gradient in grads if gradient is not None}


def _influential(module: Any, kind: str | None, batches: Sequence[Batch]) -> list[str]:
    return list(gradients(module, kind, batches[0]))


def _parts(module: Any, subject: Subject, batches: Sequence[Batch]) -> tuple[str, str] | None:
    """The first two modules side by side whose parameters the loss depends on; None if there are no two."""
    used = _influential(module, subject.loss, batches)
    path = ""
    while True:
        inner = [name[len(path) :] for name in used if name.startswith(path)]
        children = list(dict.fromkeys(name.partition(".")[0] for name in inner if "." in name))
        if len(children) > 1:
            return path + children[0], path + children[1]
        if not children or len(children) < len({name.partition(".")[0] for name in inner}):
            return None
        path += children[0] + "."


def _trained(
    module: Any, kind: str | None, batches: Sequence[Batch], optimizer: str, parts: tuple[str, str] | None
) -> Training:
    """At the first rate that PyTorch itself is sure at: float32 and float64 agree, and the loss does not explode.

    Where they do not agree well, a training tells rounding errors apart, and so two right ones from each other.
    """
    tried: list[Training] = []
    for rate in RATES[optimizer]:
        tried.append(_both(module, kind, batches, optimizer, rate, parts))
        losses = tried[-1].losses
        if tried[-1].own <= SURE and max(losses[-BATCHES:]) <= 2 * max(losses[:BATCHES]):
            return tried[-1]
    return min(tried, key=lambda training: training.own)


def _both(
    module: Any, kind: str | None, batches: Sequence[Batch], optimizer: str, rate: float, parts: tuple[str, str] | None
) -> Training:
    torch = import_module("torch")

    def run(module: Any, dtype: Any) -> _Run:
        return _run(module, kind, batches, optimizer, rate, parts, dtype)

    plain = exact = run(module, torch.float32)
    torch.set_default_dtype(torch.float64)
    try:
        exact = run(module, torch.float64)
    except RuntimeError:  # a module that asks for float32 itself
        pass
    finally:
        torch.set_default_dtype(torch.float32)
    runs = [plain, *(run(_rounded_otherwise(module, seed), torch.float32) for seed in range(RUNS))]
    slack = {}
    for name, value in plain.final.items():
        # a tenth of the rate moves a tensor by a tenth
        moved, unsure = rms(value - plain.initial[name]), max(rms(r.final[name] - exact.final[name]) for r in runs)
        slack[name] = 0.1 * moved + 2e-6 * rms(value) + 4 * unsure
    return Training(
        rate,
        plain.losses,
        max(loss_gap(r.losses, exact.losses) for r in runs),
        plain.initial,
        plain.final,
        exact.gradients,
        exact.live,
        slack,
        gradient_slack(exact.gradients, [r.gradients for r in runs]),
    )


def _rounded_otherwise(module: Any, seed: int) -> Any:
    """The module with parameters that are off by a few units in the last place."""
    torch = import_module("torch")
    random, result = torch.Generator().manual_seed(seed), copy.deepcopy(module)
    for p in result.parameters():
        p.data *= 1 + OFF * torch.randn(p.shape, generator=random)
    return result


def _contiguous(_: Any, __: Any, output: Any) -> Any:
    """PyTorch 2.13 crashes in GroupNorm's backward if an input in channels_last requires no gradient."""
    return output.contiguous() if hasattr(output, "contiguous") else output


def _run(
    module: Any,
    kind: str | None,
    batches: Sequence[Batch],
    optimizer: str,
    rate: float,
    parts: tuple[str, str] | None,
    dtype: Any,
) -> _Run:
    torch = import_module("torch")
    used = _influential(module, kind, batches)
    module = copy.deepcopy(module).to(dtype)
    if parts is not None:  # what is frozen keeps its statistics too
        frozen = module.get_submodule(parts[0]).requires_grad_(False).eval()
        frozen.register_forward_hook(_contiguous)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad and name in used}
    slow = [p for name, p in trained.items() if parts is not None and name.startswith(parts[1] + ".")]
    rest = [p for p in trained.values() if not any(p is other for other in slow)]
    groups = [{"params": rest}] if not slow else [{"params": rest}, {"params": slow, "lr": FACTOR * rate}]
    kinds: dict[str, Callable[..., Any]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    update = kinds[optimizer](groups, lr=rate, **({"momentum": 0.9} if optimizer == "sgd" else {}))

    def values() -> dict[str, np.ndarray]:
        return {name: p.detach().numpy().copy() for name, p in trained.items()}

    initial, gradients, losses = values(), dict[str, np.ndarray](), list[float]()
    live = {name: np.zeros(p.shape, bool) for name, p in trained.items()}
    for batch in islice(cycle(batches), STEPS):
        update.zero_grad()
        loss = _loss(module, kind, batch, dtype)
        loss.backward()
        for name, p in trained.items():
            gradient = np.zeros(p.shape) if p.grad is None else p.grad.numpy()
            live[name] |= gradient != 0
            gradients.setdefault(name, gradient.astype(np.float64))
        update.step()
        losses.append(float(loss.detach()))
    return _Run(initial, values(), gradients, losses, live)
