"""Modules as people write them, whose parameters an exporter or a tool behind it merges, computes or drops."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from tests.fidelity.nets import F, Net, nn, number, ones, torch, weight, zeros
from tests.fidelity.subject import Subject, floats, integers

X = (floats(4, 6),)
TOKENS = (floats(2, 5, 8),)
IMAGES = (floats(3, 3, 8, 8),)
CLASSES = (floats(4, 6), integers(3, 4))
SHARES = (0.2, 1.3, 0.5)


def people() -> Iterator[Subject]:
    def case(name: str, build: Any, inputs: Any = X, **more: Any) -> Subject:
        return Subject(name, "people", build, inputs, **more)

    yield case("frozen_batch_norm", _frozen_batch_norm, IMAGES)
    yield case("copied_layers", _copied)
    yield case("equal_modules", _equal)
    yield case("layer_mixture", _mixture)
    yield case("snake", _snake)
    yield case("filled_in_forward", _filled)
    yield case("repeated_seeds", _seeds, TOKENS)
    yield case("graph_convolution", _graph, (floats(7, 6),))
    yield case("conditional_norm", _conditional, IMAGES)
    yield case("expected_value", _expected, (floats(2, 16, 9),), frozen=("o.*",))
    yield case("quantised_by_average", _quantised)
    yield case("merged_gru_gates", _gates, TOKENS)
    yield case("padded_tied_head", _padded_head, (integers(12, 4, 5), integers(12, 20)), loss=None)
    yield case("class_weights", _class_weights, CLASSES, loss=None)
    yield case("class_weights_by_hand", _weights_by_hand, CLASSES, loss=None)
    yield case("positive_weights", _positive_weights, (floats(4, 6), integers(2, 4, 3)), loss=None)
    yield case("focal_alpha", _focal, CLASSES, loss=None)
    yield case("smoothed_labels", _smoothed, CLASSES, loss=None)
    yield case("critic", _critic, (floats(4, 6), floats(4, 6)), loss=None)
    yield case("species_scale", _species, (floats(4, 6), integers(5, 4)))
    yield case("rounded_levels", _levels)
    yield case("named_numbers", _named_numbers, (floats(4, 3),))


class _FrozenNorm(nn.Module):
    """FrozenBatchNorm2d of DETR and detectron2."""

    def __init__(self, size: int) -> None:
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.1), ("running_mean", 0.2), ("running_var", 0.9)):
            self.register_buffer(name, value + 0.1 * torch.rand(size))

    def forward(self, x: Any) -> Any:
        w, b, v, m = (t.reshape(1, -1, 1, 1) for t in (self.weight, self.bias, self.running_var, self.running_mean))
        scale = w * (v + 1e-5).rsqrt()
        return x * scale + (b - m * scale)


def _frozen_batch_norm() -> Any:
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), _FrozenNorm(4), nn.ReLU(), nn.Conv2d(4, 2, 3))


def _copied() -> Any:
    """As nn.TransformerEncoder copies its layer."""
    layer = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU())
    layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(3))

    def forward(m: Any, x: Any) -> Any:
        for inner in m.layers:
            x = x + inner(x)
        return m.o(x)

    return Net(forward, layers=layers, o=nn.Linear(6, 2))


def _equal() -> Any:
    """Two networks that begin with the same numbers, as an actor and its target."""
    net = Net(
        lambda m, x: m.o(torch.tanh(m.target(x)) * torch.tanh(m.actor(x))),
        actor=nn.Linear(6, 6),
        target=nn.Linear(6, 6),
        o=nn.Linear(6, 2),
    )
    net.target.load_state_dict(net.actor.state_dict())
    return net


def _mixture() -> Any:
    """ELMo's: a softmax of single numbers."""

    def forward(m: Any, x: Any) -> Any:
        shares, result = torch.softmax(torch.cat(list(m.scalars)), 0), 0
        for share, layer in zip(shares, m.layers, strict=True):
            x = torch.tanh(layer(x))
            result = result + share * x
        return m.o(m.gamma * result)

    return Net(
        forward,
        layers=nn.ModuleList(nn.Linear(6, 6) for _ in range(3)),
        scalars=nn.ParameterList([zeros(1) for _ in range(3)]),
        gamma=ones(1),
        o=nn.Linear(6, 2),
    )


def _snake() -> Any:
    def forward(m: Any, x: Any) -> Any:
        h = m.i(x)
        return m.o(h + (1.0 / (m.alpha + 1e-9)) * torch.sin(h * m.alpha) ** 2)

    return Net(forward, i=nn.Linear(6, 8), alpha=ones(8), o=nn.Linear(8, 2))


def _filled() -> Any:
    """Ones and zeros of arithmetic beside a scale and a shift that begin with them."""

    def forward(m: Any, x: Any) -> Any:
        one, zero = torch.ones(3, dtype=x.dtype), torch.zeros(3, dtype=x.dtype)
        return (m.i(x) * torch.tensor([0.5, 1.0, 2.0], dtype=x.dtype) * m.scale + m.shift + zero) * one

    return Net(forward, i=nn.Linear(6, 3), scale=ones(3), shift=zeros(3))


def _seeds() -> Any:
    """Pooling by attention: what is learned is repeated for the batch, and read twice."""

    def forward(m: Any, x: Any) -> Any:
        seeds = m.seeds.repeat(x.shape[0], 1, 1)
        return m.o(seeds + m.a(seeds, x, x, need_weights=False)[0])

    return Net(forward, seeds=weight(1, 2, 8), a=nn.MultiheadAttention(8, 2, batch_first=True), o=nn.Linear(8, 2))


def _graph() -> Any:
    adjacency = (torch.rand(7, 7) > 0.6).float()
    adjacency = ((adjacency + adjacency.t() + torch.eye(7)) > 0).float()
    scale = adjacency.sum(1).rsqrt()
    return Net(
        lambda m, x: m.links @ (F.relu(m.links @ (x @ m.first) + m.bias) @ m.second),
        links=scale[:, None] * adjacency * scale,
        first=weight(6, 8),
        bias=zeros(8),
        second=weight(8, 3),
    )


def _conditional() -> Any:
    """Conditional BatchNorm: the rows of its table begin equal."""

    def forward(m: Any, x: Any) -> Any:
        scale, shift = m.table(m.classes).chunk(2, 1)
        return m.o(F.relu(m.n(m.c(x)) * scale[..., None, None] + shift[..., None, None]))

    net = Net(
        forward,
        c=nn.Conv2d(3, 4, 3),
        n=nn.BatchNorm2d(4, affine=False),
        table=nn.Embedding(3, 8),
        classes=torch.arange(3),
        o=nn.Conv2d(4, 2, 1),
    )
    net.table.weight.data = torch.cat([torch.ones(3, 4), torch.zeros(3, 4)], 1)
    return net


def _expected() -> Any:
    """The distribution over places of YOLOv8's boxes: a convolution with 0, 1, 2, … that is never trained."""
    net = Net(
        lambda m, x: m.o(m.i(x).view(2, 4, 4, 9).transpose(2, 1).softmax(1)),
        i=nn.Conv1d(16, 16, 1),
        o=nn.Conv2d(4, 1, 1, bias=False).requires_grad_(False),
    )
    net.o.weight.data = torch.arange(4.0).view(1, 4, 1, 1)
    return net


def _quantised() -> Any:
    """A codebook that moving averages renew, under the name that a table of parameters has."""

    def forward(m: Any, x: Any) -> Any:
        z = torch.tanh(m.i(x))
        distance = z.square().sum(1, keepdim=True) - 2 * z @ m.embedding + m.embedding.square().sum(0)
        return m.o(z * F.embedding(distance.argmin(1), m.embedding.t()))

    return Net(forward, i=nn.Linear(6, 4), embedding=torch.randn(4, 8), o=nn.Linear(4, 2))


def _gates() -> Any:
    """A recurrence by hand, whose first step has a state of zeros and whose gates begin equal."""

    def forward(m: Any, x: Any) -> Any:
        h = torch.zeros(2, 8, dtype=x.dtype)
        for t in range(3):
            keep = torch.sigmoid(m.keep * h + m.bias + x[:, t])
            h = keep * h + (1 - keep) * torch.tanh(m.i(x[:, t]))
        return m.o(h)

    return Net(forward, i=nn.Linear(8, 8), keep=number(0.5, 8), bias=zeros(8), o=nn.Linear(8, 2))


def _padded_head() -> Any:
    """The row of padding gets the gradient of the head alone."""

    def forward(m: Any, i: Any, t: Any) -> Any:
        return F.cross_entropy((torch.relu(m.l(m.e(i))) @ m.e.weight.t()).flatten(0, 1), t)

    return Net(forward, e=nn.Embedding(12, 8, padding_idx=0), l=nn.Linear(8, 8))


def _class_weights() -> Any:
    return Net(lambda m, x, t: m.c(m.l(x), t), l=nn.Linear(6, 3), c=nn.CrossEntropyLoss(torch.tensor(SHARES)))


def _weights_by_hand() -> Any:
    def forward(m: Any, x: Any, t: Any) -> Any:
        w = m.shares[t]
        return -(w * F.log_softmax(m.l(x), 1).gather(1, t[:, None])[:, 0]).sum() / w.sum()

    return Net(forward, l=nn.Linear(6, 3), shares=torch.tensor(SHARES))


def _positive_weights() -> Any:
    loss = nn.BCEWithLogitsLoss(torch.tensor(SHARES), pos_weight=torch.tensor([1.7, 3.1, 0.4]))
    return Net(lambda m, x, t: m.c(m.l(x), t.to(x.dtype)), l=nn.Linear(6, 3), c=loss)


def _focal() -> Any:
    """A share of each class that requires no gradient, as no exporter says."""

    def forward(m: Any, x: Any, t: Any) -> Any:
        loss = F.cross_entropy(m.l(x), t, reduction="none")
        return (m.alpha[t] * (1 - torch.exp(-loss)) ** 2 * loss).mean()

    net = Net(forward, l=nn.Linear(6, 3), alpha=nn.Parameter(torch.tensor(SHARES)))
    net.alpha.requires_grad_(False)
    return net


def _smoothed() -> Any:
    return Net(lambda m, x, t: F.cross_entropy(m.l(x), t, label_smoothing=0.2), l=nn.Linear(6, 3))


def _critic() -> Any:
    """Whose last layer the loss is linear in."""

    def forward(m: Any, x: Any, t: Any) -> Any:
        return m.o(torch.tanh(m.l(t))).mean() - m.o(torch.tanh(m.l(x))).mean()

    return Net(forward, l=nn.Linear(6, 8), o=nn.Linear(8, 1))


def _species() -> Any:
    """A scale and a shift of each kind of atom."""

    def forward(m: Any, x: Any, kinds: Any) -> Any:
        return (m.o(torch.tanh(m.l(x)))[:, 0] * m.scale[kinds] + m.shift[kinds]).sum()

    return Net(forward, l=nn.Linear(6, 8), o=nn.Linear(8, 1), scale=weight(5), shift=weight(5))


def _named_numbers() -> Any:
    """A law with constants that are fitted."""
    return Net(lambda m, x: m.k * torch.sin(m.theta * x) + m.mu * x, theta=number(0.7), mu=number(1.3), k=number(2.1))


def _levels() -> Any:
    """A finite scalar quantiser: the gradient passes straight through the rounding."""

    def forward(m: Any, x: Any) -> Any:
        z = 2 * torch.tanh(m.i(x))
        return m.o(z + (torch.round(z) - z).detach())

    return Net(forward, i=nn.Linear(6, 4), o=nn.Linear(4, 2))
