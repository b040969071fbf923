"""The runs of `ob.torch.module`: what autograd sees of them. Needs PyTorch, as test_torch.py does."""

from __future__ import annotations

import gc
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper, parser

import onnx_backprop as ob
from models import unet_resize
from onnx_backprop.opset.core.errors import InvalidArgumentError, UnsupportedError
from onnx_backprop.ort_ops.huge_pages import HugePages, block_bytes
from onnx_backprop.ort_ops.runtime import pause
from tests.onnx_backprop.exported_modules import close, exported, several
from tests.ort_ops.runtime.test_pause import child

torch: Any = pytest.importorskip("torch")
sessions: Any = import_module("onnx_backprop.torch.sessions")
functional: Any = torch.nn.functional


@pytest.fixture(params=["one session that pauses", "a session for each pass"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "a session for each pass":
        monkeypatch.setattr(sessions, "has_kernels", lambda _: False)
    return request.param


@pytest.mark.skipif(not block_bytes(), reason="this system gives no huge pages on request")
def test_steps_use_huge_pages_from_the_third_on(monkeypatch: pytest.MonkeyPatch) -> None:
    network, asked = ob.torch.module(unet_resize.build(features=4, levels=2)), list[int]()
    done = list[int]()
    monkeypatch.setattr(HugePages, "collapse", lambda *_: asked.append(len(done)))
    while len(done) < 4:
        network(torch.rand(1, 1, 24, 24)).sum().backward()
        done.append(1)
    assert asked == [2]


def test_several_inputs_and_outputs(tmp_path: Path, way: str) -> None:
    ours, module, (words, scale) = several(tmp_path)
    scales = [scale.clone().requires_grad_() for _ in range(2)]
    results = [network(words, s) for network, s in zip((ours, module), scales, strict=True)]
    for a, b in zip(*results, strict=True):
        close(a, b)
    assert not results[0][1].requires_grad
    for first, _, doubled in results:
        (first.pow(3).sum() + 3 * doubled.sum()).backward()
    close(scales[0].grad, scales[1].grad)
    expected = dict(module.named_parameters())
    assert {name for name, _ in ours.named_parameters() if name in expected} >= {"words.weight", "blocks.0.bias"}
    close(ours.words.weight.grad, module.words.weight.grad)
    close(ours.blocks.get_submodule("1").bias.grad, module.blocks[1].bias.grad)
    named = ours(x1=scale, x0=words)
    close(named[0], results[1][0])


def test_only_what_is_wanted_has_a_gradient(tmp_path: Path, way: str) -> None:
    ours, module, (words, scale) = several(tmp_path)
    ours.requires_grad_(False)
    first, _, _ = ours(words, scale)
    assert first.grad_fn is None
    ours.norm.weight.requires_grad_(True)
    first, _, _ = ours(words, scale)
    first.square().sum().backward()
    module(words, scale)[0].square().sum().backward()
    close(ours.norm.weight.grad, module.norm.weight.grad)
    assert [name for name, p in ours.named_parameters() if p.grad is not None] == ["norm.weight"]
    with torch.no_grad():
        assert ours(words, scale)[0].grad_fn is None
    with torch.inference_mode():
        close(ours(words, scale)[0], first)


def test_gradients_add_up_and_a_graph_is_gone_after_its_use(tmp_path: Path, way: str) -> None:
    ours, _, (words, scale) = several(tmp_path)
    first = ours(words, scale)[0].square().mean()
    second = ours(words, 2 * scale)[0].sum()
    second.backward()
    once = ours.norm.weight.grad.clone()
    first.backward(retain_graph=True)
    first.backward()
    twice = ours.norm.weight.grad - once
    ours.zero_grad()
    ours(words, scale)[0].square().mean().backward()
    close(twice, 2 * ours.norm.weight.grad)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        first.backward()


def test_a_weight_that_changes_before_backward_is_noticed(tmp_path: Path, way: str) -> None:
    ours, _, (words, scale) = several(tmp_path)
    loss = ours(words, scale)[0].square().sum()
    with torch.no_grad():
        ours.norm.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("shape", "changed"),
    [
        ((2, 3, 4), "Reshape(w, to)"),
        ((6, 4), "Identity(w)"),
        ((6, 4), "Cast <to = 1> (w)"),
        ((4, 6), "Transpose <perm = [1, 0]> (w)"),
        ((6, 4), "Mul(one, w)"),
        ((6, 4), "Div(w, one)"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernels", ["native", "onnx"])
def test_a_weight_that_is_read_through_a_view_is_noticed(
    shape: tuple[int, ...], changed: str, kernels: str, way: str
) -> None:
    """onnxruntime reads its memory, or the gradient is that of what it was."""
    text = f"m (float[N, 6] x) => (float[N, 4] y) {{ v = {changed} y = MatMul(x, v) }}"
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {text}')
    w = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    given = {"w": w, "to": np.array([6, 4]), "one": np.float32(1)}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in given.items())
    network, x = ob.torch.module(model, kernels=kernels), torch.rand(2, 6, requires_grad=True)
    (expected,) = torch.autograd.grad(network(x).sum(), x)
    loss = network(x).sum()
    with torch.no_grad():
        network.w.mul_(3)
    try:
        (got,) = torch.autograd.grad(loss, x)
    except RuntimeError as e:
        assert "modified by an inplace operation" in str(e)  # noqa: PT017
    else:
        close(got, expected)


def test_a_second_backward_pass_reads_the_numbers_that_were_drawn(way: str) -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> m (float[N, 3] x) => (float[N, 3] y) '
        "{ r = RandomNormalLike(x) s = Mul(r, w) y = Mul(s, x) }"
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "w"))
    network = ob.torch.module(model)
    y = network(torch.ones(2, 3))
    for _ in range(2):
        (dw,) = torch.autograd.grad(y.sum(), network.w, retain_graph=True)
        close(dw, y.detach().sum(0))


def test_an_inference_tensor_that_no_gradient_reads(way: str) -> None:
    """It has no version; a second backward pass reads what it was all the same."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> m (float[N, 3] x) => (float[N, 3] y) { a = Add(x, w) y = Sigmoid(a) }'
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "w"))
    network = ob.torch.module(model)
    with torch.inference_mode():
        x = torch.ones(2, 3)
    loss = network(x).sum()
    (once,) = torch.autograd.grad(loss, network.w, retain_graph=True)
    with torch.inference_mode():
        x.zero_()
    (again,) = torch.autograd.grad(loss, network.w)
    close(again, once)
    assert once.abs().min() > 0


@pytest.mark.parametrize(
    ("node", "output"), [("SequenceConstruct", "seq(float[N, 3])"), ("Optional", "optional(float[N, 3])")]
)
def test_an_output_that_is_no_tensor_is_refused(node: str, output: str, way: str) -> None:
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> m (float[N, 3] x) => (float[N, 3] y, {output} z) '
        f"{{ y = Mul(x, x) z = {node}(x) }}"
    )
    with pytest.raises(UnsupportedError, match=r"reads 'z'.* which PyTorch cannot hold"):
        ob.torch.module(model)(torch.ones(2, 3, requires_grad=True))


PARALLEL = """
import onnxruntime
import torch
from onnx import numpy_helper, parser
import numpy as np
import onnx_backprop as ob
text = "m (float[N, 3] x) => (float[N, 3] y) { a = Add(x, w) b = Mul(x, w) c = Sigmoid(a) y = Mul(b, c) }"
model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {text}')
model.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "w"))
options = onnxruntime.SessionOptions()
options.execution_mode, options.inter_op_num_threads = onnxruntime.ExecutionMode.ORT_PARALLEL, 3
own, x = ob.torch.module(model, session_options=options), torch.ones(2, 3)
sum(own(x).sum() for _ in range(12)).backward()
w = torch.ones(3, requires_grad=True)
(12 * (x * w * torch.sigmoid(x + w)).sum()).backward()
torch.testing.assert_close(own.w.grad, w.grad)
"""


def test_more_losses_than_threads_of_a_parallel_session() -> None:
    child(PARALLEL)


FIRST_BACKWARD = """
import torch
from onnx import numpy_helper, parser
import numpy as np
import onnx_backprop as ob
text = "m (float[1, 16, 9, 9] x) => (float[1, 16, 9, 9] y) { a = Conv <pads = [1, 1, 1, 1]> (x, w) b = Add(a, bias) c = Sigmoid(b) y = Mul(c, c) }"
model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {text}')
draw = np.random.default_rng(0).standard_normal
values = {"w": draw((16, 16, 3, 3)), "bias": draw((16, 1, 1))}
model.graph.initializer.extend(numpy_helper.from_array(v.astype(np.float32), k) for k, v in values.items())
own, x = ob.torch.module(model), torch.linspace(-1, 1, 16 * 81).reshape(1, 16, 9, 9)
with torch.no_grad():
    own(x)
y = own(x)
with torch.no_grad():
    own.bias.add_(5)
y.sum().backward()
other = ob.torch.module(model)
other(x).sum().backward()
torch.testing.assert_close(own.w.grad, other.w.grad)
torch.testing.assert_close(own.bias.grad, other.bias.grad)
"""


def test_a_first_backward_pass_that_compiles_reads_what_the_forward_pass_did(tmp_path: Path) -> None:
    """A bias that PyTorch would not have saved has been written into since: the run does not begin anew."""
    child(FIRST_BACKWARD, NUMBA_CACHE_DIR=str(tmp_path))


def test_a_second_backward_pass_reads_what_the_first_one_did(tmp_path: Path) -> None:
    """It runs the forward pass again: on weights that nobody has written into, or not at all."""

    class Biased(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.weight = (torch.nn.Parameter(torch.linspace(0.1, end, 3)) for end in (1, 2))

        def forward(self, x: Any) -> Any:
            return torch.sigmoid(x + self.bias) * self.weight

    x = torch.linspace(-1, 1, 3)[None]
    ours, module = ob.torch.module(exported(Biased(), tmp_path / "b.onnx", x)), Biased()
    losses = [network(x).square().sum() for network in (ours, module)]
    for loss in losses:
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
    close(ours.bias.grad, module.bias.grad)
    with torch.no_grad():
        ours.bias.add_(1)
    with pytest.raises((RuntimeError, InvalidArgumentError), match="inplace operation|'bias' was written into"):
        losses[0].backward()


def test_runs_of_losses_that_are_dropped_end(tmp_path: Path) -> None:
    ours, _, (words, scale) = several(tmp_path)
    kept = ours(words, scale)[0].sum()
    for _ in range(20):
        ours(words, scale)
    gc.collect()
    for _ in range(500):
        if len(pause._running) == 1:
            break
        time.sleep(0.01)
    assert len(pause._running) == 1
    kept.backward()
    assert ours.norm.weight.grad is not None


def test_a_loss_in_the_model() -> None:
    """A scalar output, and statistics of a batch beside it."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> m (float[N, 3] x) => (float loss) '
        "{ p = Mul(x, w) s = Mul(p, p) loss = ReduceSum <keepdims = 0> (s) }"
    )
    model.graph.initializer.append(numpy_helper.from_array(np.arange(3, dtype=np.float32), "w"))
    network, x = ob.torch.module(model), torch.rand(2, 3)
    loss = network(x)
    assert loss.shape == ()
    (3 * loss).backward()
    close(network.w.grad, 6 * (x * x).sum(0) * network.w.detach())


def test_an_output_that_is_written_into_changes_no_gradient() -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> m (float[N] x) => (float[N] y, float[N] z, float[N] x) '
        "{ y = Sigmoid(x) z = Identity(y) }"
    )
    network = ob.torch.module(model)
    x = torch.linspace(-1, 1, 3).requires_grad_()
    y, z, same = network(x)
    with torch.no_grad():
        same.zero_()
        z.zero_()
    np.testing.assert_allclose(x.detach(), [-1, 0, 1])
    np.testing.assert_allclose(y.detach(), torch.sigmoid(x).detach())
    y.sum().backward()
    close(x.grad, torch.sigmoid(x.detach()) * (1 - torch.sigmoid(x.detach())))
    y, _, _ = network(x)
    loss, x.grad = y.sum(), None
    with torch.no_grad():
        y.zero_()
    loss.backward()
    close(x.grad, torch.sigmoid(x.detach()) * (1 - torch.sigmoid(x.detach())))


def test_gradients_of_one_value_are_tensors_of_their_own() -> None:
    """x and z get the same gradient; PyTorch adds to one of them in place."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> m (float[N] x, float[N] z) => (float[N] y) { y = Add(x, z) }'
    )
    network = ob.torch.module(model)
    x, z = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    dy = torch.arange(3.0)
    for _ in range(2):
        network(x, z).backward(dy)
    np.testing.assert_array_equal(x.grad, [0, 2, 4])
    np.testing.assert_array_equal(z.grad, [0, 2, 4])
    np.testing.assert_array_equal(dy, [0, 1, 2])


def test_a_second_derivative_is_refused(tmp_path: Path) -> None:
    ours, _, (words, scale) = several(tmp_path)
    scale.requires_grad_()
    with pytest.raises(UnsupportedError, match=r"has no derivative in PyTorch\. Leave create_graph out"):
        torch.autograd.grad(ours(words, scale)[0].square().sum(), scale, create_graph=True)
