"""Converters: a forward ONNX model in, a training graph out."""

from __future__ import annotations

from .backward import backward
from .coverage import SupportedOp, supported_ops
from .files import save_model
from .training import TrainingGraph, training_graph

__all__ = ["SupportedOp", "TrainingGraph", "backward", "save_model", "supported_ops", "training_graph"]
