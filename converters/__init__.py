"""Converters: a forward ONNX model in, a training graph out."""

from __future__ import annotations

from . import losses, optimizers
from .backward import backward
from .check import check
from .check_report import GradientReport
from .coverage import SupportedOp, supported_ops
from .explain import GradientExplanation, explain_gradients
from .files import save_model
from .gradient_operator import expand_gradients
from .training import training_graph
from .training_result import TrainingGraph

__all__ = [
    "GradientExplanation",
    "GradientReport",
    "SupportedOp",
    "TrainingGraph",
    "backward",
    "check",
    "expand_gradients",
    "explain_gradients",
    "losses",
    "optimizers",
    "save_model",
    "supported_ops",
    "training_graph",
]
