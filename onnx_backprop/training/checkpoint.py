"""Checkpoints: one safetensors file with every tensor of the state, and JSON in its header for everything else.

The file is written under another name, brought to the disk and renamed, so that a process killed at any moment leaves
the previous checkpoint or the new one, never a part, however many write there. Any reader of safetensors opens it; the
JSON is the entry "onnx_backprop" of its metadata.
"""

import json
import os
import reprlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
from onnx import NodeProto

from onnx_backprop.converters.training.metadata import no_number
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.opset.core.errors import CheckpointError, InvalidArgumentError, warn
from onnx_backprop.opset.core.files import locked, named, replacing
from onnx_backprop.opset.core.limits import current, how_to_raise
from onnx_backprop.opset.graphs.walk import all_nodes, reads
from onnx_backprop.training.schedules import SCHEDULES, Schedule, restored

KEY = "onnx_backprop"
FORMAT = 1
_SHOWN = 4  # operators that a warning lists
_HEADER = 8  # bytes that hold the length of the header
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_held: ContextVar[frozenset[Path]] = ContextVar("held", default=frozenset())


def write_checkpoint(path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> None:
    """Write a checkpoint; an existing one is replaced at once, or stays where this fails.

    Errors: InvalidArgumentError when the folder is missing or the system refuses to write.
    """
    largest_first = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # so that all are aligned
    arrays = {name: np.ascontiguousarray(tensors[name]).reshape(np.shape(tensors[name])) for name in largest_first}
    text = json.dumps({"format": FORMAT, **about}, allow_nan=False)
    header: dict[str, Any] = {"__metadata__": {KEY: text}}
    end = 0
    for name, array in arrays.items():
        header[name] = {"dtype": _NAMES[array.dtype], "shape": array.shape, "data_offsets": (end, end + array.nbytes)}
        end += array.nbytes
    start = json.dumps(header).encode()
    start += b" " * (-len(start) % _HEADER)
    try:
        with replacing(path) as (file,):
            file.write(len(start).to_bytes(_HEADER, "little") + start)
            for array in arrays.values():
                file.write(array.reshape(-1).view(np.uint8).data)
    except (OSError, ValueError) as e:
        raise _unwritten(path, e) from e


@contextmanager
def held(path: str | os.PathLike[str]) -> Iterator[None]:
    """A block in which no other training, of this process or another, has the checkpoint; it may be nested in itself.

    Errors: InvalidArgumentError where one has it, or the folder does not let itself be written to.
    """
    with ExitStack() as stack:
        try:
            target = Path(os.path.realpath(path))
            alone = target in _held.get() or stack.enter_context(locked(target))
        except (OSError, ValueError) as e:
            raise _unwritten(path, e) from e
        if not alone:
            raise InvalidArgumentError(
                f"another training writes the checkpoint {path}. Name another, or wait for its end"
            )
        stack.callback(_held.reset, _held.set(_held.get() | {target}))
        yield


def _unwritten(path: str | os.PathLike[str], error: OSError | ValueError) -> InvalidArgumentError:
    return InvalidArgumentError(f"cannot write the checkpoint {path}: {getattr(error, 'strerror', None) or error}")


def read_checkpoint(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors of a checkpoint, and what else it says; CheckpointError for a file that is not a checkpoint."""
    content, length = _content(path)
    try:
        parts = safetensors.deserialize(content)
        text = json.loads(content[_HEADER : _HEADER + length])["__metadata__"][KEY]
        about = json.loads(text, parse_constant=no_number)
        tensors = {
            name: np.frombuffer(bytes(part["data"]), _DTYPES[part["dtype"]]).reshape(part["shape"]).copy()
            for name, part in parts
        }
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RecursionError, MemoryError) as e:
        raise CheckpointError(f"{path} is no checkpoint of onnx-backprop: {e or type(e).__name__}") from e
    written = about.pop("format", None) if isinstance(about, dict) else None
    if type(written) is not int or written < FORMAT:
        raise CheckpointError(f"{path} is no checkpoint of onnx-backprop: it does not say its format")
    if written > FORMAT:
        raise CheckpointError(f"{path} was written by a later version of onnx-backprop. Install that one")
    return tensors, about


def _content(path: str | os.PathLike[str]) -> tuple[bytes, int]:
    """The bytes of a file, and how many of them it says are its header."""
    if not os.path.isfile(named(path)):  # a pipe would have no end
        raise CheckpointError(f"cannot read the checkpoint {path}: there is no such file")
    try:
        with open(path, "rb") as file:
            start = file.read(_HEADER + 1)
            length = int.from_bytes(start[:_HEADER], "little")
            if start[_HEADER:] != b"{":  # as in an .npz or an .onnx
                raise CheckpointError(f"{path} is no checkpoint of onnx-backprop: it is no safetensors file")
            if length <= current().header_bytes:
                return start + file.read(), length
    except (OSError, MemoryError) as e:
        raise CheckpointError(f"cannot read the checkpoint {path}: {e or type(e).__name__}") from e
    raise CheckpointError(
        f"{path} is no checkpoint of onnx-backprop: its header has {length:,} bytes. {how_to_raise('header_bytes')}"
    )


def check_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray], graph: Mapping[str, tuple[Sequence[int], np.dtype]]
) -> None:
    """CheckpointError unless the tensors have the names, shapes and types of the state of a training graph."""

    def other(what: str) -> CheckpointError:
        return CheckpointError(f"{path} belongs to another training graph: {what}")

    for name in [*graph, *tensors]:
        if name not in tensors:
            raise other(f"{name!r} is missing in it")
        if name not in graph:
            raise other(f"{name!r} is not in the graph")
        got, (shape, dtype) = tensors[name], graph[name]
        if list(got.shape) != list(shape):
            raise other(f"{name!r} has shape {list(got.shape)}, the graph's has {list(shape)}")
        if got.dtype != dtype:
            raise other(f"{name!r} has type {got.dtype}, the graph's has {dtype}")


def operators(graph: TrainingGraph) -> dict[str, int]:
    """How many of each operator the forward model has, but for casts, which other options of a training add."""
    needed, nodes = {*graph.outputs}, list[NodeProto]()
    for node in reversed(graph.model.graph.node):
        if needed.intersection(filter(None, node.output)):
            needed |= reads(node)
            nodes.append(node)
    return dict(sorted(Counter(node.op_type for node in all_nodes(nodes) if node.op_type != "Cast").items()))


def warn_of_another(path: str | os.PathLike[str], about: Mapping[str, Any], graph: TrainingGraph) -> None:
    """Say how a checkpoint whose tensors fit belongs to another graph: its operators, its loss, its kind of optimizer.

    What it does not say is not compared, so that those of earlier versions load as before.
    """
    settings = about.get("settings")
    differences = []
    for what in ("loss", "optimizer"):
        there, here = (
            _name(each.get(what)) for each in (settings if isinstance(settings, dict) else {}, graph.settings)
        )
        if there and here and there != here:
            differences.append(f"its {what} is {there}, the graph's {here}")
    counts, here = about.get("operators"), operators(graph)
    if isinstance(counts, dict):
        other = [name for name in {**here, **counts} if counts.get(name, 0) != here.get(name, 0)]
        differences += [f"it has {counts.get(n, 0)} {n}, the graph {here.get(n, 0)}" for n in other[:_SHOWN]]
    if differences:
        warn(f"{path} is of another training graph: {'; '.join(differences)}. The training goes on with the graph's")


def _name(setting: Any) -> str:
    """What a loss or an optimizer is called; nothing for a function whose name is an address."""
    name = setting.get("name") if isinstance(setting, dict) else setting
    return name if isinstance(name, str) and " at 0x" not in name else ""


@dataclass(frozen=True)
class Progress:
    """How far a training was; learning_rate, schedule: None where the checkpoint has none."""

    steps: int
    epoch: int
    batch: int
    learning_rate: float | None
    schedule: Schedule | None


def read_progress(path: str | os.PathLike[str], about: Mapping[str, Any]) -> Progress:
    """What a checkpoint of `Trainer` says beside the tensors; CheckpointError for anything but that."""

    def wrong(name: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{path}: {name}: expected {expected}, got {reprlib.repr(about.get(name))}")

    missing = [name for name in ("steps", "epoch", "batch", "learning_rate", "schedule") if name not in about]
    if missing:
        raise CheckpointError(f"{path} is no checkpoint of Trainer: {', '.join(missing)} missing")
    for name in ("steps", "epoch", "batch"):
        if type(about[name]) is not int or not 0 <= about[name] < 2**63:
            raise wrong(name, "a count")
    rate = about["learning_rate"]
    if rate is not None and not (type(rate) in (int, float) and abs(rate) <= sys.float_info.max):
        raise wrong("learning_rate", "a number")
    try:
        schedule = None if about["schedule"] is None else restored(about["schedule"])
        if schedule is not None:
            schedule(0)
    except (ValueError, TypeError, ArithmeticError, RecursionError) as e:
        raise wrong("schedule", f"one of {', '.join(SCHEDULES)} with its numbers") from e
    counts = (about[name] for name in ("steps", "epoch", "batch"))
    return Progress(*counts, learning_rate=None if rate is None else float(rate), schedule=schedule)
