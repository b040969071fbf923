"""A plan is run in stages, each so many items that onnxruntime's threads take one after the other. Compiled.

Where scratch for everything at once would be too much, the stages are run in rounds of some groups, or of some parts of
a group. What the items are and how they are cut depends on shapes alone, so results do not depend on the threads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from onnx_backprop.ort_ops.compiler.decorators import compiled, exported, inner
from onnx_backprop.ort_ops.compiler.llvm import call as call_function
from onnx_backprop.ort_ops.compiler.llvm import fetch_add, load_i64
from onnx_backprop.ort_ops.compiler.objects import Exported
from onnx_backprop.ort_ops.compiler.records import Record, offset, size, view
from onnx_backprop.ort_ops.compiler.values import INT
from onnx_backprop.ort_ops.runtime.c_abi import CREATE_STATUS
from onnx_backprop.ort_ops.runtime.scratch import Runtime, acquire, block_bytes, release

PARALLEL_FOR = 274  # its position in OrtApi


@dataclass(frozen=True)
class Plan:
    """Which stages to run, each with the number of its items, and their parameters, which tables of int64 may follow.

    What the stages acquire, in bytes: `shared` once, for the call, and `per_thread` in every thread that works on it.
    groups, parts: (how many, how many of them in one round).
    """

    parameters: Record
    stages: tuple[tuple[Exported, int], ...]
    shared: int = 0
    per_thread: int = 0
    groups: tuple[int, int] = (1, 1)
    parts: tuple[int, int] = (1, 1)
    tables: Sequence[int] | np.ndarray = ()

    @property
    def words(self) -> np.ndarray:
        """The parameters and the tables."""
        return np.concatenate([np.array(self.parameters.words(), np.int64), np.asarray(self.tables, np.int64)])

    def extra_bytes(self, threads: int) -> int:
        """The most memory that a call takes besides its tensors: the parameters, and blocks as they are allocated."""
        return self.words.nbytes + block_bytes(self.shared) + threads * block_bytes(self.per_thread)

    def block(
        self,
        key: np.ndarray,
        outputs: Sequence[tuple[int, ...]],
        address: Callable[[Exported], int] = attrgetter("address"),
    ) -> np.ndarray:
        """The plan as compiled code reads it; here the stages are compiled that were not yet.

        address: of a function, where that is not to be its address in this process.
        """
        shapes = [word for shape in outputs for word in (len(shape), *shape)]
        stages = [word for function, items in self.stages for word in (address(function), items)]
        parts = [key, np.array(shapes, np.int64), np.array(stages, np.int64), self.words]
        places = np.cumsum([size(PlanHead), *(len(part) for part in parts)])
        head = PlanHead(
            key=places[0], key_words=len(key), outputs=len(outputs), shapes=places[1],
            stages=places[2], stage_count=len(self.stages), parameters=places[3],
            shared_bytes=self.shared, thread_bytes=self.per_thread,
            groups=self.groups[0], groups_at_once=self.groups[1], parts=self.parts[0], parts_at_once=self.parts[1],
        )  # fmt: skip
        return np.concatenate([np.array(head.words(), np.int64), *parts])


@dataclass(kw_only=True)
class PlanHead(Record):
    """What a plan begins with; the other parts are found by their distance in words from its first."""

    next: int = 0  # in the kernel's list
    users: int = 1  # calls that run it now
    key: int
    key_words: int
    outputs: int  # how many
    shapes: int  # rank and dimensions of each output
    stages: int  # (C function, items) of each
    stage_count: int
    parameters: int
    shared_bytes: int
    thread_bytes: int
    groups: int
    groups_at_once: int
    parts: int
    parts_at_once: int


@dataclass(kw_only=True)
class Call(Record):
    """One call as its stages see it; tensors by their addresses, 0 for what is absent or read by nobody.

    shared: the call's scratch. group, part: the first of this round. next: the item that is taken next, of `items`; a
    thread takes `run` at a time. failed: 1 when a thread found no memory.
    """

    context: int
    api: int
    runtime: int
    parameters: int
    output: int
    more: tuple[int, int, int, int]  # outputs
    inputs: tuple[int, int, int, int, int, int, int, int, int, int]
    shared: int
    group: int
    part: int
    items: int
    run: int
    thread_bytes: int
    next: int
    failed: int


_NEXT = offset(Call, "next")
# that a thread takes about: adjacent items are mostly adjacent in memory, and one thread reads them as one stream
_RUNS = 64


@inner
def ort(api, position, arguments):
    """Call a function of OrtApi."""
    return call_function(load_i64(api, position), arguments)


def stage(name: str, parameters: type[Record], item: Callable[..., object]) -> Exported:
    """A C function (call, per_thread) that calls item(call, parameters, n, scratch) for one n after the other.

    A thread takes its scratch when it takes its first item.
    """

    @exported(None, INT, INT)
    @compiled(f"stage.{name}")
    def work(address: Any, _thread):
        call = view(Call, address)
        p, runtime, scratch = view(parameters, call.parameters), view(Runtime, call.runtime), 0
        while True:
            first = fetch_add(address + _NEXT, call.run)
            if first >= call.items:
                break
            if scratch == 0 and call.thread_bytes:
                scratch = acquire(runtime, call.thread_bytes)
                if scratch == 0:
                    call.failed = 1
                    break
            for n in range(first, min(first + call.run, call.items)):
                item(call, p, n, scratch)
        release(runtime, scratch, call.thread_bytes)

    return work


@inner
def run_stages(call, plan):
    """All stages of a plan in every round; a status."""
    runtime, shared, status = view(Runtime, call.runtime), 0, 0
    if plan.shared_bytes:
        shared = acquire(runtime, plan.shared_bytes)
    call.shared, call.thread_bytes, call.failed = shared, plan.thread_bytes, plan.shared_bytes != 0 and shared == 0
    for group in range(0, plan.groups, plan.groups_at_once):
        for part in range(0, plan.parts, plan.parts_at_once):
            call.group, call.part = group, part
            for n in range(plan.stage_count):
                if status == 0 and call.failed == 0:
                    status = _run_stage(call, runtime, plan + 8 * (plan.stages + 2 * n))
    release(runtime, shared, plan.shared_bytes)
    if status == 0 and call.failed:
        return ort(call.api, CREATE_STATUS, (1, runtime.no_memory))
    return status


@inner
def _run_stage(call, runtime, entry):
    function, items = load_i64(entry, 0), load_i64(entry, 1)
    threads = min(runtime.threads, items)
    call.next, call.items, call.run = 0, items, max(items // (_RUNS * max(threads, 1)), 1)
    return ort(call.api, PARALLEL_FOR, (call.context, function, threads, threads, call))
