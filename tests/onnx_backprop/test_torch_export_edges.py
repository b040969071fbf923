"""What `ob.torch.export` keeps of a module beside its arithmetic: stops, hooks, limits, what is no forward pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import onnx_backprop as ob

torch: Any = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
functional: Any = torch.nn.functional
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*numbers of the file are trained"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def exported(module: Any, *args: Any) -> tuple[Any, str]:
    """The file, and what is said when it is made and made a training of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        file = ob.torch.export(module, args)
        ob.training_graph(file, loss="mse")
    return file, "\n".join(str(w.message) for w in caught if issubclass(w.category, ob.OnnxBackpropWarning))


def gradients(file: Any, x: Any, target: Any) -> dict[str, np.ndarray]:
    graph = ob.training_graph(file, loss="mse")
    values = ob.session(graph.model).run(
        list(graph.parameters.values()), {graph.inputs[0]: x.numpy(), "target": target.numpy()}
    )
    return dict(zip(graph.parameters, map(np.asarray, values), strict=True))


class Scaled(torch.nn.Module):
    def __init__(self, scale: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.a, self.g, self.scale = torch.nn.Linear(4, 3), torch.nn.Parameter(torch.tensor(1.7)), scale

    def forward(self, x: Any) -> Any:
        y = self.a(x)
        return y * self.scale(self.g, y)


@pytest.mark.parametrize(
    "scale", [lambda g, _: g.item(), lambda _, y: 1 / (1 + y.abs().max().item())], ids=["of a parameter", "of a value"]
)
def test_no_gradient_passes_item(scale: Callable[[Any, Any], Any]) -> None:
    torch.manual_seed(0)
    module, x, target = Scaled(scale), torch.randn(6, 4), torch.randn(6, 3)
    functional.mse_loss(module(x), target).backward()
    file, _ = exported(module, x)
    by_name = gradients(file, x, target)
    assert set(by_name) == {"a.weight", "a.bias"}
    for name, gradient in by_name.items():
        np.testing.assert_allclose(gradient, module.get_parameter(name).grad.numpy(), rtol=1e-4, atol=1e-6)


class Shifted(torch.nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.b, self.function = torch.nn.Parameter(torch.zeros(4)), function

    def forward(self, x: Any) -> Any:
        return self.function(x + self.b)


LIMITS: dict[str, Callable[[Any], Any]] = {
    "clamp(min)": lambda y: y.clamp(min=0),
    "clamp(max)": lambda y: y.clamp(max=1),
    "clamp": lambda y: y.clamp(-1, 1),
    "clamp_min": lambda y: torch.clamp_min(y, 0.0),
    "clamp by tensors": lambda y: torch.clamp(y, torch.tensor(-1.0), torch.tensor(1.0)),
    "hardtanh": functional.hardtanh,
    "relu6": functional.relu6,
    "max(dim)": lambda y: y.max(1, keepdim=True)[0] * torch.ones(4),
    "max(-1)": lambda y: y.max(-1)[0].unsqueeze(1) * torch.ones(4),
    "min(dim)": lambda y: (-y).min(1, keepdim=True)[0] * torch.ones(4),
    "amax": lambda y: y.amax(1, keepdim=True) * torch.ones(4),
    "maximum": lambda y: torch.maximum(y, torch.ones(4)),
}


@pytest.mark.parametrize("name", LIMITS)
def test_gradients_at_limits_and_ties_are_those_of_torch(name: str) -> None:
    module, x, target = Shifted(LIMITS[name]), torch.tensor([[-1.0, 0.0, 1.0, 1.0]]), torch.full((1, 4), 3.0)
    functional.mse_loss(module(x), target).backward()
    file, _ = exported(module, x)
    np.testing.assert_allclose(gradients(file, x, target)["b"], module.b.grad.numpy(), atol=1e-6)


class Hooked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = torch.nn.Linear(4, 5), torch.nn.Linear(5, 2)

    def forward(self, x: Any) -> Any:
        h = torch.tanh(self.a(x))
        if h.requires_grad:
            h.register_hook(lambda g: g * 0.1)
        return self.o(h)


def test_hooks_on_values_are_warned_of() -> None:
    assert "values that forward computes (register_hook): backward hooks" in exported(Hooked(), torch.randn(2, 4))[1]


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)
        self.register_buffer("n", torch.tensor(0))

    def forward(self, x: Any) -> Any:
        self.n += 1
        return self.norm(self.a(x)) * torch.clamp(self.n.float() / 5, max=1.0)


def test_integers_that_a_call_changes_are_warned_of() -> None:
    warned = exported(Counting(), torch.randn(6, 4))[1]
    assert "the module changes its buffers 'n' in each call" in warned


class Forces(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))

    def forward(self, x: Any) -> Any:
        x = x.detach().requires_grad_(True)
        return -torch.autograd.grad(self.n(x).sum(), x, create_graph=True)[0]


def test_autograd_grad_and_max_norm_in_forward_are_refused() -> None:
    with pytest.raises(ob.UnsupportedError, match="the module calls grad: expected a forward pass"):
        ob.torch.export(Forces(), (torch.randn(2, 4),))
    table = torch.nn.Embedding(10, 6, max_norm=1.0)
    before = table.weight.detach().clone()
    with pytest.raises(ob.UnsupportedError, match="an embedding with max_norm, which changes its table"):
        ob.torch.export(table, (torch.tensor([1, 2]),))
    assert torch.equal(before, table.weight)


@pytest.mark.parametrize("padding", [None, 0])
def test_gradients_scaled_by_frequency_are_refused(padding: int | None) -> None:
    table = torch.nn.Embedding(6, 4, padding_idx=padding, scale_grad_by_freq=True)
    with pytest.raises(ob.UnsupportedError, match="an embedding with scale_grad_by_freq=True"):
        ob.torch.export(table, (torch.tensor([1, 1, 2, 0]),))


class ReadTwice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g, self.o = torch.nn.Parameter(torch.ones(4)), torch.nn.Linear(4, 2)
        self.frequencies = torch.nn.Parameter(1 / 10000 ** (torch.arange(0, 4, 2) / 4.0))

    def forward(self, x: Any) -> Any:
        angles = torch.arange(x.shape[1])[:, None] * self.frequencies
        x = x * angles.cos().repeat(1, 2) + torch.cat([-x[..., 2:], x[..., :2]], -1) * angles.sin().repeat(1, 2)
        return self.o(x * self.g + torch.tanh(x * self.g))


def test_no_warning_about_parameters_that_the_file_marks() -> None:
    file, warned = exported(ReadTwice(), torch.randn(2, 5, 4))
    assert "trained as one" not in warned
    assert "does not say for sure" not in warned
    assert set(ob.training_graph(file, loss="mse", untie=True).parameters) == {
        "frequencies", "g", "o.bias", "o.weight"
    }  # fmt: skip


RANGE: dict[str, tuple[Callable[[Any], Any], list[float]]] = {
    "logsigmoid": (functional.logsigmoid, [-200.0, -5.0, 0.0, 200.0]),
    "bce_with_logits": (
        lambda y: functional.binary_cross_entropy_with_logits(y, torch.full((1, 4), 0.3), reduction="none"),
        [-200.0, -5.0, 0.0, 200.0],
    ),
    "logaddexp": (lambda y: torch.logaddexp(y, y.flip(1)), [-200.0, 3.0, 3.0, 100.0]),
    "logaddexp of two shapes": (lambda y: torch.logaddexp(y, y[:, :1].detach()), [-200.0, 3.0, 0.0, 100.0]),
    "logaddexp2": (lambda y: torch.logaddexp2(y, y.flip(1)), [-300.0, 3.0, 3.0, 200.0]),
    "xlogy": (lambda y: torch.xlogy(y, y.abs().detach() + 3), [0.0, -2.0, 0.0, 1.0]),
    "xlogy of a number": (lambda y: torch.xlogy(y, 3.0), [0.0, -2.0, 0.0, 1.0]),
    "xlogy of what has no logarithm": (lambda y: torch.xlogy(y, y.detach()), [0.0, 2.0, 0.0, 1.0]),
    "sinc": (torch.sinc, [0.0, 0.1, -0.4, 2.0]),
    "atan2": (lambda y: torch.atan2(y, y.flip(1) * 2), [0.0, -3.0, 0.5, 2.0]),
    "atan2 of what is left of 0": (lambda y: torch.atan2(y, -y.detach().abs()), [-1.0, 3.0, 1e-3, 1e3]),
    "std": (lambda y: y.repeat(2, 1).std(0, keepdim=True) + y, [0.0, -3.0, 0.5, 2.0]),
}


@pytest.mark.parametrize("name", RANGE)
def test_values_and_gradients_where_functions_overflow_or_end(name: str) -> None:
    function, numbers = RANGE[name]
    module, x = Shifted(function), torch.tensor([numbers])
    want = module(x)
    target = torch.full_like(want, 0.7)
    functional.mse_loss(want, target).backward()
    file, _ = exported(module, x)
    (got,) = ob.session(file).run(None, {"x": x.numpy()})
    np.testing.assert_allclose(np.asarray(got), want.detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradients(file, x, target)["b"], module.b.grad.numpy(), rtol=1e-4, atol=1e-6)


INFINITY = float("inf")
POINTS: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
    "logaddexp": (
        lambda x: torch.logaddexp(x[0], x[1]),
        [[1e3, 1e7, 1e7, INFINITY, 1.0, -INFINITY, 0.0, 3.0], [1e3, 1e7, 3.0, 1.0, INFINITY, -3.0, 0.0, -40.0]],
    ),
    "logaddexp2": (
        lambda x: torch.logaddexp2(x[0], x[1]),
        [[1e3, 1e7, 1e7, INFINITY, 1.0, -INFINITY, 0.0, 3.0], [1e3, 1e7, 1e7 + 1, 1.0, INFINITY, -3.0, 0.0, -40.0]],
    ),
    "atan2": (
        lambda x: torch.atan2(x[0], x[1]),
        [[0.0, 0.0, -0.0, -0.0, -0.0, 0.0, 2.0, -3.0], [0.0, -0.0, 0.0, -0.0, -1.0, -2.0, -0.0, 0.0]],
    ),
    "atan2 of one number": (lambda x: torch.atan2(x, x), [[0.0, 2.0, -1.0]]),
    "xlog1py": (lambda x: torch.special.xlog1py(x[0], x[1].detach()), [[0.0, 0.0, 2.0, -1.0], [-1.0, -3.0, 0.5, 0.0]]),
    "std_mean": (lambda x: sum(torch.std_mean(x, 1)), [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 2.0, 4.0]]),
    "std_mean of all": (lambda x: torch.std_mean(x)[0], [[2.0, 2.0], [2.0, 2.0]]),
    "std of std_mean": (lambda x: torch.std_mean(x, dim=0, correction=0, keepdim=True)[0], [[2.0, 1.0], [2.0, 5.0]]),
    "mean of std_mean": (lambda x: torch.std_mean(x, dim=0)[1], [[2.0, 1.0], [2.0, 5.0]]),
    "embedding_bag": (
        lambda x: functional.embedding_bag(torch.tensor([[1, 2], [0, 0]]), x, mode="max"),
        [[0.0, 0.0], [1.0, 3.0], [1.0, 2.0]],
    ),
    "binary_cross_entropy": (
        lambda x: functional.binary_cross_entropy(x, torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.3]), reduction="none"),
        [0.0, 0.0, 1.0, 1.0, 1e-20, 0.8],
    ),
    "mean of binary_cross_entropy": (
        lambda x: functional.binary_cross_entropy(x, torch.tensor([0.0, 1.0]), torch.tensor([2.0, 3.0])),
        [0.0, 0.8],
    ),
    "sum of binary_cross_entropy": (
        lambda x: functional.binary_cross_entropy(x.sigmoid(), torch.ones(3), reduction="sum"),
        [-200.0, 200.0, 0.3],
    ),
    "AdaptiveMaxPool1d": (lambda x: functional.adaptive_max_pool1d(x, 1), [[0.0, 0.0, 0.0], [1.0, 2.0, 2.0]]),
    "AdaptiveMaxPool2d": (torch.nn.AdaptiveMaxPool2d(1), [[[[0.0, 0.0], [0.0, 0.0]], [[1.0, 2.0], [2.0, 0.0]]]]),
    "AdaptiveMaxPool3d": (torch.nn.AdaptiveMaxPool3d((1, 1, 1)), [[[[1.0, 2.0], [2.0, 0.0]]]]),
    "norm of 3": (lambda x: torch.linalg.vector_norm(x, 3, dim=1), [[0.0, 0.0], [0.0, 2.0], [-1.0, 3.0]]),
    "norm of 0.5": (lambda x: torch.norm(x, 0.5, 1, keepdim=True), [[0.0, 0.0], [0.0, 2.0], [-1.0, 3.0]]),
    "norm of -1": (lambda x: torch.linalg.vector_norm(x, -1, dim=1), [[0.0, 0.0], [0.0, 2.0], [-1.0, 3.0]]),
    "norm of all": (lambda x: torch.linalg.vector_norm(x, 3), [[0.0, 0.0], [0.0, 0.0]]),
    "norm of 0": (lambda x: torch.linalg.vector_norm(x, 0, dim=1) + x[:, 0], [[0.0, 0.0], [0.0, 2.0]]),
    "norm of infinity": (lambda x: torch.linalg.vector_norm(x, INFINITY, dim=(0, 1)), [[0.0, -3.0], [3.0, 2.0]]),
    "norm of all, axes kept": (lambda x: torch.linalg.vector_norm(x, 2, keepdim=True), [[0.0, -3.0], [3.0, 2.0]]),
    "linalg.norm": (lambda x: torch.linalg.norm(x, 3, dim=1), [[0.0, 0.0], [0.0, 2.0], [-1.0, 3.0]]),
    "renorm": (lambda x: torch.renorm(x, 3, 0, 1.0), [[0.0, 0.0], [0.1, 0.2], [-1.0, 3.0]]),
    "pairwise_distance": (
        lambda x: functional.pairwise_distance(x[0], x[1], 3.0, eps=0.0),
        [[[0.0, 1.0], [1.0, 2.0]], [[0.0, 1.0], [1.0, 4.0]]],
    ),
    "normalize": (lambda x: functional.normalize(x, 3.0), [[0.0, 0.0], [-1.0, 3.0]]),
    "cumprod": (lambda x: torch.cumprod(x, 1), [[0.0, 2.0, -3.0], [2.0, 0.0, 0.0], [-1.0, 3.0, 0.5]]),
    "cumprod(0)": (lambda x: x.cumprod(dim=0, dtype=torch.float32) * x, [[0.0, 2.0], [2.0, 0.0], [-1.0, 3.0]]),
    "cdist": (lambda x: torch.cdist(x, x.detach()[1:]), [[0.0, 0.5], [1.0, 2.0], [-1.0, 3.0]]),
    "cdist(1)": (lambda x: torch.cdist(x, x[:, :2], 1.0), [[[0.0, 0.5], [1.0, 2.0], [-1.0, 3.0]]]),
    "attention of three axes": (
        lambda x: functional.scaled_dot_product_attention(x, 2 * x[:, :2], -x[:, :2], scale=0.1),
        [[[0.0, 0.5], [1.0, 2.0], [-1.0, 3.0]]],
    ),
    "causal attention of three axes": (
        lambda x: functional.scaled_dot_product_attention(x, 2 * x, -x, is_causal=True, scale=0.3),
        [[[0.0, 0.5], [1.0, 2.0], [-1.0, 3.0]]],
    ),
    "attention of three axes to nothing": (
        lambda x: functional.scaled_dot_product_attention(
            x, x, -x, torch.arange(3)[:, None] > x.detach()[0, :, 0], scale=0.1
        ),
        [[[0.0, 0.5], [1.0, 2.0], [5.0, 3.0]]],
    ),
    "cumprod of integers": (lambda x: x * torch.cumprod(x.long() + 3, 1), [[0.0, 2.0, -5.0], [2.0, 9e6, 5e6]]),
    "attention of two axes": (
        lambda x: functional.scaled_dot_product_attention(x, x, x, torch.tensor([True, False, True])),
        [[0.0, 0.5], [1.0, 2.0], [-1.0, 3.0]],
    ),
}


class Called(torch.nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


@pytest.mark.parametrize("name", POINTS)
def test_gradients_at_special_points_are_those_of_torch(name: str) -> None:
    function, numbers = POINTS[name]
    x = torch.tensor(numbers, requires_grad=True)
    y = function(x)
    (want,) = torch.autograd.grad(y.sum(), x)
    file = ob.torch.export(Called(function), (x.detach(),), input_names=["x"], output_names=["y"])
    feeds = {"x": x.detach().numpy(), "y_grad": np.ones(y.shape, np.float32)}
    got, gradient = map(np.asarray, ob.session(ob.vjp(file, ["x"])).run(["y", "x_grad"], feeds))
    np.testing.assert_allclose(got, y.detach().numpy(), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(gradient, want.numpy(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("function", [torch.logaddexp, torch.logaddexp2])
def test_second_derivatives_where_both_operands_are_equal(function: Callable[..., Any]) -> None:
    x, v = torch.tensor([0.0, 1.0, -2.0], requires_grad=True), torch.tensor([0.7, 0.5, -1.0])
    want = torch.autograd.functional.hvp(lambda x: function(x, -x).sum(), x, v)[1]
    example = (x.detach(),)
    file = ob.torch.export(Called(lambda x: function(x, -x).sum()), example, input_names=["x"], output_names=["y"])
    derived = ob.hvp(file, ["x"])
    feeds = {"x": x.detach().numpy(), ob.derivatives(derived)[-1].seeds["x"]: v.numpy()}
    (got,) = ob.session(derived).run([ob.derivatives(derived)[-1].results["x"]], feeds)
    np.testing.assert_allclose(np.asarray(got), want.numpy(), rtol=1e-5)


@pytest.mark.parametrize("order", [1, 2, 3, float("inf")])
def test_a_norm_of_another_type(order: float) -> None:
    x = torch.randn(2, 3)
    function = partial(torch.linalg.vector_norm, ord=order, dim=-1, dtype=torch.float64)
    file = ob.torch.export(Called(function), (x,), input_names=["x"], output_names=["y"])
    (y,) = ob.session(file).run(["y"], {"x": x.numpy()})
    np.testing.assert_allclose(np.asarray(y), function(x).numpy(), rtol=1e-12)


def test_statistics_of_an_instance_norm_are_warned_of() -> None:
    """Its batches do without them, so that the file has none; eval() reads them."""
    norm = torch.nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
    x = torch.randn(2, 3, 5)
    assert "changes its buffers 'running_mean', 'running_var' in each call" in exported(norm, x)[1]
    assert "changes its buffers" not in exported(norm.eval(), x)[1]


def test_cumulative_statistics_are_refused_by_name() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3, momentum=None))
    with pytest.raises(ob.UnsupportedError, match="'1', a BatchNorm1d in training mode, has momentum=None"):
        ob.torch.export(module, (torch.randn(6, 4),))
    ob.torch.export(module.eval(), (torch.randn(6, 4),))
