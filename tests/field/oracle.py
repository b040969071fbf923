"""What PyTorch says of a file's gradients, through its `Twin`, and how fast its steps are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tests.field.sources import Feeds
from tests.field.twin import Twin, UnknownOperatorError

torch: Any = import_module("torch")
F: Any = torch.nn.functional
THREADS = torch.get_num_threads()
torch.set_num_threads(1)  # where nothing is timed: threads that wait for each other are slow on a busy machine


def torch_threads() -> int:
    """How many threads PyTorch would take."""
    return THREADS


def use_threads(count: int) -> None:
    torch.set_num_threads(count)


def _loss(kind: str, y: Any, target: Any) -> Any:
    return F.cross_entropy(y, target) if kind == "softmax_cross_entropy" else F.mse_loss(y, target)


class Oracle:
    """The file in PyTorch, in float64. problem: why it has nothing to say, or empty."""

    def __init__(
        self, path: Path, values: Feeds, feeds: Feeds, prediction: str, y: np.ndarray, *, half: bool = False
    ) -> None:
        self.model, self.values, self.feeds, self.prediction = onnx.load(path), values, feeds, prediction
        self.problem = ""
        try:
            self._load(torch.float64)
            output = self.forward().detach().numpy()
        except (UnknownOperatorError, NotImplementedError, KeyError) as e:
            self.problem = f"no twin: {type(e).__name__} {e}"
            return
        gap = np.abs(output - y).max() / max(np.abs(y).max(), 1e-2) if output.shape == y.shape else np.inf
        missing = set(values) - self.twin.found
        if not gap < (0.2 if half else 2e-3):
            self.problem = f"no twin: it differs from onnxruntime's forward by {gap:.1e}"
        elif missing:
            self.problem = f"no twin: it has not met {', '.join(sorted(missing)[:3])}"

    def _load(self, dtype: Any) -> None:
        self.leaves = {name: torch.tensor(value).to(dtype).requires_grad_() for name, value in self.values.items()}
        self.fed = {
            name: torch.tensor(value).to(dtype).requires_grad_() if value.dtype.kind == "f" else torch.tensor(value)
            for name, value in self.feeds.items()
        }
        self.twin = Twin(self.model, self.leaves, dtype, tied=True)

    def forward(self) -> Any:
        return self.twin(self.fed, self.prediction)

    def of_loss(self, kind: str, target: np.ndarray, at: Feeds) -> Feeds:
        """∂ loss / ∂ parameters, where the file's tensors have these values."""
        self.twin.at = at
        loss = _loss(kind, self.forward(), self._target(target))
        return self._gradients(loss, None, self.leaves)

    def of_prediction(self, dy: np.ndarray, names: Sequence[str], at: Feeds) -> Feeds:
        """Σ dy · ∂ prediction / ∂ names, where the file's tensors have these values."""
        self.twin.at = at
        known = self.fed | self.leaves
        return self._gradients(self.forward(), torch.tensor(dy).double(), {name: known[name] for name in names})

    @staticmethod
    def _gradients(y: Any, dy: Any, wrt: dict[str, Any]) -> Feeds:
        grads = torch.autograd.grad(y, list(wrt.values()), dy, allow_unused=True)
        return {
            name: (torch.zeros_like(leaf) if g is None else g).numpy()
            for (name, leaf), g in zip(wrt.items(), grads, strict=True)
        }

    def _target(self, target: np.ndarray) -> Any:
        tensor = torch.tensor(target)
        return tensor.to(self.twin.dtype) if tensor.is_floating_point() else tensor

    def trained(self, kind: str, target: np.ndarray, steps: int, *, exact: bool = False) -> list[float]:
        """The losses of so many steps of AdamW with our defaults, each before its update; exact: in float64."""
        self._load(torch.float64 if exact else torch.float32)
        step = self._step(kind, target)
        return [step() for _ in range(steps)]

    def _step(self, kind: str, target: np.ndarray) -> Callable[[], float]:
        optimizer = torch.optim.AdamW(self.leaves.values(), lr=1e-3, weight_decay=0.01)

        def step() -> float:
            optimizer.zero_grad()
            loss = _loss(kind, self.forward(), self._target(target))
            loss.backward()
            optimizer.step()
            return float(loss.detach())

        return step

    def eager(self, kind: str, target: np.ndarray) -> Callable[[], float]:
        """A step in float32, node by node."""
        self._load(torch.float32)
        return self._step(kind, target)


def eager_step(module: Any, oracle: Oracle, kind: str, target: np.ndarray, batch: Feeds) -> Callable[[], float] | None:
    """A step of PyTorch eager: of the module where there is one, else of the twin, else none."""
    if module is None:
        return None if oracle.problem else oracle.eager(kind, target)
    xs = [torch.from_numpy(value) for value in batch.values()]
    wanted = torch.from_numpy(target)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad()
        loss = _loss(kind, module(*xs), wanted)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step
