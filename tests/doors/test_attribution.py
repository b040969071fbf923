"""`attribute` beside formulas, and beside Captum on a twin in PyTorch (`make doors`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import parser

import onnx_backprop as ob
from tests.doors.models import classifier, images, with_weights
from tests.doors.torch_twin import twin

TARGETS = [0, 2, 1, 1, 0]


def quadratic() -> Any:
    """s_c = Σ_d x_d² W_dc."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        quadratic (double[N, 2] x) => (double[N, 2] s) { q = Mul (x, x) s = MatMul (q, W) }""")
    return with_weights(model, W=W)


W, X = np.array([[1.0, -2.0], [3.0, 0.5]]), np.array([[1.0, 2.0], [-0.5, 4.0], [2.0, 0.1]])


def test_formulas() -> None:
    f, columns = ob.function(quadratic()), W[:, [1, 0, 1]].T
    target = [1, 0, 1]
    np.testing.assert_allclose(ob.attribute(f, X, target=target), np.abs(2 * X * columns))
    integrated = ob.attribute(f, X, method="integrated", target=target, baselines=np.array([1.0, -3.0]))
    np.testing.assert_allclose(integrated, (X**2 - [1, 9]) * columns)
    background = np.random.default_rng(0).standard_normal((6, 2))
    of_each = [(X - b) * (X + b) * columns for b in background]
    shap = ob.attribute(f, X, method="shap", target=target, baselines=background)
    np.testing.assert_allclose(shap, np.mean(of_each, axis=0))
    smooth = ob.attribute(f, X, method="smoothgrad", target=target, noise=0.3, samples=4000, seed=1)
    np.testing.assert_allclose(smooth, 2 * X * columns, atol=0.1)
    again = [ob.attribute(f, X, method="smoothgrad", target=1, seed=s) for s in (1, 1, 2)]
    assert (again[0] == again[1]).all()
    assert (again[0] != again[2]).all()
    best = (X**2 @ W).argmax(axis=1)
    np.testing.assert_array_equal(ob.attribute(f, X), ob.attribute(f, X, target=best))


def test_the_sum_of_integrated_gradients() -> None:
    f = ob.function(classifier())
    attribution = ob.attribute(f, images(), method="integrated", target=TARGETS, steps=200)
    scores, base = f(images())[0], f(np.zeros_like(images()))[0]
    rows = np.arange(5)
    np.testing.assert_allclose(attribution.sum(axis=(1, 2, 3)), (scores - base)[rows, TARGETS], atol=5e-3)


def test_gradcam_and_more_inputs() -> None:
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        g (double[N, 2, 3] x, int64[N] k, double[N] scale) => (double[N] s) {
            a = Sin (x) weighted = Mul (a, gains) pooled = ReduceSum <keepdims = 0> (weighted, axes) kd = Cast <to = 11> (k)
            t = Mul (pooled, kd) s = Mul (t, scale) }""")
    gains = np.array([[1.0, 2.0, 3.0], [-1.0, 0.5, 0.25]])
    model = with_weights(model, axes=np.array([1, 2]), gains=gains)
    x = np.random.default_rng(0).standard_normal((4, 2, 3))
    feeds = {"x": x, "k": np.array([1, -2, 3, 0]), "scale": np.full(4, 0.5)}
    slope = 0.5 * feeds["k"]
    cam = ob.attribute(model, feeds, method="gradcam", layer="a", wrt=["x"])
    mean = slope[:, None, None] * gains.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(cam, np.maximum((mean * np.sin(x)).sum(axis=1, keepdims=True), 0))
    attribution = ob.attribute(model, feeds, wrt=["x"])
    np.testing.assert_allclose(attribution, np.abs(slope[:, None, None] * gains * np.cos(x)))


def test_invalid_use_is_refused() -> None:
    f = ob.function(quadratic())
    for arguments, message in (
        ({"method": "lime"}, "method: expected one of saliency, integrated"),
        ({"method": "gradcam"}, "layer: the name of a value goes with gradcam"),
        ({"layer": "q"}, "layer: the name of a value goes with gradcam"),
        ({"target": 2}, "target: expected classes below 2, got 2"),
        ({"method": "shap"}, "baselines: shap wants an array of several"),
        ({"method": "gradcam", "layer": "q"}, r"expected \(rows, channels, …\), 'q' has the shape \(3, 2\)"),
        ({"of": ["s"]}, "of: go to ob.function"),
        ({"method": "smoothgrad", "samples": 0}, "samples: expected a whole number of 1 or more, got 0"),
        ({"method": "smoothgrad", "noise": -1}, "noise: expected a number of 0 or more, got -1"),
        ({"method": "integrated", "steps": 0}, "steps: expected a whole number of 1 or more, got 0"),
        ({"method": "integrated", "baselines": np.zeros((7, 2))}, r"baselines: expected a shape like .* got \(7, 2\)"),
        ({"method": "shap", "baselines": np.zeros((2, 7, 2))}, r"baselines: expected a shape like .* got \(7, 2\)"),
        ({"method": "shap", "baselines": np.zeros((0, 2))}, "baselines: shap wants an array of several"),
        ({"target": [0, 1]}, r"target: expected a class, or one for each of 3 rows, got int64 of the shape \(2,\)"),
        ({"target": 0.5}, "target: expected a class, or one for each of 3 rows, got float64"),
        ({"baselines": 1.0}, "baselines: goes with integrated and shap, not with saliency. Leave it out"),
        ({"steps": 7}, "steps: goes with integrated and shap"),
        ({"noise": 5.0}, "noise: goes with smoothgrad, not with saliency"),
    ):
        with pytest.raises(ob.InvalidArgumentError, match=message):
            ob.attribute(f, X, **arguments)
    with pytest.raises(ob.InvalidArgumentError, match="x: expected arrays of x, got y"):
        ob.attribute(f, {"y": X})


def test_captum() -> None:
    captum: Any = pytest.importorskip("captum", minversion="0.9", reason="needs captum: make doors").attr
    network, tensor = twin(classifier()), pytest.importorskip("torch").from_numpy(images())
    tensor.requires_grad_()
    f = ob.function(classifier())

    def check(actual: np.ndarray, expected: Any) -> None:
        expected = expected.detach().numpy()
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())

    check(ob.attribute(f, images(), target=TARGETS), captum.Saliency(network).attribute(tensor, target=TARGETS))
    baselines = images(4)[3:] * 0.3
    integrated = captum.IntegratedGradients(network)
    arguments = {"baselines": tensor.new_tensor(baselines), "target": TARGETS, "n_steps": 30}
    expected = integrated.attribute(tensor, **arguments)
    check(ob.attribute(f, images(), method="integrated", target=TARGETS, baselines=baselines, steps=30), expected)
    expected = captum.LayerGradCam(network, network.features).attribute(tensor, target=TARGETS, relu_attributions=True)
    check(ob.attribute(f, images(), method="gradcam", layer="features", target=TARGETS), expected)
    background = np.random.default_rng(8).random((12, 1, 6, 6), np.float32)
    shap = ob.attribute(f, images(), method="shap", target=TARGETS, baselines=background, steps=20)
    sampled = captum.GradientShap(network).attribute(
        tensor, baselines=tensor.new_tensor(background), n_samples=1500, target=TARGETS
    )
    error = np.abs(shap - sampled.detach().numpy()).mean() / np.abs(shap).mean()
    assert error < 0.15, error  # Captum draws what is summed here
    tunnel = captum.NoiseTunnel(captum.Saliency(network))
    sampled = tunnel.attribute(tensor, nt_samples=1500, stdevs=0.2, target=TARGETS, abs=False)
    smooth = ob.attribute(f, images(), method="smoothgrad", target=TARGETS, noise=0.2, samples=1500)
    error = np.abs(smooth - sampled.detach().numpy()).mean() / np.abs(smooth).mean()
    assert error < 0.15, error
