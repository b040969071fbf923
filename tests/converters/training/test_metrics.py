"""Metrics over batches of unequal size beside scikit-learn, scikit-image, and formulas in float64 of all rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import onnx_backprop as ob
from onnx_backprop.training.reports.history import TokenLoss
from tests.support.metric_cases import parts, trainer

metrics = ob.metrics
IGNORED = 255


def softmax(y: np.ndarray) -> np.ndarray:
    e = np.exp(y.astype(np.float64) - y.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def labelled(rng: np.random.Generator, shape: tuple[int, ...], axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores with ties, and labels of which some are ignored and class 4 is none, nor is it predicted."""
    y = rng.integers(-3, 4, shape).astype(np.float32)
    y[(slice(None),) * (axis % len(shape)) + (4,)] = -9
    labels = rng.integers(0, 4, [d for n, d in enumerate(shape) if n != axis % len(shape)])
    labels[rng.random(labels.shape) < 0.2] = IGNORED
    labels[3] = 1  # the batch of one row
    return y, labels


@pytest.mark.parametrize(("shape", "axis"), [("N, 5, H, 4", 1), ("N, T, 5", -1), ("N, 5", 1)])
def test_classes(rng: np.random.Generator, shape: str, axis: int) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    lengths = tuple(int(d) if d.isdigit() else {"N": 12, "H": 3, "T": 7}[d] for d in shape.split(", "))
    x, labels = labelled(rng, lengths, axis)
    loss = ob.losses.SoftmaxCrossEntropy(axis=axis, ignore_index=IGNORED)
    asked: dict[str, Any] = {
        **{name: name for name in ("accuracy", "top3", "f1", "iou", "dice", "perplexity", "confusion_matrix")},
        **{f"{m.name}_{a}": m(average=a) for m in (metrics.F1, metrics.IoU) for a in ("micro", None)},
        **{
            "precision": "precision",
            "recall": "recall",
            "auroc": metrics.AUROC(bins=2**20),
            "aurocs": metrics.AUROC(average=None, bins=2**20),
        },
        "own": metrics.Function(function=sklearn.accuracy_score, form="classes"),
        "log_loss": metrics.Function(
            function=lambda t, p: sklearn.log_loss(t, p, labels=range(5)), form="probabilities"
        ),
    }
    measured = trainer(shape, loss).evaluate(parts({"x": x, "labels": labels}), metrics=asked)
    scores = np.moveaxis(x, axis, -1).reshape(-1, 5)
    kept = labels.reshape(-1) != IGNORED
    y, t, p = scores[kept], labels.reshape(-1)[kept], softmax(scores[kept])
    chosen = y.argmax(axis=1)
    cm = sklearn.confusion_matrix(t, chosen, labels=range(5))
    hit, union = np.diag(cm).astype(float), cm.sum(0) + cm.sum(1) - np.diag(cm)
    with np.errstate(invalid="ignore"):
        iou, f1 = hit / union, 2 * hit / (cm.sum(0) + cm.sum(1))
    # a stable order of equal scores: the first classes are the best
    best = np.argsort(-y, axis=1, kind="stable")[:, :3]
    aurocs = [sklearn.roc_auc_score(t == c, np.floor(p[:, c] * 2**20)) for c in range(4)]
    nll = -np.log(p[np.arange(len(t)), t]).mean()
    expected = {
        "accuracy": sklearn.accuracy_score(t, chosen),
        "top3": (best == t[:, None]).any(axis=1).mean(),
        "f1": sklearn.f1_score(t, chosen, average="macro"),
        "f1_micro": sklearn.f1_score(t, chosen, average="micro"),
        "f1_None": f1,
        "precision": sklearn.precision_score(t, chosen, average="macro", zero_division=0),
        "recall": sklearn.recall_score(t, chosen, average="macro"),
        "dice": sklearn.f1_score(t, chosen, average="macro"),
        "iou": sklearn.jaccard_score(t, chosen, average="macro"),
        "iou_micro": sklearn.jaccard_score(t, chosen, average="micro"),
        "iou_None": iou,
        "confusion_matrix": cm,
        "perplexity": math.exp(nll),
        "own": sklearn.accuracy_score(t, chosen),
        "log_loss": nll,
        "auroc": np.mean(aurocs),
        "aurocs": [*aurocs, math.nan],
    }
    assert expected.keys() == measured.metrics.keys()
    assert np.isnan(f1[4])
    for name, value in expected.items():
        np.testing.assert_allclose(measured.metrics[name], value, rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("loss", ["bce_with_logits", "bce", "focal"])
@pytest.mark.parametrize("shape", ["N, 1", "N, 3", "N, 2, 4, D"])
def test_yes_and_no(rng: np.random.Generator, loss: str, shape: str) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    lengths = [int(d) if d.isdigit() else {"N": 13, "D": 3}[d] for d in shape.split(", ")]
    x = rng.standard_normal(lengths).astype(np.float32)
    x = 1 / (1 + np.exp(-x)) if loss == "bce" else x
    target = (rng.random(lengths) < 0.4).astype(np.float32)
    asked = {
        **{name: name for name in ("accuracy", "auroc", "confusion_matrix", "f1", "mae")},
        "each": metrics.IoU(average=None),
        "micro": metrics.Dice(average="micro"),
        "strict": metrics.Accuracy(threshold=0.9),
        "own": metrics.Function(function=sklearn.balanced_accuracy_score, form="classes"),
        "brier": metrics.Function(function=sklearn.brier_score_loss, form="probabilities"),
    }
    measured = trainer(shape, loss).evaluate(parts({"x": x, "target": target}), metrics=asked)
    yes, t = x > (0.5 if loss == "bce" else 0), target.astype(bool)
    channels = [np.moveaxis(a, 1, 0).reshape(lengths[1], -1) for a in (t, yes)]
    p = x if loss == "bce" else 1 / (1 + np.exp(-x.astype(np.float64)))
    expected = {
        "accuracy": (yes == t).mean(),
        "strict": ((x > 0.9) == t).mean(),
        "confusion_matrix": sklearn.confusion_matrix(t.ravel(), yes.ravel()),
        "f1": np.mean([sklearn.f1_score(a, b) for a, b in zip(*channels, strict=True)]),
        "each": [sklearn.jaccard_score(a, b) for a, b in zip(*channels, strict=True)],
        "micro": sklearn.f1_score(t.ravel(), yes.ravel()),
        "mae": np.abs(x.astype(np.float64) - target).mean(),
        "own": sklearn.balanced_accuracy_score(t.ravel(), yes.ravel()),
        "brier": ((p.ravel().astype(np.float64) - t.ravel()) ** 2).mean(),
        "auroc": sklearn.roc_auc_score(t.ravel(), x.ravel()),
    }
    assert expected.keys() == measured.metrics.keys()
    for name, value in expected.items():
        tolerance = 1e-3 if name == "auroc" else 1e-7 if name == "brier" else 1e-12
        np.testing.assert_allclose(measured.metrics[name], value, rtol=tolerance, err_msg=name)


def test_scores_in_the_bins_give_the_very_area(rng: np.random.Generator) -> None:
    """Ties count one half, and a bin is as good as its score."""
    sklearn = pytest.importorskip("sklearn.metrics")
    x = (rng.integers(0, 64, (300, 1)) / 64).astype(np.float32)
    target = (rng.random((300, 1)) < x).astype(np.float32)
    x[0, 0], target[0, 0] = 1.0, 0.0
    evaluation = trainer("N, 1", "bce").evaluate(parts({"x": x, "target": target}), metrics=metrics.AUROC(bins=128))
    assert evaluation.metrics["auroc"] == pytest.approx(sklearn.roc_auc_score(target.ravel(), x.ravel()), rel=1e-14)


def test_numbers_beside_numbers(rng: np.random.Generator) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    for shape in ("N, 3", "N, 2, 3"):
        lengths = [13, *map(int, shape.split(", ")[1:])]
        t = (1e4 + rng.standard_normal(lengths)).astype(np.float32)  # where Σt² - (Σt)²/n would cancel
        x = (t + 0.3 * rng.standard_normal(lengths)).astype(np.float32)
        x[:, 1], t[:, 1] = t[:, 1], t[0, 1]  # a constant target, which is missed
        custom = metrics.Function(function=sklearn.median_absolute_error) if len(lengths) == 2 else "mae"
        asked = {"mae": "mae", "rmse": "rmse", "r2": "r2", "own": custom}
        evaluation = trainer(shape, "mse").evaluate(parts({"x": x, "target": t}), metrics=asked)
        y, true = x.astype(np.float64), t.astype(np.float64)
        columns = (true, y) if len(lengths) == 2 else (true.reshape(-1, 1), y.reshape(-1, 1))
        assert evaluation.metrics["mae"] == pytest.approx(np.abs(y - true).mean(), rel=1e-13)
        assert evaluation.metrics["rmse"] == pytest.approx(np.sqrt(((y - true) ** 2).mean()), rel=1e-13)
        assert evaluation.metrics["r2"] == pytest.approx(sklearn.r2_score(*columns), rel=1e-9)
        if len(lengths) == 2:
            assert evaluation.metrics["own"] == pytest.approx(sklearn.median_absolute_error(true, y), rel=1e-6)


def test_images(rng: np.random.Generator) -> None:
    skimage = pytest.importorskip("skimage.metrics")
    t = rng.random((5, 2, 19, 15), np.float32)
    x = np.clip(t + rng.normal(0, 0.1, t.shape), 0, 1).astype(np.float32)
    options = {"data_range": 1.0, "gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    pairs = list(zip(t.astype(np.float64), x.astype(np.float64), strict=True))
    asked = {"psnr": "psnr", "ssim": "ssim", "all": metrics.PSNR(per_image=False, data_range=2.0)}
    for shape in ("N, 2, H, W", "N, 2, 19, 15"):
        evaluation = trainer(shape, "l1").evaluate(parts({"x": x, "target": t}, (2, 1)), metrics=asked)
        psnr = np.mean([skimage.peak_signal_noise_ratio(a, b, data_range=1.0) for a, b in pairs])
        ssim = np.mean([skimage.structural_similarity(a, b, channel_axis=0, **options) for a, b in pairs])
        assert evaluation.metrics["psnr"] == pytest.approx(psnr, rel=1e-12)
        assert evaluation.metrics["ssim"] == pytest.approx(ssim, rel=1e-9)
        whole = 10 * np.log10(4 / ((x.astype(np.float64) - t) ** 2).mean())
        assert evaluation.metrics["all"] == pytest.approx(whole, rel=1e-12)
    small = trainer("N, 2, H, W", "l1")
    assert small.evaluate({"x": t, "target": t}, metrics="psnr,ssim").metrics == {"psnr": math.inf, "ssim": 1.0}
    with pytest.raises(ob.InvalidArgumentError, match="ssim: expected images of 11 × 11 or more, got smaller ones"):
        small.evaluate({"x": x[:, :, :7], "target": t[:, :, :7]}, metrics="ssim")
    with pytest.raises(ob.InvalidArgumentError, match=r"ssim: expected images \(N, C, H, W\) .* got 'y' of shape"):
        trainer("N, 2, 7, 15", "l1").evaluate({"x": x[:, :, :7], "target": t[:, :, :7]}, metrics="ssim")


def test_tokens(rng: np.random.Generator) -> None:
    """A label belongs to the logits before it; -100 and weights of 0 count nowhere."""
    x, labels = rng.standard_normal((9, 6, 5), np.float32), rng.integers(0, 5, (9, 6))
    labels[rng.random(labels.shape) < 0.3] = -100
    weights = (rng.random((9, 6)) < 0.7).astype(np.float32)
    loss = ob.losses.NextToken(weights="w")
    batches = parts({"x": x, "labels": labels, "w": weights})
    evaluation = trainer("N, T, 5", loss).evaluate(batches, metrics="accuracy,top2,perplexity")
    assert isinstance(evaluation, TokenLoss)
    kept = (labels[:, 1:] != -100) & (weights[:, 1:] > 0)
    y, t = x[:, :-1][kept], labels[:, 1:][kept]
    assert evaluation.metrics["accuracy"] == pytest.approx((y.argmax(axis=1) == t).mean(), rel=1e-14)
    assert evaluation.metrics["top2"] == pytest.approx(
        (np.argsort(-y)[:, :2] == t[:, None]).any(axis=1).mean(), rel=1e-14
    )
    assert evaluation.metrics["perplexity"] == evaluation.perplexity == math.exp(evaluation)
    assert evaluation.tokens == kept.sum()


def test_objects_that_are_updated(rng: np.random.Generator) -> None:
    """As torchmetrics has them: (output, target), reset before."""

    class Bias:
        total = 5.0

        def reset(self) -> None:
            self.total = 0.0

        def update(self, preds: np.ndarray, target: np.ndarray) -> None:
            self.total += float((preds.astype(np.float64) - target).sum())

        def compute(self) -> float:
            return self.total

    x, t = rng.random((2, 9, 3), np.float32)
    evaluator = trainer("N, 3", "mse")
    asked = {"bias": Bias(), "max": lambda t, y: (y - t).max()}
    evaluator.evaluate(parts({"x": x, "target": t}), metrics=asked)
    measured = evaluator.evaluate(parts({"x": x, "target": t}), metrics=asked)  # begins anew
    assert measured.metrics["bias"] == pytest.approx((x.astype(np.float64) - t).sum())
    assert measured.metrics["max"] == pytest.approx((x - t).max())


def test_torchmetrics(rng: np.random.Generator) -> None:
    torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed here")
    x, labels = rng.standard_normal((9, 5)).astype(np.float32), rng.integers(0, 5, 9)
    options: dict[str, Any] = {"task": "multiclass", "num_classes": 5}
    theirs = {
        "accuracy": torchmetrics.Accuracy(**options, average="micro"),
        "top2": torchmetrics.Accuracy(**options, top_k=2, average="micro"),
        "f1": torchmetrics.F1Score(**options, average="macro"),
        "iou": torchmetrics.JaccardIndex(**options),
        "confusion_matrix": torchmetrics.ConfusionMatrix(**options),
        "auroc": torchmetrics.AUROC(**options),
    }
    evaluator = trainer("N, 5", "softmax_cross_entropy")
    batches = parts({"x": x, "labels": labels})
    asked, expected = (evaluator.evaluate(batches, metrics=m).metrics for m in (list(theirs), theirs))
    for name in theirs:
        tolerance = 1e-3 if name == "auroc" else 1e-6
        np.testing.assert_allclose(asked[name], expected[name], rtol=tolerance, err_msg=name)


def test_several_outputs(rng: np.random.Generator) -> None:
    from onnx import numpy_helper, parser

    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        m (float[N, 3] x) => (float[N, 3] a, float[N, 3] b) { a = Mul(x, s) b = Neg(a) p = Sigmoid(a) }""")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((), np.float32), "s"))
    graph = ob.training_graph(model, loss={"a": "mse", "b": "bce_with_logits"}, optimizer="sgd", trainable=["s"])
    evaluator = ob.Trainer(graph, kernels="onnx")
    feeds = {"x": rng.standard_normal((9, 3), np.float32)}
    feeds |= {"a_target": rng.random((9, 3), np.float32), "b_target": np.float32(rng.random((9, 3)) < 0.5)}
    asked = {"accuracy": "accuracy:b", "mae": metrics.MAE("a"), "inner": metrics.MAE("p", target="a_target")}
    values = evaluator.evaluate(parts(feeds), metrics=asked).metrics
    x = feeds["x"].astype(np.float64)
    assert values["accuracy"] == ((x < 0) == feeds["b_target"]).mean()
    assert values["mae"] == pytest.approx(np.abs(x - feeds["a_target"]).mean(), rel=1e-12)
    assert values["inner"] == pytest.approx(np.abs(1 / (1 + np.exp(-x)) - feeds["a_target"]).mean(), rel=1e-6)
    with pytest.raises(
        ob.InvalidArgumentError, match="mae: the loss reads 'a' beside 'a_target', 'b' beside 'b_target'"
    ):
        evaluator.evaluate(feeds, metrics="mae")
    with pytest.raises(ob.InvalidArgumentError, match="mae_c: expected one of 'a', 'b', which the loss reads, got 'c'"):
        evaluator.evaluate(feeds, metrics="mae:c")
    with pytest.raises(ob.InvalidArgumentError, match="target: expected one of x, a_target, b_target, got 'targt'"):
        evaluator.evaluate(feeds, metrics=metrics.MAE("p", target="targt"))


@pytest.mark.parametrize(
    ("loss", "asked", "message"),
    [
        ("mse", "acuracy", "got 'acuracy'. Did you mean 'accuracy'"),
        ("mse", "accuracy", r"or the argument threshold=.* got 'y' of shape \(N, 3\) beside 'target' \(mse\)"),
        ("mse", "top2", "expected scores of classes"),
        ("mse", "auroc", "expected logits or probabilities"),
        ("softmax_cross_entropy", "mae", "expected a target of the shape of the prediction, .* which holds classes"),
        ("softmax_cross_entropy", "top4", "k: expected at most 3, the number of classes, got 4"),
        ("softmax_cross_entropy", metrics.F1(average="binary"), "is for two classes, there are 3"),
        ("softmax_cross_entropy", "f1,f1", "'f1' stands twice"),
        ("softmax_cross_entropy", {"loss": "f1"}, "'loss' is what a record calls something else"),
        ("softmax_cross_entropy", metrics.F1, r"F1 is a class. Write F1\(\)"),
        ("softmax_cross_entropy", [3], "expected a name, a record .* got 3"),
        (
            "softmax_cross_entropy",
            lambda t, y: t @ y @ y,
            r"called with \(target, output\), arrays int64 \[2\] and float32",
        ),
        ("softmax_cross_entropy", lambda *_: "good", "expected a number or an array of numbers"),
    ],
)
def test_refusals(loss: str, asked: Any, message: str) -> None:
    feeds = {"x": np.ones((2, 3), np.float32)}
    feeds |= {"target": feeds["x"]} if loss == "mse" else {"labels": np.array([0, 1])}
    with pytest.raises(ob.InvalidArgumentError, match=message):
        trainer("N, 3", loss).evaluate(feeds, metrics=asked)


def test_arguments() -> None:
    for make, message in (
        (lambda: metrics.F1(average="mean"), "f1: average: expected 'macro', 'micro', 'binary' or None, got 'mean'"),
        (lambda: metrics.TopK(k=0), "top_k: k: expected 1 or more, got 0"),
        (lambda: metrics.PSNR(data_range=0.0), "psnr: data_range: expected more than 0, got 0.0"),
        (lambda: metrics.AUROC(bins="many"), "auroc: bins: expected 2 … 2²⁰, got 'many'"),
        (lambda: metrics.Function(), "function: function: expected a function of"),
    ):
        with pytest.raises(ob.InvalidArgumentError, match=message):
            make()


def test_what_no_loss_of_this_package_reads() -> None:
    from onnx import numpy_helper, parser

    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        m (float[N, 3] x, int64[N] t) => (float loss, float[N, 3] y) { y = Mul(x, s) loss = ReduceMean<keepdims = 0>(y) }""")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((), np.float32), "s"))
    evaluator = ob.Trainer(ob.training_graph(model, loss=None, prediction="loss", optimizer="sgd"), kernels="onnx")
    feeds = {"x": np.eye(3, dtype=np.float32), "t": np.array([0, 1, 1])}
    with pytest.raises(ob.InvalidArgumentError, match="accuracy: the graph does not say what its loss reads"):
        evaluator.evaluate(feeds, metrics="accuracy")
    evaluation = evaluator.evaluate(feeds, metrics=metrics.Accuracy("y", target="t"))
    assert evaluation.metrics["accuracy"] == pytest.approx(2 / 3)
    feeds["t"][0] = 3  # a class that there is not, which nobody has checked
    with pytest.raises(ob.InvalidArgumentError, match="onnxruntime cannot run this batch"):
        evaluator.evaluate(feeds, metrics=metrics.IoU("y", target="t"))
