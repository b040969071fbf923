"""The native operator `Update`: a formula applied to any number of tensors, item by item. Compiled.

Inputs: the numbers of the formula, float32 in one axis, then for every item its tensors; outputs: for every item its
results. All float32, those of an item of equal length. Attribute `program`: the formula (`program`).

Results may lie where tensors of their item lie. Attribute `after`: so many inputs follow that have to be there before
anything is written, of which the last two are numbers: where one of them is not finite, no tensor is overwritten; else
the last is raised by 1 in the end, which tells its owner that tensors have been.
"""

import ctypes
from dataclasses import dataclass

import numpy as np

from onnx_backprop.opset.functions.native import NATIVE_PREFIX
from onnx_backprop.ort_ops.compiler.decorators import exported, inner
from onnx_backprop.ort_ops.compiler.llvm import call, load_f32, load_i64, stack, store_f32, store_i64
from onnx_backprop.ort_ops.compiler.records import Record, size, view
from onnx_backprop.ort_ops.compiler.values import INT
from onnx_backprop.ort_ops.elementwise.program import PIECE, Job, Program, stage_of
from onnx_backprop.ort_ops.runtime import c_abi
from onnx_backprop.ort_ops.runtime.bridge import api_of, block, runtime
from onnx_backprop.ort_ops.runtime.c_abi import CREATE_STATUS
from onnx_backprop.ort_ops.runtime.call import INPUT_COUNT, INPUT_WORDS, MAX_RANK, MUTABLE_DATA, OUTPUT, read_input
from onnx_backprop.ort_ops.runtime.interpreter import immortal
from onnx_backprop.ort_ops.runtime.scratch import Runtime, acquire, release
from onnx_backprop.ort_ops.runtime.stages import PARALLEL_FOR, ort

NAME, ELEMENTWISE = f"{NATIVE_PREFIX}Update", f"{NATIVE_PREFIX}Elementwise"
UNEQUAL = b"the tensors of an item must have one shape, and a formula as many numbers as it reads"

INPUTS, OUTPUTS = [(c_abi.FLOAT, c_abi.REQUIRED), (c_abi.FLOAT, c_abi.VARIADIC)], [c_abi.FLOAT]


@dataclass(kw_only=True)
class State(Record):
    """One kernel. unequal: a text."""

    api: int
    runtime: int
    work: int
    numbers: int
    tensors: int
    results: int
    after: int
    unequal: int


_job = stack(size(Job))
_word = stack(1)
_key, _first = stack(INPUT_WORDS), stack(INPUT_WORDS)


@inner
def _elements(key):
    elements = 1
    for axis in range(load_i64(key, 1)):
        elements *= load_i64(key, 3 + axis)
    return elements


@inner
def _same_shape(key, other):
    same = load_i64(key, 1) == load_i64(other, 1)
    if same:
        for axis in range(load_i64(key, 1)):
            same = same and load_i64(key, 3 + axis) == load_i64(other, 3 + axis)
    return same


@inner
def _item(state, context, n, row):
    """Read the tensors of an item and allocate its results, of the shape of the first; a status."""
    api, key, first, word = state.api, _key(), _first(), _word()
    index, status = 1 + n * state.tensors, 0
    _, status = read_input(api, context, index, 0, first, 0, row + 8)
    if status:
        return status
    if load_i64(first, 1) > MAX_RANK:
        return ort(api, CREATE_STATUS, (1, state.unequal))
    store_i64(row, 0, _elements(first))
    for k in range(1, state.tensors):
        _, status = read_input(api, context, index + k, 0, key, 0, row + 8 * (1 + k))
        if status:
            return status
        if not _same_shape(key, first):
            return ort(api, CREATE_STATUS, (1, state.unequal))
    for k in range(state.results):
        store_i64(word, 0, 0)
        output = n * state.results + k
        status = ort(api, OUTPUT, (context, output, first + 24, load_i64(first, 1), word))
        if status:
            return status
        status = ort(api, MUTABLE_DATA, (load_i64(word, 0), row + 8 * (1 + state.tensors + k)))
        if status:
            return status
    return 0


@inner
def _overwrites(state, row):
    """Whether a result of an item lies where a tensor does."""
    for k in range(state.results):
        for n in range(state.tensors):
            if load_i64(row, 1 + state.tensors + k) == load_i64(row, 1 + n):
                return True
    return False


@inner
def _guards(api, context, first, count):
    """Of what has to be there before: (the address of the last, whether the last two are finite, a status)."""
    key, word = _key(), _word()
    guard, finite = 0, 1
    for n in range(max(count - 2, 0), count):
        _, status = read_input(api, context, first + n, 0, key, 0, word)
        if status:
            return 0, 0, status
        guard = load_i64(word, 0)
        number = load_f32(guard, 0)
        if number - number != np.float32(0.0):  # as of a NaN too
            finite = 0
    return guard, finite, 0


@inner
def _compute(state, context):
    api, runtime = state.api, view(Runtime, state.runtime)
    key, word, job = _key(), _word(), view(Job, _job())
    store_i64(word, 0, 0)
    status = ort(api, INPUT_COUNT, (context, word))
    if status:
        return status
    first_after = load_i64(word, 0) - state.after
    items, row_words = (first_after - 1) // state.tensors, 1 + state.tensors + state.results
    guard, finite, status = _guards(api, context, first_after, state.after)
    if status:
        return status
    _, status = read_input(api, context, 0, 0, key, 0, word)
    if status:
        return status
    if load_i64(key, 1) > MAX_RANK or _elements(key) < state.numbers:
        return ort(api, CREATE_STATUS, (1, state.unequal))
    wanted = 8 * items * (row_words + 1)
    memory = acquire(runtime, wanted)
    if memory == 0:
        return ort(api, CREATE_STATUS, (1, runtime.no_memory))
    job.next, job.items, job.row_words, job.table = 0, items, row_words, memory
    job.starts, job.numbers = memory + 8 * items * row_words, load_i64(word, 0)
    pieces = 0
    for n in range(items):
        row = memory + 8 * n * row_words
        if status == 0:
            status = _item(state, context, n, row)
            if finite == 0 and _overwrites(state, row):
                store_i64(row, 0, 0)
            store_i64(job.starts, n, pieces)
            pieces += (load_i64(row, 0) + PIECE - 1) // PIECE
    job.pieces = pieces
    if status == 0 and pieces:
        threads = min(runtime.threads, pieces)
        status = ort(api, PARALLEL_FOR, (context, state.work, threads, threads, job))
    release(runtime, memory, wanted)
    if status == 0 and finite and guard:
        store_f32(guard, 0, load_f32(guard, 0) + np.float32(1.0))
    return status


@exported(INT, INT, INT)
def compute(state, context):
    """KernelComputeV2: an OrtStatus, 0 for success."""
    return _compute(view(State, state), context)


@exported(None, INT)
def destroy(address):
    """KernelDestroy."""
    call(view(Runtime, view(State, address).runtime).free, (address,))


def _create(api_table: int, info: int) -> tuple[int, int]:
    """CreateKernelV2: (kernel handle, 0) or (0, status); the formula is compiled here."""
    api = api_of(api_table)
    try:
        text = str(api.attribute(info, "program", "string"))
        program = Program.parse(text)
        state = State(
            api=api_table,
            runtime=runtime(),
            work=stage_of(text).address,
            numbers=program.numbers,
            tensors=program.tensors,
            results=len(program.results),
            after=int(str(api.attribute(info, "after", "int") or 0)),
            unequal=ctypes.addressof(immortal(_text)),
        )
        return block(np.array(state.words(), np.int64)), 0
    except Exception as e:  # noqa: BLE001 - an exception here must become a status
        return 0, api.status(f"Update: {e}")


_text = ctypes.create_string_buffer(UNEQUAL)


def custom_op(name: str) -> c_abi.OrtCustomOp:
    """The operator, for onnxruntime: Update, or of one item and without anything to wait for, Elementwise."""
    return c_abi.custom_op(name, INPUTS, OUTPUTS, create=_create, compute=compute, destroy=destroy, variadic=True)
