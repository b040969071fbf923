"""Small modules written as one expression."""

from __future__ import annotations

from importlib import import_module
from typing import Any

torch: Any = import_module("torch")
nn: Any = torch.nn
F: Any = nn.functional


class Net(nn.Module):
    """forward(m, *inputs) over parts: modules, parameters, and tensors, which become buffers."""

    def __init__(self, forward: Any, **parts: Any) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def weight(*shape: int) -> Any:
    """A parameter of normal numbers, as weights begin."""
    return nn.Parameter(torch.randn(shape) / max(1, shape[-1]) ** 0.5)


def zeros(*shape: int) -> Any:
    return nn.Parameter(torch.zeros(shape))


def ones(*shape: int) -> Any:
    return nn.Parameter(torch.ones(shape))


def number(value: float, *shape: int) -> Any:
    return nn.Parameter(torch.full(shape, value))


def attention(m: Any, q: Any, k: Any, v: Any, bias: Any = None) -> Any:
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return m.o(torch.softmax(scores if bias is None else scores + bias, -1) @ v)


def qkv(**parts: Any) -> dict[str, Any]:
    return {"q": nn.Linear(8, 8), "k": nn.Linear(8, 8), "v": nn.Linear(8, 8), **parts, "o": nn.Linear(8, 2)}
