"""From a table of operators to custom operators of onnxruntime that run compiled code.

`register(entries)` hands every operator, once per element type, to onnxruntime-extensions. When a session is created
the attributes of a node are read and validated; when a shape is new `prepare` validates it with the operator's own
`shape` function and makes the plan. Both are Python, and what they raise becomes a status (`interpreter`). All else is
compiled.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import isnan
from typing import Any, TypeVar

import numpy as np
from numba import types

from onnx_backprop.opset.core.errors import ShapeError
from onnx_backprop.opset.core.op import Arg, Attributes, Op
from onnx_backprop.opset.core.signals import Deferred
from onnx_backprop.opset.functions.numba import NATIVE_PREFIX
from onnx_backprop.opset.functions.protos import ABSENT_INT
from onnx_backprop.ort_ops.runtime import c_abi
from onnx_backprop.ort_ops.runtime import call as native_call
from onnx_backprop.ort_ops.runtime.compile import exported
from onnx_backprop.ort_ops.runtime.extensions import get_library_path
from onnx_backprop.ort_ops.runtime.interpreter import immortal, interface
from onnx_backprop.ort_ops.runtime.machine import processors

ELEMENT_TYPES = (c_abi.FLOAT, c_abi.FLOAT16, c_abi.BFLOAT16)
_NUMBER_ELEMENTS = {"T2": c_abi.INT32, "T3": c_abi.FLOAT, "T4": c_abi.INT64, "T5": c_abi.FLOAT}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Which loops to run, a C function int64(call), and their parameters as a block of int64.

    What the loops acquire, in bytes: `shared` once, for the call, and `lane` in every thread that works on it.
    """

    run: int
    parameters: np.ndarray
    shared: int = 0
    lane: int = 0

    def extra_bytes(self, threads: int) -> int:
        """The most memory that a call takes besides its tensors: the parameters, and blocks as they are allocated."""
        blocks = [native_call.block_bytes(size) for size in (self.shared, self.lane)]
        return self.parameters.nbytes + blocks[0] + threads * blocks[1]


@dataclass(frozen=True)
class Call:
    """One combination of shapes, already validated: what a plan is made for. An absent input is None."""

    attributes: Attributes
    element_type: int
    inputs: tuple[Shape | None, ...]
    numbers: tuple[tuple[float, ...] | None, ...]
    outputs: tuple[Shape, ...]

    @property
    def output(self) -> Shape:
        """The shape of the first output."""
        return self.outputs[0]


@dataclass(frozen=True)
class NativeKernel:
    """One operator of the table: what it is and how to plan a call of it. Planning compiles what is needed."""

    op: Op
    plan: Callable[[Call], Plan]
    compile: Callable[[], object]


@dataclass(frozen=True)
class _Spec:
    """What one kernel was created with."""

    kernel: NativeKernel
    attributes: Attributes


# Sessions may outlive the interpreter's modules: what onnxruntime or compiled code points to is never freed.
_immortal: list[object] = []
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_immortal))

# Held for a few instructions. A fork waits for it, or the child would find it held by a thread that it does not have.
_lock = threading.Lock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)

# Equal specs share a number, so that creating the same session again takes no memory.
_specs: list[_Spec] = []
_spec_numbers: dict[tuple[object, ...], int] = {}
_apis: dict[int, c_abi.Api] = {}
_registered: list[str] = []  # the library, once it has the operators


_T = TypeVar("_T")


def keep(value: _T) -> _T:
    """Make an object live as long as the process."""
    _immortal.append(value)
    return value


@cache
def _libc() -> tuple[Any, int, int]:
    """(malloc, its address, the address of free)."""
    library = keep(ctypes.CDLL(None))
    malloc, free = library.malloc, library.free
    malloc.restype, malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    malloc_address, free_address = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (malloc, free))
    return malloc, malloc_address, free_address


def _block(words: np.ndarray) -> int:
    """A copy of an array of int64 in memory that C frees."""
    malloc, _, _ = _libc()
    address = malloc(max(words.nbytes, 8))
    if not address:
        raise MemoryError
    ctypes.memmove(address, words.ctypes.data, words.nbytes)
    return address


@cache
def runtime() -> int:
    """The process-wide block."""
    _, malloc, free = _libc()
    no_memory = keep(ctypes.create_string_buffer(b"onnx_backprop: not enough memory for a kernel's scratch space"))
    words = np.zeros(native_call.RUNTIME_WORDS, np.int64)
    words[native_call.RUNTIME_MALLOC], words[native_call.RUNTIME_FREE] = malloc, free
    words[native_call.RUNTIME_NO_MEMORY] = ctypes.addressof(no_memory)
    words[native_call.RUNTIME_PYTHON] = interface()
    words[native_call.RUNTIME_LANES] = processors()
    return _block(words)


def _runtime_word(index: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(runtime() + 8 * index)


def scratch_in_use() -> int:
    """Bytes of scratch that calls have in use now; blocks that wait for their next use do not count."""
    return _runtime_word(native_call.RUNTIME_LIVE).value


def scratch_peak(*, anew: bool = False) -> int:
    """The most bytes of scratch that all calls together had in use at one time since this was counted `anew`."""
    word = _runtime_word(native_call.RUNTIME_PEAK)
    peak = word.value
    if anew:
        word.value = scratch_in_use()
    return peak


# ----- a session is created ------


def _given_attributes(op: Op, api: c_abi.Api, info: int) -> dict[str, object]:
    """The node's attributes; the value that a function gives an attribute without default counts as absent."""
    given: dict[str, object] = {}
    for attribute in op.attributes:
        value = api.attribute(info, attribute.name, attribute.kind)
        nothing = value in (ABSENT_INT, "") or (isinstance(value, float) and isnan(value))
        if value is not None and not (nothing and attribute.default is None and not attribute.required):
            given[attribute.name] = value
    return given


def _spec_number(key: tuple[object, ...], spec: _Spec) -> int:
    """Where a spec lies in `_specs`; sessions may be created by several threads at once."""
    with _lock:
        if key not in _spec_numbers:
            _specs.append(spec)
            _spec_numbers[key] = len(_specs) - 1
        return _spec_numbers[key]


def _create(kernel: NativeKernel, api_table: int, info: int) -> tuple[int, int]:
    """CreateKernelV2: (kernel handle, 0) or (0, status)."""
    api = _apis.setdefault(api_table, c_abi.Api(api_table))
    try:
        attributes = Attributes(kernel.op, _given_attributes(kernel.op, api, info))
        kernel.compile()
        key = (kernel.op.name, *(attributes[a.name] for a in kernel.op.attributes))
        number = _spec_number(key, _Spec(kernel, attributes))
        words = np.zeros(native_call.STATE_WORDS, np.int64)
        words[native_call.STATE_API] = api_table
        words[native_call.STATE_SPEC] = number
        words[native_call.STATE_PREPARE] = id(immortal(_prepare))
        words[native_call.STATE_RUNTIME] = runtime()
        carries = [not i.tensor for i in kernel.op.inputs]
        words[native_call.STATE_NUMBERS] = sum(1 << n for n, numbers in enumerate(carries) if numbers)
        return _block(words), 0
    except Exception as e:  # noqa: BLE001 - an exception here must become a status
        return 0, api.status(_sentence(kernel.op, e))


def _sentence(op: Op, error: Exception) -> str:
    text = str(error)
    return text if text.startswith(op.name) else f"{op.name}: {type(error).__name__}: {text}"


# ----- a shape is new ------


def _prepare(asked: int) -> None:
    """A plan for a key, 0 and a status where it is refused; `kept` = 0: free it after the call."""
    answers = (ctypes.c_int64 * native_call.ASK_WORDS).from_address(asked)
    state, key, words = answers[: native_call.ASK_PLAN]
    state_words = (ctypes.c_int64 * native_call.STATE_WORDS).from_address(state)
    spec = _specs[state_words[native_call.STATE_SPEC]]
    try:
        key_words = np.ctypeslib.as_array((ctypes.c_int64 * words).from_address(key)).copy()
        call = _validated(spec, key_words)
        nothing = Plan(0, np.zeros(0, np.int64))  # to be done for empty outputs, compiled code sees that first
        empty = all(0 in shape for shape in call.outputs)
        plan = _plan_block(nothing if empty else spec.kernel.plan(call), key_words, call.outputs)
    except Exception as e:  # noqa: BLE001 - an exception here must become a status
        answers[native_call.ASK_STATUS] = _apis[state_words[native_call.STATE_API]].status(_sentence(spec.kernel.op, e))
        return
    publish = _publish()
    with _lock:  # other threads walk the list meanwhile, but one at a time adds to it
        kept = state_words[native_call.STATE_COUNT] < native_call.MAX_PLANS
        if kept:
            state_words[native_call.STATE_COUNT] += 1
            ctypes.c_int64.from_address(plan).value = state_words[native_call.STATE_PLANS]
            publish(state + 8 * native_call.STATE_PLANS, plan)
    answers[native_call.ASK_KEPT], answers[native_call.ASK_PLAN] = kept, plan


def _validated(spec: _Spec, key: np.ndarray) -> Call:
    """The call behind a key; raises what the operator's shape function has to say against it."""
    op = spec.kernel.op
    inputs: list[Shape | None] = [None] * len(op.inputs)
    numbers: list[tuple[float, ...] | None] = [None] * len(op.inputs)
    args: list[Arg | None] = [None] * len(op.inputs)
    element_type, at = 0, 1
    for n in range(int(key[0])):
        kind, rank, count = (int(v) for v in key[at : at + 3])
        at += 3
        if not kind:
            continue
        name = op.inputs[n].name
        if rank > native_call.MAX_RANK:
            raise ShapeError(f"{name}: expected rank at most {native_call.MAX_RANK}, got {rank}", op_type=op.name)
        dims = tuple(int(d) for d in key[at : at + rank])
        at += rank
        inputs[n] = dims
        values = key[at : at + count]
        at += count
        if op.inputs[n].tensor:
            if op.inputs[n].type_name == "T1":
                element_type = element_type or kind
            args[n] = Arg(dims)
            continue
        if rank == 1 and dims[0] > native_call.MAX_NUMBERS:
            raise ShapeError(
                f"{name}: expected at most {native_call.MAX_NUMBERS} entries, got {dims[0]}", op_type=op.name
            )
        if rank != 1:
            args[n] = Arg(dims)
        else:
            floats = op.inputs[n].type_name == "T3"
            numbers[n] = tuple((values.astype(np.int32).view(np.float32) if floats else values).tolist())
            args[n] = Arg(dims, numbers[n])
    op.require_inputs([i is not None for i in inputs])
    return Call(spec.attributes, element_type, tuple(inputs), tuple(numbers), op.run_shapes(spec.attributes, args))


def _plan_block(plan: Plan, key: np.ndarray, outputs: Sequence[Shape]) -> int:
    shapes = np.array([word for shape in outputs for word in (len(shape), *shape)], np.int64)
    header = np.zeros(native_call.PLAN_HEADER, np.int64)
    header[native_call.PLAN_RUN] = plan.run
    header[native_call.PLAN_KEY] = len(header)
    header[native_call.PLAN_KEY_WORDS] = len(key)
    header[native_call.PLAN_OUTPUTS] = len(outputs)
    header[native_call.PLAN_SHAPES] = len(header) + len(key)
    header[native_call.PLAN_PARAMETERS] = len(header) + len(key) + len(shapes)
    return _block(np.concatenate([header, key, shapes, plan.parameters.astype(np.int64)]))


# ----- compiled entry points ------


def _entry_points() -> tuple[Any, Any, Any]:
    """(compute, destroy, publish)."""

    @exported(types.int64(types.int64, types.int64))
    def compute(state, context):
        return native_call.compute(state, context)

    @exported(types.void(types.int64))
    def destroy(state):
        native_call.destroy(state)

    @exported(types.int64(types.int64, types.int64))
    def publish(place, value):
        return native_call.exchange(place, value)

    return compute, destroy, publish


@cache
def _entries() -> tuple[Any, Any, Any]:
    return keep(_entry_points())


@cache
def _publish() -> Any:
    return keep(ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(_entries()[2].address))


def register(kernels: Sequence[NativeKernel]) -> None:
    """Hand the operators to onnxruntime-extensions, once. Raises OSError or AttributeError where that is impossible."""
    compute, destroy, _ = _entries()
    library = str(get_library_path())
    with Deferred():  # an operator is registered once or never
        if _registered:
            return
        for kernel in kernels:
            inputs = [(i.type_name, c_abi.OPTIONAL if i.optional else c_abi.REQUIRED) for i in kernel.op.inputs]
            for element_type in ELEMENT_TYPES:
                op = c_abi.custom_op(
                    NATIVE_PREFIX + kernel.op.name,
                    [(_NUMBER_ELEMENTS.get(name, element_type), there) for name, there in inputs],
                    [element_type if o.type_name == "T1" else c_abi.FLOAT for o in kernel.op.outputs],
                    create=partial(_create, kernel),
                    compute=compute,
                    destroy=destroy,
                )
                c_abi.add_external_custom_op(library, op)
        _registered.append(library)
