"""Normalisations and their statistics, what is frozen, what gradients stop at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from tests.fidelity.exporters import TORCHSCRIPT
from tests.fidelity.nets import F, Net, nn, torch, weight
from tests.fidelity.subject import Subject, floats

X = (floats(6, 5),)
TOKENS = (floats(2, 5, 8),)
IMAGES = (floats(3, 3, 8, 8),)


def norms() -> Iterator[Subject]:
    def case(name: str, build: Any, inputs: Any = IMAGES, **more: Any) -> Subject:
        return Subject(name, "norms", build, inputs, **more)

    def conv(norm: Any, **more: Any) -> Any:
        return nn.Sequential(nn.Conv2d(3, 4, 3, **more), norm, nn.ReLU(), nn.Conv2d(4, 2, 3))

    yield case("conv_bn", lambda: conv(nn.BatchNorm2d(4)))
    yield case("conv_bn_no_bias", lambda: conv(nn.BatchNorm2d(4), bias=False))
    yield case("conv_bn_trained", lambda: conv(_trained(nn.BatchNorm2d(4))))
    yield case("conv_bn_plain", lambda: conv(_trained(nn.BatchNorm2d(4, affine=False))))
    yield case("conv_bn_without_statistics", lambda: conv(nn.BatchNorm2d(4, track_running_stats=False)))
    yield case("conv_bn_momentum", lambda: conv(_trained(nn.BatchNorm2d(4, momentum=0.3, eps=1e-3))))
    yield case(
        "relu_bn", lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), _trained(nn.BatchNorm2d(4)), nn.Conv2d(4, 2, 3))
    )
    yield case("bn_first", lambda: nn.Sequential(_trained(nn.BatchNorm2d(3)), nn.ReLU(), nn.Conv2d(3, 2, 3)))
    yield case("bn1d", lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)), X)
    yield case(
        "bn1d_trained",
        lambda: nn.Sequential(nn.Linear(5, 6), _trained(nn.BatchNorm1d(6)), nn.Tanh(), nn.Linear(6, 2)),
        X,
    )
    yield case(
        "bn1d_plain",
        lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, affine=False), nn.Tanh(), nn.Linear(6, 2)),
        X,
    )
    yield case(
        "bn_twice_fresh",
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 2, 1),
        ),
    )
    yield case("bn_zero_gamma", _zero_gamma)
    yield case("group_norm", lambda: conv(nn.GroupNorm(2, 4)))
    yield case("group_norm_plain", lambda: conv(nn.GroupNorm(2, 4, affine=False)))
    yield case("instance_norm", lambda: conv(nn.InstanceNorm2d(4, affine=True)))
    yield case("instance_norm_plain", lambda: conv(nn.InstanceNorm2d(4)))
    yield case(
        "layer_norm", lambda: nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 2)), TOKENS
    )
    yield case(
        "layer_norm_plain",
        lambda: nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6, elementwise_affine=False), nn.GELU(), nn.Linear(6, 2)),
        TOKENS,
    )
    yield case(
        "layer_norm_no_bias",
        lambda: nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6, bias=False), nn.GELU(), nn.Linear(6, 2)),
        TOKENS,
    )
    yield case("rms_norm", lambda: nn.Sequential(nn.Linear(8, 6), nn.RMSNorm(6), nn.GELU(), nn.Linear(6, 2)), TOKENS)
    yield case(
        "rms_norm_plus_one",
        lambda: Net(
            lambda m, x: m.o(m.i(x) * torch.rsqrt(m.i(x).square().mean(-1, keepdim=True) + 1e-6) * (1.0 + m.w)),
            i=nn.Linear(8, 6),
            w=nn.Parameter(torch.zeros(6)),
            o=nn.Linear(6, 2),
        ),
        TOKENS,
    )
    yield case(
        "layer_norm_2d",
        lambda: Net(
            lambda m, x: m.o(m.n(m.c(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)),
            c=nn.Conv2d(3, 4, 3),
            n=nn.LayerNorm(4),
            o=nn.Conv2d(4, 2, 1),
        ),
    )
    yield case("local_response", lambda: conv(nn.LocalResponseNorm(3)))
    yield case("residual_block", _residual)


def _trained(norm: Any) -> Any:
    """Statistics, and scale and bias if there are any, as after some training."""
    norm.running_mean.normal_(0, 0.3)
    norm.running_var.uniform_(0.5, 1.5)
    if norm.affine:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias, 0, 0.2)
    return norm


def _zero_gamma() -> Any:
    net = _residual()
    nn.init.zeros_(net.last.weight)
    return net


def _residual() -> Any:
    def forward(m: Any, x: Any) -> Any:
        h = F.relu(m.stem(x))
        return m.o(F.relu(h + m.last(m.second(F.relu(m.norm(m.first(h)))))))

    return Net(
        forward,
        stem=nn.Conv2d(3, 4, 3),
        first=nn.Conv2d(4, 4, 3, padding=1, bias=False),
        norm=nn.BatchNorm2d(4),
        second=nn.Conv2d(4, 4, 3, padding=1, bias=False),
        last=nn.BatchNorm2d(4),
        o=nn.Conv2d(4, 2, 1),
    )


def frozen() -> Iterator[Subject]:
    """Parts that do not require a gradient: no plain exporter writes that, so a user names them."""

    def case(name: str, build: Any, frozen: tuple[str, ...], inputs: Any = IMAGES) -> Subject:
        return Subject(name, "frozen", build, inputs, frozen=frozen)

    yield case("frozen_bn_beside", _frozen_bn, ("backbone.*",))
    yield case(
        "frozen_layer",
        lambda: _without_gradient(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)), "0"),
        ("0.*",),
        X,
    )
    yield case(
        "frozen_backbone",
        lambda: _without_gradient(
            Net(
                lambda m, x: m.head(F.relu(m.body(x)).mean((2, 3))),
                body=nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)),
                head=nn.Linear(4, 2),
            ),
            "body",
        ),
        ("body.*",),
    )
    yield case("frozen_parameter", _frozen_parameter, ("scale",), X)


def _without_gradient(net: Any, name: str) -> Any:
    net.get_submodule(name).requires_grad_(False)
    return net


class _Backbone(nn.Sequential):
    """Its statistics stay, as in detectron2."""

    def train(self, _: bool = True) -> Any:
        return super().train(False)


def _frozen_bn() -> Any:
    def forward(m: Any, x: Any) -> Any:
        return m.l(F.relu(m.bn(m.c(m.backbone(x)))).mean((2, 3)))

    backbone = _Backbone(nn.Conv2d(3, 4, 3), _trained(nn.BatchNorm2d(4)), nn.ReLU())
    net = Net(forward, backbone=backbone, c=nn.Conv2d(4, 4, 3), bn=_trained(nn.BatchNorm2d(4)), l=nn.Linear(4, 2))
    return _without_gradient(net, "backbone")


def _frozen_parameter() -> Any:
    scale = nn.Parameter(torch.rand(5) + 0.5, requires_grad=False)
    return Net(lambda m, x: m.o(torch.tanh(m.i(x * m.scale))), scale=scale, i=nn.Linear(5, 6), o=nn.Linear(6, 2))


def stops() -> Iterator[Subject]:
    """dynamo's files have no node for `detach`, but the metadata of what reads its output names it."""

    def case(name: str, build: Any, inputs: Any = X, **more: Any) -> Subject:
        return Subject(name, "stops", build, inputs, lost=more.pop("lost", (TORCHSCRIPT,)), **more)

    yield case(
        "stop_gradient",
        lambda: Net(
            lambda m, x: m.o(m.i(x).detach() * m.g(x)), i=nn.Linear(5, 6), g=nn.Linear(5, 6), o=nn.Linear(6, 2)
        ),
    )
    yield case("no_grad", _no_grad)
    yield case("no_grad_methods", _no_grad_methods)
    yield case("no_grad_gate", _no_grad_gate)
    yield case("autocast", _autocast, lost=())
    yield case("no_grad_in_autocast", lambda: _autocast(stops=True))
    yield case("byol", _byol, (floats(6, 5), floats(6, 5)), loss=None)
    yield case(
        "straight_through",
        lambda: Net(
            lambda m, x: m.o(m.i(x) + (torch.round(m.i(x)) - m.i(x)).detach()), i=nn.Linear(5, 6), o=nn.Linear(6, 2)
        ),
    )
    yield case("vector_quantised", _quantised, loss=None)


def _no_grad() -> Any:
    def forward(m: Any, x: Any) -> Any:
        with torch.no_grad():
            features = torch.tanh(m.i(x))
        return m.o(features)

    return Net(forward, i=nn.Linear(5, 6), o=nn.Linear(6, 2))


def _no_grad_methods() -> Any:
    """Two blocks, one of a method; what leaves the first is read inside and outside of the second."""

    @torch.no_grad()
    def encoded(m: Any, x: Any) -> Any:
        return torch.tanh(m.i(x)), x.mean(1, keepdim=True)

    def forward(m: Any, x: Any) -> Any:
        features, mean = encoded(m, x)
        with torch.no_grad():
            scale = torch.sigmoid(m.s(features))
        return m.o(torch.tanh(m.h(features)) * scale) + mean

    return Net(forward, i=nn.Linear(5, 6), s=nn.Linear(6, 6), h=nn.Linear(6, 6), o=nn.Linear(6, 2))


def _no_grad_gate() -> Any:
    def forward(m: Any, x: Any) -> Any:
        features = torch.tanh(m.i(x))
        with torch.no_grad():
            gate = torch.softmax(features, -1)
        return m.o(features * gate)

    return Net(forward, i=nn.Linear(5, 6), o=nn.Linear(6, 2))


def _autocast(*, stops: bool = False) -> Any:
    def forward(m: Any, x: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            with torch.no_grad() if stops else nullcontext():
                features = torch.tanh(m.i(x))
            doubled = 2 * features
        return m.o(doubled)

    return Net(forward, i=nn.Linear(5, 6), o=nn.Linear(6, 2))


def _byol() -> Any:
    def forward(m: Any, a: Any, b: Any) -> Any:
        online = F.normalize(m.predictor(torch.tanh(m.encoder(a))), dim=-1)
        target = F.normalize(torch.tanh(m.encoder(b)), dim=-1).detach()
        return (2 - 2 * (online * target).sum(-1)).mean()

    return Net(forward, encoder=nn.Linear(5, 6), predictor=nn.Linear(6, 6))


def _quantised() -> Any:
    def forward(m: Any, x: Any) -> Any:
        z = m.encoder(x)
        nearest = (z.square().sum(1, keepdim=True) - 2 * z @ m.codes.t() + m.codes.square().sum(1)).argmin(1)
        q = m.codes[nearest]
        y = m.decoder(z + (q - z).detach())
        return F.mse_loss(y, x) + F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())

    return Net(forward, encoder=nn.Linear(5, 4), codes=weight(8, 4), decoder=nn.Linear(4, 5))
