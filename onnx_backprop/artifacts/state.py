"""`CheckpointState`: what a training by onnxruntime-training's names changes, in memory and in a file."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
import onnxruntime

from onnx_backprop.converters.training.names import STEP
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.opset.core.errors import CheckpointError, InvalidArgumentError
from onnx_backprop.opset.core.hints import near
from onnx_backprop.opset.core.limits import current, how_to_raise
from onnx_backprop.training.checkpoint import read_checkpoint, write_checkpoint
from onnx_backprop.training.divergence import accept, check_finite, not_finite

Uri = str | os.PathLike[str]
OrtValue = onnxruntime.OrtValue
Nominal = dict[str, tuple[str, list[int]]]
_TYPES = ("float16", "float32", "float64", "int32", "int64", "bool")  # of parameters in a nominal checkpoint


class ArtifactError(InvalidArgumentError, RuntimeError):
    """What onnxruntime-training's code expects as a RuntimeError."""


class Parameter:
    """A parameter of a checkpoint: its values and its accumulated gradient; both can be set."""

    def __init__(self, state: CheckpointState, name: str) -> None:
        self._state = state
        self.name = name

    @property
    def data(self) -> np.ndarray:
        """A copy of the values."""
        return np.array(self._state.values[self.name].numpy())

    @data.setter
    def data(self, value: np.ndarray) -> None:
        self._state.values[self.name] = self._same_kind(value)
        accept(self._state.accepted, {self.name: self._state.values[self.name].numpy()})

    @property
    def grad(self) -> np.ndarray | None:
        """A copy of the gradient since the last reset; None before the first training step and for frozen ones."""
        gradient = self._state.gradients.get(self.name)
        return None if gradient is None else np.array(gradient.numpy())

    @grad.setter
    def grad(self, value: np.ndarray) -> None:
        if not self.requires_grad:
            raise ArtifactError(f"{self.name!r} is frozen, it has no gradient")
        self._state.gradients[self.name] = self._same_kind(value)

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""
        return self._state.trained[self.name]

    def _same_kind(self, value: np.ndarray) -> OrtValue:
        old = self._state.values[self.name].numpy()
        if np.shape(value) != old.shape:
            raise ArtifactError(f"{self.name!r} has shape {old.shape}, got {np.shape(value)}")
        return OrtValue.ortvalue_from_numpy(np.array(value).astype(old.dtype))


class _Named:
    """What stands under names; iteration gives (name, value), not names, as onnxruntime-training's does."""

    def __init__(self, stored: Mapping[str, Any]) -> None:
        self._stored = stored

    def __getitem__(self, name: str) -> Any:
        return self._stored[name]

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def __len__(self) -> int:
        return len(self._stored)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((name, self[name]) for name in self._stored)


class Parameters(_Named):
    """The parameters by name: `parameters["w"]`."""

    def __init__(self, state: CheckpointState) -> None:
        super().__init__(state.values)
        self._state = state

    def __getitem__(self, name: str) -> Parameter:
        if name not in self._stored:
            raise KeyError(f"the checkpoint has no parameter {name!r}{near(name, self._stored)}")
        return Parameter(self._state, name)

    def __setitem__(self, name: str, value: np.ndarray) -> None:
        self[name].data = value


class Properties(_Named):
    """Numbers and texts to keep with a checkpoint."""

    def __init__(self, values: dict[str, int | float | str]) -> None:
        super().__init__(values)
        self.values = values

    def __setitem__(self, name: str, value: int | float | str) -> None:
        if not isinstance(value, (int, float, str)):
            raise TypeError(f"a property is an int, a float or a str, got {type(value).__name__}")
        self.values[name] = value


class CheckpointState:
    """The parameters, their gradients, the optimizer's state and properties: everything that a training changes."""

    def __init__(self, values: Mapping[str, np.ndarray], trained: Mapping[str, bool]) -> None:
        self.values = {name: OrtValue.ortvalue_from_numpy(np.array(value)) for name, value in values.items()}
        self.accepted = not_finite(values)
        self.trained = dict(trained)
        self.gradients: dict[str, OrtValue] = {}
        self.optimizer: dict[str, OrtValue] = {}
        self.counter = STEP  # the name of the number of updates in it
        self.nominal = False
        self.parameters = Parameters(self)
        self.properties = Properties({})

    @classmethod
    def of(cls, graph: TrainingGraph) -> CheckpointState:
        """The state that a training graph starts from."""
        values = graph.initial_values() | {n: v for n, v in graph.initial_state().items() if n not in graph.fill}
        values |= graph.frozen_values()
        return cls(values, {name: name in graph.parameters for name in values})

    @classmethod
    def load_checkpoint(cls, checkpoint_uri: Uri) -> CheckpointState:
        """Read a checkpoint, or a nominal one: its parameters are zeros until a buffer is copied to them."""
        try:
            tensors, about = read_checkpoint(checkpoint_uri)
        except CheckpointError as e:
            raise ArtifactError(str(e)) from e
        if "trained" not in about:
            raise ArtifactError(
                f"{checkpoint_uri} is no checkpoint of a CheckpointState. Load Trainer's with Trainer.load"
            )
        trained, properties, nominal = _described(checkpoint_uri, about)
        values = {name.removeprefix("parameter/"): v for name, v in tensors.items() if name.startswith("parameter/")}
        values |= {name: np.zeros(shape, dtype) for name, (dtype, shape) in nominal.items()}
        if values.keys() != trained.keys():
            name = min(values.keys() ^ trained.keys())
            raise ArtifactError(
                f"{checkpoint_uri}: parameters: what is said of {name!r} has no tensor, or the other way"
            )
        # in the order that the checkpoint was made in, which a safetensors file does not keep
        state = cls({name: values[name] for name in trained}, trained)
        state.nominal = "nominal" in about
        state.optimizer = {
            name.removeprefix("optimizer/"): OrtValue.ortvalue_from_numpy(value)
            for name, value in tensors.items()
            if name.startswith("optimizer/")
        }
        state.properties = Properties(properties)
        return state

    @classmethod
    def save_checkpoint(
        cls, state: CheckpointState, checkpoint_uri: Uri, include_optimizer_state: bool = False
    ) -> None:
        """Write a checkpoint; it appears complete or not at all. FloatingPointError when the training has diverged."""
        tensors = {f"parameter/{name}": np.array(value.numpy()) for name, value in state.values.items()}
        if include_optimizer_state:
            tensors |= {f"optimizer/{name}": np.array(value.numpy()) for name, value in state.optimizer.items()}
        state.check_finite(tensors, checkpoint_uri)
        write_checkpoint(checkpoint_uri, tensors, {"trained": state.trained, "properties": state.properties.values})

    def check_finite(self, tensors: Mapping[str, np.ndarray], checkpoint: Uri | None = None) -> None:
        """Before tensors are written: FloatingPointError for numbers that are not finite and were at the start."""
        accepted = {f"parameter/{name}": where for name, where in self.accepted.items()} | self.accepted
        updates = self.optimizer.get(self.counter)
        check_finite(
            tensors,
            accepted,
            step=None if updates is None else int(updates.numpy()),
            kept=(checkpoint, None) if checkpoint is not None and os.path.isfile(checkpoint) else None,
        )

    def save_nominal(self, checkpoint_uri: Uri) -> None:
        """Write names, types and shapes, but no values."""
        types = {name: (value.numpy().dtype.name, list(value.shape())) for name, value in self.values.items()}
        write_checkpoint(
            checkpoint_uri, {}, {"trained": self.trained, "properties": self.properties.values, "nominal": types}
        )

    def __getitem__(self, name: str) -> int | float | str:
        return self.properties[name]

    def __setitem__(self, name: str, value: int | float | str) -> None:
        self.properties[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self.properties


def _described(uri: Uri, about: Mapping[str, Any]) -> tuple[dict[str, bool], dict[str, int | float | str], Nominal]:
    """What a checkpoint says beside its tensors; ArtifactError for anything but that."""
    trained, properties, nominal = about["trained"], about.get("properties"), about.get("nominal", {})
    if not (isinstance(trained, dict) and all(isinstance(value, bool) for value in trained.values())):
        raise ArtifactError(f"{uri}: trained: expected true or false for each parameter, got {reprlib.repr(trained)}")
    if not (isinstance(properties, dict) and all(type(v) in (int, float, str) for v in properties.values())):
        raise ArtifactError(f"{uri}: properties: expected numbers and texts, got {reprlib.repr(properties)}")
    total = 0
    for name, entry in nominal.items() if isinstance(nominal, dict) else [("nominal", nominal)]:
        match entry:
            case [str(dtype), list(shape)] if dtype in _TYPES and all(type(n) is int and n >= 0 for n in shape):
                total += np.dtype(dtype).itemsize * prod(shape)
            case _:
                raise ArtifactError(
                    f"{uri}: nominal: expected a type and a shape of {name!r}, got {reprlib.repr(entry)}"
                )
    if total > current().npz_bytes:
        raise ArtifactError(f"{uri}: nominal: parameters of {total:,} bytes are declared. {how_to_raise('npz_bytes')}")
    return trained, properties, nominal
