"""Layers of torch.nn, and what reads their parameters in other ways."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from tests.fidelity.nets import F, Net, nn, ones, torch, weight, zeros
from tests.fidelity.subject import CROSS_ENTROPY, Subject, floats, integers, positive

X = (floats(4, 6),)
TOKENS = (floats(2, 5, 8),)
IMAGES = (floats(2, 3, 8, 8),)


def layers() -> Iterator[Subject]:
    def case(name: str, build: Any, inputs: Any = X, **more: Any) -> Subject:
        return Subject(name, "layers", build, inputs, **more)

    yield case("linear", lambda: nn.Linear(6, 3))
    yield case("linear_no_bias", lambda: nn.Linear(6, 3, bias=False))
    yield case("mlp", lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), loss=CROSS_ENTROPY)
    yield case(
        "mlp_no_bias", lambda: nn.Sequential(nn.Linear(6, 8, bias=False), nn.GELU(), nn.Linear(8, 3, bias=False))
    )
    yield case("mlp_3d", lambda: nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)), TOKENS)
    yield case("mlp_dropout", lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 3)))
    yield case("conv", lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)), IMAGES)
    yield case(
        "conv_no_bias",
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.Conv2d(4, 2, 3, bias=False)),
        IMAGES,
    )
    yield case("conv_zero_biases", _zero_biases, IMAGES)
    yield case(
        "conv_1d",
        lambda: nn.Sequential(nn.Conv1d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv1d(4, 2, 3)),
        (floats(2, 3, 9),),
    )
    yield case(
        "conv_3d", lambda: nn.Sequential(nn.Conv3d(2, 3, 2), nn.ReLU(), nn.Conv3d(3, 2, 2)), (floats(2, 2, 4, 4, 4),)
    )
    yield case(
        "conv_depthwise", lambda: nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.ReLU(), nn.Conv2d(6, 2, 1)), IMAGES
    )
    yield case(
        "conv_transpose",
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3, 2, output_padding=1)),
        IMAGES,
    )
    yield case(
        "conv_reflect",
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.ReLU(), nn.Conv2d(4, 2, 3)),
        IMAGES,
    )
    yield case("prelu", lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(4), nn.Conv2d(4, 2, 3), nn.PReLU()), IMAGES)
    yield case("bilinear", lambda: Net(lambda m, x: m.b(m.i(x), x), i=nn.Linear(6, 4), b=nn.Bilinear(4, 6, 3)))
    yield case(
        "embedding",
        lambda: Net(lambda m, i: m.o(m.e(i).mean(1)), e=nn.Embedding(20, 8), o=nn.Linear(8, 3)),
        (integers(20, 4, 5),),
    )
    yield case(
        "embedding_padding",
        lambda: Net(lambda m, i: m.o(m.e(i)), e=nn.Embedding(20, 8, padding_idx=0), o=nn.Linear(8, 3)),
        (integers(20, 4, 5),),
    )
    yield case(
        "embedding_bag",
        lambda: Net(lambda m, i: m.o(m.e(i)), e=nn.EmbeddingBag(20, 8, mode="sum"), o=nn.Linear(8, 3)),
        (integers(20, 4, 5),),
    )
    yield case(
        "lstm",
        lambda: Net(lambda m, x: m.o(m.r(x)[0][:, -1]), r=nn.LSTM(8, 6, batch_first=True), o=nn.Linear(6, 2)),
        TOKENS,
    )
    yield case(
        "gru", lambda: Net(lambda m, x: m.o(m.r(x)[0]), r=nn.GRU(8, 6, batch_first=True), o=nn.Linear(6, 2)), TOKENS
    )
    yield case("rnn", lambda: Net(lambda m, x: m.o(m.r(x)[0]), r=nn.RNN(8, 6), o=nn.Linear(6, 2)), TOKENS)
    yield case(
        "lstm_bidirectional",
        lambda: Net(lambda m, x: m.o(m.r(x)[0]), r=nn.LSTM(8, 4, 2, bidirectional=True), o=nn.Linear(8, 2)),
        TOKENS,
    )
    yield case(
        "gru_no_bias", lambda: Net(lambda m, x: m.o(m.r(x)[0]), r=nn.GRU(8, 6, bias=False), o=nn.Linear(6, 2)), TOKENS
    )
    yield case(
        "gru_zero_state",
        lambda: Net(
            lambda m, x: m.o(m.r(x, torch.zeros(1, 5, 6, dtype=x.dtype))[0]), r=nn.GRU(8, 6), o=nn.Linear(6, 2)
        ),
        TOKENS,
    )
    yield case(
        "gru_learned_state",
        lambda: Net(
            lambda m, x: m.o(m.r(x, m.h.expand(1, 5, 6).contiguous())[0]),
            r=nn.GRU(8, 6),
            h=zeros(1, 1, 6),
            o=nn.Linear(6, 2),
        ),
        TOKENS,
    )
    yield case(
        "gru_cell",
        lambda: Net(lambda m, x: m.o(m.c(x[:, 1], m.c(x[:, 0]))), c=nn.GRUCell(8, 6), o=nn.Linear(6, 2)),
        TOKENS,
    )
    yield case("unet", _unet, IMAGES)
    yield case(
        "squeeze_excite",
        lambda: Net(
            lambda m, x: m.o(_scaled(m, F.relu(m.c(x)))),
            c=nn.Conv2d(3, 8, 3),
            a=nn.Conv2d(8, 2, 1),
            b=nn.Conv2d(2, 8, 1),
            o=nn.Conv2d(8, 2, 1),
        ),
        IMAGES,
    )
    yield case(
        "autoencoder",
        lambda: nn.Sequential(
            OrderedDict(
                encoder=nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)),
                decoder=nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 6)),
            )
        ),
    )
    yield case("mixture_of_experts", _experts)
    yield case("mixture_density", _mixture_density, (floats(4, 6), floats(4, 1)), loss=None)


def _zero_biases() -> Any:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1))
    for layer in (net[0], net[2], net[4]):
        nn.init.zeros_(layer.bias)
    return net


def _scaled(m: Any, h: Any) -> Any:
    return h * torch.sigmoid(m.b(F.relu(m.a(h.mean((2, 3), keepdim=True)))))


def _unet() -> Any:
    def forward(m: Any, x: Any) -> Any:
        a = F.relu(m.down(x))
        b = F.relu(m.inner(F.max_pool2d(a, 2)))
        return m.out(torch.cat([a, m.up(b)], 1))

    return Net(
        forward,
        down=nn.Conv2d(3, 4, 3, padding=1),
        inner=nn.Conv2d(4, 6, 3, padding=1),
        up=nn.ConvTranspose2d(6, 4, 2, 2),
        out=nn.Conv2d(8, 2, 1),
    )


def _experts() -> Any:
    def forward(m: Any, x: Any) -> Any:
        gates = torch.softmax(m.gate(x), -1)
        return (torch.stack([expert(x) for expert in m.experts], -1) * gates[:, None]).sum(-1)

    return Net(forward, gate=nn.Linear(6, 3), experts=nn.ModuleList(nn.Linear(6, 2) for _ in range(3)))


def _mixture_density() -> Any:
    def forward(m: Any, x: Any, y: Any) -> Any:
        logits, means, scales = m.o(torch.tanh(m.i(x))).chunk(3, 1)
        log = torch.log_softmax(logits, 1) - scales - 0.5 * ((y - means) * torch.exp(-scales)) ** 2
        return -torch.logsumexp(log, 1).mean()

    return Net(forward, i=nn.Linear(6, 8), o=nn.Linear(8, 9))


def readings() -> Iterator[Subject]:
    """Parameters that the forward pass changes before it uses them."""

    def case(name: str, build: Any, inputs: Any = X, **more: Any) -> Subject:
        return Subject(name, "readings", build, inputs, **more)

    yield case("weight_norm", lambda: nn.Sequential(_weight_normed(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3)))
    yield case(
        "weight_norm_conv",
        lambda: nn.Sequential(_weight_normed(nn.Conv2d(3, 4, 3)), nn.ReLU(), nn.Conv2d(4, 2, 3)),
        IMAGES,
    )
    yield case("spectral_norm", _spectral)
    yield case(
        "weight_standardisation", lambda: nn.Sequential(_Standardised(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1)), IMAGES
    )
    yield case("concatenated_qkv", _concatenated, TOKENS)
    yield case(
        "multihead_attention",
        lambda: Net(
            lambda m, x: m.o(m.a(x, x, x, need_weights=False)[0]),
            a=nn.MultiheadAttention(8, 2, batch_first=True),
            o=nn.Linear(8, 2),
        ),
        TOKENS,
    )
    yield case(
        "transformer_layer",
        lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), nn.Linear(8, 2)),
        TOKENS,
    )
    yield case("tied_head", _tied, (integers(20, 2, 5),))
    yield case("untied_head", _untied, (integers(20, 2, 5),))
    yield case(
        "used_twice",
        lambda: Net(
            lambda m, x: m.o(torch.tanh(m.h(torch.tanh(m.h(m.i(x)))))),
            i=nn.Linear(6, 8),
            h=nn.Linear(8, 8),
            o=nn.Linear(8, 2),
        ),
    )
    yield case(
        "unused",
        lambda: Net(
            lambda m, x: m.o(torch.tanh(m.i(x))),
            i=nn.Linear(6, 8),
            unused=nn.Linear(8, 8),
            spare=weight(3),
            o=nn.Linear(8, 2),
        ),
    )
    yield case("sliced", lambda: Net(lambda m, x: x @ m.w[:, 1:5] + m.b[::2], w=weight(6, 8), b=weight(8)))
    yield case(
        "transposed", lambda: Net(lambda m, x: torch.tanh(x @ m.w.t()) @ m.v.t(), w=weight(8, 6), v=weight(3, 8))
    )
    yield case(
        "reshaped",
        lambda: Net(lambda m, x: torch.tanh(x @ m.w.reshape(6, 4)) @ m.v.view(4, 2), w=weight(24), v=weight(8)),
    )
    yield case(
        "expanded",
        lambda: Net(
            lambda m, x: m.o(x + m.b.expand(4, 6) * m.g.unsqueeze(0)), b=zeros(1, 1), g=ones(6), o=nn.Linear(6, 2)
        ),
    )
    yield case("scaled_weight", lambda: Net(lambda m, x: F.linear(x, m.w * 0.5, m.b * 2), w=weight(3, 6), b=zeros(3)))
    yield case(
        "softplus_weight", lambda: Net(lambda m, x: F.linear(x, F.softplus(m.w), m.b), w=weight(3, 6), b=zeros(3))
    )
    yield case(
        "low_rank",
        lambda: Net(lambda m, x: m.l(x) + x @ m.a @ m.b * 2.0, l=nn.Linear(6, 3), a=weight(6, 2), b=zeros(2, 3)),
    )
    yield case(
        "parameter_list",
        lambda: Net(
            lambda m, x: torch.tanh(x @ m.ws[0] + m.bs["first"]) @ m.ws[1] + m.bs["second"],
            ws=nn.ParameterList([weight(6, 8), weight(8, 2)]),
            bs=nn.ParameterDict({"first": zeros(8), "second": zeros(2)}),
        ),
    )
    yield case(
        "nested_names",
        lambda: nn.Sequential(
            nn.ModuleList([nn.Linear(6, 8)])[0],
            nn.Sequential(nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), nn.ReLU()),
            nn.Linear(8, 2),
        ),
    )
    yield case(
        "our_names",
        lambda: Net(
            lambda m, x: m.target(torch.tanh(m.grad(torch.tanh(m.loss(x))))),
            loss=nn.Linear(6, 8),
            grad=nn.Linear(8, 8),
            target=nn.Linear(8, 2),
        ),
    )
    yield case(
        "our_tensor_names",
        lambda: Net(
            lambda m, x: x @ m.labels * m.learning_rate + m.step,
            labels=weight(6, 3),
            learning_rate=ones(3),
            step=zeros(3),
        ),
    )
    yield case(
        "rates_by_position",
        lambda: Net(lambda m, x: m.o(torch.einsum("bi,ijk,bj->bk", x, m.w, x)), w=weight(6, 6, 4), o=nn.Linear(4, 2)),
        (positive(4, 6),),
    )


def _weight_normed(layer: Any) -> Any:
    return nn.utils.parametrizations.weight_norm(layer)


def _spectral() -> Any:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3)).eval()


class _Standardised(nn.Conv2d):
    """ScaledStdConv of NFNets."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.gain = ones(sizes[1], 1, 1, 1)

    def forward(self, x: Any) -> Any:
        w = self.weight
        variance, mean = torch.var_mean(w, dim=(1, 2, 3), keepdim=True, unbiased=False)
        fan = w[0].numel()
        return F.conv2d(x, self.gain * (w - mean) / torch.sqrt(variance * fan + 1e-4), self.bias)


def _concatenated() -> Any:
    def forward(m: Any, x: Any) -> Any:
        q, k, v = F.linear(x, torch.cat([m.q, m.k, m.v]), torch.cat([m.qb, torch.zeros_like(m.qb), m.vb])).chunk(3, -1)
        return m.o(torch.softmax(q @ k.transpose(1, 2) / 8**0.5, -1) @ v)

    return Net(forward, q=weight(8, 8), k=weight(8, 8), v=weight(8, 8), qb=zeros(8), vb=zeros(8), o=nn.Linear(8, 2))


def _tied() -> Any:
    net = Net(
        lambda m, i: m.head(torch.tanh(m.h(m.e(i)))),
        e=nn.Embedding(20, 8),
        h=nn.Linear(8, 8),
        head=nn.Linear(8, 20, bias=False),
    )
    net.head.weight = net.e.weight
    return net


def _untied() -> Any:
    """Equal first values, two parameters."""
    net = Net(
        lambda m, i: m.head(torch.tanh(m.h(m.e(i)))),
        e=nn.Embedding(20, 8),
        h=nn.Linear(8, 8),
        head=nn.Linear(8, 20, bias=False),
    )
    net.head.weight.data = net.e.weight.data.clone()
    return net
