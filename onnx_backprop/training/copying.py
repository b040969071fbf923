"""Trainers that are pickled or copied: the graph, the arguments, and the state as a checkpoint holds it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.opset.core.errors import InvalidArgumentError

if TYPE_CHECKING:
    from onnx_backprop.training.trainer import Trainer

_KEPT = ("losses", "read", "schedule", "kept")


def reduced(trainer: Trainer) -> tuple[Callable[..., Trainer], tuple[Any, ...]]:
    """What pickle and copy keep of a trainer: it goes on bit for bit, in another process too.

    The graph of one that was made from a path begins with the values of now, since the trainer has no others.
    Errors: InvalidArgumentError for one of several ranks, or with session options of one's own, which no file can hold;
    FloatingPointError for a state that has diverged.
    """
    if trainer.communicator.size > 1:
        raise InvalidArgumentError("a trainer of several ranks cannot be copied. Save a checkpoint")
    if trainer.arguments["session_options"] is not None:
        raise InvalidArgumentError(
            "a trainer with session_options of yours cannot be copied: onnxruntime does not write them down. Make "
            "another with them, and load a checkpoint"
        )
    kept = {name: getattr(trainer, name) for name in _KEPT}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.ckpt"
        trainer.save(path)
        trainer.kept = kept["kept"]
        state = path.read_bytes()
    graph = trainer.graph.with_values(trainer.state())
    return _rebuilt, (type(trainer), graph, dict(trainer.arguments), state, kept)


def _rebuilt(
    kind: type[Trainer], graph: TrainingGraph, arguments: Mapping[str, Any], state: bytes, kept: Mapping[str, Any]
) -> Trainer:
    trainer = kind(graph, **arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.ckpt"
        path.write_bytes(state)
        trainer.load(path)
    for name, value in kept.items():
        setattr(trainer, name, value)
    return trainer
