"""From a table of operators to custom operators of onnxruntime that run compiled code.

`register(entries)` hands every operator, once per element type, to onnxruntime-extensions. When a session is created
the attributes of a node are read and validated; when a shape is new `prepare` validates it with the operator's own
`shape` function and makes the plan. Both are Python, and what they raise becomes a status (`interpreter`). All else is
compiled.
"""

import ctypes
import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from onnx_backprop.opset.core.errors import ShapeError
from onnx_backprop.opset.core.op import Arg, Attributes, Op
from onnx_backprop.opset.core.signals import Deferred
from onnx_backprop.opset.functions.native import NATIVE_PREFIX
from onnx_backprop.opset.functions.protos import ABSENT_INT
from onnx_backprop.ort_ops.compiler.llvm import ITEM_SIZE
from onnx_backprop.ort_ops.compiler.machine import processors
from onnx_backprop.ort_ops.compiler.records import Record, layout, offset, size
from onnx_backprop.ort_ops.runtime import ahead, c_abi
from onnx_backprop.ort_ops.runtime.call import (
    MAX_NUMBERS,
    MAX_RANK,
    KernelState,
    Question,
    ask_python,
    compute,
    destroy,
)
from onnx_backprop.ort_ops.runtime.extensions import native_library
from onnx_backprop.ort_ops.runtime.interpreter import immortal, interface
from onnx_backprop.ort_ops.runtime.scratch import RUNTIME_WORDS, Runtime
from onnx_backprop.ort_ops.runtime.stages import Plan

ELEMENT_TYPES = (c_abi.FLOAT, c_abi.FLOAT16, c_abi.BFLOAT16)
_NUMBER_ELEMENTS = {"T2": c_abi.INT32, "T3": c_abi.FLOAT, "T4": c_abi.INT64, "T5": c_abi.FLOAT, "T6": c_abi.UINT8}
_NUMBER_ELEMENTS["T7"] = c_abi.INT64

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Request:
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
    """One operator of the table: what it is, how to plan a call of it, and for which element types."""

    op: Op
    plan: Callable[[Request], Plan]
    element_types: tuple[int, ...] = ELEMENT_TYPES


@dataclass(frozen=True)
class _Spec:
    """What one kernel was created with."""

    kernel: NativeKernel
    attributes: Attributes


Key = tuple[int, ...]
# Where a session is watched: the keys that were planned in this context, by `spec_key`.
asked_for: ContextVar[dict[tuple[object, ...], dict[Key, None]] | None] = ContextVar("asked_for", default=None)

# Held for a few instructions. A fork waits for it, or the child would find it held by a thread that it does not have.
_lock = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)

# Equal specs share a number, so that creating the same session again takes no memory.
_specs: list[_Spec] = []
_spec_numbers: dict[tuple[object, ...], int] = {}
_apis: dict[int, c_abi.Api] = {}
_registered: set[str] = set()  # the keys of the operators that the library has


@cache
def _libc() -> tuple[Any, int, int]:
    """(malloc, its address, the address of free)."""
    library = immortal(c_abi.c_library())
    malloc, free = library.malloc, library.free
    malloc.restype, malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    malloc_address, free_address = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (malloc, free))
    return malloc, malloc_address, free_address


def block(words: np.ndarray) -> int:
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
    no_memory = immortal(ctypes.create_string_buffer(b"onnx_backprop: not enough memory for a kernel's scratch space"))
    whole = Runtime(
        malloc=malloc,
        free=free,
        no_memory=ctypes.addressof(no_memory),
        python=interface(),
        prepare=id(immortal(_prepare)),
        threads=processors(),
    )
    return block(np.array(whole.words() + [0] * (RUNTIME_WORDS - size(Runtime)), np.int64))


def _runtime_word(name: str) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(runtime() + offset(Runtime, name))


def scratch_in_use() -> int:
    """Bytes of scratch that calls have in use now; blocks that wait for their next use do not count."""
    return _runtime_word("live").value


def node_attributes(op: Op, attribute_of: Callable[[str, str], object]) -> Attributes:
    """The node's attributes, by name and kind; the value that a function gives one without default counts as absent."""
    given: dict[str, object] = {}
    for attribute in op.attributes:
        value = attribute_of(attribute.name, attribute.kind)
        nothing = value in (ABSENT_INT, "") or (isinstance(value, float) and math.isnan(value))
        if value is not None and not (nothing and attribute.default is None and not attribute.required):
            given[attribute.name] = value
    return Attributes(op, given)


def numbers_of(op: Op) -> int:
    """Bit i: input i carries numbers."""
    return sum(1 << n for n, i in enumerate(op.inputs) if not i.tensor)


def api_of(table: int) -> c_abi.Api:
    """The functions of an OrtApi at an address."""
    return _apis.setdefault(table, c_abi.Api(table))


def _spec_number(key: tuple[object, ...], spec: _Spec) -> int:
    """Where a spec lies in `_specs`; sessions may be created by several threads at once."""
    with _lock:
        if key not in _spec_numbers:
            _specs.append(spec)
            _spec_numbers[key] = len(_specs) - 1
        return _spec_numbers[key]


def spec_key(op: Op, attributes: Attributes) -> tuple[object, ...]:
    """What two nodes have in common whose plans are the same."""
    return (op.key, *(attributes[a.name] for a in op.attributes))


def _create(kernel: NativeKernel, api_table: int, info: int) -> tuple[int, int]:
    """CreateKernelV2: (kernel handle, 0) or (0, status)."""
    api = api_of(api_table)
    try:
        attributes = node_attributes(kernel.op, partial(api.attribute, info))
        key = spec_key(kernel.op, attributes)
        state = KernelState(
            api=api_table,
            spec=_spec_number(key, _Spec(kernel, attributes)),
            prepare=ask_python.address,
            runtime=runtime(),
            numbers=numbers_of(kernel.op),
        )
        return block(np.array(state.words(), np.int64)), 0
    except Exception as e:  # noqa: BLE001 - an exception here must become a status
        return 0, api.status(_sentence(kernel.op, e))


def _sentence(op: Op, error: Exception) -> str:
    text = str(error)
    return text if text.startswith(op.name) else f"{op.name}: {type(error).__name__}: {text}"


def _prepare(asked: int) -> None:
    """Answer a `Question`."""
    question = (ctypes.c_int64 * size(Question)).from_address(asked)
    address, key, words = question[:3]
    state = (ctypes.c_int64 * size(KernelState)).from_address(address)
    spec = _specs[state[layout(KernelState)["spec"].first_word]]
    try:
        key_words = np.ctypeslib.as_array((ctypes.c_int64 * words).from_address(key)).copy()
        request, plan = planned(spec.kernel, spec.attributes, key_words)
        recorded = asked_for.get()
        if recorded is not None:
            recorded.setdefault(spec_key(spec.kernel.op, spec.attributes), {})[tuple(key_words.tolist())] = None
        items = [ITEM_SIZE[request.element_type] if o.type_name == "T1" else 4 for o in spec.kernel.op.outputs]
        sizes = [math.prod(shape) * item for shape, item in zip(request.outputs, items, strict=True)]
        plan, cached = ahead.considered(plan, sizes)
        question[layout(Question)["cached"].first_word] = cached
        question[layout(Question)["plan"].first_word] = block(plan.block(key_words, request.outputs))
    except Exception as e:  # noqa: BLE001 - an exception here must become a status
        api = _apis[state[layout(KernelState)["api"].first_word]]
        question[layout(Question)["status"].first_word] = api.status(_sentence(spec.kernel.op, e))


def planned(kernel: NativeKernel, attributes: Attributes, key: np.ndarray) -> tuple[Request, Plan]:
    """What a key asks for, and the plan for it; raises what the operator's shape function has to say against it."""
    request = _validated(kernel.op, attributes, key)
    # A list: what interrupts a generator while it is closed is printed, not raised.
    empty = not [shape for shape in request.outputs if 0 not in shape]  # nothing is to be done
    return request, Plan(Record(), ()) if empty else kernel.plan(request)


def _validated(op: Op, attributes: Attributes, key: np.ndarray) -> Request:
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
        if rank > MAX_RANK:
            raise ShapeError(f"{name}: expected rank at most {MAX_RANK}, got {rank}", op_type=op.name)
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
        if rank == 1 and dims[0] > MAX_NUMBERS:
            raise ShapeError(f"{name}: expected at most {MAX_NUMBERS} entries, got {dims[0]}", op_type=op.name)
        if rank != 1:
            args[n] = Arg(dims)
        else:
            floats = op.inputs[n].type_name == "T3"
            numbers[n] = tuple((values.astype(np.int32).view(np.float32) if floats else values).tolist())
            args[n] = Arg(dims, numbers[n])
    op.require_inputs([i is not None for i in inputs])
    return Request(attributes, element_type, tuple(inputs), tuple(numbers), op.run_shapes(attributes, args))


def input_types(op: Op, element_type: int) -> list[tuple[int, int]]:
    """The element type and the characteristic of each input, where T1 is an element type."""
    return [
        (_NUMBER_ELEMENTS.get(i.type_name, element_type), c_abi.OPTIONAL if i.optional else c_abi.REQUIRED)
        for i in op.inputs
    ]


def output_types(op: Op, element_type: int) -> list[int]:
    """The element type of each output."""
    return [element_type if o.type_name == "T1" else c_abi.FLOAT for o in op.outputs]


def register(kernels: Iterable[NativeKernel], others: Callable[[], Sequence[c_abi.OrtCustomOp]]) -> None:
    """Hand the operators, and `others` that have no schema, to the library for them, each once.

    Raises OSError or AttributeError where that is impossible.
    """
    library = native_library()
    with Deferred():  # an operator is registered once or never
        for op in () if _registered else others():
            c_abi.add_external_custom_op(library, op)
        for kernel in kernels:
            if kernel.op.key in _registered:
                continue
            for element_type in kernel.element_types:
                op = c_abi.custom_op(
                    NATIVE_PREFIX + kernel.op.key,
                    input_types(kernel.op, element_type),
                    output_types(kernel.op, element_type),
                    create=partial(_create, kernel),
                    compute=compute,
                    destroy=destroy,
                )
                c_abi.add_external_custom_op(library, op)
            _registered.add(kernel.op.key)
