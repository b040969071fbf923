"""Modules that are called several times, and tensors that a module has under several names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.fidelity.nets import F, Net, nn, ones, torch
from tests.fidelity.subject import Subject, floats

X = (floats(4, 6),)
TOKENS = (floats(2, 5, 8),)
IMAGES = (floats(2, 3, 10, 10),)


def shared() -> Iterator[Subject]:
    def case(name: str, build: Any, inputs: Any = X, **more: Any) -> Subject:
        return Subject(name, "shared", build, inputs, **more)

    yield case("one_prelu", lambda: _one(nn.PReLU()))
    yield case("one_layer_norm", lambda: _one(nn.LayerNorm(6)))
    yield case("one_group_norm", lambda: _one(nn.GroupNorm(2, 6)))
    yield case("batch_norm_twice", lambda: Net(lambda m, x: m.o(m.n(torch.tanh(m.l(m.n(x))))), n=_bn(), **_layers()))
    yield case("one_norm_and_another", _norms)
    yield case("one_bias", _bias)
    yield case("one_scale", _scale)
    yield case("one_encoder", _siamese, (floats(4, 6), floats(4, 6)))
    yield case("head_of_levels", _levels, IMAGES)
    yield case("layer_twice", lambda: Net(lambda m, x: m.o(torch.tanh(m.l(torch.tanh(m.l(x))))), **_layers()))
    yield case("weight_alone", lambda: Net(lambda m, x: m.o(m.l(torch.tanh(F.linear(x, m.l.weight)))), **_layers()))
    yield case("two_and_three_axes", lambda: Net(lambda m, x: m.o(m.l(torch.tanh(m.l(x))[:, None])), **_layers()))
    yield case("gru_cell", lambda: Net(_steps, c=_zero_biases(nn.GRUCell(2, 5)), o=nn.Linear(5, 2)))
    yield case("lstm_cell", lambda: Net(_steps, c=_zero_biases(nn.LSTMCell(2, 5)), o=nn.Linear(5, 2)))
    yield case("attention_twice", lambda: _attention(cross=False), TOKENS)
    yield case("self_and_cross_attention", lambda: _attention(cross=True), TOKENS)
    yield case("encoder_layer_twice", _encoder, TOKENS)
    yield case("encoder_layer_of_two_names", _named_encoder, TOKENS)
    yield case(
        "identity_and_its_transpose", lambda: Net(lambda m, x: m.o(torch.tanh(x @ m.w) @ m.w.t()), **_identity())
    )
    yield case(
        "identity_of_layer", lambda: Net(lambda m, x: m.o(torch.tanh(F.linear(x, m.w)) @ m.w), **_identity(8)), TOKENS
    )


def _zero_biases(module: Any) -> Any:
    for name, parameter in module.named_parameters():
        if "bias" in name:
            nn.init.zeros_(parameter)
    return module


def _layers() -> dict[str, Any]:
    return {"l": _zero_biases(nn.Linear(6, 6)), "o": nn.Linear(6, 2)}


def _identity(size: int = 6) -> dict[str, Any]:
    return {"w": nn.Parameter(torch.eye(size)), "o": nn.Linear(size, 2)}


def _bn() -> Any:
    return nn.BatchNorm1d(6)


def _one(part: Any) -> Any:
    return nn.Sequential(nn.Linear(6, 6), part, nn.Tanh(), nn.Linear(6, 6), part, nn.Linear(6, 2))


def _norms() -> Any:
    def forward(m: Any, x: Any) -> Any:
        for layer, norm in zip(m.layers, m.norms, strict=True):
            x = x + torch.tanh(layer(norm(x)))
        return m.o(x)

    norm, layers = nn.LayerNorm(6), nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
    norms = nn.ModuleList([norm, nn.LayerNorm(6), norm, nn.LayerNorm(6)])
    return Net(forward, layers=layers, norms=norms, o=nn.Linear(6, 2))


def _bias() -> Any:
    first, second = _zero_biases(nn.Linear(6, 6)), nn.Linear(6, 6)
    second.bias = first.bias
    return nn.Sequential(nn.Sequential(first, nn.Tanh(), second), nn.Tanh(), nn.Linear(6, 2))


def _scale() -> Any:
    class Scaled(nn.Module):
        def __init__(self, scale: Any) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, w: Any) -> Any:
            return w * self.scale

    scale, layers = ones(6), (nn.Linear(6, 6), nn.Linear(6, 6))
    for layer in layers:
        torch.nn.utils.parametrize.register_parametrization(layer, "weight", Scaled(scale))
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Linear(6, 2))


def _siamese() -> Any:
    encoder = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.PReLU())
    return Net(lambda m, a, b: m.o((m.e1(a) - m.e2(b)).abs()), e1=encoder, e2=encoder, o=nn.Linear(6, 2))


def _levels() -> Any:
    """FCOS and RetinaNet: one head, whose biases begin with zeros, for each level."""

    def forward(m: Any, x: Any) -> Any:
        x = torch.tanh(m.b(x))
        return torch.cat([m.h(x).flatten(1), m.h(F.avg_pool2d(x, 2)).flatten(1)], 1)

    head = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))
    return _zero_biases(Net(forward, b=nn.Conv2d(3, 4, 3), h=head))


def _steps(m: Any, x: Any) -> Any:
    zeros = x.new_zeros(x.shape[0], 5)
    state = (zeros, zeros) if isinstance(m.c, nn.LSTMCell) else zeros
    for n in range(3):
        state = m.c(x[:, 2 * n : 2 * n + 2], state)
    return m.o(state[0] if isinstance(state, tuple) else state)


def _attention(*, cross: bool) -> Any:
    def forward(m: Any, x: Any) -> Any:
        h = x + m.a(x, x, x, need_weights=False)[0]
        memory = x if cross else h
        return m.o(h + m.a(h, memory, memory, need_weights=False)[0])

    return Net(forward, a=nn.MultiheadAttention(8, 2, batch_first=True), o=nn.Linear(8, 2))


def _encoder() -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    return Net(lambda m, x: m.o(m.e(m.e(x))), e=layer, o=nn.Linear(8, 2))


def _named_encoder() -> Any:
    """ALBERT's layers."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    return Net(lambda m, x: m.o(m.b(m.a(x))), a=layer, b=layer, o=nn.Linear(8, 2))
