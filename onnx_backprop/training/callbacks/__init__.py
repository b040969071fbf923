"""What acts on a training while it runs, for `fit(callbacks=[…])`, and trackers, for `fit(log=…)`.

    trainer = ob.Trainer(ob.training_graph("model.onnx", loss="mse", optimizer="adamw"))
    calls = [ob.callbacks.KeepBest("best.safetensors", "mae"), ob.callbacks.EarlyStopping("mae", patience=3)]
    trainer.fit(batches, 9, evaluation=batches, metrics="mae", callbacks=calls)

A function of (trainer, record) is a callback too.
"""

# May import what `training` may.

from onnx_backprop.training.callbacks.averaging import StochasticWeightAveraging
from onnx_backprop.training.callbacks.base import Callback, Monitor, Run
from onnx_backprop.training.callbacks.histograms import Histograms
from onnx_backprop.training.callbacks.stopping import EarlyStopping, KeepBest, ReduceLROnPlateau, TimeLimit
from onnx_backprop.training.callbacks.trackers import MLflow, TensorBoard, Tracker, WandB

__all__ = [
    "Callback",
    "EarlyStopping",
    "Histograms",
    "KeepBest",
    "MLflow",
    "Monitor",
    "ReduceLROnPlateau",
    "Run",
    "StochasticWeightAveraging",
    "TensorBoard",
    "TimeLimit",
    "Tracker",
    "WandB",
]


def __dir__() -> list[str]:
    return list(__all__)
