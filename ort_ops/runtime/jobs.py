"""A call's work as numbered items that onnxruntime's threads take one after the other, each thread with scratch memory.

What the items are and how they are cut depends on shapes alone, so results do not depend on the threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnx_backprop.ort_ops.runtime.call import (
    CALL_PARAMETERS,
    CALL_RUNTIME,
    acquire,
    lanes,
    no_memory,
    parallel,
    release,
    take,
)
from onnx_backprop.ort_ops.runtime.compile import compiled, inner
from onnx_backprop.ort_ops.runtime.llvm import exchange, load_i64, stack, store_i64

# what workers share: the call, the next item, whether memory ran out, memory of the whole call and, where that does not
# hold everything at once, the first group and the first part of it that this round is about
JOB_CALL, JOB_NEXT, JOB_FAILED, JOB_SHARED, JOB_GROUP, JOB_PART, JOB_WORDS = range(7)

new_job = stack(JOB_WORDS)


def worker(name: str, item: Callable[..., object], items_word: int, bytes_word: int) -> Any:
    """A compiled function (job, lane) that takes items until none is left and calls item(job, item, scratch).

    The number of items and the bytes of a thread's scratch stand in the parameters, at these words.
    """

    @compiled(name)
    def work(job, _lane):
        call = load_i64(job, JOB_CALL)
        p, runtime = load_i64(call, CALL_PARAMETERS), load_i64(call, CALL_RUNTIME)
        items, size, scratch = load_i64(p, items_word), load_i64(p, bytes_word), 0
        while True:
            n = take(job + 8 * JOB_NEXT)
            if n >= items:
                break
            if scratch == 0:
                scratch = acquire(runtime, size)
                if scratch == 0:
                    exchange(job + 8 * JOB_FAILED, 1)
                    break
            item(job, n, scratch)
        release(runtime, scratch, size)

    return work


@inner
def begin(job, call, shared):
    """Fill in a new job."""
    store_i64(job, JOB_CALL, call)
    store_i64(job, JOB_FAILED, 0)
    store_i64(job, JOB_SHARED, shared)
    begin_round(job, 0, 0)


@inner
def begin_round(job, group, part):
    """The items are taken from the first one on, for other groups or another part of a group."""
    store_i64(job, JOB_NEXT, 0)
    store_i64(job, JOB_GROUP, group)
    store_i64(job, JOB_PART, part)


@inner
def work_off(job, function, items):
    """Run a worker, given as a C function, on as many threads as there are; a status."""
    call = load_i64(job, JOB_CALL)
    status = parallel(call, function, job, min(lanes(call), items))
    if status == 0 and load_i64(job, JOB_FAILED):
        return no_memory(call)
    return status
