"""BiasAddBackward, compiled: channel sums in two levels of float32 partial sums whose order the shape alone decides."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from ..opset.bias_add_backward import OP
from .native_bridge import Call, NativeKernel, Plan, keep
from .native_call import (
    CALL_INPUTS,
    CALL_OUTPUT,
    CALL_PARAMETERS,
    CALL_RUNTIME,
    acquire,
    no_memory,
    parallel,
    release,
)
from .native_llvm import load_f32, load_i64, stack, store_f32, store_i64
from .native_rows import add_run, clear, write_run
from .native_source import exported

# parameters
WORKER, KIND, BATCH, CHANNELS, LENGTH, PARTS, LAST = range(7)
# what a worker is told
JOB_CALL, JOB_SUMS = range(2)

LANES = 64  # independent partial sums of one run
CHUNK = 128  # rows added up before they join the sum of the part

_job = stack(2)
_lanes = stack(LANES // 2)


@njit
def _sum_channel(kind, source, parameters, part, channel, sums):
    """NCX: one channel of a part of the batch."""
    channels, length = load_i64(parameters, CHANNELS), load_i64(parameters, LENGTH)
    parts, batch = load_i64(parameters, PARTS), load_i64(parameters, BATCH)
    lanes = _lanes()
    total = np.float32(0.0)
    for n in range(part * batch // parts, (part + 1) * batch // parts):
        clear(lanes, 0, LANES)
        first = (n * channels + channel) * length
        done = 0
        while done < length:
            count = min(LANES, length - done)
            add_run(kind, lanes, source, first + done, count)
            done += count
        width = LANES
        while width > 1:
            width //= 2
            for i in range(width):
                store_f32(lanes, i, load_f32(lanes, i) + load_f32(lanes, i + width))
        total += load_f32(lanes, 0)
    store_f32(sums, part * channels + channel, total)


@njit
def _sum_rows(kind, source, parameters, part, sums):
    """NXC: all channels of a part of the rows."""
    channels = load_i64(parameters, CHANNELS)
    parts, rows = load_i64(parameters, PARTS), load_i64(parameters, BATCH)
    total = sums + 8 * part * channels
    chunk = total + 4 * channels
    clear(total, 0, channels)
    row, end = part * rows // parts, (part + 1) * rows // parts
    while row < end:
        stop = min(end, row + CHUNK)
        clear(chunk, 0, channels)
        while row < stop:
            add_run(kind, chunk, source, row * channels, channels)
            row += 1
        for i in range(channels):
            store_f32(total, i, load_f32(total, i) + load_f32(chunk, i))


@njit
def _work(job, index):
    call = load_i64(job, JOB_CALL)
    parameters, source = load_i64(call, CALL_PARAMETERS), load_i64(call, CALL_INPUTS)
    kind, sums = load_i64(parameters, KIND), load_i64(job, JOB_SUMS)
    if load_i64(parameters, LAST):
        _sum_rows(kind, source, parameters, index, sums)
    else:
        channels = load_i64(parameters, CHANNELS)
        _sum_channel(kind, source, parameters, index // channels, index % channels, sums)


@njit
def _run(call):
    parameters, runtime = load_i64(call, CALL_PARAMETERS), load_i64(call, CALL_RUNTIME)
    channels, parts, last = (
        load_i64(parameters, CHANNELS),
        load_i64(parameters, PARTS),
        load_i64(parameters, LAST),
    )
    per_part = 2 * channels if last else channels
    size = 4 * parts * per_part
    sums = acquire(runtime, size)
    if sums == 0:
        return no_memory(call)
    job = _job()
    store_i64(job, JOB_CALL, call)
    store_i64(job, JOB_SUMS, sums)
    status = parallel(call, load_i64(parameters, WORKER), job, parts if last else parts * channels)
    for part in range(1, parts):
        add_run(1, sums, sums, part * per_part, channels)
    write_run(load_i64(parameters, KIND), load_i64(call, CALL_OUTPUT), 0, 1, sums, 0, channels)
    release(runtime, sums, size)
    return status


def _build() -> tuple[Any, Any]:
    @exported(types.void(types.int64, types.int64))
    def work(job, index):
        _work(job, index)

    @exported(types.int64(types.int64))
    def run(call):
        return _run(call)

    return work, run


@cache
def _functions() -> tuple[Any, Any]:
    return keep(_build())


def _plan(call: Call) -> Plan:
    shape = call.inputs[0]
    assert shape is not None
    work, run = _functions()
    last = call.attributes["data_format"] == "NXC"
    if last:
        rows, channels, length = math.prod(shape[:-1]), shape[-1], 1
        parts = max(1, min(16, rows // CHUNK))
    else:
        rows, channels, length = shape[0], shape[1], math.prod(shape[2:])
        parts = max(1, min(rows, 16 // channels))
    words = {
        WORKER: work.address,
        KIND: call.element_type,
        BATCH: rows,
        CHANNELS: channels,
        LENGTH: length,
        PARTS: parts,
        LAST: last,
    }
    return Plan(run.address, np.array([words[n] for n in range(len(words))], np.int64))


KERNEL = NativeKernel(OP, _plan, _functions)
