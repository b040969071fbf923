"""Train ONNX models in stock onnxruntime: gradient operators, their kernels, and the converters that use them.

    import onnx_backprop as ob
    graph = ob.training_graph("model.onnx", loss="mse", optimizer="adamw")
    trainer = ob.Trainer(graph)
    trainer.fit(batches, epochs=10)
    trainer.export("trained.onnx")

Importing this needs onnx alone; `Trainer`, `session` and what else runs models load
onnxruntime when they are first asked for.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from onnx_backprop.opset import (
    DOMAIN,
    OPSET_VERSION,
    CheckpointError,
    InvalidArgumentError,
    InvalidModelError,
    KernelError,
    OnnxBackpropError,
    OnnxBackpropWarning,
    RegistrationError,
    ReplicaError,
    ShapeError,
    UnsupportedAttributeError,
    UnsupportedError,
    UnsupportedOpError,
    reference_ops,
)
from onnx_backprop.opset.core.hints import near as _near
from onnx_backprop.opset.core.limits import limits
from onnx_backprop.opset.core.signals import Deferred as _Deferred

if TYPE_CHECKING:
    from onnx_backprop import artifacts
    from onnx_backprop import text as text  # not in __all__: it needs tokenizers
    from onnx_backprop import torch as torch  # not in __all__: it needs PyTorch
    from onnx_backprop.adapters import save_adapter
    from onnx_backprop.checking import check_gradients
    from onnx_backprop.converters.check.explain import GradientExplanation, explain_gradients
    from onnx_backprop.converters.check.report import GradientReport
    from onnx_backprop.converters.derivatives.dense import hessian, jacobian
    from onnx_backprop.converters.derivatives.family import family
    from onnx_backprop.converters.derivatives.products import hvp, jvp, vjp
    from onnx_backprop.converters.derivatives.vmap import vmap
    from onnx_backprop.converters.finetune.head import replace_head
    from onnx_backprop.converters.finetune.lora import LoraModel, lora
    from onnx_backprop.converters.prepare.ir_models import use_kernels
    from onnx_backprop.converters.prepare.writing.files import save_model
    from onnx_backprop.converters.quantized.dequantize import dequantize
    from onnx_backprop.converters.reverse.extending.rules import register_expansion, register_gradient
    from onnx_backprop.converters.reverse.models.backward import backward
    from onnx_backprop.converters.reverse.models.derivatives import Derivative, derivatives
    from onnx_backprop.converters.reverse.registry import supported_ops
    from onnx_backprop.converters.training import losses, metrics, optimizers
    from onnx_backprop.converters.training.losses import register_loss
    from onnx_backprop.converters.training.optimizers import register_optimizer
    from onnx_backprop.converters.training.result import TrainingGraph
    from onnx_backprop.converters.training.standard.gradient_operator import expand_gradients
    from onnx_backprop.converters.training.standard.training_info import from_training_info, to_training_info
    from onnx_backprop.converters.training.training_graph import training_graph
    from onnx_backprop.diagnosis.anonymize import anonymize
    from onnx_backprop.diagnosis.reduce import reduce
    from onnx_backprop.diagnosis.report import report
    from onnx_backprop.doors import flower as flower  # nor these: each needs the library of its name
    from onnx_backprop.doors import jax as jax
    from onnx_backprop.doors import openmdao as openmdao
    from onnx_backprop.doors import pytensor as pytensor
    from onnx_backprop.doors.attacks import attack, counterexample
    from onnx_backprop.doors.attribution import attribute
    from onnx_backprop.doors.function import function
    from onnx_backprop.doors.vector import vector_function
    from onnx_backprop.fmi import fmu
    from onnx_backprop.functions import value_and_grad
    from onnx_backprop.ort_ops import register_ops
    from onnx_backprop.ort_ops.custom_kernels import register_kernel
    from onnx_backprop.plugin import compile_plugin
    from onnx_backprop.providers.choose import devices
    from onnx_backprop.providers.placed import session
    from onnx_backprop.quantization import merge_adapter, requantize
    from onnx_backprop.training import callbacks, schedules
    from onnx_backprop.training.data.batches import Batches
    from onnx_backprop.training.data.images import augment, image_folder
    from onnx_backprop.training.data.packing import pack, packed_bias
    from onnx_backprop.training.trainer import Trainer

__all__ = [
    "DOMAIN",
    "OPSET_VERSION",
    "Batches",
    "CheckpointError",
    "Derivative",
    "GradientExplanation",
    "GradientReport",
    "InvalidArgumentError",
    "InvalidModelError",
    "KernelError",
    "LoraModel",
    "OnnxBackpropError",
    "OnnxBackpropWarning",
    "RegistrationError",
    "ReplicaError",
    "ShapeError",
    "Trainer",
    "TrainingGraph",
    "UnsupportedAttributeError",
    "UnsupportedError",
    "UnsupportedOpError",
    "__version__",
    "anonymize",
    "artifacts",
    "attack",
    "attribute",
    "augment",
    "backward",
    "callbacks",
    "check_gradients",
    "compile_plugin",
    "counterexample",
    "dequantize",
    "derivatives",
    "devices",
    "expand_gradients",
    "explain_gradients",
    "family",
    "fmu",
    "from_training_info",
    "function",
    "hessian",
    "hvp",
    "image_folder",
    "jacobian",
    "jvp",
    "limits",
    "lora",
    "losses",
    "merge_adapter",
    "metrics",
    "optimizers",
    "pack",
    "packed_bias",
    "reduce",
    "reference_ops",
    "register_expansion",
    "register_gradient",
    "register_kernel",
    "register_loss",
    "register_ops",
    "register_optimizer",
    "replace_head",
    "report",
    "requantize",
    "save_adapter",
    "save_model",
    "schedules",
    "session",
    "supported_ops",
    "to_training_info",
    "training_graph",
    "use_kernels",
    "value_and_grad",
    "vector_function",
    "vjp",
    "vmap",
]

try:
    __version__ = version("onnx-backprop")
except PackageNotFoundError:  # the source on the path, not installed
    __version__ = "0+unknown"

_WHERE = {
    "adapters": "save_adapter",
    "converters.check.explain": "GradientExplanation explain_gradients",
    "converters.check.report": "GradientReport",
    "converters.derivatives.dense": "hessian jacobian",
    "converters.derivatives.family": "family",
    "converters.derivatives.products": "hvp jvp vjp",
    "converters.derivatives.vmap": "vmap",
    "converters.finetune.head": "replace_head",
    "converters.finetune.lora": "LoraModel lora",
    "converters.quantized.dequantize": "dequantize",
    "converters.reverse.models.backward": "backward",
    "converters.reverse.models.derivatives": "Derivative derivatives",
    "converters.reverse.extending.rules": "register_expansion register_gradient",
    "converters.reverse.registry": "supported_ops",
    "converters.training.losses": "register_loss",
    "converters.training.optimizers": "register_optimizer",
    "converters.training.standard.gradient_operator": "expand_gradients",
    "converters.training.result": "TrainingGraph",
    "converters.training.training_graph": "training_graph",
    "converters.training.standard.training_info": "from_training_info to_training_info",
    "converters.prepare.ir_models": "use_kernels",
    "converters.prepare.writing.files": "save_model",
    "checking": "check_gradients",
    "diagnosis.anonymize": "anonymize",
    "diagnosis.reduce": "reduce",
    "diagnosis.report": "report",
    "doors.attacks": "attack counterexample",
    "doors.attribution": "attribute",
    "doors.function": "function",
    "doors.vector": "vector_function",
    "fmi": "fmu",
    "functions": "value_and_grad",
    "ort_ops": "register_ops",
    "ort_ops.custom_kernels": "register_kernel",
    "plugin": "compile_plugin",
    "providers.choose": "devices",
    "providers.placed": "session",
    "quantization": "merge_adapter requantize",
    "training.data.batches": "Batches",
    "training.data.images": "augment image_folder",
    "training.data.packing": "pack packed_bias",
    "training.trainer": "Trainer",
}
_MODULES = {"artifacts": "artifacts", "schedules": "training.schedules", "text": "text", "torch": "torch"}
_MODULES["callbacks"] = "training.callbacks"
_MODULES |= {name: f"doors.{name}" for name in ("flower", "jax", "openmdao", "pytensor")}
_MODULES |= {name: f"converters.training.{name}" for name in ("losses", "metrics", "optimizers")}
_NAMES = {name: module for module, names in _WHERE.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """What is imported when it is first asked for; KernelError where it needs an onnxruntime that is not there."""
    if name not in _MODULES and name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_near(name, __all__)}")
    try:
        with _Deferred():  # pybind11 turns an interrupted import into an ImportError
            module = import_module(f"{__name__}.{_MODULES.get(name) or _NAMES[name]}")
    except ImportError as e:
        raise KernelError(
            f"{__name__}.{name} needs onnxruntime and onnxruntime-extensions, and importing them failed: {e}. "
            "Install them with `pip install onnxruntime onnxruntime-extensions`"
        ) from e
    globals()[name] = value = module if name in _MODULES else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return list(__all__)
