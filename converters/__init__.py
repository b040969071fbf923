"""Converters: a forward ONNX model in, a training graph out."""

from onnx_backprop.converters import rules  # noqa: F401 - registers the gradient rules
from onnx_backprop.converters.check.check import check
from onnx_backprop.converters.check.explain import GradientExplanation, explain_gradients
from onnx_backprop.converters.check.report import GradientReport
from onnx_backprop.converters.derivatives.dense import hessian, jacobian
from onnx_backprop.converters.derivatives.products import hvp, jvp, vjp
from onnx_backprop.converters.prepare.files import save_model
from onnx_backprop.converters.reverse.backward import backward
from onnx_backprop.converters.reverse.derivatives import Derivative, derivatives
from onnx_backprop.converters.reverse.registry import SupportedOp, supported_ops
from onnx_backprop.converters.training import losses, optimizers
from onnx_backprop.converters.training.gradient_operator import expand_gradients
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.converters.training.training_graph import training_graph
from onnx_backprop.converters.training.training_info import from_training_info, to_training_info

__all__ = [
    "Derivative",
    "GradientExplanation",
    "GradientReport",
    "SupportedOp",
    "TrainingGraph",
    "backward",
    "check",
    "derivatives",
    "expand_gradients",
    "explain_gradients",
    "from_training_info",
    "hessian",
    "hvp",
    "jacobian",
    "jvp",
    "losses",
    "optimizers",
    "save_model",
    "supported_ops",
    "to_training_info",
    "training_graph",
    "vjp",
]
