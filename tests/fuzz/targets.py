"""What mutated files are given to: every public door, each with what it may raise."""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from google.protobuf.message import DecodeError
from onnx import ModelProto
from onnxruntime.capi import onnxruntime_pybind11_state as state  # pyright: ignore[reportAttributeAccessIssue]

import onnx_backprop as ob
from onnx_backprop.command.options import read_arrays
from onnx_backprop.training.checkpoint import read_checkpoint
from tests.fuzz import mutate, seeds
from tests.support.training_models import training

RUNTIME = tuple(error for error in vars(state).values() if isinstance(error, type) and issubclass(error, Exception))


@dataclass(frozen=True)
class Target:
    """A door, the files it is tried on, and how these are changed."""

    call: Callable[[Path], object]
    files: Callable[[], dict[str, bytes]]
    change: Callable[[bytes, random.Random], bytes]
    allowed: tuple[type[BaseException], ...] = (ob.OnnxBackpropError,)
    runs: bool = False  # runs the model, which may ask for any time and memory


def _session(path: Path) -> None:
    ob.session(path, kernels="onnx")


def _check(path: Path) -> None:
    str(ob.check_gradients(path, nodes=True))


def _load(path: Path) -> None:
    graph = ob.TrainingGraph.load(path)
    str(graph)
    graph.initial_state()
    graph.inference_model()


def _proto(path: Path) -> None:
    """A model that lies in memory has no file's folder, and may hold what onnx would not have read."""
    try:
        proto = ModelProto.FromString(path.read_bytes())
    except DecodeError:
        return
    ob.backward(proto)


@cache
def _trainer() -> ob.Trainer:
    return ob.Trainer(training(), kernels="onnx")


def _checkpoint(path: Path) -> None:
    read_checkpoint(path)
    _trainer().load(path)


def _there_and_back(path: Path) -> None:
    ob.requantize(ob.dequantize(path), path)


MODELS = {
    "convert": Target(lambda p: ob.backward(p), seeds.models, mutate.model),
    "train": Target(lambda p: ob.training_graph(p, loss="mse", optimizer="adam"), seeds.models, mutate.model),
    "explain": Target(lambda p: str(ob.explain_gradients(p)), seeds.models, mutate.model),
    "load": Target(_load, seeds.models, mutate.model),
    "proto": Target(_proto, seeds.models, mutate.model),
    "dequantize": Target(_there_and_back, seeds.quantized, mutate.model),
    "expand": Target(lambda p: ob.expand_gradients(p), seeds.models, mutate.model),
    "session": Target(_session, seeds.models, mutate.model, (ob.OnnxBackpropError, *RUNTIME)),
    "check": Target(_check, seeds.models, mutate.model, (ob.OnnxBackpropError, *RUNTIME), runs=True),
}
TARGETS = MODELS | {
    "npz": Target(lambda p: dict(read_arrays(str(p), "--data") or {}), seeds.archives, mutate.archive),
    "checkpoints": Target(_checkpoint, seeds.checkpoints, mutate.checkpoint),
}
GROUPS = {"models": list(MODELS), "npz": ["npz"], "checkpoints": ["checkpoints"]}


def case(group: str, seed: int, number: int) -> tuple[str, str, bytes]:
    """The door of a case, the seed it starts from, and the file."""
    rng = random.Random(f"{group}/{seed}/{number}")
    door = rng.choice(GROUPS[group])
    target = TARGETS[door]
    files = target.files()
    start = rng.choice(list(files))
    return door, start, target.change(files[start], rng)


def attempt(door: str, content: bytes) -> str:
    """What a door makes of a file."""
    target = TARGETS[door]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "file.onnx"
        path.write_bytes(content)
        try:
            target.call(path)
        except target.allowed as e:
            if _is_memory(e):
                return f"big: {_description(e)}"
            return f"refused: {type(e).__name__}"
        except MemoryError as e:
            return f"big: {_description(e)}"
        except Exception as e:  # noqa: BLE001 - that is what is looked for
            return f"untyped: {_description(e)}"
    return "answered"


def _description(error: BaseException) -> str:
    """The innermost cause, its class, place and sentence."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    trace = cause.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = "" if trace is None else f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
    return f"{type(cause).__name__} at {place}: {str(cause)[:100]!r}"


def _is_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError) or "bad_alloc" in str(error):
            return True
        error = error.__cause__
    return False
