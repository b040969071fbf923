"""From onnxruntime's call of a kernel to its plan: compiled, without Python unless a shape is new.

A kernel's state holds the plans made so far, one per combination of input shapes and of the values of shape-carrying
inputs; the one that was used last is the first. Where none fits, a function is asked. In a process of Python it is
`ask_python`: Python validates the shapes as everywhere else, before any memory is touched, and answers with a plan or
with a status. Of more than MAX_PLANS the one goes that was not used for the longest time.
"""

from dataclasses import dataclass

from onnx_backprop.ort_ops.compiler.decorators import exported, inner
from onnx_backprop.ort_ops.compiler.llvm import call as call_function
from onnx_backprop.ort_ops.compiler.llvm import exchange, fetch_add, load_i32, load_i64, stack, store_i64
from onnx_backprop.ort_ops.compiler.records import Record, offset, size, view
from onnx_backprop.ort_ops.compiler.values import INT
from onnx_backprop.ort_ops.runtime.c_abi import CREATE_STATUS
from onnx_backprop.ort_ops.runtime.interpreter import Interpreter, ask
from onnx_backprop.ort_ops.runtime.scratch import Runtime
from onnx_backprop.ort_ops.runtime.stages import Call, PlanHead, ort, run_stages

MAX_INPUTS = 10
MAX_PLANS = 256  # cached per kernel
MAX_RANK = 64
MAX_NUMBERS = 64  # of a shape-carrying input
INPUT_WORDS = 3 + MAX_RANK + MAX_NUMBERS  # element type (0: absent), rank, numbers that follow, dimensions, numbers
KEY_WORDS = 2 + MAX_INPUTS * INPUT_WORDS

# positions in OrtApi
MUTABLE_DATA = 51
_ELEMENT_TYPE = 60
_RANK = 61
_DIMENSIONS = 62
_TYPE_AND_SHAPE = 65
INPUT_COUNT = 88
_INPUT = 90
OUTPUT = 91
_RELEASE_TYPE_AND_SHAPE = 99

_INT64 = 7
_LOW = 0xFFFFFFFF


@dataclass(kw_only=True)
class KernelState(Record):
    """One kernel, with the addresses that compiled code needs. Bit i of `numbers`: input i carries numbers.

    prepare: a C function that answers a `Question`.
    """

    api: int
    spec: int
    prepare: int
    runtime: int
    numbers: int
    plans: int = 0  # the first of a list
    count: int = 0
    lock: int = 0  # 1 while a thread is at the list


@dataclass(kw_only=True)
class Question(Record):
    """A plan for a key of so many words is asked for. The answer is one and whether it is cached, or a status."""

    state: int
    key: int
    key_words: int
    plan: int
    cached: int
    status: int


_LOCK, _USERS = offset(KernelState, "lock"), offset(PlanHead, "users")
_OUTPUT_AT, _MORE_AT, _INPUTS_AT = (offset(Call, name) for name in ("output", "more", "inputs"))

_key = stack(KEY_WORDS)
_call_block = stack(size(Call))
_word = stack(1)
_words2 = stack(2)
_question = stack(size(Question))


@inner
def _find(state, key, words):
    """The plan for a key, moved to the front and with one user more; 0 where there is none."""
    while exchange(state + _LOCK, 1):
        pass
    before, address, match = 0, state.plans, 0
    while address and match == 0:
        plan = view(PlanHead, address)
        if plan.key_words == words and _equal(key, address + 8 * plan.key, words):
            if before:
                view(PlanHead, before).next = plan.next
                plan.next, state.plans = state.plans, address
            fetch_add(address + _USERS, 1)
            match = address
        before, address = address, plan.next
    exchange(state + _LOCK, 0)
    return match


@inner
def _equal(one, other, words):
    for i in range(words):  # noqa: SIM110
        if load_i64(one, i) != load_i64(other, i):
            return False
    return True


@inner
def _add(state, plan):
    """Put a new plan at the front; return the plan that is evicted for it, or 0."""
    while exchange(state + _LOCK, 1):
        pass
    plan.next, state.plans, state.count = state.plans, plan, state.count + 1
    before, address, last, before_last = 0, state.plans, 0, 0
    if state.count > MAX_PLANS:
        while address:
            if view(PlanHead, address).users == 0:
                before_last, last = before, address
            before, address = address, view(PlanHead, address).next
    if last:  # never the first, which has a user
        view(PlanHead, before_last).next, state.count = view(PlanHead, last).next, state.count - 1
    exchange(state + _LOCK, 0)
    return last


@inner
def read_input(api, context, index, numbers, key, at, data):
    """Append what an input is to the key, store its data's address; (words of the key, status)."""
    word, two = _word(), _words2()
    store_i64(word, 0, 0)
    status = ort(api, _INPUT, (context, index, word))
    if status:
        return at, status
    value = load_i64(word, 0)
    store_i64(key, at, 0)
    store_i64(key, at + 1, 0)
    store_i64(key, at + 2, 0)
    store_i64(data, 0, 0)
    if value == 0:
        return at + 3, 0
    status = ort(api, _TYPE_AND_SHAPE, (value, word))
    if status:
        return at, status
    info = load_i64(word, 0)
    store_i64(two, 0, 0)
    store_i64(two, 1, 0)
    status = ort(api, _ELEMENT_TYPE, (info, two))
    if not status:
        status = ort(api, _RANK, (info, two + 8))
    element_type = load_i64(two, 0) & _LOW
    rank = load_i64(two, 1)
    known = min(rank, MAX_RANK)
    if not status:
        status = ort(api, _DIMENSIONS, (info, key + 8 * (at + 3), known))
    ort(api, _RELEASE_TYPE_AND_SHAPE, (info,))
    if status:
        return at, status
    status = ort(api, MUTABLE_DATA, (value, data))
    if status:
        return at, status
    store_i64(key, at, element_type)
    store_i64(key, at + 1, rank)
    end = at + 3 + known
    if rank == 1 and (numbers >> index) & 1:
        end = _read_numbers(element_type, load_i64(data, 0), load_i64(key, at + 3), key, at + 2, end)
    return end, 0


@inner
def _read_numbers(element_type, address, count, key, count_at, at):
    """Append the numbers of a 1-D input (floats as their bits) and how many there are; too many: none."""
    if count > MAX_NUMBERS:
        return at
    store_i64(key, count_at, count)
    for i in range(count):
        store_i64(key, at + i, load_i64(address, i) if element_type == _INT64 else load_i32(address, i))
    return at + count


@inner
def _compute(state, context):
    api, runtime = state.api, view(Runtime, state.runtime)
    key, block, word = _key(), _call_block(), _words2()
    call = view(Call, block)
    store_i64(word, 0, 0)
    status = ort(api, INPUT_COUNT, (context, word))
    if status:
        return status
    count = min(load_i64(word, 0), MAX_INPUTS)
    store_i64(key, 0, count)
    words = 1
    for i in range(count):
        words, status = read_input(api, context, i, state.numbers, key, words, block + _INPUTS_AT + 8 * i)
        if status:
            return status
    for i in range(count, MAX_INPUTS):  # trailing inputs that the node leaves out
        store_i64(block + _INPUTS_AT, i, 0)
    plan, spare = _find(state, key, words), 0
    if plan == 0:
        question = view(Question, _question())
        question.state, question.key, question.key_words, question.plan, question.status = state, key, words, 0, 0
        call_function(state.prepare, (question,))
        plan = question.plan
        if plan == 0:
            return question.status
        spare = _add(state, view(PlanHead, plan)) if question.cached else plan
    if spare and spare != plan:
        call_function(runtime.free, (spare,))
    call.context, call.api, call.runtime = context, api, state.runtime
    status = _run(call, view(PlanHead, plan))
    if spare == plan:  # for this call only
        call_function(runtime.free, (plan,))
        return status
    fetch_add(plan + _USERS, -1)
    return status


@inner
def _run(call, plan):
    """Allocate the outputs as the plan says and run its stages; an output that nobody reads has no address."""
    word, shape, filled = _word(), plan + 8 * plan.shapes, 0
    for index in range(plan.outputs):
        rank, dims = load_i64(shape, 0), shape + 8
        store_i64(word, 0, 0)
        status = ort(call.api, OUTPUT, (call.context, index, dims, rank, word))
        if status:
            return status
        elements = 1
        for axis in range(rank):
            elements *= load_i64(dims, axis)
        place = call + (_OUTPUT_AT if index == 0 else _MORE_AT + 8 * (index - 1))
        store_i64(place, 0, 0)
        if elements and load_i64(word, 0):
            status = ort(call.api, MUTABLE_DATA, (load_i64(word, 0), place))
            if status:
                return status
            filled += 1
        shape = dims + 8 * rank
    if filled == 0:
        return 0
    call.parameters = plan + 8 * plan.parameters
    return run_stages(call, plan)


@exported(INT, INT)
def ask_python(address):
    """Let Python answer a `Question`."""
    question = view(Question, address)
    state = view(KernelState, question.state)
    runtime = view(Runtime, state.runtime)
    python = view(Interpreter, runtime.python)
    if not ask(python, runtime.prepare, question):
        question.plan, question.status = 0, ort(state.api, CREATE_STATUS, (1, python.interrupted))
    return 0


@exported(INT, INT, INT)
def compute(state, context):
    """KernelComputeV2: an OrtStatus, 0 for success."""
    return _compute(view(KernelState, state), context)


@exported(None, INT)
def destroy(address):
    """KernelDestroy: free the plans and the state."""
    state = view(KernelState, address)
    free, at = view(Runtime, state.runtime).free, state.plans
    while at:
        following = view(PlanHead, at).next
        call_function(free, (at,))
        at = following
    call_function(free, (address,))
