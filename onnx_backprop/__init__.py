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

from onnx_backprop.opset.core.errors import KernelError as _KernelError  # with which onnx learns of our operators
from onnx_backprop.opset.core.hints import near as _near
from onnx_backprop.opset.core.signals import Deferred as _Deferred

if TYPE_CHECKING:  # a name as itself is public to type checkers
    from onnx_backprop import artifacts as artifacts
    from onnx_backprop import text as text
    from onnx_backprop import torch as torch
    from onnx_backprop.adapters import save_adapter as save_adapter
    from onnx_backprop.checking import check_gradients as check_gradients
    from onnx_backprop.converters.check.explain import GradientExplanation as GradientExplanation
    from onnx_backprop.converters.check.explain import explain_gradients as explain_gradients
    from onnx_backprop.converters.check.report import GradientReport as GradientReport
    from onnx_backprop.converters.derivatives.dense import hessian as hessian
    from onnx_backprop.converters.derivatives.dense import jacobian as jacobian
    from onnx_backprop.converters.derivatives.family import family as family
    from onnx_backprop.converters.derivatives.products import hvp as hvp
    from onnx_backprop.converters.derivatives.products import jvp as jvp
    from onnx_backprop.converters.derivatives.products import vjp as vjp
    from onnx_backprop.converters.derivatives.vmap import vmap as vmap
    from onnx_backprop.converters.finetune.head import replace_head as replace_head
    from onnx_backprop.converters.finetune.lora import LoraModel as LoraModel
    from onnx_backprop.converters.finetune.lora import lora as lora
    from onnx_backprop.converters.prepare.ir_models import use_kernels as use_kernels
    from onnx_backprop.converters.prepare.writing.files import save_model as save_model
    from onnx_backprop.converters.quantized.dequantize import dequantize as dequantize
    from onnx_backprop.converters.reverse.extending.rules import register_expansion as register_expansion
    from onnx_backprop.converters.reverse.extending.rules import register_gradient as register_gradient
    from onnx_backprop.converters.reverse.models.backward import backward as backward
    from onnx_backprop.converters.reverse.models.derivatives import Derivative as Derivative
    from onnx_backprop.converters.reverse.models.derivatives import derivatives as derivatives
    from onnx_backprop.converters.reverse.registry import supported_ops as supported_ops
    from onnx_backprop.converters.training import losses as losses
    from onnx_backprop.converters.training import metrics as metrics
    from onnx_backprop.converters.training import optimizers as optimizers
    from onnx_backprop.converters.training.losses import register_loss as register_loss
    from onnx_backprop.converters.training.optimizers import register_optimizer as register_optimizer
    from onnx_backprop.converters.training.result import TrainingGraph as TrainingGraph
    from onnx_backprop.converters.training.standard.gradient_operator import expand_gradients as expand_gradients
    from onnx_backprop.converters.training.standard.training_info import from_training_info as from_training_info
    from onnx_backprop.converters.training.standard.training_info import to_training_info as to_training_info
    from onnx_backprop.converters.training.training_graph import training_graph as training_graph
    from onnx_backprop.diagnosis.anonymize import anonymize as anonymize
    from onnx_backprop.diagnosis.reduce import reduce as reduce
    from onnx_backprop.diagnosis.report import report as report
    from onnx_backprop.doors import flower as flower
    from onnx_backprop.doors import jax as jax
    from onnx_backprop.doors import openmdao as openmdao
    from onnx_backprop.doors import pytensor as pytensor
    from onnx_backprop.doors.attacks import attack as attack
    from onnx_backprop.doors.attacks import counterexample as counterexample
    from onnx_backprop.doors.attribution import attribute as attribute
    from onnx_backprop.doors.function import function as function
    from onnx_backprop.doors.vector import vector_function as vector_function
    from onnx_backprop.fmi import fmu as fmu
    from onnx_backprop.functions import value_and_grad as value_and_grad
    from onnx_backprop.opset import DOMAIN as DOMAIN
    from onnx_backprop.opset import OPSET_VERSION as OPSET_VERSION
    from onnx_backprop.opset import reference_ops as reference_ops
    from onnx_backprop.opset.core.errors import CheckpointError as CheckpointError
    from onnx_backprop.opset.core.errors import InvalidArgumentError as InvalidArgumentError
    from onnx_backprop.opset.core.errors import InvalidModelError as InvalidModelError
    from onnx_backprop.opset.core.errors import KernelError as KernelError
    from onnx_backprop.opset.core.errors import OnnxBackpropError as OnnxBackpropError
    from onnx_backprop.opset.core.errors import OnnxBackpropWarning as OnnxBackpropWarning
    from onnx_backprop.opset.core.errors import RegistrationError as RegistrationError
    from onnx_backprop.opset.core.errors import ReplicaError as ReplicaError
    from onnx_backprop.opset.core.errors import ShapeError as ShapeError
    from onnx_backprop.opset.core.errors import UnsupportedAttributeError as UnsupportedAttributeError
    from onnx_backprop.opset.core.errors import UnsupportedError as UnsupportedError
    from onnx_backprop.opset.core.errors import UnsupportedOpError as UnsupportedOpError
    from onnx_backprop.opset.core.limits import limits as limits
    from onnx_backprop.ort_ops import register_ops as register_ops
    from onnx_backprop.ort_ops.custom_kernels import register_kernel as register_kernel
    from onnx_backprop.plugin import compile_plugin as compile_plugin
    from onnx_backprop.providers.choose import devices as devices
    from onnx_backprop.providers.placed import session as session
    from onnx_backprop.quantization import merge_adapter as merge_adapter
    from onnx_backprop.quantization import requantize as requantize
    from onnx_backprop.training import callbacks as callbacks
    from onnx_backprop.training import schedules as schedules
    from onnx_backprop.training.data.augmentation import augment as augment
    from onnx_backprop.training.data.batches import Batches as Batches
    from onnx_backprop.training.data.images import image_folder as image_folder
    from onnx_backprop.training.data.packing import pack as pack
    from onnx_backprop.training.data.packing import packed_bias as packed_bias
    from onnx_backprop.training.trainer import Trainer as Trainer

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
    "opset": "DOMAIN OPSET_VERSION reference_ops",
    "opset.core.errors": "CheckpointError InvalidArgumentError InvalidModelError KernelError OnnxBackpropError "
    "OnnxBackpropWarning RegistrationError ReplicaError ShapeError UnsupportedAttributeError UnsupportedError "
    "UnsupportedOpError",
    "opset.core.limits": "limits",
    "ort_ops": "register_ops",
    "ort_ops.custom_kernels": "register_kernel",
    "plugin": "compile_plugin",
    "providers.choose": "devices",
    "providers.placed": "session",
    "quantization": "merge_adapter requantize",
    "training.data.batches": "Batches",
    "training.data.augmentation": "augment",
    "training.data.images": "image_folder",
    "training.data.packing": "pack packed_bias",
    "training.trainer": "Trainer",
}
_MODULES = {"artifacts": "artifacts", "schedules": "training.schedules", "callbacks": "training.callbacks"}
_MODULES |= {name: f"converters.training.{name}" for name in ("losses", "metrics", "optimizers")}
_NAMES = {name: module for module, names in _WHERE.items() for name in names.split()}
if not TYPE_CHECKING:
    __all__ = sorted([*_NAMES, *_MODULES, "__version__"])
_MODULES |= {"text": "text", "torch": "torch"}  # not in __all__, nor are these: each needs the library of its name
_MODULES |= {name: f"doors.{name}" for name in ("flower", "jax", "openmdao", "pytensor")}


def __getattr__(name: str) -> Any:
    """What is imported when it is first asked for; KernelError where it needs an onnxruntime that is not there."""
    if name not in _MODULES and name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_near(name, __dir__())}")
    try:
        with _Deferred():  # pybind11 turns an interrupted import into an ImportError
            module = import_module(f"{__name__}.{_MODULES.get(name) or _NAMES[name]}")
    except ImportError as e:
        raise _KernelError(
            f"{__name__}.{name} needs onnxruntime and onnxruntime-extensions, and importing them failed: {e}. "
            "Install them with `pip install onnxruntime onnxruntime-extensions`"
        ) from e
    globals()[name] = value = module if name in _MODULES else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return list(globals()["__all__"])
