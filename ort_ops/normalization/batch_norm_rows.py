"""BatchNormTrainingBackward of rows of channels (NXC), compiled: memory is read twice, in whole rows.

The rows are shared out in parts. Of some rows that stay in a cache, each channel's own mean comes first, then the sums
about it; rows and parts are joined by Chan's formula in float64. The second reading takes the gradient. Very many
channels are cut into blocks, and where these are enough work, or there are few rows, a block is finished by one worker
at once. Few channels would make short loops: some rows that follow one another are one line then, and what belongs to
one channel is joined at the end. Shapes alone decide the order of all sums.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import types

from onnx_backprop.ort_ops.normalization.batch_norm_factors import MEAN, factors_of
from onnx_backprop.ort_ops.normalization.batch_norm_sums import (
    C_REST,
    F_ALONG,
    F_LEVEL,
    F_MEAN,
    F_SLOPE,
    FACTORS,
    GROUP,
    SUMS,
    T_ALONG,
    T_MEAN,
    T_SQUARE,
    T_WHOLE,
    TOTALS,
    add_lines,
    add_moments,
    differentiate_line,
    divide,
    flush,
    flush_given,
    join_totals,
)
from onnx_backprop.ort_ops.runtime.bridge import Plan, keep
from onnx_backprop.ort_ops.runtime.call import (
    CALL_INPUTS,
    CALL_OUTPUT,
    CALL_PARAMETERS,
    CALL_RUNTIME,
    acquire,
    no_memory,
    release,
)
from onnx_backprop.ort_ops.runtime.compile import exported, inner
from onnx_backprop.ort_ops.runtime.jobs import JOB_CALL, JOB_SHARED, begin, new_job, work_off, worker
from onnx_backprop.ort_ops.runtime.llvm import load_f32, load_f64, load_i64, store_f32, store_f64
from onnx_backprop.ort_ops.vector.registers import copy_run
from onnx_backprop.ort_ops.vector.rows import clear

# parameters; a line is FOLD rows, of WIDTH channels at a time, SPAN elements with what fills up a vector; CHUNK lines
# are added up in float32. EPSILON is a float64
(
    WORKER, JOINER, GRADER, KIND, ROWS, CHANNELS, WIDTH, BLOCKS, PARTS, FOLD, SPAN, CHUNK, EPSILON, ITEMS, LANE_BYTES,
    SHARED_BYTES,
) = range(16)  # fmt: skip
LINE = 1024  # elements of folded rows
WIDEST, NARROWEST = 2048, 256  # channels of a block, where there are several
CACHED = 1 << 15  # elements of a chunk
MAX_CHUNK = 64  # lines
PART = 1 << 15  # elements of a part, at least
PART_ROWS = 128  # of a part, at least
MAX_ITEMS = 32
STAGGER = 48  # elements, so that arrays do not begin whole pages apart, in the same few places of a cache


@inner
def _repeat(line, count, times):
    """float32 line[n·count + i] = line[i]."""
    for n in range(1, times):
        copy_run(line + 4 * n * count, line, count)


@inner
def _place(p, item):
    """(first channel, channels, first line, whole lines to, elements of the line behind them) of a part of a block."""
    rows, channels, width, fold = load_i64(p, ROWS), load_i64(p, CHANNELS), load_i64(p, WIDTH), load_i64(p, FOLD)
    blocks, parts = load_i64(p, BLOCKS), load_i64(p, PARTS)
    channel, part, lines = item % blocks * width, item // blocks, (rows + fold - 1) // fold
    first, last = part * lines // parts, (part + 1) * lines // parts
    whole = min(last, rows // fold)
    rest = (rows - whole * fold) * channels if whole < last else 0
    return channel, min(width, channels - channel), first, whole, rest


@inner
def _chunk(call, sums, totals, start, before, lines, count):
    """Some lines from the element `start` on, added to the totals of those before."""
    p = load_i64(call, CALL_PARAMETERS)
    x, dy = load_i64(call, CALL_INPUTS), load_i64(call, CALL_INPUTS + 1)
    kind, span = load_i64(p, KIND), load_i64(p, SPAN)
    pitch, given = load_i64(p, FOLD) * load_i64(p, CHANNELS), load_i64(call, MEAN)
    if given == 0:
        clear(sums, 0, count)
        for line in range(0, lines, GROUP):
            add_lines(kind, sums, x, start + line * pitch, pitch, min(GROUP, lines - line), count)
        divide(sums, count, np.float64(lines))
    clear(sums, C_REST * span, (SUMS - C_REST) * span)
    for line in range(0, lines, GROUP):
        add_moments(kind, sums, span, x, dy, start + line * pitch, pitch, min(GROUP, lines - line), count)
    if given:
        flush_given(totals, sums, span, count)
    else:
        flush(totals, sums, span, count, np.float64(before), np.float64(lines))


@inner
def _measure(call, item, scratch):
    """The totals of a part of a block; where in the scratch they are, SPAN to an array."""
    p = load_i64(call, CALL_PARAMETERS)
    span, chunk, fold = load_i64(p, SPAN), load_i64(p, CHUNK), load_i64(p, FOLD)
    channel, count, first, whole, rest = _place(p, item)
    sums, totals, given, pitch = scratch, scratch + 4 * SUMS * span, load_i64(call, MEAN), fold * load_i64(p, CHANNELS)
    for i in range(TOTALS * span):
        store_f64(totals, i, 0.0)
    if given:
        copy_run(sums, given + 4 * channel, count)
        _repeat(sums, count, fold)
    for line in range(first, whole, chunk):
        some = min(chunk, whole - line)
        _chunk(call, sums, totals, line * pitch + channel, line - first, some, count * fold)
    if rest:
        _chunk(call, sums, totals, whole * pitch, whole - first, 1, rest)
    for i in range(count * fold):
        store_f64(totals, i, np.float64(whole - first) + (1.0 if i < rest else 0.0))
    while fold > 1:
        fold //= 2
        join_totals(call, totals, span, totals + 8 * fold * count, span, fold * count)
    return totals


@inner
def _finish(call, channel, count, totals, span, factors, factors_span):
    """From the totals of some channels to the factors of their gradient; diff_gamma and diff_beta."""
    p, given = load_i64(call, CALL_PARAMETERS), load_i64(call, MEAN)
    rows, epsilon = np.float64(max(1, load_i64(p, ROWS))), load_f64(p, EPSILON)
    for i in range(count):
        mean = np.float64(load_f32(given, channel + i)) if given else load_f64(totals, T_MEAN * span + i)
        square, whole = load_f64(totals, T_SQUARE * span + i), load_f64(totals, T_WHOLE * span + i)
        along = load_f64(totals, T_ALONG * span + i)
        slope, along, level = factors_of(call, channel + i, rows, epsilon, square, whole, along)
        rounded = np.float32(mean)
        store_f32(factors, F_MEAN * factors_span + i, rounded)
        store_f32(factors, F_SLOPE * factors_span + i, np.float32(slope))
        store_f32(factors, F_ALONG * factors_span + i, np.float32(along))
        store_f32(factors, F_LEVEL * factors_span + i, np.float32(level + along * (np.float64(rounded) - mean)))


@inner
def _differentiate(call, item, factors):
    """dx of a part of a block, from the factors of its channels, SPAN to an array."""
    p, dx = load_i64(call, CALL_PARAMETERS), load_i64(call, CALL_OUTPUT)
    x, dy = load_i64(call, CALL_INPUTS), load_i64(call, CALL_INPUTS + 1)
    kind, span = load_i64(p, KIND), load_i64(p, SPAN)
    fold = load_i64(p, FOLD)
    channel, count, first, whole, rest = _place(p, item)
    if dx == 0:
        return
    for n in range(FACTORS):
        _repeat(factors + 4 * n * span, count, fold)
    pitch = fold * load_i64(p, CHANNELS)
    for line in range(first, whole):
        differentiate_line(kind, dx, x, dy, line * pitch + channel, count * fold, factors, span)
    if rest:
        differentiate_line(kind, dx, x, dy, whole * pitch, rest, factors, span)


@inner
def _factors(p, scratch):
    """Where a thread's factors are."""
    return scratch + (4 * SUMS + 8 * TOTALS) * load_i64(p, SPAN)


@inner
def _item(job, item, scratch):
    """A part: its totals. Where there is but one: the whole block."""
    call, shared = load_i64(job, JOB_CALL), load_i64(job, JOB_SHARED)
    p = load_i64(call, CALL_PARAMETERS)
    span, channels, totals = load_i64(p, SPAN), load_i64(p, CHANNELS), _measure(call, item, scratch)
    channel, count = _place(p, item)[:2]
    if load_i64(p, PARTS) == 1:
        factors = _factors(p, scratch)
        _finish(call, channel, count, totals, span, factors, span)
        _differentiate(call, item, factors)
        return
    own = shared + 8 * (item // load_i64(p, BLOCKS) * TOTALS * channels + channel)
    for n in range(TOTALS):
        for i in range(count):
            store_f64(own, n * channels + i, load_f64(totals, n * span + i))


@inner
def _joined(job, block, _scratch):
    """The parts of a block, one after the other."""
    call, shared = load_i64(job, JOB_CALL), load_i64(job, JOB_SHARED)
    p = load_i64(call, CALL_PARAMETERS)
    channels, parts = load_i64(p, CHANNELS), load_i64(p, PARTS)
    channel, count = _place(p, block)[:2]
    totals = shared + 8 * channel
    for part in range(1, parts):
        join_totals(call, totals, channels, totals + 8 * part * TOTALS * channels, channels, count)
    factors = shared + 8 * parts * TOTALS * channels + 4 * channel
    _finish(call, channel, count, totals, channels, factors, channels)


@inner
def _graded(job, item, scratch):
    """The gradient of a part, the last ones first: they may still be in a cache."""
    call, shared = load_i64(job, JOB_CALL), load_i64(job, JOB_SHARED)
    p = load_i64(call, CALL_PARAMETERS)
    span, channels, item = load_i64(p, SPAN), load_i64(p, CHANNELS), load_i64(p, ITEMS) - 1 - item
    channel, count = _place(p, item)[:2]
    factors, source = _factors(p, scratch), shared + 8 * load_i64(p, PARTS) * TOTALS * channels + 4 * channel
    for n in range(FACTORS):
        copy_run(factors + 4 * n * span, source + 4 * n * channels, count)
    _differentiate(call, item, factors)


_work_off_items = worker("batch_norm_items", _item, ITEMS, LANE_BYTES)
_join_blocks = worker("batch_norm_joined", _joined, BLOCKS, LANE_BYTES)
_grade_items = worker("batch_norm_graded", _graded, ITEMS, LANE_BYTES)


@inner
def _run(call):
    p, runtime = load_i64(call, CALL_PARAMETERS), load_i64(call, CALL_RUNTIME)
    size, items, job, shared = load_i64(p, SHARED_BYTES), load_i64(p, ITEMS), new_job(), 0
    if size:
        shared = acquire(runtime, size)
        if shared == 0:
            return no_memory(call)
    begin(job, call, shared)
    status = work_off(job, load_i64(p, WORKER), items)
    if size:
        if status == 0:
            begin(job, call, shared)
            status = work_off(job, load_i64(p, JOINER), load_i64(p, BLOCKS))
        if status == 0 and load_i64(call, CALL_OUTPUT):
            begin(job, call, shared)
            status = work_off(job, load_i64(p, GRADER), items)
        release(runtime, shared, size)
    return status


def _build() -> tuple[Any, Any, Any, Any]:
    @exported(types.void(types.int64, types.int64))
    def work(job, lane):
        _work_off_items(job, lane)

    @exported(types.void(types.int64, types.int64))
    def join(job, lane):
        _join_blocks(job, lane)

    @exported(types.void(types.int64, types.int64))
    def grade(job, lane):
        _grade_items(job, lane)

    @exported(types.int64(types.int64))
    def run(call):
        return _run(call)

    return work, join, grade, run


@cache
def functions() -> tuple[Any, Any, Any, Any]:
    return keep(_build())


def plan(kind: int, rows: int, channels: int, epsilon: float) -> Plan:
    """For rows of channels."""
    work, join, grade, run = functions()
    wanted = max(1, min(MAX_ITEMS, rows * channels // PART))
    most = max(1, rows // PART_ROWS)
    blocks = max(-(-channels // WIDEST), min(wanted // most, channels // NARROWEST), 1)
    width = -(-channels // (16 * blocks)) * 16 if blocks > 1 else channels
    blocks = -(-channels // width)
    parts = max(1, min(wanted // blocks, most))
    fold = 1
    while blocks == 1 and 2 * fold <= rows and 2 * fold * channels <= LINE:
        fold *= 2
    parts = max(1, min(parts, rows // fold))
    span = -(-fold * width // 16) * 16
    span += STAGGER if span % 512 == 0 else 0
    words = {
        WORKER: work.address,
        JOINER: join.address,
        GRADER: grade.address,
        KIND: kind,
        ROWS: rows,
        CHANNELS: channels,
        WIDTH: width,
        BLOCKS: blocks,
        PARTS: parts,
        FOLD: fold,
        SPAN: span,
        CHUNK: max(1, min(MAX_CHUNK, CACHED // (fold * width))),
        EPSILON: int(np.float64(epsilon).view(np.int64)),
        ITEMS: parts * blocks,
        LANE_BYTES: (4 * SUMS + 8 * TOTALS + 4 * FACTORS) * span,
        SHARED_BYTES: (8 * TOTALS * parts + 4 * FACTORS) * channels if parts > 1 else 0,
    }
    parameters = np.array([words[n] for n in range(len(words))], np.int64)
    return Plan(run.address, parameters, words[SHARED_BYTES], words[LANE_BYTES])
