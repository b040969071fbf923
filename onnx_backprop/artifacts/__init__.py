"""The names of onnxruntime-training's `artifacts` and `training.api`, on stock onnxruntime: docs/migrating.md.

from onnx_backprop import artifacts
from onnx_backprop.artifacts import CheckpointState, LinearLRScheduler, Module, Optimizer
"""

# May import `training`, `converters`, `ort_ops` and opset.

from onnx_backprop.artifacts.generate import LossType, OptimType, generate_artifacts
from onnx_backprop.artifacts.module import LinearLRScheduler, Module, Optimizer
from onnx_backprop.artifacts.state import ArtifactError, CheckpointState, Parameter

__all__ = [
    "ArtifactError",
    "CheckpointState",
    "LinearLRScheduler",
    "LossType",
    "Module",
    "OptimType",
    "Optimizer",
    "Parameter",
    "generate_artifacts",
]


def __dir__() -> list[str]:
    return list(__all__)
