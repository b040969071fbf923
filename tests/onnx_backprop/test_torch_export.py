"""`ob.torch.export`: what comes back trains as the module does. Runs where PyTorch is (`make torch`)."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, numpy_helper

import onnx_backprop as ob
from onnx_backprop.converters.prepare.exporters.torch_metadata import ALIASES, KIND, REQUIRES_GRAD, STOP, signature
from tests.onnx_backprop.exported_modules import BUILD, Net, conv_net, functional, nn, tied, torch

pytest.importorskip("onnxscript")
STEPS, TOLERANCE = 20, 1e-4  # of the losses, relative
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch, about itself
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*numbers of the file are trained"),
]


def metadata(model: ModelProto, name: str) -> dict[str, str]:
    return next(({p.key: p.value for p in v.metadata_props} for v in model.graph.value_info if v.name == name), {})


def nodes(model: ModelProto, op_type: str) -> list[NodeProto]:
    return [node for node in model.graph.node if node.op_type == op_type]


def stops(model: ModelProto) -> list[NodeProto]:
    return [node for node in nodes(model, "Identity") if any(p.key == STOP for p in node.metadata_props)]


def trains(batch_norm: NodeProto) -> bool:
    return any(a.name == "training_mode" and a.i for a in batch_norm.attribute)


def drops(dropout: NodeProto) -> bool:
    return len(dropout.input) > 2


def optimizers(kind: str, net: Any, rate: float) -> tuple[Any, Any]:
    if kind == "sgd":
        return torch.optim.SGD(net.parameters(), rate, momentum=0.9), ob.optimizers.SGD(momentum=0.9)
    return torch.optim.AdamW(net.parameters(), rate), ob.optimizers.AdamW(weight_decay=1e-2)


def compare(net: Any, inputs: tuple[Any, ...], kind: str, model: ModelProto, target: Any, **more: Any) -> None:
    """The losses of some steps beside those of PyTorch's own loop."""
    rate = 1e-2
    theirs, ours = optimizers(kind, net, rate)
    trainer = ob.Trainer(ob.training_graph(model, optimizer=ours, **more), learning_rate=rate)
    names = [v.name for v in model.graph.input]
    feeds = dict(zip(names, (x.numpy() for x in inputs), strict=False)) | {"target": target.numpy()}
    losses, expected = [], []
    for _ in range(STEPS):
        losses.append(float(trainer.step(**feeds)))
        theirs.zero_grad()
        loss = functional.mse_loss(net(*inputs), target)
        loss.backward()
        theirs.step()
        expected.append(float(loss.detach()))
    np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("build", BUILD.values(), ids=list(BUILD))
def test_what_comes_back_trains_as_the_module_does(build: Callable[..., Any], train: bool, kind: str) -> None:
    torch.manual_seed(0)
    net, inputs = build()
    net.train(train)
    modes = [part.training for part in net.modules()]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    random = torch.get_rng_state()
    model = ob.torch.export(net, inputs)
    assert torch.equal(random, torch.get_rng_state())
    assert [part.training for part in net.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    onnx.checker.check_model(model)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for name, parameter in net.named_parameters():
        np.testing.assert_array_equal(stored[name], parameter.detach().numpy())
        assert metadata(model, name)[KIND] == "PARAMETER"
        assert (metadata(model, name).get(REQUIRES_GRAD) == "False") == (not parameter.requires_grad)
    for name, _ in net.named_buffers():
        assert name not in stored or metadata(model, name)[KIND] == "BUFFER"
    compare(net, inputs, kind, model, torch.randn_like(net(*inputs)), loss="mse")


@pytest.mark.parametrize("train", [False, True])
def test_batch_norm_and_dropout_are_nodes_in_the_mode_of_their_modules(train: bool) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout2d(0.5), nn.Dropout(0.25, inplace=True))
    net.append(nn.BatchNorm2d(4)).append(Net(lambda m, x: functional.dropout(x, 0.125, m.training)))
    net.train(train)
    net[4].train(not train)
    net[3].train(not train)
    model = ob.torch.export(net, (torch.randn(2, 3, 6, 6),))
    assert [trains(node) for node in nodes(model, "BatchNormalization")] == [train, not train]
    assert [drops(node) for node in nodes(model, "Dropout")] == [train, not train, train]
    constants = {node.output[0]: node.attribute[0].f for node in nodes(model, "Constant")}
    assert [constants[node.input[1]] for node in nodes(model, "Dropout")] == [0.5, 0.25, 0.125]


def attention(weights: bool) -> Any:
    net = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    return Net(lambda m, x: m.net(x, x, x, need_weights=weights)[0], net=net)


DROPPING: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "attention": (lambda: attention(False), (2, 4, 8)),
    "attention and its weights": (lambda: attention(True), (2, 4, 8)),
    "LSTM": (lambda: Net(lambda m, x: m.net(x)[0], net=nn.LSTM(4, 3, 2, dropout=0.5, bidirectional=True)), (5, 2, 4)),
    "GRU": (lambda: Net(lambda m, x: m.net(x)[0], net=nn.GRU(4, 3, 2, dropout=0.5)), (5, 2, 4)),
    "RNN": (lambda: Net(lambda m, x: m.net(x)[0], net=nn.RNN(4, 3, 2, dropout=0.5)), (5, 2, 4)),
    "Dropout2d": (lambda: nn.Dropout2d(0.5), (3, 16, 4, 4)),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(("build", "shape"), DROPPING.values(), ids=list(DROPPING))
def test_dropout_inside_modules_is_kept(build: Callable[[], Any], shape: tuple[int, ...], train: bool) -> None:
    model = ob.torch.export(build().train(train), (torch.randn(*shape),))
    (node,) = nodes(model, "Dropout")
    assert drops(node) == train


def test_dropout_in_attention_has_the_mean_and_the_variance_of_the_module() -> None:
    torch.manual_seed(0)
    net = Net(lambda _, x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5, is_causal=True)).train()
    x = torch.randn(1, 5, 8)
    model = ob.torch.export(net, (x,))
    network = ob.torch.module(model).train()
    ours = np.stack([network(x).numpy() for _ in range(3000)])
    theirs = np.stack([net(x).numpy() for _ in range(3000)])
    np.testing.assert_allclose(ours.mean(0), theirs.mean(0), atol=0.15)
    np.testing.assert_allclose(ours.std(0), theirs.std(0), atol=0.15)
    assert ours.std(0).max() > 0.5


def test_a_region_without_gradient_writes_into_its_buffers_and_stops_what_enters() -> None:
    def forward(m: Any, x: Any) -> Any:
        y = m.body(x)
        with torch.no_grad():
            m.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return y - m.mean

    net = Net(forward, body=nn.Linear(3, 2))
    net.register_buffer("mean", torch.zeros(2))
    x = torch.randn(4, 3)
    with pytest.warns(ob.OnnxBackpropWarning, match="changes its buffers 'mean' in each call"):
        model = ob.torch.export(net, (x,))
    assert [node.input[0] for node in stops(model)] == nodes(model, "Gemm")[0].output
    assert torch.equal(net.mean, torch.zeros(2))


@pytest.mark.filterwarnings("ignore:.*numbers of the file are trained:onnx_backprop.OnnxBackpropWarning")
@pytest.mark.parametrize("outer", [torch.no_grad, lambda: torch.autocast("cpu", enabled=False)])
def test_a_region_without_gradient_inside_of_autocast_and_around_it(outer: Callable[[], Any]) -> None:
    """torch.export itself forgets one inside; no gradient passes it, and one passes what autocast has beside it."""
    inner = (lambda: torch.autocast("cpu", enabled=False)) if outer is torch.no_grad else torch.no_grad

    def forward(m: Any, x: Any) -> Any:
        y = m.body(x)
        with outer():
            with inner():
                z = torch.tanh(m.other(y))
            w = 2 * y
        return z + w + m.last(y)

    net = Net(forward, body=nn.Linear(3, 2), other=nn.Linear(2, 2), last=nn.Linear(2, 2))
    x = torch.randn(4, 3)
    net(x).sum().backward()
    expected = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    assert "other.weight" not in expected
    network = ob.torch.module(ob.torch.export(net, (x,)))
    network(x).sum().backward()
    got = {name: p.grad for name, p in network.named_parameters() if p.grad is not None and p.grad.any()}
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient)


def test_tied_parameters_are_one_tensor_with_its_other_names() -> None:
    net, inputs = tied()
    model = ob.torch.export(net, inputs)
    names = [tensor.name for tensor in model.graph.initializer]
    assert names == ["table.weight"]
    assert json.loads(metadata(model, "table.weight")[ALIASES]) == ["head.weight"]
    assert {entry.target for entry in signature(model)} >= {"table.weight", "head.weight"}


def test_a_frozen_bias_of_zeros_is_frozen_after_the_optimizer_of_onnxscript() -> None:
    """Which takes it out with what was written of it; of two names torch reads the last."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 3))
    for layer in (net[0], net[2], net[3]):
        nn.init.zeros_(layer.bias)
    net[2].bias = net[0].bias
    net[0].bias.requires_grad_(False)
    onnxscript = pytest.importorskip("onnxscript.optimizer")
    model = onnxscript.optimize(ob.torch.export(net, (torch.randn(2, 3),)))
    assert not any("bias" in tensor.name for tensor in model.graph.initializer)
    graph = ob.training_graph(model, loss="mse")
    assert set(graph.parameters) == {"0.weight", "2.weight", "3.weight", "3.bias"}
    assert graph.left_out == {"2.bias": "requires no gradient"}


def test_a_parameter_that_nothing_reads_is_there() -> None:
    net = Net(lambda m, x: m.body(x), body=nn.Linear(3, 2))
    net.never = nn.Parameter(torch.randn(3))
    model = ob.torch.export(net, (torch.randn(4, 3),))
    assert {tensor.name for tensor in model.graph.initializer} == {"body.weight", "body.bias", "never"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(ob.training_graph(model, loss="mse").parameters) == {"body.weight", "body.bias"}


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_loss_inside(kind: str) -> None:
    net, inputs = conv_net()
    forward = net.forward
    target = torch.randn(4, 3)
    batch = torch.export.Dim("batch")
    model = ob.torch.export(
        net.train(), inputs, loss=functional.mse_loss, targets=(target,), dynamic_shapes=({0: batch},)
    )
    assert net.forward == forward
    assert "forward" not in vars(net)
    assert [v.name for v in model.graph.input] == ["input", "target"]
    assert model.graph.output[0].name == "loss"
    shapes = [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input]
    assert shapes[0][0] == shapes[1][0] == "batch"
    assert shapes[0][1:] == [3, 8, 8]
    compare(net, inputs, kind, model, target, prediction="loss")


def test_a_loss_that_is_a_module_has_parameters_and_targets_have_names() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))

        def forward(self, y: Any, label: Any, scale: Any) -> Any:
            return (functional.cross_entropy(y * self.weight, label) * scale).sum()

    net, loss = nn.Linear(3, 2), Weighted()
    targets = (torch.tensor([0, 1, 1, 0]), torch.tensor([2.0]))
    model = ob.torch.export(net, (torch.randn(4, 3),), loss=loss, targets=targets)
    assert [v.name for v in model.graph.input] == ["input", "target_0", "target_1"]
    assert {tensor.name for tensor in model.graph.initializer} >= {"weight", "bias", "loss.weight"}
    assert not hasattr(net, "loss")


def test_a_module_that_returns_its_loss_and_names() -> None:
    net = Net(lambda m, x, t: (functional.l1_loss(m.body(x), t), m.body(x)), body=nn.Linear(3, 2))
    inputs = (torch.randn(4, 3), torch.randn(4, 2))
    model = ob.torch.export(net, inputs, input_names=["data", "truth"], output_names=["l1", "y"])
    assert [v.name for v in (*model.graph.input, *model.graph.output)] == ["data", "truth", "l1", "y"]
    assert set(ob.training_graph(model, prediction="l1").parameters) == {"body.weight", "body.bias"}


def test_functions_with_a_backward_pass_of_their_own_are_named() -> None:
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Any) -> Any:
            return x.round()

        @staticmethod
        def backward(_: Any, dy: Any) -> Any:
            return dy

    net = Net(lambda m, x: Straight.apply(m.body(x)), body=nn.Linear(3, 2))
    with pytest.warns(ob.OnnxBackpropWarning, match="Straight, of torch.autograd.Function"):
        ob.torch.export(net, (torch.randn(4, 3),))
    hooked = nn.Sequential(nn.Linear(3, 2))
    hooked[0].register_full_backward_hook(lambda *_: None)
    with pytest.warns(ob.OnnxBackpropWarning, match="0: backward hooks"):
        ob.torch.export(hooked, (torch.randn(4, 3),))


class Squared(torch.autograd.Function):
    @staticmethod
    @torch.no_grad()
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return 2 * ctx.saved_tensors[0] * dy


@pytest.mark.parametrize(
    "operation",
    [Squared.apply, lambda x: torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=True)],
    ids=["no_grad in a function", "reentrant checkpoint"],
)
@pytest.mark.filterwarnings("ignore:export. the module calls Squared")
def test_gradients_pass_what_switches_them_off_and_on(operation: Any) -> None:
    """torch.export takes all that follows, up to the next block, for one of no_grad."""

    def forward(m: Any, x: Any) -> Any:
        h = m.second(operation(m.first(x)))
        with torch.no_grad():
            positions = torch.cos(torch.arange(2.0))
        return m.third(h * positions)

    net = Net(forward, first=nn.Linear(3, 4), second=nn.Linear(4, 2), third=nn.Linear(2, 2))
    x = torch.randn(5, 3)
    compare(net, (x,), "sgd", ob.torch.export(net, (x,)), torch.randn(5, 2), loss="mse")


def in_place(m: Any, x: Any) -> Any:
    y = m.body(x)
    with torch.no_grad():
        y.clamp_(0)
    return y


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "in place": (lambda: Net(in_place, body=nn.Linear(3, 2)), "is changed in place under torch.no_grad"),
    "alpha_dropout": (lambda: nn.Sequential(nn.Linear(3, 2), nn.AlphaDropout()), "alpha_dropout in training mode"),
    "branch": (lambda: Net(lambda _, x: x if x.sum() > 0 else -x), "torch.export.export refuses the module: "),
    "operator": (lambda: Net(lambda _, x: torch.linalg.eigvalsh(x.T @ x)), "torch.onnx.export refuses the module: "),
}


@pytest.mark.parametrize(("build", "message"), REFUSED.values(), ids=list(REFUSED))
def test_invalid_use_is_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ob.UnsupportedError, match=message) as caught:
        ob.torch.export(build().train(), (torch.randn(4, 3),))
    assert "\n" not in str(caught.value)
    if "refuses" in message:
        assert caught.value.__cause__ is not None


def test_arguments_that_do_not_fit() -> None:
    net, x = nn.Linear(3, 2), torch.randn(4, 3)
    with pytest.raises(ob.InvalidArgumentError, match="module: expected a torch.nn.Module"):
        ob.torch.export(torch.relu, (x,))
    with pytest.raises(ob.InvalidArgumentError, match="expected tuples"):
        ob.torch.export(net, x)
    path: Any = "model.onnx"
    with pytest.raises(ob.InvalidArgumentError, match=r"kwargs: expected a mapping .* onnx.save\(model, path\)"):
        ob.torch.export(net, (x,), path)
    with pytest.raises(ob.InvalidArgumentError, match="targets: without a loss"):
        ob.torch.export(net, (x,), targets=(x,))
    with pytest.raises(ob.InvalidArgumentError, match="loss: expected one number"):
        ob.torch.export(net, (x,), loss=lambda y, t: y - t, targets=(torch.zeros(4, 2),))
    with pytest.raises(ob.InvalidArgumentError, match="dynamic_shapes: expected those of input, target"):
        ob.torch.export(net, (x,), loss=functional.mse_loss, targets=(x,), dynamic_shapes=({}, {}, {}))


def test_outputs_that_differ_are_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnx_backprop.torch import exporting

    net, x = nn.Linear(3, 2), torch.randn(4, 3)
    monkeypatch.setattr(exporting, "_outputs", lambda *_: [net(x) + 0.5])
    with pytest.raises(ob.UnsupportedError, match="differs from the module's by up to 0.5, expected"):
        ob.torch.export(net, (x,))
    ob.torch.export(net, (x,), check=False)


@pytest.mark.parametrize("dynamo", [False, True], ids=["TorchScript", "dynamo"])
def test_standardised_weights_by_both_exporters(dynamo: bool, tmp_path: Any) -> None:
    """timm's ScaledStdConv2d, whose TorchScript form has statistics that are computed in the graph."""

    class Standardised(nn.Conv2d):
        """As timm writes it."""

        def __init__(self, *sizes: int) -> None:
            super().__init__(*sizes)
            self.gain = nn.Parameter(torch.full((self.out_channels, 1, 1, 1), 1.5))
            self.scale = self.weight[0].numel() ** -0.5

        def forward(self, x: Any) -> Any:
            flat, gain = self.weight.reshape(1, self.out_channels, -1), (self.gain * self.scale).view(-1)
            weight = functional.batch_norm(flat, None, None, weight=gain, training=True, momentum=0.0, eps=1e-6)
            return functional.conv2d(x, weight.reshape_as(self.weight), self.bias)

    torch.manual_seed(0)
    net = nn.Sequential(Standardised(3, 6, 3), nn.ReLU(), Standardised(6, 2, 3)).eval()
    x = torch.randn(2, 3, 8, 8)
    path = tmp_path / "net.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        more = {"optimize": False} if dynamo else {"do_constant_folding": False, "opset_version": 18}
        torch.onnx.export(net, (x,), str(path), dynamo=dynamo, input_names=["x"], external_data=False, **more)
    names = [name for name, _ in net.named_parameters()]
    model = onnx.load(path)
    assert dynamo or all(trains(node) for node in nodes(model, "BatchNormalization"))
    compare(net, (x,), "sgd", model, torch.randn_like(net(x)), loss="mse", trainable=names)


def test_submodules_in_eval_keep_their_statistics_in_the_module() -> None:
    """`ob.torch.module`: `network.backbone.eval()`, as detection nets are fine-tuned."""
    net, inputs = conv_net()
    ours = ob.torch.module(ob.torch.export(net.eval(), inputs)).train()
    net.train()
    ours.get_submodule("1").eval()
    net[1].eval()
    np.testing.assert_allclose(ours(*inputs).detach(), net(*inputs).detach(), rtol=1e-4, atol=1e-5)
    assert torch.equal(ours.get_buffer("1.running_mean"), torch.zeros(6))
    assert not torch.equal(ours.get_buffer("4.running_mean"), torch.zeros(4))
