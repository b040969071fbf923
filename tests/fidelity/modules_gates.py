"""Parameters of one element, and positions, learned and computed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from tests.fidelity.nets import F, Net, attention, nn, number, ones, qkv, torch, weight, zeros
from tests.fidelity.subject import CROSS_ENTROPY, Subject, floats, positive

X = (floats(4, 6),)
TOKENS = (floats(2, 5, 8),)
IMAGES = (floats(2, 3, 8, 8),)


def gates() -> Iterator[Subject]:
    """Parameters of one element, and those that begin as one number."""

    def case(name: str, build: Any, inputs: Any = X, **more: Any) -> Subject:
        return Subject(name, "gates", build, inputs, **more)

    def rezero(*shape: int) -> Any:
        return Net(
            lambda m, x: m.o(m.i(x) + m.alpha * torch.tanh(m.f(m.i(x)))),
            i=nn.Linear(6, 8),
            f=nn.Linear(8, 8),
            alpha=zeros(*shape),
            o=nn.Linear(8, 2),
        )

    yield case("rezero", lambda: rezero(1))
    yield case("rezero_0d", rezero)
    yield case(
        "sagan",
        lambda: Net(lambda m, x: m.o(m.gamma * m.v(x) + x), v=nn.Conv2d(3, 3, 1), gamma=zeros(1), o=nn.Conv2d(3, 2, 3)),
        IMAGES,
    )
    yield case(
        "gem",
        lambda: Net(
            lambda m, x: m.o(F.relu(m.c(x)).clamp(min=1e-6).pow(m.p).mean((2, 3)).pow(1 / m.p)),
            c=nn.Conv2d(3, 8, 3),
            p=number(3.0, 1),
            o=nn.Linear(8, 2),
        ),
        IMAGES,
    )
    yield case(
        "dyt",
        lambda: Net(
            lambda m, x: m.o(torch.tanh(m.alpha * m.i(x)) * m.w + m.b),
            i=nn.Linear(6, 8),
            alpha=number(0.5, 1),
            w=ones(8),
            b=zeros(8),
            o=nn.Linear(8, 2),
        ),
    )
    yield case(
        "fcos_scale",
        lambda: Net(
            lambda m, x: torch.cat([torch.exp(m.i(x) * m.first), torch.exp(m.i(x) * m.second)], 1),
            i=nn.Linear(6, 2),
            first=number(1.0),
            second=number(1.0),
        ),
    )
    yield case(
        "swish",
        lambda: Net(
            lambda m, x: m.o(m.i(x) * torch.sigmoid(m.beta * m.i(x))),
            i=nn.Linear(6, 8),
            beta=number(1.0),
            o=nn.Linear(8, 2),
        ),
    )
    yield case(
        "pact",
        lambda: Net(
            lambda m, x: m.o(torch.minimum(F.relu(m.i(x)), m.limit)),
            i=nn.Linear(6, 8),
            limit=number(0.5),
            o=nn.Linear(8, 2),
        ),
    )
    yield case(
        "pact_clamp",
        lambda: Net(
            lambda m, x: m.o(0.5 * (m.i(x).abs() - (m.i(x) - m.limit).abs() + m.limit)),
            i=nn.Linear(6, 8),
            limit=number(0.5, 1),
            o=nn.Linear(8, 2),
        ),
    )
    yield case(
        "pinn",
        lambda: Net(
            lambda m, x: m.first * torch.tanh(m.n(x)) ** 2 + torch.exp(m.second) * torch.tanh(m.n(x)),
            n=nn.Linear(6, 2),
            first=zeros(1),
            second=number(-2.0, 1),
        ),
    )
    yield case("logit_scale", _clip, (floats(4, 6), floats(4, 5)))
    yield case(
        "temperature", lambda: Net(lambda m, x: m.i(x) / m.t, i=nn.Linear(6, 3), t=number(1.5, 1)), loss=CROSS_ENTROPY
    )
    yield case(
        "layer_scale",
        lambda: Net(
            lambda m, x: m.o(x + m.gamma * m.f(x)), f=nn.Linear(8, 8), gamma=number(1e-4, 8), o=nn.Linear(8, 2)
        ),
        TOKENS,
    )
    yield case(
        "pelican_mixture",
        lambda: Net(
            lambda m, x: m.o(torch.sigmoid(m.mix) * m.a(x) + (1 - torch.sigmoid(m.mix)) * m.b(x)),
            mix=zeros(),
            a=nn.Linear(6, 4),
            b=nn.Linear(6, 4),
            o=nn.Linear(4, 2),
        ),
    )
    yield case(
        "uncertainty_weights",
        lambda: Net(
            lambda m, x, y: (torch.exp(-m.s) * (m.i(x) - y).square().mean(0) + m.s).sum(), i=nn.Linear(6, 2), s=zeros(2)
        ),
        (floats(4, 6), floats(4, 2)),
        loss=None,
    )
    yield case(
        "scalar_bias",
        lambda: Net(lambda m, x: torch.sigmoid(m.i(x).sum(1, keepdim=True) + m.b), i=nn.Linear(6, 3), b=zeros(1)),
    )
    yield case("linear_to_one", lambda: nn.Sequential(nn.Linear(6, 1), nn.Tanh(), nn.Linear(1, 1)))
    yield case(
        "elu_alpha",
        lambda: Net(
            lambda m, x: m.o(torch.where(m.i(x) > 0, m.i(x), m.a * (torch.exp(m.i(x)) - 1))),
            i=nn.Linear(6, 8),
            a=number(1.0),
            o=nn.Linear(8, 2),
        ),
    )


def _clip() -> Any:
    def forward(m: Any, a: Any, b: Any) -> Any:
        return m.scale.exp() * F.normalize(m.image(a), dim=-1) @ F.normalize(m.text(b), dim=-1).t()

    return Net(forward, image=nn.Linear(6, 8), text=nn.Linear(5, 8), scale=number(math.log(1 / 0.07)))


def _sine_table(length: int, width: int) -> Any:
    angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    return torch.stack([angles.sin(), angles.cos()], -1).reshape(1, length, width)


def tables() -> Iterator[Subject]:
    """Positions, learned and computed."""

    def case(name: str, build: Any, inputs: Any = TOKENS, **more: Any) -> Subject:
        return Subject(name, "tables", build, inputs, **more)

    def added(**parts: Any) -> Any:
        return Net(lambda m, x: m.o(torch.tanh(m.i(x + m.position))), i=nn.Linear(8, 8), o=nn.Linear(8, 2), **parts)

    yield case("learned_positions", lambda: added(position=weight(1, 5, 8)))
    yield case("learned_positions_zero", lambda: added(position=zeros(1, 5, 8)))
    yield case(
        "learned_positions_longer",
        lambda: Net(
            lambda m, x: m.o(torch.tanh(m.i(x + m.position[:, : x.shape[1]]))),
            i=nn.Linear(8, 8),
            position=weight(1, 9, 8),
            o=nn.Linear(8, 2),
        ),
    )
    yield case(
        "embedded_positions",
        lambda: Net(
            lambda m, x: m.o(torch.tanh(m.i(x + m.position(torch.arange(x.shape[1]))))),
            i=nn.Linear(8, 8),
            position=nn.Embedding(9, 8),
            o=nn.Linear(8, 2),
        ),
    )
    yield case("sines_learned", lambda: added(position=nn.Parameter(_sine_table(5, 8))))
    yield case("sines_buffer", lambda: added(position=_sine_table(5, 8)))
    yield case(
        "sines_in_forward",
        lambda: Net(lambda m, x: m.o(torch.tanh(m.i(x + _sine_table(5, 8)))), i=nn.Linear(8, 8), o=nn.Linear(8, 2)),
    )
    yield case(
        "class_token",
        lambda: Net(
            lambda m, x: m.o(torch.tanh(m.i(torch.cat([m.token.expand(2, 1, 8), x], 1)))),
            token=zeros(1, 1, 8),
            i=nn.Linear(8, 8),
            o=nn.Linear(8, 2),
        ),
    )
    yield case(
        "register_tokens",
        lambda: Net(
            lambda m, x: m.o(
                torch.tanh(m.i(torch.cat([m.token, m.registers], 1).expand(2, -1, -1) + x[:, :4].mean(1, keepdim=True)))
            ),
            token=zeros(1, 1, 8),
            registers=weight(1, 3, 8),
            i=nn.Linear(8, 8),
            o=nn.Linear(8, 2),
        ),
    )
    yield case("rotary", _rotary)
    yield case("alibi", _alibi)
    yield case("relative_bias", _relative)
    yield case(
        "timestep_embedding",
        lambda: Net(_timestep, i=nn.Linear(8, 8), t=nn.Linear(8, 8), o=nn.Linear(8, 2)),
        (floats(4, 8), positive(4)),
    )


def _rotary() -> Any:
    angles = torch.arange(5)[:, None] / 10000 ** (torch.arange(4) / 4)
    cos, sin = (torch.cat([f(angles), f(angles)], -1)[None] for f in (torch.cos, torch.sin))

    def turn(m: Any, x: Any) -> Any:
        return x * m.cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * m.sin

    return Net(lambda m, x: attention(m, turn(m, m.q(x)), turn(m, m.k(x)), m.v(x)), **qkv(cos=cos, sin=sin))


def _alibi() -> Any:
    slopes = 2.0 ** -torch.arange(1, 3)[:, None, None]

    def forward(m: Any, x: Any) -> Any:
        distance = (torch.arange(x.shape[1])[None] - torch.arange(x.shape[1])[:, None]).to(x.dtype)
        q, k, v = (f(x)[:, None].expand(2, 2, 5, 8) for f in (m.q, m.k, m.v))
        return attention(m, q, k, v, m.slopes * distance)

    return Net(forward, **qkv(slopes=slopes))


def _relative() -> Any:
    index = torch.arange(5)[None] - torch.arange(5)[:, None] + 4
    return Net(lambda m, x: attention(m, m.q(x), m.k(x), m.v(x), m.table[m.index]), **qkv(table=zeros(9), index=index))


def _timestep(m: Any, x: Any, t: Any) -> Any:
    frequencies = torch.exp(-math.log(10000) * torch.arange(4, dtype=x.dtype) / 4)
    angles = t[:, None] * frequencies[None]
    return m.o(torch.tanh(m.i(x) + m.t(torch.cat([angles.cos(), angles.sin()], -1))))
