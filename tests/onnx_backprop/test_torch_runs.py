"""The runs of `ob.torch.module`: what autograd sees of them. Needs PyTorch, as test_torch.py does."""

from __future__ import annotations

import gc
import time
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
from onnx_backprop.torch import runs
from tests.onnx_backprop.exported_modules import close, exported, several

torch: Any = pytest.importorskip("torch")
functional: Any = torch.nn.functional


@pytest.fixture(params=["one session that pauses", "a session for each pass"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "a session for each pass":
        monkeypatch.setattr(runs, "has_kernels", lambda _: False)
    return request.param


@pytest.mark.skipif(not block_bytes(), reason="this system gives no huge pages on request")
def test_steps_use_huge_pages_from_the_third_on(monkeypatch: pytest.MonkeyPatch) -> None:
    own, asked = ob.torch.module(unet_resize.build(features=4, levels=2)), list[int]()
    done = list[int]()
    monkeypatch.setattr(HugePages, "collapse", lambda *_: asked.append(len(done)))
    while len(done) < 4:
        own(torch.rand(1, 1, 24, 24)).sum().backward()
        done.append(1)
    assert asked == [2]


def test_several_inputs_and_outputs(tmp_path: Path, way: str) -> None:
    own, module, (words, scale) = several(tmp_path)
    scales = [scale.clone().requires_grad_() for _ in range(2)]
    results = [network(words, s) for network, s in zip((own, module), scales, strict=True)]
    for a, b in zip(*results, strict=True):
        close(a, b)
    assert not results[0][1].requires_grad
    for first, _, doubled in results:
        (first.pow(3).sum() + 3 * doubled.sum()).backward()
    close(scales[0].grad, scales[1].grad)
    expected = dict(module.named_parameters())
    assert {name for name, _ in own.named_parameters() if name in expected} >= {"words.weight", "blocks.0.bias"}
    close(own.words.weight.grad, module.words.weight.grad)
    close(own.blocks.get_submodule("1").bias.grad, module.blocks[1].bias.grad)
    named = own(x1=scale, x0=words)
    close(named[0], results[1][0])


def test_only_what_is_wanted_has_a_gradient(tmp_path: Path, way: str) -> None:
    own, module, (words, scale) = several(tmp_path)
    own.requires_grad_(False)
    first, _, _ = own(words, scale)
    assert first.grad_fn is None
    own.norm.weight.requires_grad_(True)
    first, _, _ = own(words, scale)
    first.square().sum().backward()
    module(words, scale)[0].square().sum().backward()
    close(own.norm.weight.grad, module.norm.weight.grad)
    assert [name for name, p in own.named_parameters() if p.grad is not None] == ["norm.weight"]
    with torch.no_grad():
        assert own(words, scale)[0].grad_fn is None
    with torch.inference_mode():
        close(own(words, scale)[0], first)


def test_gradients_add_up_and_a_graph_is_gone_after_its_use(tmp_path: Path, way: str) -> None:
    own, _, (words, scale) = several(tmp_path)
    first = own(words, scale)[0].square().mean()
    second = own(words, 2 * scale)[0].sum()
    second.backward()
    once = own.norm.weight.grad.clone()
    first.backward(retain_graph=True)
    first.backward()
    twice = own.norm.weight.grad - once
    own.zero_grad()
    own(words, scale)[0].square().mean().backward()
    close(twice, 2 * own.norm.weight.grad)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        first.backward()


def test_a_weight_that_changes_before_backward_is_noticed(tmp_path: Path, way: str) -> None:
    own, _, (words, scale) = several(tmp_path)
    loss = own(words, scale)[0].square().sum()
    with torch.no_grad():
        own.norm.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_backward_pass_reads_what_the_first_one_did(tmp_path: Path) -> None:
    """It runs the forward pass again: on weights that nobody has written into, or not at all."""

    class Biased(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.weight = (torch.nn.Parameter(torch.linspace(0.1, end, 3)) for end in (1, 2))

        def forward(self, x: Any) -> Any:
            return torch.sigmoid(x + self.bias) * self.weight

    x = torch.linspace(-1, 1, 3)[None]
    own, module = ob.torch.module(exported(Biased(), tmp_path / "b.onnx", x)), Biased()
    losses = [network(x).square().sum() for network in (own, module)]
    for loss in losses:
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
    close(own.bias.grad, module.bias.grad)
    with torch.no_grad():
        own.bias.add_(1)
    with pytest.raises((RuntimeError, InvalidArgumentError), match="inplace operation|'bias' was written into"):
        losses[0].backward()


def test_runs_of_losses_that_are_dropped_end(tmp_path: Path) -> None:
    own, _, (words, scale) = several(tmp_path)
    kept = own(words, scale)[0].sum()
    for _ in range(20):
        own(words, scale)
    gc.collect()
    for _ in range(500):
        if len(pause._running) == 1:
            break
        time.sleep(0.01)
    assert len(pause._running) == 1
    kept.backward()
    assert own.norm.weight.grad is not None


def test_a_loss_in_the_model() -> None:
    """A scalar output, and statistics of a batch beside it."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> m (float[N, 3] x) => (float loss) '
        "{ p = Mul(x, w) s = Mul(p, p) loss = ReduceSum <keepdims = 0> (s) }"
    )
    model.graph.initializer.append(numpy_helper.from_array(np.arange(3, dtype=np.float32), "w"))
    own, x = ob.torch.module(model), torch.rand(2, 3)
    loss = own(x)
    assert loss.shape == ()
    (3 * loss).backward()
    close(own.w.grad, 6 * (x * x).sum(0) * own.w.detach())


def test_an_output_that_is_written_into_changes_no_gradient() -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> m (float[N] x) => (float[N] y, float[N] z, float[N] x) '
        "{ y = Sigmoid(x) z = Identity(y) }"
    )
    own = ob.torch.module(model)
    x = torch.linspace(-1, 1, 3).requires_grad_()
    y, z, same = own(x)
    with torch.no_grad():
        same.zero_()
        z.zero_()
    np.testing.assert_allclose(x.detach(), [-1, 0, 1])
    np.testing.assert_allclose(y.detach(), torch.sigmoid(x).detach())
    y.sum().backward()
    close(x.grad, torch.sigmoid(x.detach()) * (1 - torch.sigmoid(x.detach())))
    y, _, _ = own(x)
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
    own = ob.torch.module(model)
    x, z = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    dy = torch.arange(3.0)
    for _ in range(2):
        own(x, z).backward(dy)
    np.testing.assert_array_equal(x.grad, [0, 2, 4])
    np.testing.assert_array_equal(z.grad, [0, 2, 4])
    np.testing.assert_array_equal(dy, [0, 1, 2])


def test_a_second_derivative_is_refused(tmp_path: Path) -> None:
    own, _, (words, scale) = several(tmp_path)
    scale.requires_grad_()
    with pytest.raises(UnsupportedError, match=r"has no derivative in PyTorch\. Leave create_graph out"):
        torch.autograd.grad(own(words, scale)[0].square().sum(), scale, create_graph=True)
