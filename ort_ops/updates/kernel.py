"""The native operator `Update`: a formula applied to any number of tensors, item by item. Compiled.

Inputs: the numbers of the formula, float32 in one axis, then for every item its tensors; outputs: for every item its
results. All float32, those of an item of equal length. Attribute `program`: the formula (`program`).
"""

import ctypes
from dataclasses import dataclass

import numpy as np

from onnx_backprop.opset.functions.numba import NATIVE_PREFIX
from onnx_backprop.ort_ops.compiler.decorators import exported, inner
from onnx_backprop.ort_ops.compiler.llvm import call, load_i64, stack, store_i64
from onnx_backprop.ort_ops.compiler.records import Record, size, view
from onnx_backprop.ort_ops.compiler.values import INT
from onnx_backprop.ort_ops.runtime import c_abi
from onnx_backprop.ort_ops.runtime.bridge import api_of, block, runtime
from onnx_backprop.ort_ops.runtime.c_abi import CREATE_STATUS
from onnx_backprop.ort_ops.runtime.call import INPUT_COUNT, INPUT_WORDS, MAX_RANK, MUTABLE_DATA, OUTPUT, read_input
from onnx_backprop.ort_ops.runtime.interpreter import immortal
from onnx_backprop.ort_ops.runtime.scratch import Runtime, acquire, release
from onnx_backprop.ort_ops.runtime.stages import PARALLEL_FOR, ort
from onnx_backprop.ort_ops.updates.program import PIECE, Job, Program, stage_of

NAME = f"{NATIVE_PREFIX}Update"
_UNEQUAL = b"Update: the tensors of an item must have as many elements, and a formula as many numbers as it reads"


@dataclass(kw_only=True)
class State(Record):
    """One kernel. unequal: a text."""

    api: int
    runtime: int
    work: int
    numbers: int
    tensors: int
    results: int
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
        if load_i64(key, 1) > MAX_RANK or _elements(key) != load_i64(row, 0):
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
def _compute(state, context):
    api, runtime = state.api, view(Runtime, state.runtime)
    key, word, job = _key(), _word(), view(Job, _job())
    store_i64(word, 0, 0)
    status = ort(api, INPUT_COUNT, (context, word))
    if status:
        return status
    items, row_words = (load_i64(word, 0) - 1) // state.tensors, 1 + state.tensors + state.results
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
            store_i64(job.starts, n, pieces)
            pieces += (load_i64(row, 0) + PIECE - 1) // PIECE
    job.pieces = pieces
    if status == 0 and pieces:
        threads = min(runtime.threads, pieces)
        status = ort(api, PARALLEL_FOR, (context, state.work, threads, threads, job))
    release(runtime, memory, wanted)
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
            unequal=ctypes.addressof(immortal(_text)),
        )
        return block(np.array(state.words(), np.int64)), 0
    except Exception as e:  # noqa: BLE001 - an exception here must become a status
        return 0, api.status(f"Update: {e}")


_text = ctypes.create_string_buffer(_UNEQUAL)


def custom_op() -> c_abi.OrtCustomOp:
    """The operator, for onnxruntime."""
    return c_abi.custom_op(
        NAME,
        [(c_abi.FLOAT, c_abi.REQUIRED), (c_abi.FLOAT, c_abi.VARIADIC)],
        [c_abi.FLOAT],
        create=_create,
        compute=compute,
        destroy=destroy,
        variadic=True,
    )
