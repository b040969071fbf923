"""A run that pauses: it hands values out, waits, and goes on with what somebody has computed from them.

    Yield(y, token) -> token, one value after the other      Resume(token) -> dy, of each value that has a gradient

So a forward and a backward pass with a loss of somebody else's between them are one run of one session, which frees
what the backward pass reads as soon as it has read it. Two sessions hold all of that until the second one is done.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from onnx_backprop.opset.core.errors import KernelError
from onnx_backprop.opset.graphs.edit import add_import, assign
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.opset.graphs.order import ancestors
from onnx_backprop.ort_ops.runtime.ahead import PAUSES, compile_at_once, will_be_repeated
from onnx_backprop.ort_ops.runtime.extensions import PyCustomOpDef, RawArray, onnx_op

YIELD, RESUME = "Yield", "Resume"
Array = NDArray[Any]
# The types that values pass in, each by operators with its number behind their names, as of onnxruntime-extensions.
_PASSES = {
    TensorProto.DOUBLE: (PyCustomOpDef.dt_double, np.float64),
    TensorProto.FLOAT: (PyCustomOpDef.dt_float, np.float32),
    TensorProto.INT64: (PyCustomOpDef.dt_int64, np.int64),
}
_LOOK = 0.2  # seconds after which Windows notices an interruption; elsewhere it ends the waiting
_LAST = 10.0  # seconds that the end of the process waits for runs
_KEPT = 16  # threads that wait for the next run


def _passes_as(elements: int) -> int | None:
    """The type among `_PASSES` that has all numbers of another, those of uint64 modulo 2⁶⁴; None: there is none."""
    if elements in (TensorProto.UNDEFINED, TensorProto.STRING, TensorProto.COMPLEX64, TensorProto.COMPLEX128):
        return None
    if elements == TensorProto.DOUBLE:
        return elements
    integer = helper.tensor_dtype_to_np_dtype(elements).kind in "biu"
    return TensorProto.INT64 if integer else TensorProto.FLOAT


def add_pause(model: ModelProto, ends: Sequence[str], seeds: Mapping[str, str]) -> str | None:
    """Have a model hand out the values `ends` in place of outputs, and take its inputs `seeds` at that time; in place.

    seeds: {one of the values: the input of its type and shape that is its gradient}.
    Returns the name of the input that tells runs apart; None, and the model as it was, for values of types that cannot
    be handed out or are not known.
    """
    graph = model.graph
    declared: dict[str, ValueInfoProto] = {v.name: v for v in (*graph.value_info, *graph.input, *graph.output)}
    elements = {t.name: t.data_type for t in graph.initializer}
    elements |= {name: v.type.tensor_type.elem_type for name, v in declared.items()}
    kinds = [_passes_as(elements.get(name, TensorProto.UNDEFINED)) for name in ends]
    if None in kinds:
        return None
    reserved = used_names(graph)
    token = last = unique("token", reserved)
    nodes: list[NodeProto] = []

    def add(op_type: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        name = unique(f"{output}/{op_type}", reserved)
        nodes.append(helper.make_node(op_type, inputs, [output], name, **attributes))
        return output

    for place, (name, kind) in enumerate(zip(ends, kinds, strict=True)):
        value = name if kind == elements[name] else add("Cast", [name], unique(f"{name}/passed", reserved), to=kind)
        last = add(f"{YIELD}{kind}", [value, last], unique(token, reserved), domain=PAUSES, place=place)
    for name, seed in seeds.items():
        place = ends.index(name)
        value = seed if kinds[place] == elements[name] else unique(f"{seed}/passed", reserved)
        add(f"{RESUME}{kinds[place]}", [last], value, domain=PAUSES, place=place)
        if value != seed:
            add("Cast", [value], seed, to=elements[name])
    early = ancestors(graph.node, ends)
    late = sorted(set(range(len(graph.node))).difference(early))
    assign(graph.node, [*(graph.node[n] for n in early), *nodes, *(graph.node[n] for n in late)])
    # the last one is read by nobody where no gradient needs a seed
    first, end = (helper.make_tensor_value_info(name, TensorProto.INT64, []) for name in (token, last))
    taken = set(seeds.values())
    graph.value_info.extend(v for v in graph.input if v.name in taken)
    assign(graph.input, [*(v for v in graph.input if v.name not in taken), first])
    assign(graph.output, [*(v for v in graph.output if v.name not in ends), end])
    add_import(model, PAUSES)
    return token


class _State:
    """What a run and whoever waits for it have in common."""

    def __init__(self) -> None:
        self.options = onnxruntime.RunOptions()
        self.values: dict[int, Array] = {}
        self.seeds: Mapping[int, Array] | None = None
        # seeds, and whether the run may be repeated; of queues and events the only kind that `__del__` may write to
        self.sent = SimpleQueue[tuple[Mapping[int, Array] | None, bool]]()
        self.paused, self.over = threading.Event(), threading.Event()
        self.results: Sequence[onnxruntime.OrtValue] = ()
        self.error: BaseException | None = None

    def cancel(self) -> None:
        self.options.terminate = True
        self.sent.put((None, True))

    def end(self) -> None:
        self.paused.set()
        self.over.set()


_numbers = count(1)
_running: dict[int, _State] = {}
_Work = SimpleQueue[Callable[[], None]]  # of a thread
_idle: list[_Work] = []
_busy: set[_Work] = set()


def _forked() -> None:
    """The threads, and with them the runs, are those of the other process."""
    _idle.clear()
    _busy.clear()
    for state in _running.values():
        state.error = KernelError("the run belongs to the process that this one was forked from. Call the model here")
        state.paused, state.over = threading.Event(), threading.Event()  # a lock of the old ones may be held
        state.end()
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _in_a_thread(function: Callable[[], None]) -> None:
    """One that has run before, where there is one: a new one costs 35 µs, and memory of its own in the C library."""
    try:
        work = _idle.pop()
    except IndexError:
        work = _Work()
        threading.Thread(target=_serve, args=(work,), daemon=True).start()
    _busy.add(work)
    work.put(function)


def _serve(work: _Work) -> None:
    while True:
        work.get()()
        _busy.discard(work)
        if len(_idle) >= _KEPT:
            return
        _idle.append(work)


class PausedRun:
    """A run of a session, in a thread of its own, up to its pause; one that nobody refers to any more ends there.

    values: what it has handed out, in arrays of their own.
    Errors: those of the run, here or in `resume`.
    """

    def __init__(
        self, session: onnxruntime.InferenceSession, token: str, feeds: Mapping[str, onnxruntime.OrtValue]
    ) -> None:
        self._state = state = _State()
        number = next(_numbers)
        names = [value.name for value in session.get_outputs()]
        fed = {**feeds, token: onnxruntime.OrtValue.ortvalue_from_numpy(np.array(number))}
        _in_a_thread(partial(_run, session, names, fed, number, state))
        self._wait(state.paused)
        self.values = [state.values[place] for place in sorted(state.values)]
        state.values.clear()

    def resume(self, seeds: Mapping[int, Array], *, repeatable: bool = True) -> list[onnxruntime.OrtValue]:
        """The outputs of the model but the values, in their order. Once for a run.

        seeds: by the place of the value. repeatable: whether what was fed has the numbers that it had, so that the run
        may begin anew once missing kernels have been compiled; otherwise each is compiled when it is needed.
        """
        self._state.sent.put((seeds, repeatable))
        self._wait(self._state.over)
        results, self._state.results = self._state.results, ()
        return list(results[:-1])

    def _wait(self, event: threading.Event) -> None:
        try:
            while not event.wait(_LOOK):
                pass
        except BaseException:  # an interruption
            self._state.cancel()
            raise
        if self._state.error is not None:
            raise self._state.error

    def __del__(self) -> None:
        self._state.cancel()


def _run(
    session: onnxruntime.InferenceSession,
    names: Sequence[str],
    feeds: dict[str, onnxruntime.OrtValue],
    number: int,
    state: _State,
) -> None:
    _running[number] = state
    try:
        state.results = session.run_with_ort_values(names, feeds, state.options)
    except BaseException as e:  # noqa: BLE001 - it is raised in the other thread
        state.error = state.error or e
    finally:
        _running.pop(number, None)
        state.end()


@contextmanager
def _failing(state: _State) -> Iterator[None]:
    """Nothing may leave a Python operator: an error ends the run, and is what its caller gets to see."""
    try:
        yield
    except BaseException as e:  # noqa: BLE001
        state.error = e
        state.options.terminate = True


def register() -> None:
    """Declare the operators of every type; once per process."""
    for kind, (library_type, dtype) in _PASSES.items():
        _register(kind, library_type, dtype)
    atexit.register(_end)


def _register(kind: int, library_type: int, dtype: type[np.generic]) -> None:
    def hand_out(value: Array, token: Array, place: int) -> RawArray:
        state = _running[int(token)]
        if not state.paused.is_set():  # else the run is repeated, whose values have been handed out
            with _failing(state):
                state.values[place] = np.array(value)
        return RawArray(token, np.int64)

    def take(token: Array, place: int) -> RawArray:
        state = _running[int(token)]
        zeros = RawArray(np.zeros(1), dtype)
        if state.error is not None:
            return zeros
        with _failing(state):
            if will_be_repeated() and not state.paused.is_set():
                return RawArray(np.zeros(state.values[place].shape), dtype)
            state.paused.set()
            if state.seeds is None and not state.options.terminate:
                state.seeds, repeatable = state.sent.get()
                if not repeatable:
                    compile_at_once()
            if state.seeds is not None:
                return RawArray(state.seeds[place], dtype)
        return zeros

    integer = PyCustomOpDef.dt_int64
    more = {"attrs": {"place": integer}}
    onnx_op(op_type=f"{PAUSES}::{YIELD}{kind}", inputs=[library_type, integer], outputs=[integer], **more)(hand_out)
    onnx_op(op_type=f"{PAUSES}::{RESUME}{kind}", inputs=[integer], outputs=[library_type], **more)(take)


def _end() -> None:
    """No thread may be inside onnxruntime, or free what is its, once Python is gone: that ends the process."""
    for state in list(_running.values()):
        state.cancel()
    end = time.monotonic() + _LAST
    while _busy and time.monotonic() < end:
        time.sleep(0.001)
