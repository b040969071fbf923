"""BiasAddBackward, compiled: channel sums in two levels of float32 partial sums whose order the shape alone decides."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import types

from onnx_backprop.opset.operators.bias_add_backward import OP
from onnx_backprop.ort_ops.runtime.bridge import Call, NativeKernel, Plan, keep
from onnx_backprop.ort_ops.runtime.call import (
    CALL_INPUTS,
    CALL_OUTPUT,
    CALL_PARAMETERS,
    CALL_RUNTIME,
    POOL_BYTES,
    acquire,
    no_memory,
    parallel,
    release,
)
from onnx_backprop.ort_ops.runtime.compile import exported, inner
from onnx_backprop.ort_ops.runtime.llvm import load_f32, load_i64, stack, store_f32, store_i64
from onnx_backprop.ort_ops.vector.rows import add_run, clear, write_run

# parameters
WORKER, KIND, BATCH, CHANNELS, LENGTH, PARTS, LAST, AT_ONCE, SUM_BYTES = range(9)
# what a worker is told: the call, where the sums are, and the channels of this round
JOB_CALL, JOB_SUMS, JOB_FIRST, JOB_COUNT = range(4)

LANES = 64  # independent partial sums of one run
CHUNK = 128  # rows added up before they join the sum of the part

_job = stack(4)
_lanes = stack(LANES // 2)


@inner
def _sum_channel(kind, source, parameters, part, channel):
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
    return total


@inner
def _sum_rows(kind, source, parameters, part, first, count, sums):
    """NXC: some channels of a part of the rows."""
    channels = load_i64(parameters, CHANNELS)
    parts, rows = load_i64(parameters, PARTS), load_i64(parameters, BATCH)
    total = sums + 8 * part * count
    chunk = total + 4 * count
    clear(total, 0, count)
    row, end = part * rows // parts, (part + 1) * rows // parts
    while row < end:
        stop = min(end, row + CHUNK)
        clear(chunk, 0, count)
        while row < stop:
            add_run(kind, chunk, source, row * channels + first, count)
            row += 1
        for i in range(count):
            store_f32(total, i, load_f32(total, i) + load_f32(chunk, i))


@inner
def _work(job, index):
    call = load_i64(job, JOB_CALL)
    parameters, source = load_i64(call, CALL_PARAMETERS), load_i64(call, CALL_INPUTS)
    kind, sums = load_i64(parameters, KIND), load_i64(job, JOB_SUMS)
    first, count = load_i64(job, JOB_FIRST), load_i64(job, JOB_COUNT)
    if load_i64(parameters, LAST):
        _sum_rows(kind, source, parameters, index, first, count, sums)
    else:
        store_f32(sums, index, _sum_channel(kind, source, parameters, index // count, first + index % count))


@inner
def _run(call):
    parameters, runtime = load_i64(call, CALL_PARAMETERS), load_i64(call, CALL_RUNTIME)
    channels, parts, last = (
        load_i64(parameters, CHANNELS),
        load_i64(parameters, PARTS),
        load_i64(parameters, LAST),
    )
    size, status = load_i64(parameters, SUM_BYTES), 0
    sums = acquire(runtime, size)
    if sums == 0:
        return no_memory(call)
    job = _job()
    store_i64(job, JOB_CALL, call)
    store_i64(job, JOB_SUMS, sums)
    for first in range(0, channels, load_i64(parameters, AT_ONCE)):
        count = min(load_i64(parameters, AT_ONCE), channels - first)
        store_i64(job, JOB_FIRST, first)
        store_i64(job, JOB_COUNT, count)
        if status == 0:
            status = parallel(call, load_i64(parameters, WORKER), job, parts if last else parts * count)
        for part in range(1, parts):
            add_run(1, sums, sums, part * (2 * count if last else count), count)
        write_run(load_i64(parameters, KIND), load_i64(call, CALL_OUTPUT), first, 1, sums, 0, count)
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
    per_channel = (8 if last else 4) * parts
    at_once = min(channels, POOL_BYTES // per_channel)
    words = {
        WORKER: work.address,
        KIND: call.element_type,
        BATCH: rows,
        CHANNELS: channels,
        LENGTH: length,
        PARTS: parts,
        LAST: last,
        AT_ONCE: at_once,
        SUM_BYTES: at_once * per_channel,
    }
    return Plan(run.address, np.array([words[n] for n in range(len(words))], np.int64), words[SUM_BYTES])


KERNEL = NativeKernel(OP, _plan, _functions)
