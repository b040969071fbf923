"""Clipped steps beside Opacus, and the page about them (`make doors`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import parser

import onnx_backprop as ob
from tests.docs.blocks import ROOT, blocks, run
from tests.doors.models import images, with_weights

opacus: Any = pytest.importorskip("opacus", minversion="1.6", reason="needs opacus: make doors")
torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")  # Opacus's own
NETWORK = """<ir_version: 10, opset_import: ["": 18]>
    network (float[N, 1, 6, 6] image) => (float[N, 3] logits) {
        a = Conv <pads = [1, 1, 1, 1]> (image, k0, k1) b = Tanh (a) c = Flatten (b)
        d = Gemm <transB = 1> (c, k3, k4) e = LayerNormalization (d, k5, k6) f = Relu (e)
        logits = Gemm <transB = 1> (f, k7, k8) }"""


@pytest.mark.parametrize("expected", [None, 16])
def test_steps_of_opacus(expected: int | None) -> None:
    """Five steps without noise, some rows clipped; B the rows of the batch, or what is expected of it."""
    torch.manual_seed(0)
    layers = torch.nn
    network = layers.Sequential(
        layers.Conv2d(1, 4, 3, padding=1), layers.Tanh(), layers.Flatten(), layers.Linear(144, 8), layers.LayerNorm(8),
        layers.ReLU(), layers.Linear(8, 3),
    )  # fmt: skip
    names = ["k0", "k1", "k3", "k4", "k5", "k6", "k7", "k8"]
    weights = dict(zip(names, (p.detach().numpy().copy() for p in network.parameters()), strict=True))
    optimizer = ob.optimizers.SGD(momentum=0.9)
    graph = ob.training_graph(
        with_weights(parser.parse_model(NETWORK), **weights), loss="softmax_cross_entropy", optimizer=optimizer,
        per_sample_clip=8.0, expected_batch=expected,
    )  # fmt: skip
    trainer = ob.Trainer(graph, learning_rate=0.1)
    module = opacus.GradSampleModule(network)
    inner = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    theirs = opacus.optimizers.DPOptimizer(
        inner, noise_multiplier=0.0, max_grad_norm=8.0, expected_batch_size=expected or 20
    )
    x, labels = images(20), np.arange(20) % 3
    norms: list[float] = []
    for _ in range(5):
        theirs.zero_grad()
        loss = layers.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(labels))
        loss.backward()
        norms += torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in module.parameters()]).norm(dim=0).tolist()
        theirs.step()
        assert trainer.step(image=x, labels=labels) == pytest.approx(float(loss), rel=1e-5)
    assert min(norms) < 8 < max(norms)
    for name, p in zip(names, network.parameters(), strict=True):
        np.testing.assert_allclose(trainer.parameters()[name], p.detach().numpy(), atol=5e-6, err_msg=name)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "privacy"}
    for block in blocks(ROOT / "docs" / "privacy.md"):
        if block.language:
            run(block, names)
    assert 0.5 < names["epsilon"] < 10
