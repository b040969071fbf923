"""From onnxruntime's call of a kernel to the loops: compiled, without Python unless a shape is new.

A kernel's state holds the plans made so far, one per combination of input shapes and of the values of shape-carrying
inputs. A plan says what to allocate, which loops to run and with which numbers. Where none fits, Python is asked: it
validates the shapes as everywhere else, before any memory is touched, and answers with a plan or with a status.
All blocks below are arrays of int64; what is named is the index.
"""

from __future__ import annotations

from onnx_backprop.ort_ops.runtime.compile import inner
from onnx_backprop.ort_ops.runtime.interpreter import INTERRUPTED, ask
from onnx_backprop.ort_ops.runtime.llvm import (
    call,
    exchange,
    fetch_add,
    fetch_max,
    load_i32,
    load_i64,
    stack,
    store_i64,
)

# ----- blocks ------

# The state of one kernel, with the addresses that compiled code needs; bit i of NUMBERS: input i carries numbers.
STATE_API, STATE_PLANS, STATE_COUNT, STATE_SPEC, STATE_PREPARE, STATE_RUNTIME, STATE_NUMBERS, STATE_WORDS = range(8)
# What is the same in the whole process: C functions, texts, bytes of scratch in use and the most there were, and
# scratch blocks that wait for their next use.
(
    RUNTIME_MALLOC, RUNTIME_FREE, RUNTIME_NO_MEMORY, RUNTIME_PYTHON, RUNTIME_LANES, RUNTIME_LIVE, RUNTIME_PEAK,
    RUNTIME_POOL,
) = range(8)  # fmt: skip
POOL_SLOTS = 16
RUNTIME_WORDS = RUNTIME_POOL + POOL_SLOTS
BLOCK_HEAD = 128  # bytes before a block, which is aligned
POOL_BYTES = (4 << 20) - BLOCK_HEAD  # of a pooled block; what is larger is allocated for the call
# A plan; after the named words come the key, rank and dimensions of each output, and the parameters, at these indices.
PLAN_NEXT, PLAN_RUN, PLAN_KEY, PLAN_KEY_WORDS, PLAN_OUTPUTS, PLAN_SHAPES, PLAN_PARAMETERS, PLAN_HEADER = range(8)
# One call as a kernel's loops see it; further outputs lie behind the inputs.
CALL_CONTEXT, CALL_API, CALL_RUNTIME, CALL_PARAMETERS, CALL_OUTPUT, CALL_INPUTS = range(6)

# What Python is asked for: a plan for a key of so many words; it answers one, or a status, and whether it keeps it.
ASK_STATE, ASK_KEY, ASK_KEY_WORDS, ASK_PLAN, ASK_STATUS, ASK_KEPT, ASK_WORDS = range(7)

MAX_INPUTS, MAX_OUTPUTS = 8, 3
CALL_MORE = CALL_INPUTS + MAX_INPUTS
MAX_PLANS = 64  # kept per kernel; beyond that a plan lives for one call
MAX_RANK = 64
MAX_NUMBERS = 64  # of a shape-carrying input
INPUT_WORDS = 3 + MAX_RANK + MAX_NUMBERS  # element type (0: absent), rank, numbers that follow, dimensions, numbers
KEY_WORDS = 2 + MAX_INPUTS * INPUT_WORDS

# positions in OrtApi
_CREATE_STATUS = 0
MUTABLE_DATA = 51
_ELEMENT_TYPE = 60
_RANK = 61
_DIMENSIONS = 62
_TYPE_AND_SHAPE = 65
_INPUT_COUNT = 88
_INPUT = 90
OUTPUT = 91
_RELEASE_TYPE_AND_SHAPE = 99
_PARALLEL_FOR = 274

_INT64 = 7
_LOW = 0xFFFFFFFF
_INVALID_ARGUMENT = 2

_key = stack(KEY_WORDS)
_call_block = stack(CALL_MORE + MAX_OUTPUTS - 1)
_word = stack(1)
_words2 = stack(2)
_asked = stack(ASK_WORDS)


@inner
def api_call(api, position, arguments):
    return call(load_i64(api, position), arguments)


# ----- scratch ------


def block_bytes(size: int) -> int:
    """How much memory `acquire` takes for so many bytes; none is taken for none."""
    return max(size, POOL_BYTES) + BLOCK_HEAD if size else 0


@inner
def acquire(runtime, size):
    """Memory for one call, aligned to 64 bytes: a pooled block if `size` fits one. 0 when there is none."""
    if size <= POOL_BYTES:
        for slot in range(POOL_SLOTS):
            place = runtime + 8 * (RUNTIME_POOL + slot)
            if load_i64(place, 0):
                block = exchange(place, 0)
                if block:
                    _use(runtime, POOL_BYTES)
                    return block
        size = POOL_BYTES
    raw = call(load_i64(runtime, RUNTIME_MALLOC), (size + BLOCK_HEAD,))
    if raw == 0:
        return 0
    block = (raw + BLOCK_HEAD - 1) & -64  # at least one word before it
    store_i64(block, -1, raw)
    _use(runtime, size)
    return block


@inner
def _use(runtime, size):
    """Count a block of `size` bytes that a call begins to use."""
    size += BLOCK_HEAD
    live = fetch_add(runtime + 8 * RUNTIME_LIVE, size) + size
    fetch_max(runtime + 8 * RUNTIME_PEAK, live)


@inner
def release(runtime, block, size):
    """Give back what `acquire(runtime, size)` answered."""
    if block == 0:
        return
    fetch_add(runtime + 8 * RUNTIME_LIVE, -(max(size, POOL_BYTES) + BLOCK_HEAD))
    if size <= POOL_BYTES:
        for slot in range(POOL_SLOTS):
            place = runtime + 8 * (RUNTIME_POOL + slot)
            if load_i64(place, 0) == 0:
                block = exchange(place, block)
                if block == 0:
                    return
    call(load_i64(runtime, RUNTIME_FREE), (load_i64(block, -1),))


@inner
def no_memory(call_block):
    """A status that says so."""
    text = load_i64(load_i64(call_block, CALL_RUNTIME), RUNTIME_NO_MEMORY)
    return api_call(load_i64(call_block, CALL_API), _CREATE_STATUS, (1, text))


# ----- threads ------


@inner
def parallel(call_block, function, argument, count):
    """Run the C function(argument, i) for i < count on onnxruntime's threads and wait for all of them."""
    context = load_i64(call_block, CALL_CONTEXT)
    return api_call(load_i64(call_block, CALL_API), _PARALLEL_FOR, (context, function, count, count, argument))


@inner
def lanes(call_block):
    """How many workers to start at most: one per processor."""
    return load_i64(load_i64(call_block, CALL_RUNTIME), RUNTIME_LANES)


@inner
def take(counter):
    """The next item of work of a counter in memory."""
    return fetch_add(counter, 1)


# ----- one call ------


@inner
def read_input(api, context, index, numbers, key, at, data):
    """Append what an input is to the key, store its data's address; (words of the key, status)."""
    word, two = _word(), _words2()
    store_i64(word, 0, 0)
    status = api_call(api, _INPUT, (context, index, word))
    if status:
        return at, status
    value = load_i64(word, 0)
    store_i64(key, at, 0)
    store_i64(key, at + 1, 0)
    store_i64(key, at + 2, 0)
    store_i64(data, 0, 0)
    if value == 0:
        return at + 3, 0
    status = api_call(api, _TYPE_AND_SHAPE, (value, word))
    if status:
        return at, status
    info = load_i64(word, 0)
    store_i64(two, 0, 0)
    store_i64(two, 1, 0)
    status = api_call(api, _ELEMENT_TYPE, (info, two))
    if not status:
        status = api_call(api, _RANK, (info, two + 8))
    kind = load_i64(two, 0) & _LOW
    rank = load_i64(two, 1)
    known = min(rank, MAX_RANK)
    if not status:
        status = api_call(api, _DIMENSIONS, (info, key + 8 * (at + 3), known))
    api_call(api, _RELEASE_TYPE_AND_SHAPE, (info,))
    if status:
        return at, status
    status = api_call(api, MUTABLE_DATA, (value, data))
    if status:
        return at, status
    store_i64(key, at, kind)
    store_i64(key, at + 1, rank)
    end = at + 3 + known
    if rank == 1 and (numbers >> index) & 1:
        end = _read_numbers(kind, load_i64(data, 0), load_i64(key, at + 3), key, at + 2, end)
    return end, 0


@inner
def _read_numbers(kind, address, count, key, count_at, at):
    """Append the numbers of a 1-D input (floats as their bits) and how many there are; too many: none."""
    if count > MAX_NUMBERS:
        return at
    store_i64(key, count_at, count)
    for i in range(count):
        store_i64(key, at + i, load_i64(address, i) if kind == _INT64 else load_i32(address, i))
    return at + count


@inner
def _find(state, key, words):
    plan = load_i64(state, STATE_PLANS)
    while plan:
        if load_i64(plan, PLAN_KEY_WORDS) == words:
            other = plan + 8 * load_i64(plan, PLAN_KEY)
            same = True
            for i in range(words):
                if load_i64(key, i) != load_i64(other, i):
                    same = False
                    break
            if same:
                return plan
        plan = load_i64(plan, PLAN_NEXT)
    return 0


@inner
def compute(state, context):
    """KernelComputeV2: an OrtStatus, 0 for success."""
    api, runtime = load_i64(state, STATE_API), load_i64(state, STATE_RUNTIME)
    key, block, word = _key(), _call_block(), _words2()
    store_i64(word, 0, 0)
    status = api_call(api, _INPUT_COUNT, (context, word))
    if status:
        return status
    count, numbers = min(load_i64(word, 0), MAX_INPUTS), load_i64(state, STATE_NUMBERS)
    store_i64(key, 0, count)
    words = 1
    for i in range(count):
        words, status = read_input(api, context, i, numbers, key, words, block + 8 * (CALL_INPUTS + i))
        if status:
            return status
    for i in range(count, MAX_INPUTS):  # trailing inputs that the node leaves out
        store_i64(block, CALL_INPUTS + i, 0)
    plan = _find(state, key, words)
    kept = 1
    if plan == 0:
        asked, python = _asked(), load_i64(runtime, RUNTIME_PYTHON)
        store_i64(asked, ASK_STATE, state)
        store_i64(asked, ASK_KEY, key)
        store_i64(asked, ASK_KEY_WORDS, words)
        store_i64(asked, ASK_PLAN, 0)
        store_i64(asked, ASK_STATUS, 0)
        if not ask(python, load_i64(state, STATE_PREPARE), asked):
            return api_call(api, _CREATE_STATUS, (1, load_i64(python, INTERRUPTED)))
        plan, kept = load_i64(asked, ASK_PLAN), load_i64(asked, ASK_KEPT)
        if plan == 0:
            return load_i64(asked, ASK_STATUS)
    status = _run(api, context, runtime, plan, block)
    if not kept:
        call(load_i64(runtime, RUNTIME_FREE), (plan,))
    return status


@inner
def _run(api, context, runtime, plan, block):
    """Allocate the outputs as the plan says and run its loops; an output that nobody reads has no address."""
    word = _word()
    shape, filled = plan + 8 * load_i64(plan, PLAN_SHAPES), 0
    for index in range(load_i64(plan, PLAN_OUTPUTS)):
        rank, dims = load_i64(shape, 0), shape + 8
        store_i64(word, 0, 0)
        status = api_call(api, OUTPUT, (context, index, dims, rank, word))
        if status:
            return status
        elements = 1
        for axis in range(rank):
            elements *= load_i64(dims, axis)
        place = block + 8 * (CALL_OUTPUT if index == 0 else CALL_MORE + index - 1)
        store_i64(place, 0, 0)
        if elements and load_i64(word, 0):
            status = api_call(api, MUTABLE_DATA, (load_i64(word, 0), place))
            if status:
                return status
            filled += 1
        shape = dims + 8 * rank
    if filled == 0:
        return 0
    store_i64(block, CALL_CONTEXT, context)
    store_i64(block, CALL_API, api)
    store_i64(block, CALL_RUNTIME, runtime)
    store_i64(block, CALL_PARAMETERS, plan + 8 * load_i64(plan, PLAN_PARAMETERS))
    return call(load_i64(plan, PLAN_RUN), (block,))


@inner
def destroy(state):
    """KernelDestroy: free the plans and the state."""
    free = load_i64(load_i64(state, STATE_RUNTIME), RUNTIME_FREE)
    plan = load_i64(state, STATE_PLANS)
    while plan:
        following = load_i64(plan, PLAN_NEXT)
        call(free, (plan,))
        plan = following
    call(free, (state,))
