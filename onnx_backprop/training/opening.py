"""What a `Trainer` opens: the arguments that it is given, sessions, and weights that nothing trains in their memory."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np
import onnxruntime
from onnx import ModelProto, TensorProto, helper

from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.ort_ops import SessionOptions, session, take_weights
from onnx_backprop.providers.choose import Target
from onnx_backprop.providers.memory import Memory
from onnx_backprop.providers.placed import Placed

OrtValue = onnxruntime.OrtValue


def check_arguments(seed: int, session_options: Any, read_every: int) -> None:
    """InvalidArgumentError for a seed of more than 64 bits, options of something else, and no steps to read after."""
    if not isinstance(seed, Integral) or not -(2**63) <= seed < 2**63:
        raise InvalidArgumentError(f"seed: expected a whole number of 64 bits, got {seed!r}")
    if session_options is not None and not isinstance(session_options, onnxruntime.SessionOptions):
        raise InvalidArgumentError(
            f"session_options: expected onnxruntime.SessionOptions, got {type(session_options).__name__}"
        )
    if not isinstance(read_every, Integral) or read_every < 1:
        raise InvalidArgumentError(f"read_every: expected a whole number of 1 or more, got {read_every!r}")


def take_frozen(model: ModelProto, frozen: dict[str, OrtValue], memory: Memory | None) -> None:
    """Make inputs of large weights that nothing trains, which lie in memory once, and add them to `frozen`."""
    taken = take_weights(model, frozen, fuse=memory is None)
    if memory is not None and (place := memory.info) is not None:
        taken = {n: frozen.get(n) or memory.moved(v, place) or v for n, v in taken.items()}
    frozen |= taken


def open_model(
    model: ModelProto,
    *,
    frozen: dict[str, OrtValue],
    memory: Memory | None,
    target: Target | None,
    options: SessionOptions,
) -> onnxruntime.InferenceSession | Placed:
    """What runs a model without state where the steps run."""
    take_frozen(model, frozen, memory)
    return session(model, kernels=None, session_options=options) if target is None else Placed(model, target, options)


def declared_rate(graph: TrainingGraph) -> np.ndarray:
    """A learning rate of the type and the shape that the graph declares, any where it has none."""
    declared = [v.type.tensor_type for v in graph.model.graph.input if v.name == graph.learning_rate]
    kind, axes = next(((d.elem_type, len(d.shape.dim)) for d in declared), (TensorProto.FLOAT, 0))
    return np.zeros([1] * axes, helper.tensor_dtype_to_np_dtype(kind))
