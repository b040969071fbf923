"""A small classifier with everything that carries state from step to step, and data for it."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.training.optimizers import AdamW, Optimizer
from onnx_backprop.training.reports.history import Record

SEED = 11


def classifier() -> ModelProto:
    """Gemm, BatchNormalization, Relu, Dropout, Gemm: (N, 4) -> (N, 3)."""
    model = parser.parse_model(
        """
        <ir_version: 10, opset_import: ["": 18]>
        classifier (float[N, 4] x) => (float[N, 3] y) <float[16] mean = {}, float ratio = {0.25}>
        {
            hidden = Gemm(x, w1, b1)
            normal = BatchNormalization(hidden, scale, b1, mean, variance)
            positive = Relu(normal)
            kept = Dropout(positive, ratio)
            y = Gemm(kept, w2, b2)
        }
    """.replace("float[16] mean = {}, ", "")
    )
    rng = np.random.default_rng(SEED)
    values = {
        "w1": rng.standard_normal((4, 16)) / 2,
        "b1": np.linspace(-0.1, 0.1, 16),
        "scale": np.ones(16),
        "mean": np.zeros(16),
        "variance": np.ones(16),
        "w2": rng.standard_normal((16, 3)) / 4,
        "b2": np.zeros(3),
    }
    model.graph.initializer.extend(numpy_helper.from_array(v.astype(np.float32), name) for name, v in values.items())
    return model


def data(rows: int = 60) -> dict[str, np.ndarray]:
    """Three overlapping clouds of points."""
    rng = np.random.default_rng(SEED + 1)
    labels = rng.integers(0, 3, rows)
    centres = np.array([[1, 0, 0, 1], [0, 1, 0, -1], [-1, 0, 1, 0]])
    return {"x": (centres[labels] + 0.5 * rng.standard_normal((rows, 4))).astype(np.float32), "labels": labels}


def training(optimizer: Optimizer | None = None) -> ob.TrainingGraph:
    """Every kind of state: moments, running means and statistics, accumulation, random numbers."""
    chosen = optimizer or AdamW(accumulate=2, ema=0.9, clip_norm=1.0)
    return ob.training_graph(classifier(), loss="softmax_cross_entropy", optimizer=chosen, training_mode=True)


def batches(**arguments: Any) -> ob.Batches:
    return ob.Batches(data(), 7, seed=3, **arguments)


def fitted(epochs: int, trainer: ob.Trainer | None = None, **arguments: Any) -> tuple[ob.Trainer, list[Record]]:
    trainer = trainer or ob.Trainer(training(), seed=2)
    return trainer, trainer.fit(batches(), epochs, progress=False, **arguments)
