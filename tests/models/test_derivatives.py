"""The examples of derivatives, on small sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

import onnx_backprop as ob
from models import digits, explanations, forces, surrogate


def test_newton_needs_fewer_gradients() -> None:
    newton, quasi = surrogate.fit("Newton-CG", steps=60), surrogate.fit("L-BFGS-B", steps=60)
    assert newton.loss < 1e-3
    assert newton.loss < quasi.loss
    assert newton.products > 0


def test_products_are_those_of_the_hessian() -> None:
    x, target = surrogate.points(20)
    f = ob.value_and_grad(surrogate.build(3), surrogate.PARAMETERS, feeds={"x": x, "target": target}, hvp=True)
    v = np.random.default_rng(0).standard_normal(f.start.size)
    at = f.start + 0.1
    differences = (f(at + 1e-6 * v)[1] - f(at - 1e-6 * v)[1]) / 2e-6
    np.testing.assert_allclose(f.hvp(at, v), differences, rtol=1e-6, atol=1e-8)


def test_a_potential_learns_forces() -> None:
    trainer, error = forces.train(epochs=16)
    assert error < 0.2
    before = forces.build()
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in before.graph.initializer}
    assert not np.array_equal(trainer.state()["w1"], weights["w1"])


def test_forces_are_the_slope_of_the_energy() -> None:
    x, _ = forces.clusters(2, seed=3)
    model, energy = ob.session(forces.force_model(forces.build())), ob.session(forces.build())
    (gradient,) = (np.asarray(v) for v in model.run(None, {"positions": x}))
    v = np.random.default_rng(0).standard_normal(x.shape).astype(np.float32)
    above, below = (float(np.asarray(energy.run(None, {"positions": x + s * v})[0])) for s in (1e-2, -1e-2))
    assert (above - below) / 2e-2 == pytest.approx(float((gradient * v).sum()), rel=2e-2, abs=1e-2)


def test_a_picture_of_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explanations.main(["--epochs", "2", "--output", str(tmp_path)]) == 0
    assert "integrated gradients sum" in capsys.readouterr().out
    with Image.open(tmp_path / "explanations.png") as picture:
        assert picture.width > 700
    classifier = explanations.Classifier(onnx.load(tmp_path / "digits.onnx"))
    images = digits.digits()[1][0][:3]
    maps = classifier.grad_cam(images, np.array([1, 2, 3]))
    assert maps.shape == (3, 4, 4)
    assert maps.max() == 1
    assert maps.min() >= 0
