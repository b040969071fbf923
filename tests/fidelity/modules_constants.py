"""What is no parameter: buffers, and constants that stand for something absent."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from tests.fidelity.nets import F, Net, attention, nn, qkv, torch, weight, zeros
from tests.fidelity.subject import CROSS_ENTROPY, Subject, floats, integers, true

X = (floats(4, 6),)
TOKENS = (floats(2, 5, 8),)
IMAGES = (floats(2, 3, 8, 8),)


def buffers() -> Iterator[Subject]:
    """Tensors that the module registers and does not train."""

    def case(name: str, build: Any, inputs: Any = X, **more: Any) -> Subject:
        return Subject(name, "buffers", build, inputs, **more)

    yield case("blur", _blur, IMAGES)
    yield case("sobel", _sobel, (floats(2, 1, 8, 8),))
    yield case(
        "mel",
        lambda: Net(lambda m, x: m.o(torch.log(F.relu(x.square() @ m.mel) + 1e-3)), mel=_mel(), o=nn.Linear(4, 2)),
        (floats(4, 12),),
    )
    yield case("dft", _dft, (floats(2, 1, 32),))
    yield case(
        "dft_matrix",
        lambda: Net(
            lambda m, x: m.o(torch.tanh(m.i(x) @ m.cos - m.i(x) @ m.sin)),
            i=nn.Linear(6, 8),
            **_waves(8),
            o=nn.Linear(8, 2),
        ),
    )
    yield case("codebook", _codebook)
    yield case("codebook_learned", _codebook_learned, (floats(4, 6), integers(10, 4)))
    yield case(
        "input_normalisation",
        lambda: Net(
            lambda m, x: m.o(F.relu(m.c((x - m.mean) / m.std))),
            mean=torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1),
            std=torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1),
            c=nn.Conv2d(3, 4, 3),
            o=nn.Conv2d(4, 2, 1),
        ),
        IMAGES,
    )
    yield case(
        "output_scaler",
        lambda: Net(
            lambda m, x: m.i((x - m.center) / m.spread) * m.scale + m.shift,
            center=torch.randn(6),
            spread=torch.rand(6) + 0.5,
            i=nn.Linear(6, 3),
            scale=torch.rand(3) + 0.5,
            shift=torch.randn(3),
        ),
    )
    yield case(
        "coordinates",
        lambda: Net(
            lambda m, x: m.o(F.relu(m.c(torch.cat([x, m.grid.expand(2, 2, 8, 8)], 1)))),
            grid=torch.stack(torch.meshgrid(torch.linspace(-1, 1, 8), torch.linspace(-1, 1, 8), indexing="ij"))[None],
            c=nn.Conv2d(5, 4, 3),
            o=nn.Conv2d(4, 2, 1),
        ),
        IMAGES,
    )
    yield case(
        "log_coordinates",
        lambda: Net(
            lambda m, x: m.o(torch.tanh(m.i(x))) @ m.basis,
            i=nn.Linear(6, 8),
            o=nn.Linear(8, 5),
            basis=torch.log1p(torch.arange(5.0))[:, None] * torch.randn(5, 3),
        ),
    )
    yield case(
        "fourier_features",
        lambda: Net(
            lambda m, x: m.o(torch.cat([(x @ m.b).sin(), (x @ m.b).cos()], -1)), b=torch.randn(6, 8), o=nn.Linear(16, 2)
        ),
    )
    yield case(
        "siren", lambda: Net(lambda m, x: m.o(torch.sin(30 * m.i(x * 0.1))), i=nn.Linear(6, 8), o=nn.Linear(8, 2))
    )
    yield case("kan_splines", _kan)
    yield case("coupling_mask", _coupling)
    yield case(
        "class_weights",
        lambda: Net(
            lambda m, x, y: F.cross_entropy(m.i(x), y, weight=m.weights),
            i=nn.Linear(6, 3),
            weights=torch.tensor([0.5, 1.0, 2.0]),
        ),
        (floats(4, 6), integers(3, 4)),
        loss=None,
    )
    yield case(
        "prototypes",
        lambda: Net(
            lambda m, x: -(m.i(x)[:, None] - m.prototypes).square().sum(-1),
            i=nn.Linear(6, 4),
            prototypes=torch.randn(3, 4),
        ),
        loss=CROSS_ENTROPY,
    )
    yield case(
        "random_features_linear",
        lambda: Net(
            lambda m, x: m.o(F.relu(F.linear(x, m.w, m.b))), w=torch.randn(8, 6), b=torch.randn(8), o=nn.Linear(8, 2)
        ),
    )
    yield case(
        "quantiles",
        lambda: Net(
            lambda m, x: m.o(torch.tanh(m.i(x))) * m.q,
            i=nn.Linear(6, 8),
            o=nn.Linear(8, 3),
            q=torch.tensor([0.1, 0.5, 0.9]),
        ),
    )
    yield case(
        "distribution_bins",
        lambda: Net(
            lambda m, x: (torch.softmax(m.i(x), -1) * m.bins).sum(-1), i=nn.Linear(6, 9), bins=torch.linspace(-2, 2, 9)
        ),
    )


def _blur() -> Any:
    k = torch.tensor([1.0, 2, 1])
    kernel = (torch.outer(k, k) / 16)[None, None].repeat(4, 1, 1, 1)
    return Net(
        lambda m, x: m.o(F.conv2d(F.pad(F.relu(m.c(x)), [1] * 4, mode="reflect"), m.blur, stride=2, groups=4)),
        c=nn.Conv2d(3, 4, 3, padding=1),
        blur=kernel,
        o=nn.Conv2d(4, 2, 1),
    )


def _sobel() -> Any:
    k = torch.tensor([[1.0, 0, -1], [2, 0, -2], [1, 0, -1]])
    return Net(
        lambda m, x: m.o(F.relu(m.c(F.conv2d(x, m.sobel)))),
        sobel=torch.stack([k, k.t()])[:, None],
        c=nn.Conv2d(2, 4, 3),
        o=nn.Conv2d(4, 2, 1),
    )


def _mel() -> Any:
    centers = torch.linspace(1, 10, 4)[None]
    return F.relu(1 - (torch.arange(12.0)[:, None] - centers).abs() / 3)


def _waves(size: int) -> dict[str, Any]:
    angles = 2 * math.pi * torch.outer(torch.arange(size), torch.arange(size)) / size
    return {"cos": angles.cos(), "sin": angles.sin()}


def _dft() -> Any:
    waves = {k: (v[:5] * torch.hann_window(8))[:, None] for k, v in _waves(8).items()}
    return Net(
        lambda m, x: m.o(F.conv1d(x, m.cos, stride=4).square() + F.conv1d(x, m.sin, stride=4).square()),
        **waves,
        o=nn.Conv1d(5, 2, 1),
    )


def _nearest(m: Any, z: Any, codes: Any) -> Any:
    distance = z.square().sum(1, keepdim=True) - 2 * z @ codes.t() + codes.square().sum(1)
    return codes[distance.argmin(1)]


def _codebook() -> Any:
    return Net(
        lambda m, x: m.o(torch.tanh(m.i(x)) * _nearest(m, x, m.codes)),
        i=nn.Linear(6, 6),
        codes=torch.randn(10, 6),
        o=nn.Linear(6, 2),
    )


def _codebook_learned() -> Any:
    return Net(
        lambda m, x, i: m.o(torch.tanh(m.i(x)) * m.codes[i]), i=nn.Linear(6, 6), codes=weight(10, 6), o=nn.Linear(6, 2)
    )


def _kan() -> Any:
    def forward(m: Any, x: Any) -> Any:
        basis = torch.exp(-(((x[..., None] - m.grid) / 0.5) ** 2))
        return F.linear(F.silu(x), m.base) + torch.einsum("big,oig->bo", basis, m.splines)

    return Net(forward, grid=torch.linspace(-2, 2, 5), base=weight(3, 6), splines=weight(3, 6, 5))


def _coupling() -> Any:
    def forward(m: Any, x: Any) -> Any:
        kept = x * m.mask
        scale = torch.tanh(m.s(kept)) * (1 - m.mask)
        return kept + (1 - m.mask) * (x * torch.exp(scale) + m.t(kept))

    return Net(forward, mask=torch.tensor([1.0, 0, 1, 0, 1, 0]), s=nn.Linear(6, 6), t=nn.Linear(6, 6))


def absent() -> Iterator[Subject]:
    """Constants that stand for something absent: masks, states, bases, ones and zeros of arithmetic."""

    def case(name: str, build: Any, inputs: Any = X, **more: Any) -> Subject:
        return Subject(name, "absent", build, inputs, **more)

    causal = torch.full((5, 5), float("-inf")).triu(1)
    yield case(
        "causal_mask",
        lambda: Net(lambda m, x: attention(m, m.q(x), m.k(x), m.v(x), m.mask), **qkv(mask=causal.clamp(min=-1e4))),
        TOKENS,
    )
    yield case(
        "zero_mask",
        lambda: Net(lambda m, x: attention(m, m.q(x), m.k(x), m.v(x), m.mask), **qkv(mask=torch.zeros(1, 5, 5))),
        TOKENS,
    )
    yield case(
        "true_mask",
        lambda: Net(
            lambda m, x: attention(m, m.q(x), m.k(x), m.v(x), (1.0 - torch.ones(5, 5, dtype=x.dtype)) * -1e4), **qkv()
        ),
        TOKENS,
    )
    yield case(
        "mask_of_input",
        lambda: Net(
            lambda m, x, a: attention(m, m.q(x), m.k(x), m.v(x), (1.0 - a[:, None].to(x.dtype)) * -1e4), **qkv()
        ),
        (floats(2, 5, 8), true(2, 5)),
    )
    yield case(
        "sdpa_causal",
        lambda: Net(
            lambda m, x: m.o(F.scaled_dot_product_attention(*(f(x)[:, None] for f in (m.q, m.k, m.v)), is_causal=True)),
            **qkv(),
        ),
        TOKENS,
    )
    yield case("index_add", _index_add, (floats(5, 6), integers(3, 5)))
    yield case("scatter_add", _scatter_add, (floats(5, 6), integers(3, 5)))
    yield case(
        "one_hot_loss",
        lambda: Net(lambda m, x, y: -(F.one_hot(y, 3) * torch.log_softmax(m.i(x), 1)).sum(1).mean(), i=nn.Linear(6, 3)),
        (floats(4, 6), integers(3, 4)),
        loss=None,
    )
    yield case("scattered_loss", _scattered_loss, (floats(4, 6), integers(3, 4)), loss=None)
    yield case(
        "ctc_like_zeros",
        lambda: Net(lambda m, x: torch.cat([torch.zeros(4, 1, dtype=x.dtype), m.i(x)], 1).cumsum(1), i=nn.Linear(6, 3)),
    )
    yield case("mono_dense", _mono)
    yield case(
        "film",
        lambda: Net(
            lambda m, x, s: m.o((1 + m.g(s)) * m.i(x) + m.b(s)),
            i=nn.Linear(6, 8),
            g=nn.Linear(3, 8),
            b=nn.Linear(3, 8),
            o=nn.Linear(8, 2),
        ),
        (floats(4, 6), floats(4, 3)),
    )
    yield case(
        "style_tensor",
        lambda: Net(
            lambda m, x, s: m.o((torch.ones(8, dtype=x.dtype) + m.g(s)) * m.i(x)),
            i=nn.Linear(6, 8),
            g=nn.Linear(3, 8),
            o=nn.Linear(8, 2),
        ),
        (floats(4, 6), floats(4, 3)),
    )
    yield case("adaln", _adaln, (floats(2, 5, 8), floats(2, 3)))
    yield case("lstm_zero_state", _lstm_states, TOKENS)
    yield case("unrolled_zero_state", _unrolled, TOKENS)
    yield case(
        "residual_of_zeros",
        lambda: Net(lambda m, x: m.o(torch.zeros_like(x) + torch.tanh(m.i(x))), i=nn.Linear(6, 6), o=nn.Linear(6, 2)),
    )
    yield case(
        "maximum_of_zeros",
        lambda: Net(
            lambda m, x: m.o(torch.maximum(m.i(x), torch.zeros(8, dtype=x.dtype))), i=nn.Linear(6, 8), o=nn.Linear(8, 2)
        ),
    )
    yield case("eye", lambda: Net(lambda m, x: x @ (torch.eye(6, dtype=x.dtype) + m.w), w=zeros(6, 6)))


def _index_add() -> Any:
    return Net(
        lambda m, x, i: m.o(torch.zeros(3, 8, dtype=x.dtype).index_add(0, i, torch.tanh(m.i(x)))),
        i=nn.Linear(6, 8),
        o=nn.Linear(8, 2),
    )


def _scatter_add() -> Any:
    def forward(m: Any, x: Any, i: Any) -> Any:
        messages = torch.tanh(m.i(x))
        return m.o(torch.zeros(3, 8, dtype=x.dtype).scatter_add(0, i[:, None].expand(5, 8), messages))

    return Net(forward, i=nn.Linear(6, 8), o=nn.Linear(8, 2))


def _scattered_loss() -> Any:
    def forward(m: Any, x: Any, y: Any) -> Any:
        target = torch.full((4, 3), 0.05, dtype=x.dtype).scatter(1, y[:, None], 0.9)
        return -(target * torch.log_softmax(m.i(x), 1)).sum(1).mean()

    return Net(forward, i=nn.Linear(6, 3))


def _mono() -> Any:
    def forward(m: Any, x: Any) -> Any:
        a, b, c = m.l(x).split([3, 3, 3], 1)
        zero, one = torch.zeros_like(c), torch.ones_like(c)
        low, high = F.elu(torch.minimum(c, zero) + 1) - F.elu(one), F.elu(one) - F.elu(1 - torch.maximum(c, zero))
        return m.o(torch.cat([F.elu(a), -F.elu(-b), torch.where(c <= 0, low, high)], 1))

    return Net(forward, l=nn.Linear(6, 9), o=nn.Linear(9, 1))


def _adaln() -> Any:
    def forward(m: Any, x: Any, c: Any) -> Any:
        shift, scale, gate = m.c(F.silu(c))[:, None].chunk(3, -1)
        return m.o(x + gate * m.f(m.n(x) * (1 + scale) + shift))

    net = Net(
        forward, c=nn.Linear(3, 24), n=nn.LayerNorm(8, elementwise_affine=False), f=nn.Linear(8, 8), o=nn.Linear(8, 2)
    )
    nn.init.zeros_(net.c.weight)
    nn.init.zeros_(net.c.bias)
    return net


def _lstm_states() -> Any:
    def forward(m: Any, x: Any) -> Any:
        state = torch.zeros(1, 2, 6, dtype=x.dtype), torch.zeros(1, 2, 6, dtype=x.dtype)
        return m.o(m.r(x, state)[0])

    return Net(forward, r=nn.LSTM(8, 6, batch_first=True), o=nn.Linear(6, 2))


def _unrolled() -> Any:
    def forward(m: Any, x: Any) -> Any:
        h = torch.zeros(2, 6, dtype=x.dtype)
        for t in range(3):
            h = torch.tanh(m.i(x[:, t]) + m.h(h))
        return m.o(h)

    return Net(forward, i=nn.Linear(8, 6), h=nn.Linear(6, 6), o=nn.Linear(6, 2))
