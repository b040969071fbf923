"""`ob.torch.export` of modules whose parameters are read, written or shared past their attributes (`make torch`)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

import onnx_backprop as ob
from tests.onnx_backprop.exported_modules import torch
from tests.onnx_backprop.test_torch_export import compare

pytest.importorskip("onnxscript")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*are trained")
nn, functional = torch.nn, torch.nn.functional


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def hidden(self, x: Any) -> Any:
        return self.b(torch.tanh(self.a(x)))


class InList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.by_name = [self.a], {"a": self.a.weight, "b": [self.b.weight]}

    def forward(self, x: Any) -> Any:
        penalty = sum((w**2).sum() for w in (self.layers[0].weight, self.by_name["a"], *self.by_name["b"]))
        return self.hidden(x) + penalty


class InClosure(Net):
    def __init__(self) -> None:
        super().__init__()
        self.gain = gain = nn.Parameter(torch.full((4,), 0.5))
        self.scale = lambda x: functional.linear(x, torch.diag(gain)) * gain.sigmoid()

    def forward(self, x: Any) -> Any:
        return self.scale(self.hidden(x))


class NotRegistered(Net):
    """Parameters that `module.parameters()` has not: no optimizer of the module's updates them."""

    def __init__(self) -> None:
        super().__init__()
        self.more = [nn.Linear(4, 4), nn.Parameter(torch.ones(4))]

    def forward(self, x: Any) -> Any:
        return self.more[0](self.hidden(x)) * self.more[1]


class FlatMemory(Net):
    """Parameters that are parts of one tensor, side by side and in turns, and have no number in common."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(4, 8)
        self.c, self.d = nn.Parameter(flat[:, :4]), nn.Parameter(flat[:, 4:])

    def forward(self, x: Any) -> Any:
        return self.hidden(x) @ self.c @ self.d


class Prox(Net):
    """A distance from what functional_call replaces, which the module has in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = [self.a.weight]
        self.inner = Literal()

    def forward(self, x: Any) -> Any:
        halved = {"weight": self.a.weight * 0.5}
        y = torch.func.functional_call(self.a, halved, (x,))
        return self.b(y) + ((self.first[0] - 1) ** 2).sum() + self.inner(x)


class Replaced(Net):
    """What functional_call replaces is read from a list while it is replaced."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4))
            self.first = [self.w]

        def forward(self, x: Any) -> Any:
            return x * self.w + ((self.w - self.first[0]) ** 2).sum()

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x: Any) -> Any:
        return torch.func.functional_call(self.inner, {"w": self.inner.w * 0.5}, (self.hidden(x),))


class Relabelled(Net):
    """Calls in place that change no number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(4, 4))

    def forward(self, x: Any) -> Any:
        kept = self.a.weight.detach().t_() + self.table[:3].requires_grad_(False).sum() + self.table[:].unsqueeze_(0)[0]
        return self.hidden(x) @ kept


class FrozenMemory(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.part = self.table.data[:2]
        self.register_buffer("row", self.table.data[0])

    def forward(self, x: Any) -> Any:
        return self.hidden(x) @ self.table + self.part.sum() + self.row


class Literal(Net):
    def forward(self, x: Any) -> Any:
        return self.hidden(x) * torch.tensor([1.0, 3.0, 2.0, 4.0])


def quiet_export(net: Any, *args: Any, **more: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ob.OnnxBackpropWarning)
        return ob.torch.export(net, args, **more)


BUILD = [InList, InClosure, NotRegistered, FlatMemory, Literal, Prox, Replaced, Relabelled, FrozenMemory]


@pytest.mark.parametrize("build", BUILD)
def test_parameters_in_lists_and_closures_are_trained(build: Callable[[], Any]) -> None:
    net, x = build(), torch.randn(3, 4)
    model = quiet_export(net, x)
    assert {t.name for t in model.graph.initializer} >= {name for name, _ in net.named_parameters()}
    graph = ob.training_graph(model, loss="mse")
    assert set(graph.parameters) == {name for name, p in net.named_parameters() if p.requires_grad}
    compare(net, (x,), "adamw", model, torch.randn(3, 4), loss="mse")


class SameMemory(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b.weight = nn.Parameter(self.a.weight)

    def forward(self, x: Any) -> Any:
        return self.hidden(x)


def test_parameters_in_the_same_memory_are_one_tensor() -> None:
    net, x = SameMemory(), torch.randn(3, 4)
    with pytest.warns(
        ob.OnnxBackpropWarning, match=r"'a\.weight' and 'b\.weight' share memory: the file has one tensor"
    ):
        model = ob.torch.export(net, (x,))
    assert "b.weight" not in {t.name for t in model.graph.initializer}
    compare(net, (x,), "sgd", model, torch.randn(3, 4), loss="mse")  # two updates, each by its gradient: their sum


class Follows(Net):
    def __init__(self, of: Callable[[Any], Any]) -> None:
        super().__init__()
        self.register_buffer("first", of(self.a.weight.detach()))

    def forward(self, x: Any) -> Any:
        return self.hidden(x) + self.first.sum()


PARTS = {
    "all": lambda w: w,
    "rows": lambda w: w[:2],
    "transposed": lambda w: w.t(),
    "bits": lambda w: w.view(torch.int32),
}


@pytest.mark.parametrize("of", PARTS.values(), ids=list(PARTS))
def test_a_buffer_in_the_memory_of_a_parameter_is_warned_of(of: Callable[[Any], Any]) -> None:
    with pytest.warns(ob.OnnxBackpropWarning, match=r"'a\.weight' and 'first' share memory: in the file each"):
        model = ob.torch.export(Follows(of), (torch.randn(3, 4),))
    assert "first" not in ob.training_graph(model, loss="mse").parameters
    quiet_export(Follows(lambda w: of(w).clone()), torch.randn(3, 4))


class Written(Net):
    def __init__(self, write: Callable[[Any], None]) -> None:
        super().__init__()
        self.write = write
        self.register_buffer("average", torch.ones(4))

    def forward(self, x: Any) -> Any:
        self.write(self)
        return self.hidden(x)


def assigned(net: Any) -> None:
    net.a.weight.data = functional.normalize(net.a.weight.data)


def under_no_grad(net: Any) -> None:
    with torch.no_grad():
        net.a.weight[0] = 0.0


def multiplied(net: Any) -> None:
    net.a.weight.data *= 0.5


def listed(net: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_([net.a.weight], 0.5)


def replaced(net: Any) -> None:
    net.a.weight = nn.Parameter(net.a.weight.data.clamp(min=0))


WRITES: dict[str, Callable[[Any], Any]] = {
    "data": lambda net: net.a.weight.data.clamp_(min=0),
    "view": lambda net: net.a.weight.detach().view(-1)[3:].mul_(0.5),
    "init": lambda net: nn.init.zeros_(net.a.weight),
    "assigned": assigned,
    "no_grad": under_no_grad,
    "multiplied": multiplied,
    "inplace": lambda net: functional.hardtanh(net.a.weight.data, inplace=True),
    "out": lambda net: torch.clamp(net.a.weight.data, min=0, out=net.a.weight.data),
    "constant": lambda net: nn.init.constant_(net.a.weight.data, 0.3),
    "list": lambda net: listed(net),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_changes_of_parameters_in_forward_are_refused(write: Callable[[Any], Any], check: bool) -> None:
    net = Written(write)
    before = net.a.weight.detach().clone()
    with pytest.raises(ob.UnsupportedError, match=r"^export: forward changes 'a\.weight' by .*after each step$"):
        ob.torch.export(net, (torch.randn(3, 4),), check=check)
    assert torch.equal(net.a.weight, before)


def test_replaced_parameters_are_refused() -> None:
    net = Written(replaced)
    weight = net.a.weight
    with pytest.raises(ob.UnsupportedError, match=r"^export: forward changes 'a\.weight' by assignment"):
        ob.torch.export(net, (torch.randn(3, 4),))
    assert net.a.weight is weight


def test_a_buffer_that_forward_changes_past_torch_export_is_warned_of() -> None:
    net = Written(lambda net: net.average.data.mul_(0.9).add_(0.1))
    with pytest.warns(ob.OnnxBackpropWarning, match="the module changes its buffers 'average' in each call"):
        ob.torch.export(net, (torch.randn(3, 4),))
    assert torch.equal(net.average, torch.ones(4))


class Taken(Net):
    def __init__(self, of: Callable[[Any], Any]) -> None:
        super().__init__()
        self.taken = [of(self.a.weight)]

    def forward(self, x: Any) -> Any:
        return self.hidden(x) * self.taken[0].sum()


@pytest.mark.parametrize("of", [torch.detach, torch.t, torch.flatten], ids=["detached", "transposed", "flat"])
def test_a_view_of_a_parameter_from_before_is_refused(of: Callable[[Any], Any]) -> None:
    with pytest.raises(ob.UnsupportedError, match=r"computed of the parameter 'a\.weight' before, in the same memory"):
        ob.torch.export(Taken(of), (torch.randn(3, 4),))


class Masked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.ones(4))

    def forward(self, x: Any, mask: Any) -> Any:
        return self.hidden(x * mask * self.mask)


@pytest.mark.parametrize("mask", [torch.ones(4), torch.randn(4), torch.randn(3, 4)], ids=["ones", "other", "rows"])
def test_an_argument_with_the_name_of_a_parameter_has_another(mask: Any) -> None:
    net, x = Masked(), torch.randn(3, 4)
    with pytest.warns(ob.OnnxBackpropWarning, match=r"'mask' is the input '(mask_\d+)'"):
        model = ob.torch.export(net, (x, mask))
    compare(net, (x, mask), "sgd", model, torch.randn(3, 4), loss="mse")
    compare(net, (x, mask), "sgd", quiet_export(net, x, mask, input_names=["x", "m"]), torch.randn(3, 4), loss="mse")
    with pytest.raises(ob.InvalidArgumentError, match="input_names: mask: expected names that no parameter"):
        ob.torch.export(net, (x, mask), input_names=["x", "mask"])


def test_a_hook_behind_the_gradient_of_a_parameter_is_warned_of() -> None:
    net = FlatMemory()
    net.c.register_post_accumulate_grad_hook(lambda p: p.grad.zero_())
    with pytest.warns(ob.OnnxBackpropWarning, match="c: backward hooks"):
        ob.torch.export(net, (torch.randn(3, 4),))
