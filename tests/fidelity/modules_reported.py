"""Modules whose training somebody has found to differ from PyTorch's, or to be refused without need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.fidelity.nets import F, Net, nn, number, torch, weight
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
    yield case("subtracted_times_three", lambda: between(lambda m, x: torch.sub(x, m.w, alpha=3), w=weight(8)))
    yield case("learned_keys", _learned_keys, (floats(2, 5, 8),))
    yield case("standardised_by_batch_norm", _standardised, IMAGES)
    yield case(
        "one_gain_expanded", lambda: between(lambda m, x: F.layer_norm(x, (8,), m.w.expand(8)), w=number(0.5, 1))
    )
    index = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    yield case("bias_of_groups", lambda: between(lambda m, x: x + m.w[m.index], w=weight(4), index=index))
    yield case("anchored_weight", _anchored)
    yield case("frozen_copy_of_a_head", _copied_head)
    yield case("parameters_in_a_list", _in_a_list, lost=("dynamo",))  # which has computed the penalty


def _autoregressive() -> Any:
    """MADE on rows: the weights of both layers are multiplied by masks."""

    class Masked(nn.Linear):
        def __init__(self, diagonal: int) -> None:
            super().__init__(8, 8)
            self.register_buffer("mask", torch.tril(torch.ones(8, 8), diagonal))

        def forward(self, x: Any) -> Any:
            return F.linear(x, self.mask * self.weight, self.bias)

    return nn.Sequential(Masked(0), nn.ReLU(), Masked(-1))


def _learned_keys() -> Any:
    def forward(m: Any, x: Any) -> Any:
        return m.o(F.scaled_dot_product_attention(m.q(x), m.k.expand(2, 4, 8), m.v.expand(2, 4, 8)))

    return Net(forward, q=nn.Linear(8, 8), k=weight(1, 4, 8), v=weight(1, 4, 8), o=nn.Linear(8, 3))


def _standardised() -> Any:
    """The convolution of a ResNet whose weights have mean 0 and deviation 1 for each filter."""

    class Standardised(nn.Conv2d):
        def forward(self, x: Any) -> Any:
            flat = self.weight.reshape(1, self.out_channels, -1)
            return F.conv2d(x, F.batch_norm(flat, None, None, training=True).reshape_as(self.weight), self.bias)

    return nn.Sequential(Standardised(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))


def _anchored() -> Any:
    """A penalty on what the weight has moved from where it began."""
    first = nn.Linear(6, 8)

    def forward(m: Any, x: Any) -> Any:
        return m.o(torch.tanh(m.i(x))) + 0.5 * ((m.i.weight - m.start) ** 2).sum()

    return Net(forward, i=first, o=nn.Linear(8, 3), start=first.weight.detach().clone())


def _copied_head() -> Any:
    head = nn.Linear(8, 3)

    def forward(m: Any, x: Any) -> Any:
        hidden = torch.tanh(m.i(x))
        return m.o(hidden) + F.linear(hidden, m.w, m.b)

    return Net(forward, i=nn.Linear(6, 8), o=head, w=head.weight.detach().clone(), b=head.bias.detach().clone())


def _in_a_list() -> Any:
    """A penalty on weights that the module has in a list, too."""
    first, head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(m: Any, x: Any) -> Any:
        return m.o(torch.tanh(m.i(x))) + 0.1 * sum((w**2).sum() for w in m.weights)

    return Net(forward, i=first, o=head, weights=[first.weight, head.weight])


def _bags() -> Any:
    return nn.Sequential(nn.EmbeddingBag(10, 8, mode="sum"), nn.Linear(8, 3))
