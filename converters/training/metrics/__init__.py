"""Metrics: numbers about all batches of an evaluation together, from sums that the graph computes of each of them.

    trainer = ob.Trainer(ob.training_graph("model.onnx", loss="mse", optimizer="adamw"))
    trainer.fit(batches, 2, evaluation=batches, metrics="mae,r2")
    asked = {"error": ob.metrics.RMSE(), "largest": lambda target, output: abs(output - target).max()}
    print(trainer.evaluate(batches, metrics=asked).metrics)

A metric reads what the loss reads: its prediction, its target, the axis of the classes, the label that it ignores, and
whether scores are logits. `prediction` and `target` name others.
"""

# May import `losses`, `result`, `rules`, `reverse`, `prepare` and opset.

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
