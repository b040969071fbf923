"""Kernels are compiled together, on every core, before the first run that needs them.

Which ones a model needs is known once each of its kernels has seen shapes. So where machine code is missing, a run goes
on without it, such kernels answer zeros, and nobody gets to see the result; then what was missed is compiled, by this
process and by others, and the run is repeated. Shapes are those of a run; only what changes when it is run twice, or
may not end on zeros, has to do without (`repeatable`), and compiles one kernel after the other.
"""

import contextlib
import ctypes
import logging
import math
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from onnx import ModelProto, NodeProto

from onnx_backprop.opset.core import progress
from onnx_backprop.opset.core.files import remove_rest
from onnx_backprop.opset.core.op import DOMAIN
from onnx_backprop.opset.functions.native import NATIVE_PREFIX
from onnx_backprop.opset.graphs.facts import DRAWS
from onnx_backprop.opset.graphs.walk import all_nodes, is_standard
from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import call as call_function
from onnx_backprop.ort_ops.compiler.machine import processors
from onnx_backprop.ort_ops.compiler.objects import Exported, cache_folder
from onnx_backprop.ort_ops.compiler.records import Record
from onnx_backprop.ort_ops.runtime.c_abi import c_library
from onnx_backprop.ort_ops.runtime.stages import Plan, stage

logger = logging.getLogger("onnx_backprop")
WORKER = "onnx_backprop.ort_ops.workers"
Worker = subprocess.Popen[str]
_MANY = 3  # functions that another process is started for
PAUSES = "onnx_backprop.pause"  # the domain of `runtime.pause`
# Domains without operators that have a state of their own, but for those that `gives_the_same` names.
_KNOWN = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", DOMAIN, PAUSES)

# Called with (functions compiled, functions to compile) whenever one is done, from the first (0, n) on.
watchers: list[Callable[[int, int], None]] = []


@dataclass(frozen=True)
class _Trial:
    """A run that finds out which functions are missing. guard: see `run`."""

    missing: dict[Exported, None]
    guard: np.ndarray | None


_trial: ContextVar[_Trial | None] = ContextVar("trial", default=None)  # that of this thread


@dataclass(frozen=True, kw_only=True)
class Zeros(Record):
    """The bytes of up to five outputs, and the C function that clears them."""

    memset: int
    sizes: tuple[int, int, int, int, int]


@inner
def _clear(call, p, _item, _scratch):
    outputs = call.output, call.more[0], call.more[1], call.more[2], call.more[3]
    for n in range(5):
        if p.sizes[n] and outputs[n]:
            call_function(p.memset, (outputs[n], 0, p.sizes[n]))


CLEAR = stage("clear", Zeros, _clear)


def considered(plan: Plan, sizes: Sequence[int]) -> tuple[Plan, bool]:
    """The plan and True; where code is missing that is to be compiled ahead, zeros of those sizes and False."""
    trial = _trial.get()
    lacks = [f for stage, _ in plan.stages for f in (*stage.shared, stage) if not f.at_hand]
    if trial is None or not lacks:
        return plan, True
    trial.missing.update(dict.fromkeys(lacks))
    if trial.guard is not None:
        trial.guard[...] = math.nan
    memset = ctypes.cast(c_library().memset, ctypes.c_void_p).value or 0
    first, second, third, fourth, fifth = (*sizes, 0, 0, 0, 0)[:5]
    return Plan(Zeros(memset=memset, sizes=(first, second, third, fourth, fifth)), ((CLEAR, 1),)), False


def will_be_repeated() -> bool:
    """Whether this run, which goes on on zeros, is to be repeated."""
    trial = _trial.get()
    return trial is not None and bool(trial.missing)


def compile_at_once() -> None:
    """Have this run, which cannot be repeated from here on, compile each kernel when it is needed."""
    _trial.set(None)


_T = TypeVar("_T")


def run(once: Callable[[], _T], guard: np.ndarray | None = None) -> _T:
    """What a run answers, for which everything is compiled; it must not matter that it may take place twice.

    guard: a number that is NaN as soon as kernels have answered zeros, and 1 again before the run is repeated.
    """
    missing: dict[Exported, None] = {}
    token = _trial.set(_Trial(missing, guard))
    try:
        result = once()
        if not missing:
            return result
        del result  # of zeros, in as much memory as the next one
    except Exception as e:
        logger.debug("the run that finds out what is missing: %s", e)
        if not missing:
            raise
    finally:
        _trial.reset(token)
    compile_all(list(missing))
    if guard is not None:
        guard[...] = 1
    return once()


def repeatable(model: object) -> bool:
    """Whether a run of a model may take place twice, and ends whatever its kernels answer; not known of a file."""
    return (
        isinstance(model, ModelProto)
        and gives_the_same(model)
        and not any(word in node.op_type for node in all_nodes(model) for word in ("Dropout", "Loop"))
    )


def gives_the_same(model: ModelProto) -> bool:
    """Whether two runs of a model on the same inputs do: no operator draws, or may have a state of its own."""
    functions = {(function.domain, function.name) for function in model.functions}
    return all(
        not (any(name in node.op_type for name in DRAWS) or _drops(node))
        and (
            node.domain in _KNOWN or (node.domain, node.op_type) in functions or node.op_type.startswith(NATIVE_PREFIX)
        )
        for node in all_nodes(model)
    )


def _drops(node: NodeProto) -> bool:
    """Whether a Dropout is, or may be, one in training mode."""
    return "Dropout" in node.op_type and not (is_standard(node, "Dropout") and not "".join(node.input[2:]))


def compile_all(functions: Sequence[Exported]) -> None:
    """On every core. What another process fails at is compiled here when it is needed."""
    waiting, finished, start, folder = deque(functions), deque[None](), time.perf_counter(), cache_folder()
    where = f"cache in {folder}" if folder else "no cache"
    logger.info("compiling %d kernels for this processor, once; %s", len(waiting), where)

    def note() -> None:
        bar.update(len(finished) - bar.n)
        for watcher in watchers:
            watcher(len(finished), len(functions))

    def serve(worker: Worker) -> None:
        assert worker.stdin
        assert worker.stdout
        with contextlib.suppress(IndexError, OSError, ValueError):
            while True:
                worker.stdin.write(f"{waiting.popleft().label}\n")
                worker.stdin.flush()
                if not worker.stdout.readline():
                    return
                finished.append(None)

    bar = progress.bar(total=len(functions), desc="compiling kernels, once", unit="kernel", leave=False)
    workers = _workers(min(processors() - 1, len(waiting) // 2)) if folder and len(waiting) >= _MANY else []
    threads = [threading.Thread(target=serve, args=(worker,), daemon=True) for worker in workers]
    try:
        note()
        for thread in threads:
            thread.start()
        while waiting:
            with contextlib.suppress(IndexError):  # another thread took it
                _ = waiting.popleft().address
                finished.append(None)
            note()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.1)
                note()
    finally:
        bar.close()
        for worker in workers:
            worker.kill()
            with contextlib.suppress(OSError), worker:  # which closes its pipes
                pass
            if folder:
                remove_rest(folder)
    logger.info("compiled %d kernels in %.1f s", len(functions), time.perf_counter() - start)


def _workers(count: int) -> list[Worker]:
    """Processes that compile what they are told (`ort_ops.workers`); an interruption is this process's business."""
    package = Path(sys.modules[__name__.partition(".")[0]].__file__ or "").parent
    code = f"import sys; sys.path.insert(0, {str(package.parent)!r}); from {WORKER} import serve; serve()"
    return [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        for _ in range(count)
    ]
