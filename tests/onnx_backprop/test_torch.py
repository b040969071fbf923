"""`ob.torch.module` beside PyTorch itself. Runs where PyTorch is (`make field` makes such an environment)."""

from __future__ import annotations

import copy
import gc
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

import onnx_backprop as ob
from models import unet_conv_transpose, unet_resize
from onnx_backprop.opset.core import mapped
from onnx_backprop.opset.core.errors import InvalidArgumentError
from tests.docs.blocks import examples
from tests.onnx_backprop.exported_modules import close, exported, several
from tests.support.training_models import classifier

torch: Any = pytest.importorskip("torch")
functional: Any = torch.nn.functional


@pytest.mark.parametrize(
    "build",
    [
        lambda: unet_conv_transpose.build(features=4, levels=2),
        lambda: unet_resize.build(features=4, levels=2),
        lambda: unet_resize.build(features=4, levels=2, mode="nearest"),
    ],
    ids=["transposed", "linear", "nearest"],
)
def test_u_nets_train_as_in_pytorch(build: Callable[[], ModelProto]) -> None:
    """Gradients by weights and input, and the losses of ten steps of AdamW."""
    from benchmarks.torch_twin import Twin

    torch.manual_seed(0)
    ours, twin = ob.torch.module(build()), Twin(build())
    weights = {name.replace("/", "."): p for name, p in twin.named_parameters()}
    assert {name for name, _ in ours.named_parameters()} == weights.keys()
    x, target = torch.randn(2, 1, 24, 24), torch.rand(2, 1, 24, 24)
    seen = [x.clone().requires_grad_() for _ in range(2)]
    losses: list[list[float]] = [[], []]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (ours, twin)]
    for step in range(10):
        for network, optimizer, image, history in zip((ours, twin), optimizers, seen, losses, strict=True):
            optimizer.zero_grad()
            loss = functional.binary_cross_entropy_with_logits(network(image), target)
            loss.backward()
            history.append(loss.item())
        if not step:
            close(seen[0].grad, seen[1].grad)
            for name, parameter in ours.named_parameters():
                close(parameter.grad, weights[name].grad)
        for optimizer in optimizers:
            optimizer.step()
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    assert losses[0][-1] < losses[0][0]


def test_modes() -> None:
    """Dropout draws in training mode alone, from PyTorch's generator; BatchNormalization as the Trainer has it."""
    network = ob.torch.module(classifier())
    torch.manual_seed(3)
    x = torch.randn(50, 4)
    before = network.mean.clone()
    assert {name for name, _ in network.named_buffers()} == {"mean", "variance"}
    torch.manual_seed(5)
    a = network(x)
    moved = network.mean.clone()
    hidden = functional.linear(x, network.w1.T, network.b1)
    close(moved, 0.9 * before + 0.1 * hidden.mean(0), 1e-4)
    close(network.variance, 0.9 * torch.ones(16) + 0.1 * hidden.var(0, unbiased=False), 1e-4)
    b = network(x)
    torch.manual_seed(5)
    c = network(x)
    assert not torch.equal(a, b)
    close(a, c)
    a.square().sum().backward()
    direction, losses = torch.randn_like(network.w1), []
    for h in (1e-2, -1e-2):  # the masks are those of the backward pass
        torch.manual_seed(5)
        with torch.no_grad():
            network.w1.add_(h * direction)
            losses.append(network(x).square().sum().item())
            network.w1.sub_(h * direction)
    slope = (losses[0] - losses[1]) / 2e-2
    assert (network.w1.grad * direction).sum().item() == pytest.approx(slope, rel=2e-2)
    network.eval()
    statistics = network.mean.clone()
    d, e = network(x), network(x)
    assert torch.equal(d, e)
    assert torch.equal(network.mean, statistics)
    normal = (hidden - network.mean) / torch.sqrt(network.variance + 1e-5) * network.scale + network.b1
    close(d, functional.linear(torch.relu(normal), network.w2.T, network.b2), 1e-4)


def test_batch_normalization_in_training_has_pytorchs_gradients(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3, stride=2)
    )
    x = torch.randn(3, 3, 9, 9)
    more = {"training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False}
    ours = ob.torch.module(exported(module, tmp_path / "m.onnx", x, **more))
    for training in (True, False):
        module[1].load_state_dict({**ours.get_submodule("1").state_dict(), "num_batches_tracked": torch.tensor(0)})
        ours.train(training)
        module.train(training)
        for network in (ours, module):
            network.zero_grad()
            network(x).square().mean().backward()
        for name, parameter in module.named_parameters():
            if name != "0.bias" or not training:  # which has none in training, but rounding
                close(ours.get_parameter(name).grad, parameter.grad, 2e-5)
    assert int(ours.get_buffer("1.num_batches_tracked")) == 1


def test_the_state_dict(tmp_path: Path) -> None:
    """It has PyTorch's names, goes into PyTorch's module and comes from there; a copy is one of its own."""
    ours, module, (words, scale) = several(tmp_path)
    expected = module.state_dict()
    state = {name: value for name, value in ours.state_dict().items() if name in expected}
    assert {"words.weight", "norm.weight", "norm.bias"} <= state.keys()
    other = copy.deepcopy(ours)
    with torch.no_grad():
        ours.words.weight.mul_(2)
    assert not torch.equal(ours(words, scale)[0], other(words, scale)[0])
    other.load_state_dict(ours.state_dict())
    close(ours(words, scale)[0], other(words, scale)[0])
    torch.save(ours.state_dict(), tmp_path / "state.pt")
    module.load_state_dict(torch.load(tmp_path / "state.pt"), strict=False)
    close(module(words, scale)[0], ours(words, scale)[0], 1e-4)


def test_names_that_are_no_attributes_have_slashes() -> None:
    names = ["a", "a.b", "training", "x..y", "forward.weight", "onnx::MatMul_3", "_compiled"]
    nodes = "".join(f"v{n + 1} = Add(v{n}, w{n}) " for n in range(len(names)))
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> m (float[3] v0) => (float[3] v{len(names)}) {{ {nodes} }}'
    )
    for node, name in zip(model.graph.node, names, strict=True):
        node.input[1] = name
        model.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32) * 0.3, name))
    network = ob.torch.module(model)
    assert len(list(network.parameters())) == len(names)
    assert {"a", "a/b", "x//y", "forward/weight", "onnx::MatMul_3"} <= network.state_dict().keys()
    np.testing.assert_allclose(network(torch.zeros(3)).detach(), np.full(3, 0.3 * len(names)), rtol=1e-6)


def test_export(tmp_path: Path) -> None:
    ours, _, (words, scale) = several(tmp_path)
    with torch.no_grad():
        ours.norm.bias.add_(1)
    ours.export(tmp_path / "trained.onnx")
    onnx.checker.check_model(str(tmp_path / "trained.onnx"), full_check=True)
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx")
    y = session.run(None, {"x0": words.numpy(), "x1": scale.numpy()})
    close(torch.from_numpy(np.asarray(y[0])), ours(words, scale)[0])
    assert [v.name for v in session.get_inputs()] == ["x0", "x1"]


def test_weights_that_are_no_longer_the_models(tmp_path: Path) -> None:
    """One error that names the weight, of a call and of an export."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> m (float[N, 2] x) => (float[N, 3] y) { y = MatMul(x, w) }'
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones((2, 3), np.float32), "w"))
    for weight, message in (
        (torch.zeros(2, 4), r"'w' has shape \(2, 3\), got a tensor of \(2, 4\)"),
        (torch.zeros(2, 3, dtype=torch.float64), "'w' has type torch.float32, got a tensor of torch.float64"),
        (torch.zeros(2, 3, device="meta"), "'w': expected a dense tensor on the CPU, got torch.strided on meta"),
        (None, "'w': expected a torch.Tensor, got NoneType"),
    ):
        network = ob.torch.module(model)
        network.w = None if weight is None else torch.nn.Parameter(weight)
        with pytest.raises(InvalidArgumentError, match=message):
            network.export(tmp_path / "never.onnx")
        with pytest.raises(InvalidArgumentError, match=message):
            network(torch.zeros(1, 2))
    assert not list(tmp_path.iterdir())


def test_numbers_are_there_once() -> None:
    """The weights' memory is PyTorch's alone: what is compiled later, and a copy, has those of then."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> m (float[1, 512] x) => (float[1, 512] y) { y = MatMul(x, w) }'
    )
    model.graph.initializer.append(numpy_helper.from_array(np.eye(512, dtype=np.float32), "w"))
    network = ob.torch.module(model)
    held = [m for m in gc.get_objects() if isinstance(m, ModelProto) and m is not model and m.ByteSize() > 2**20]
    assert not held
    x = torch.arange(512.0)[None]
    with torch.no_grad():
        network.w.mul_(3)
        close(network(x), 3 * x)
        network.w.mul_(2)
    close(copy.deepcopy(network).eval()(x), 6 * x)
    network.requires_grad_(True)
    network(x).sum().backward()
    close(network.w.grad, x.T.expand(512, 512))


@pytest.mark.parametrize("beside", [False, True])
def test_a_file_is_not_needed_once_it_is_read(beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large weights and a large table, which is no tensor of the module, in the file or in another one beside it."""
    monkeypatch.setattr(mapped, "LEAST_MAPPED", 0)
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> m (float[b, 512] x) => (float[b, 10240] y)'
        "{ h = MatMul(x, w) y = Gather <axis = 1> (h, table) }"
    )
    rng = np.random.default_rng(0)
    w, table = rng.standard_normal((512, 512)).astype(np.float32), rng.integers(512, size=10240)
    model.graph.initializer.extend([numpy_helper.from_array(w, "w"), numpy_helper.from_array(table, "table")])
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=beside, location="weights.bin")
    network = ob.torch.module(path)
    for file in tmp_path.iterdir():
        file.write_bytes(b"other")
    x = torch.randn(3, 512)
    expected = (x @ torch.tensor(w))[:, table]
    close(network(x), expected)
    network(x).square().sum().backward()
    sums = torch.zeros(3, 512).index_add_(1, torch.tensor(table), 2 * expected)
    close(network.w.grad, x.T @ sums)
    network.export(path)
    close(torch.tensor(ob.session(path).run(None, {"x": x.numpy()})[0]), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types(dtype: Any, tmp_path: Path) -> None:
    element = {torch.float16: TensorProto.FLOAT16, torch.bfloat16: TensorProto.BFLOAT16}.get(dtype, TensorProto.DOUBLE)
    x, y = (helper.make_tensor_value_info(name, element, ["N", n]) for name, n in (("x", 4), ("y", 3)))
    w = np.random.default_rng(0).standard_normal((4, 3)).astype(helper.tensor_dtype_to_np_dtype(element))
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Tanh", ["p"], ["y"])]
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(w, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    ob.torch.module(model).export(tmp_path / "same.onnx")
    assert onnx.load(tmp_path / "same.onnx").graph.initializer[0].raw_data == model.graph.initializer[0].raw_data
    if dtype == torch.bfloat16:
        pytest.importorskip("torch")
        with pytest.raises(ob.OnnxBackpropError):  # onnxruntime has no MatMul of bfloat16 on the CPU
            ob.torch.module(model)(torch.ones(2, 4, dtype=dtype))
        return
    network = ob.torch.module(model)
    rows = torch.randn(2, 4).to(dtype)
    network(rows).sum().backward()
    weight = network.w.detach().clone().requires_grad_()
    torch.tanh(rows @ weight).sum().backward()
    close(network.w.grad.double(), weight.grad.double(), 1e-2 if dtype == torch.float16 else 1e-12)


def test_refusals(tmp_path: Path) -> None:
    ours, _, (words, scale) = several(tmp_path)
    for inputs, sentence in [
        ((words,), "expected x0, x1; 'x1' missing"),
        ((words, scale, scale), "got 3 tensors"),
        ((words.int(), scale), r"'x0' has type torch.int64, got a tensor of torch.int32. Use .to\(torch.int64\)"),
        ((words, scale.double()), r"'x1' has type torch.float32"),
        ((words, scale.numpy()), "'x1': expected a torch.Tensor, got ndarray"),
        ((words, scale[:1]), "batch is 2 in 'x0'"),
        ((words, scale[0]), "expected the shape"),
        ((words + 100, scale), "onnxruntime cannot run this batch"),
    ]:
        with pytest.raises(InvalidArgumentError, match=sentence):
            ours(*inputs)
    with pytest.raises(InvalidArgumentError, match="expected x0, x1"):
        ours(words, x0=words)
    with pytest.raises(InvalidArgumentError, match="'words.weight' has type torch.float32"):
        ours.double()(words, scale)


def test_strided_inputs_and_gradients(tmp_path: Path) -> None:
    ours, module, (words, scale) = several(tmp_path)
    turned = torch.rand(3, 2).T
    for network in (ours, module):
        network(words.T.contiguous().T, turned)[0].transpose(0, 1).square().sum().backward()
    close(ours.norm.weight.grad, module.norm.weight.grad)
    assert scale.shape == turned.shape


@pytest.mark.parametrize("kernels", ["onnx", "numpy"])
def test_other_kernels(kernels: str) -> None:
    model = unet_conv_transpose.build(features=4, levels=1)
    x = torch.randn(1, 1, 8, 8)
    grads = []
    for one in ("native", kernels):
        network = ob.torch.module(model, kernels=one)
        network(x).square().mean().backward()
        grads.append([p.grad for p in network.parameters()])
    for a, b in zip(*grads, strict=True):
        close(a, b)


def test_the_example_of_the_docstring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(unet_resize.build(features=4, levels=2), "model.onnx")
    x = torch.rand(2, 1, 16, 16)
    names = {"ob": ob, "torch": torch, "loader": [(x, 2 * x)] * 3}
    (code,) = examples(inspect.getdoc(ob.torch.module) or "")
    exec(code, names)
    assert Path("trained.onnx").is_file()


class Gated(torch.nn.Module):
    """A Linear whose weight exporters transpose, a GroupNorm whose scale they reshape, a gate, a buffer, statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh())
        self.norm, self.batch = torch.nn.GroupNorm(2, 6), torch.nn.BatchNorm1d(6)
        self.gate = torch.nn.Parameter(torch.tensor([0.5]))
        self.register_buffer("blur", torch.tensor([0.25, 0.5, 0.25]).repeat(6, 1, 1))

    def forward(self, x: Any) -> Any:
        h = self.norm(self.encoder(x).transpose(1, 2))
        smooth = torch.nn.functional.conv1d(h, self.blur, padding=1, groups=6)
        return self.gate * smooth + self.batch(h)


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript", "ours"])
@pytest.mark.filterwarnings("ignore:the file does not say for sure")  # TorchScript, of the gate
@pytest.mark.filterwarnings("ignore:.* numbers of the file are trained")
def test_parameters_and_buffers_are_those_of_the_module(exporter: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, other = Gated().eval(), Gated().eval()
    for one in (module, other):
        for parameter in one.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    x = torch.randn(3, 5, 4)
    path: Any = tmp_path / "gated.onnx"
    if exporter == "ours":
        path = ob.torch.export(module, (x,))
    else:
        more = {"dynamo": True, "optimize": True} if exporter == "dynamo" else {"dynamo": False, "opset_version": 17}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(module, (x,), str(path), input_names=["x"], **more)
    network = ob.torch.module(path).eval()
    shapes = {name: tuple(p.shape) for name, p in network.named_parameters()}
    assert shapes == {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert {name for name, _ in network.named_buffers()} == {name for name, _ in module.named_buffers()}
    close(network(x), module(x), 1e-5)
    network.load_state_dict(other.state_dict())
    close(network(x), other(x), 1e-5)
    for one in (network, other):
        one(x).square().sum().backward()
    expected = dict(other.named_parameters())
    for name, parameter in network.named_parameters():
        close(parameter.grad, expected[name].grad, 1e-4)
    optimizers = [torch.optim.AdamW(one.parameters(), 0.01) for one in (network, other)]
    for optimizer in optimizers:
        optimizer.step()
    close(network(x), other(x), 1e-5)
    other.load_state_dict(network.state_dict())
    network.export(tmp_path / "again.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "again.onnx")
    close(torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]), other(x), 1e-5)
    close(copy.deepcopy(network)(x), network(x))


def test_on_a_device(device: str) -> None:
    """Outputs, gradients and running statistics are those of the CPU, for batches of several lengths."""
    ours, there = ob.torch.module(classifier()), ob.torch.module(classifier(), device=device)
    for rows in (6, 6, 3):
        x = torch.randn(rows, 4, requires_grad=True)
        torch.manual_seed(0)
        (y := ours(x)).square().sum().backward()
        dx, x.grad = x.grad, None
        torch.manual_seed(0)
        (z := there(x)).square().sum().backward()
        close(z, y)
        close(x.grad, dx)
        for a, b in zip(there.parameters(), ours.parameters(), strict=True):
            close(a.grad, b.grad)
            a.grad = b.grad = None
        for a, b in zip(there.buffers(), ours.buffers(), strict=True):
            close(a.float(), b.float())
    close(there.eval()(x), ours.eval()(x))
    with pytest.raises(InvalidArgumentError, match="kernels: expected kernels 'onnx' with a device, got 'numpy'"):
        ob.torch.module(classifier(), device=device, kernels="numpy")
