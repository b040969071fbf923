"""Train ONNX models in stock onnxruntime: gradient operators, their kernels, and the converters that use them.

    import onnx_backprop as ob
    graph = ob.training_graph("model.onnx", loss="mse")
    session = ob.session(graph.model)

Importing this needs onnx alone; `session` and `register_ops` load onnxruntime when they are first asked for.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from onnx_backprop.converters import (
    Derivative,
    GradientExplanation,
    GradientReport,
    TrainingGraph,
    backward,
    derivatives,
    expand_gradients,
    explain_gradients,
    from_training_info,
    hessian,
    hvp,
    jacobian,
    jvp,
    supported_ops,
    to_training_info,
    training_graph,
    vjp,
)
from onnx_backprop.converters import check as _check
from onnx_backprop.converters.prepare.ir_models import as_given as _as_given
from onnx_backprop.converters.training import losses, optimizers
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
from onnx_backprop.opset import use_kernels as _use_kernels
from onnx_backprop.opset.core.limits import limits
from onnx_backprop.opset.core.signals import Deferred as _Deferred
from onnx_backprop.training import schedules
from onnx_backprop.training.data import Batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    import onnx_ir as ir
    from onnx import ModelProto

    from onnx_backprop import artifacts
    from onnx_backprop.functions import value_and_grad
    from onnx_backprop.ort_ops import register_ops, session
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
    "artifacts",
    "backward",
    "check_gradients",
    "derivatives",
    "expand_gradients",
    "explain_gradients",
    "from_training_info",
    "hessian",
    "hvp",
    "jacobian",
    "jvp",
    "limits",
    "losses",
    "optimizers",
    "reference_ops",
    "register_ops",
    "schedules",
    "session",
    "supported_ops",
    "to_training_info",
    "training_graph",
    "use_kernels",
    "value_and_grad",
    "vjp",
]

use_kernels = _as_given(_use_kernels)

try:
    __version__ = version("onnx-backprop")
except PackageNotFoundError:  # the source on the path, not installed
    __version__ = "0+unknown"

_RUNTIME_NAMES = {
    "Trainer": ".training.trainer",
    "artifacts": ".artifacts",
    "register_ops": ".ort_ops",
    "session": ".ort_ops",
    "value_and_grad": ".functions",
}


def __getattr__(name: str) -> Any:
    """The names that need onnxruntime; KernelError, with the missing package, where it cannot be imported."""
    if name not in _RUNTIME_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        with _Deferred():  # pybind11 turns an interrupted import into an ImportError
            module = import_module(_RUNTIME_NAMES[name], __name__)  # not before: conversion works without a runtime
    except ImportError as e:
        raise KernelError(
            f"{__name__}.{name} needs onnxruntime and onnxruntime-extensions, and importing them failed: {e}. "
            "Install them with `pip install onnxruntime onnxruntime-extensions`"
        ) from e
    return module if name == "artifacts" else getattr(module, name)


def check_gradients(
    model: ModelProto | ir.Model | str | Path,
    *,
    wrt: Sequence[str] | None = None,
    of: Sequence[str] | None = None,
    feeds: Mapping[str, np.ndarray] | None = None,
    seed: int = 0,
    kernels: str | None = None,
    tolerance: float | None = None,
    nodes: bool = False,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> GradientReport:
    """Whether `backward` gives the gradients of a model: <gradient, v> against differences along random directions v.

    With L(x) = Σ_y <dy, y(x)> and random dy, the gradient g of L is right when (L(x + h·v) - L(x - h·v)) / 2h tends to
    <g, v> as h shrinks. The differences are of the model's own forward: in float64 through onnx's reference evaluator
    for a small model that it runs as onnxruntime does, else in onnxruntime in float32. When they contradict the
    gradient, or do not settle, every node on the way is checked alone at the values that reach it.

    Args:
        model: a ModelProto, an onnx_ir.Model or the path of a file.
        wrt: graph inputs and initializers. Default: every float one that a gradient reaches. Above twelve they are
            checked in twelve groups.
        of: graph outputs. Default: every float output that depends on `wrt`.
        feeds: values for inputs, and for initializers in `wrt`. Default: random floats; integers 0 or 1; a symbolic
            axis is 2 long where it comes first and else as short as the model runs with.
        seed: of the inputs, dy and directions.
        kernels: what the gradient runs on, see `use_kernels`. Default: what `backward` attaches.
        tolerance: of the error, relative to the size of the derivative along v. Default: 5e-4, or 1e-2 where only a
            forward in float32 is to be had; 3e-2 in float16 and 1e-1 in bfloat16 models.
        nodes: check every node even when the whole model is right.
        progress: wraps the list of nodes while they are checked, for a progress bar.

    Returns: a report; `print` shows its tables, the worst node first. `ok` when right. `repro` is the smallest
    sub-model whose gradient is wrong, with its inputs' values. Where the differences do not settle, as for a network
    of kinks in float32, and not for every node either, the verdict is "undecided", which is not `ok`.

    Raises: InvalidArgumentError (unknown names, an input that needs a value in `feeds`), InvalidModelError (also for a
    model that draws random numbers), KernelError without onnxruntime, and what `backward` raises.
    """
    open_session = __getattr__("session")

    def opened(proto: ModelProto) -> Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]:
        session = open_session(proto, kernels=None)
        names = [value.name for value in session.get_outputs()]
        accepted = {value.name for value in session.get_inputs()}
        accepted |= {value.name for value in session.get_overridable_initializers()}

        def run(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            fed = {name: value for name, value in values.items() if name in accepted}
            return dict(zip(names, session.run(None, fed), strict=True))

        return run

    arguments = {} if kernels is None else {"kernels": kernels}
    return _check(
        model,
        opened,
        wrt=wrt,
        of=of,
        feeds=feeds,
        seed=seed,
        tolerance=tolerance,
        nodes=nodes,
        progress=progress,
        **arguments,
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
