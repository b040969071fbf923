"""Modules of recipes: adapters, gates, heads with a temperature, experts, losses in the graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.fidelity.nets import F, Net, nn, number, ones, torch, weight, zeros
from tests.fidelity.subject import Subject, floats, integers

X = (floats(4, 6),)
TOKENS = (floats(2, 5, 8),)
CLASSES = (floats(4, 6), integers(3, 4))
VIEWS = (floats(4, 6), floats(4, 6))


def recipes() -> Iterator[Subject]:
    def case(name: str, build: Any, inputs: Any = X, **more: Any) -> Subject:
        return Subject(name, "recipes", build, inputs, **more)

    yield case("monotonic", _monotonic)
    yield case("lora_in_the_weight", _lora, frozen=("w",))
    yield case("lists_of_parameters", _lists)
    yield case("complex_by_pairs", _complex)
    yield case("gated_attention", _gated, TOKENS)
    yield case("hypernetwork", _hyper)
    yield case("corrected_gate", _corrected, TOKENS)
    yield case("batched_experts", _experts, TOKENS)
    yield case("sigmoid_pairs", _pairs, VIEWS, loss=None)
    yield case("scaled_cosine", _cosine, CLASSES, loss=None)
    yield case("centres_of_classes", _centres, CLASSES, loss=None)
    yield case("weighted_tasks", _tasks, CLASSES, loss=None)
    yield case("redundancy", _redundancy, VIEWS, loss=None)
    yield case("one_row", _one_row, (floats(6), integers(3, 1)), loss=None)


def _monotonic() -> Any:
    class Positive(nn.Module):
        def forward(self, w: Any) -> Any:
            return F.softplus(w)

    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    for layer in (net[0], net[2]):
        torch.nn.utils.parametrize.register_parametrization(layer, "weight", Positive())
    return net


def _lora() -> Any:
    """W + BA, W frozen."""
    frozen = nn.Parameter(0.4 * torch.randn(6, 6), requires_grad=False)
    return Net(
        lambda m, x: m.o(torch.relu(F.linear(x, m.w + m.up @ m.down))),
        w=frozen,
        down=weight(2, 6),
        up=zeros(6, 2),
        o=nn.Linear(6, 2),
    )


def _lists() -> Any:
    def forward(m: Any, x: Any) -> Any:
        for w in m.layers:
            x = torch.tanh(x @ w * m.rest["scale"] + m.rest["shift"]) + m.rest["skip"] * x
        return m.o(x)

    rest = nn.ParameterDict({"scale": ones(6), "shift": zeros(6), "skip": number(0.5, 6)})
    return Net(forward, layers=nn.ParameterList([weight(6, 6) for _ in range(3)]), rest=rest, o=nn.Linear(6, 2))


def _complex() -> Any:
    def forward(m: Any, x: Any) -> Any:
        (r, i), (c, s) = x.chunk(2, -1), (torch.cos(m.phase), torch.sin(m.phase))
        a, b = r @ m.real - i @ m.imaginary, r @ m.imaginary + i @ m.real
        return m.o(torch.sqrt((a * c - b * s) ** 2 + (a * s + b * c) ** 2 + 1e-6))

    return Net(forward, real=weight(3, 4), imaginary=weight(3, 4), phase=zeros(4), o=nn.Linear(4, 2))


def _gated() -> Any:
    def forward(m: Any, x: Any) -> Any:
        x = m.attention(x, x, x, need_weights=False)[0] * m.first.tanh() + x
        return m.o(m.inner(x) * m.second.tanh() + x)

    inner = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16, bias=False), nn.GELU(), nn.Linear(16, 8, bias=False))
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    return Net(
        forward, attention=attention, first=number(0.3, 1), inner=inner, second=number(0.2, 1), o=nn.Linear(8, 2)
    )


def _hyper() -> Any:
    def forward(m: Any, x: Any) -> Any:
        return m.o(torch.tanh(F.linear(x, m.writer(m.latent).view(5, 6), m.bias)))

    return Net(forward, latent=weight(4), writer=nn.Linear(4, 30), bias=zeros(5), o=nn.Linear(5, 2))


def _corrected() -> Any:
    """A buffer named as a second bias."""

    def forward(m: Any, x: Any) -> Any:
        shares = torch.softmax(m.gate(x) + m.bias, -1)
        return sum(shares[..., n : n + 1] * expert(x) for n, expert in enumerate(m.experts))

    experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3))
    return Net(forward, gate=nn.Linear(8, 3), bias=torch.tensor([0.1, -0.2, 0.3]), experts=experts)


def _experts() -> Any:
    def forward(m: Any, x: Any) -> Any:
        tokens = x.reshape(-1, 8)
        shares, places = torch.softmax(m.gate(tokens), -1).topk(2, -1)
        shares = torch.zeros(tokens.shape[0], 3).scatter(1, places, shares / shares.sum(-1, keepdim=True))
        hidden = F.gelu(torch.bmm(tokens.expand(3, -1, -1), m.first) + m.bias)
        return m.o(torch.einsum("te,etd->td", shares, torch.bmm(hidden, m.second)).view_as(x))

    return Net(
        forward,
        gate=nn.Linear(8, 3, bias=False),
        first=weight(3, 8, 16),
        bias=zeros(3, 1, 16),
        second=weight(3, 16, 8),
        o=nn.Linear(8, 2),
    )


def _pairs() -> Any:
    """SigLIP's loss."""

    def forward(m: Any, x: Any, y: Any) -> Any:
        x, y = F.normalize(m.first(x), dim=-1), F.normalize(m.second(y), dim=-1)
        logits = y @ x.t() * m.logit_scale.exp() + m.logit_bias
        return -F.logsigmoid((2 * torch.eye(4) - torch.ones(4, 4)) * logits).sum() / 4

    return Net(forward, first=nn.Linear(6, 5), second=nn.Linear(6, 5), logit_scale=number(1.2), logit_bias=number(-3.0))


def _cosine() -> Any:
    def forward(m: Any, x: Any, labels: Any) -> Any:
        cosines = F.linear(F.normalize(m.features(x)), F.normalize(m.weight))
        return F.cross_entropy(m.sigma * 4 * (cosines - 0.1 * F.one_hot(labels, 3)), labels)

    return Net(forward, features=nn.Linear(6, 5), weight=weight(3, 5), sigma=number(1.1, 1))


def _centres() -> Any:
    def forward(m: Any, x: Any, labels: Any) -> Any:
        f = m.features(x)
        return F.cross_entropy(m.o(f), labels) + 0.05 * ((f - m.centres[labels]) ** 2).sum(1).mean()

    return Net(forward, features=nn.Linear(6, 2), centres=weight(3, 2), o=nn.Linear(2, 3))


def _tasks() -> Any:
    def forward(m: Any, x: Any, labels: Any) -> Any:
        losses = F.cross_entropy(m.first(x), labels), m.second(x).pow(2).mean()
        return sum(torch.exp(-m.log_vars[n]) * loss + m.log_vars[n] for n, loss in enumerate(losses))

    return Net(forward, first=nn.Linear(6, 3), second=nn.Linear(6, 1), log_vars=nn.Parameter(torch.tensor([0.2, -0.1])))


def _redundancy() -> Any:
    """Barlow Twins'."""

    def forward(m: Any, x: Any, y: Any) -> Any:
        c = m.norm(m.features(x)).T @ m.norm(m.features(y)) / 4
        diagonal = torch.diagonal(c)
        return ((diagonal - 1) ** 2).sum() + 0.01 * (c.pow(2).sum() - diagonal.pow(2).sum())

    return Net(forward, features=nn.Linear(6, 5), norm=nn.LayerNorm(5))


def _one_row() -> Any:
    return Net(lambda m, x, labels: F.cross_entropy(m.o(x), labels[0]), o=nn.Linear(6, 3))
