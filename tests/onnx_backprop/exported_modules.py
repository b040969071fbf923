"""Modules of PyTorch that `ob.torch.export` brings back, each with its inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_backprop as ob

torch: Any = pytest.importorskip("torch")
nn, functional = torch.nn, torch.nn.functional


class Net(nn.Module):
    """A function of a module and of its input, with parts of its own."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def conv_net() -> tuple[Any, tuple[Any, ...]]:
    layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.0), nn.Linear(64, 3)), (torch.randn(4, 3, 8, 8),)


def partly_frozen() -> tuple[Any, tuple[Any, ...]]:
    """A BatchNorm that is in eval() whatever the net is in."""
    net, inputs = conv_net()
    net[1].running_mean.normal_()
    net[1].running_var.uniform_(0.5, 2)
    net[1].train = lambda _=True: nn.Module.train(net[1], False)
    return net, inputs


def encoder() -> tuple[Any, tuple[Any, ...]]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2), (torch.randn(3, 5, 8),)


def position_bias() -> tuple[Any, tuple[Any, ...]]:
    """As in T5: what attention adds is trained."""

    def forward(m: Any, x: Any) -> Any:
        q, k, v = (part.view(2, 4, 2, 3).transpose(1, 2) for part in m.qkv(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=m.bias.weight.T.reshape(2, 4, 4)[None])
        return m.out(y.transpose(1, 2).contiguous().view(2, 4, 6))

    net = Net(forward, qkv=nn.Linear(6, 18), out=nn.Linear(6, 6), bias=nn.Embedding(16, 2))
    return net, (torch.randn(2, 4, 6),)


def recurrent(kind: Any, **more: Any) -> tuple[Any, tuple[Any, ...]]:
    return Net(lambda m, x: m.head(m.net(x)[0]), net=kind(4, 5, 2, **more), head=nn.Linear(5, 2)), (
        torch.randn(6, 3, 4),
    )


def tied() -> tuple[Any, tuple[Any, ...]]:
    net = Net(lambda m, x: m.head(torch.tanh(m.table(x))), table=nn.Embedding(10, 6), head=nn.Linear(6, 10, bias=False))
    net.head.weight = net.table.weight
    return net, (torch.randint(0, 10, (3, 5)),)


def shared() -> tuple[Any, tuple[Any, ...]]:
    """Tensors of equal numbers under two names."""
    norm, act = nn.LayerNorm(6), nn.PReLU(6)
    return nn.Sequential(nn.Linear(5, 6), norm, act, nn.Linear(6, 6), norm, act), (torch.randn(4, 5),)


def gates() -> tuple[Any, tuple[Any, ...]]:
    """Parameters of one element, of which one is a power."""
    net = Net(lambda m, x: m.a * torch.tanh(m.body(x)) + x[:, :2].clamp(min=1e-3).pow(m.p), body=nn.Linear(5, 2))
    net.a, net.p = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.tensor(3.0))
    return net, (torch.rand(4, 5) + 0.1,)


def norms() -> tuple[Any, tuple[Any, ...]]:
    layers = [nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.SiLU(), nn.Conv2d(6, 4, 3), nn.InstanceNorm2d(4, affine=True)]
    return nn.Sequential(*layers, nn.PReLU(4), nn.BatchNorm2d(4, affine=False)), (torch.randn(2, 3, 8, 8),)


def pixels() -> tuple[Any, tuple[Any, ...]]:
    up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
    layers = [nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1), nn.ReLU(), up]
    return nn.Sequential(*layers, nn.Conv2d(4, 4, 3, padding=1), nn.PixelShuffle(2)), (torch.randn(2, 3, 4, 4),)


def weight_norm() -> tuple[Any, tuple[Any, ...]]:
    wrapped = torch.nn.utils.parametrizations.weight_norm
    return nn.Sequential(wrapped(nn.Conv1d(3, 4, 3)), nn.ReLU(), wrapped(nn.Conv1d(4, 2, 3))), (torch.randn(2, 3, 9),)


def buffers() -> tuple[Any, tuple[Any, ...]]:
    net = Net(lambda m, x: m.body((x - m.mean) / m.std) @ m.kernel, body=nn.Linear(5, 4))
    for name, value in {"mean": torch.randn(5), "std": torch.rand(5) + 0.5, "kernel": torch.randn(4, 2)}.items():
        net.register_buffer(name, value)
    return net, (torch.randn(4, 5),)


def partly_trained() -> tuple[Any, tuple[Any, ...]]:
    net, inputs = conv_net()
    net[0].requires_grad_(False)
    net[4].requires_grad_(False)
    return net, inputs


def detached() -> tuple[Any, tuple[Any, ...]]:
    net = Net(
        lambda m, x: m.b(torch.tanh(m.a(x)).detach() * 2 + torch.tanh(m.a(x)) + m.a(x).data),
        a=nn.Linear(5, 4),
        b=nn.Linear(4, 2),
    )
    return net, (torch.randn(4, 5),)


def without_gradient() -> tuple[Any, tuple[Any, ...]]:
    def forward(m: Any, x: Any) -> Any:
        y = torch.tanh(m.a(x))
        with torch.no_grad():
            gate, weight = torch.sigmoid(m.b(y)), m.b.weight * 2
        return m.b(y) * gate + y @ weight.T

    return Net(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 2)), (torch.randn(4, 5),)


def gradient_again() -> tuple[Any, tuple[Any, ...]]:
    def forward(m: Any, x: Any) -> Any:
        with torch.no_grad():
            y = m.a(x)
            with torch.enable_grad():
                z = m.a(x) * y
            w = torch.sigmoid(z)
        return z * w

    return Net(forward, a=nn.Linear(5, 4)), (torch.randn(4, 5),)


def padded() -> tuple[Any, tuple[Any, ...]]:
    """PyTorch trains no row that stands for padding."""
    indices = torch.tensor([[1, 2, 0, 0], [3, 0, 4, 1]])
    return Net(lambda m, x: m.head(m.table(x)), table=nn.Embedding(6, 5, padding_idx=0), head=nn.Linear(5, 2)), (
        indices,
    )


def smoothed() -> tuple[Any, tuple[Any, ...]]:
    """torch's exporter leaves label_smoothing out."""
    loss = nn.CrossEntropyLoss(label_smoothing=0.2, ignore_index=1, reduction="none")
    return Net(
        lambda m, x: m.loss(m.a(x), m.labels), a=nn.Linear(5, 3), loss=loss, labels=torch.tensor([0, 1, 2, 2])
    ), (torch.randn(4, 5),)


BUILD: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "conv net": conv_net,
    "a BatchNorm in eval()": partly_frozen,
    "transformer": encoder,
    "a bias by position": position_bias,
    "LSTM": lambda: recurrent(nn.LSTM),
    "GRU": lambda: recurrent(nn.GRU),
    "RNN": lambda: recurrent(nn.RNN),
    "tied": tied,
    "shared": shared,
    "gates": gates,
    "norms": norms,
    "smoothed labels": smoothed,
    "pixels": pixels,
    "weight norm": weight_norm,
    "buffers": buffers,
    "partly trained": partly_trained,
    "detached": detached,
    "no_grad": without_gradient,
    "enable_grad": gradient_again,
    "padding": padded,
}


TOLERANCE = 1e-5  # of gradients, relative to the largest


def close(actual: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    actual, expected = actual.detach().numpy(), expected.detach().numpy()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * max(np.abs(expected).max(), 1e-3))


def exported(module: Any, path: Path, *inputs: Any, **more: Any) -> Path:
    names = [f"x{n}" for n in range(len(inputs))]
    axes = {name: {0: "batch"} for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the older exporter, which is deprecated
        torch.onnx.export(
            module, inputs, str(path), dynamo=False, opset_version=18, input_names=names, dynamic_axes=axes, **more
        )
    return path


class Several(torch.nn.Module):
    """Several inputs, one of integers, and several outputs, one of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(11, 6)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)])
        self.norm = torch.nn.LayerNorm(6)

    def forward(self, words: Any, scale: Any) -> tuple[Any, Any, Any]:
        x = self.words(words) * scale.unsqueeze(-1)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.norm(x), x.argmax(-1), scale * 2


def several(tmp_path: Path) -> tuple[Any, Any, tuple[Any, Any]]:
    torch.manual_seed(1)
    module = Several()
    inputs = torch.randint(0, 11, (2, 3)), torch.rand(2, 3)
    return ob.torch.module(exported(module, tmp_path / "m.onnx", *inputs)), module, inputs
