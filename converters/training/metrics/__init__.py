"""Metrics: numbers about all batches of an evaluation together, from sums that the graph computes of each of them.

    trainer.fit(batches, 10, evaluation=held_out, metrics=["accuracy", "f1"])
    trainer.evaluate(held_out, metrics={"top3": ob.metrics.TopK(k=3), "each": ob.metrics.IoU(average=None)}).metrics
    trainer.evaluate(held_out, metrics={"r2": sklearn.metrics.r2_score, "own": lambda target, output: …})

A metric reads what the loss reads: its prediction, its target, the axis of the classes, the label that it ignores, and
whether scores are logits. `prediction` and `target` name others.

May import `losses`, `result`, `rules`, `reverse`, `prepare` and opset.
"""

from onnx_backprop.converters.training.metrics.base import Metric
from onnx_backprop.converters.training.metrics.choose import Function
from onnx_backprop.converters.training.metrics.classes import (
    F1,
    Accuracy,
    ConfusionMatrix,
    Dice,
    IoU,
    OverlapMetric,
    Precision,
    Recall,
    TopK,
)
from onnx_backprop.converters.training.metrics.scores import AUROC, Perplexity
from onnx_backprop.converters.training.metrics.values import MAE, PSNR, R2, RMSE, SSIM

__all__ = [
    "AUROC",
    "F1",
    "MAE",
    "PSNR",
    "R2",
    "RMSE",
    "SSIM",
    "Accuracy",
    "ConfusionMatrix",
    "Dice",
    "Function",
    "IoU",
    "Metric",
    "OverlapMetric",
    "Perplexity",
    "Precision",
    "Recall",
    "TopK",
]


def __dir__() -> list[str]:
    return list(__all__)
