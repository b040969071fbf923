"""Modules whose training somebody has found to differ from PyTorch's, or to be refused without need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.fidelity.nets import F, Net, nn, number, torch
from tests.fidelity.subject import Subject, floats, integers

X = (floats(4, 6),)
IMAGES = (floats(2, 3, 8, 8),)


def reported() -> Iterator[Subject]:
    """What was reported of exporters' buffers, limits and masks, and of functions at the ends of their range."""

    def case(name: str, build: Any, inputs: Any = X, **more: Any) -> Subject:
        return Subject(name, "reported", build, inputs, **more)

    def between(function: Any, **parts: Any) -> Any:
        return Net(lambda m, x: m.o(function(m, m.i(x))), i=nn.Linear(6, 8), **parts, o=nn.Linear(8, 3))

    old = nn.utils.spectral_norm
    yield case("spectral_norm_old", lambda: nn.Sequential(old(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 3)).eval())
    yield case(
        "spectral_norm_of_critic",
        lambda: nn.Sequential(
            old(nn.Conv2d(3, 8, 3)), nn.LeakyReLU(0.2), old(nn.Conv2d(8, 4, 3)), nn.Flatten(), old(nn.Linear(64, 1))
        ).eval(),
        IMAGES,
    )
    yield case(
        "learned_clamp", lambda: between(lambda m, x: torch.clamp(x, m.low, m.high), low=number(-0.3), high=number(0.4))
    )
    yield case("learned_clamp_min", lambda: between(lambda m, x: torch.clamp(x, min=m.low), low=number(-0.3)))
    yield case(
        "instance_norm_tracked",
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
            nn.ReLU(),
            nn.Conv2d(4, 2, 3),
        ),
        IMAGES,
    )
    yield case("autoregressive_rows", _autoregressive, (floats(2, 5, 8),))
    yield case("logsigmoid_far", lambda: between(lambda _, x: F.logsigmoid(60 * x) * 0.05))
    yield case("embedding_bag_of_rows", _bags, (integers(10, 4, 7),))


def _autoregressive() -> Any:
    """MADE on rows: the weights of both layers are multiplied by masks."""

    class Masked(nn.Linear):
        def __init__(self, diagonal: int) -> None:
            super().__init__(8, 8)
            self.register_buffer("mask", torch.tril(torch.ones(8, 8), diagonal))

        def forward(self, x: Any) -> Any:
            return F.linear(x, self.mask * self.weight, self.bias)

    return nn.Sequential(Masked(0), nn.ReLU(), Masked(-1))


def _bags() -> Any:
    return nn.Sequential(nn.EmbeddingBag(10, 8, mode="sum"), nn.Linear(8, 3))
