"""AvgPoolBackward, compiled: every source cell gathers the shares of the windows that it lies in.

NCX: a row of dx first needs the sum of some rows of dy, each weighed, times the shares along the row: what a cell gets
of each window, a vector framed by zeros. Every stride-th cell of a row belongs to one phase. All cells of a phase add
up as many neighbours in that vector, so a phase is a sum of shifted copies of it, and the phases take turns in the row.
Rows that the same windows cover are made once. NXC is a case of interpolation.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from ..opset import pooling
from ..opset.avg_pool_backward import OP, taps
from . import interpolation_gather, interpolation_plans
from .interpolation_gather import combine
from .native_bridge import Call, NativeKernel, Plan, keep
from .native_call import CALL_INPUTS, CALL_OUTPUT, CALL_PARAMETERS
from .native_combine import combine_rows
from .native_jobs import JOB_CALL, begin, new_job, work_off, worker
from .native_llvm import (
    BF16,
    F16,
    F32,
    load_f32,
    load_i64,
    stack,
    store_bf16,
    store_f16,
    store_f32,
    store_i64,
)
from .native_rows import clear, write_run
from .native_source import compiled, exported
from .native_vectors import copy_run

# parameters; rows are numbered over all planes, a plane having A times B of them. Tables lie behind, at word indices:
# SPANS the first window over a cell and one behind the last, SHARES float32 (those along a row 0: all are EVEN)
(
    WORKER, KIND, ITEMS, LANE_BYTES, ROWS, PER_ITEM, A, B, WIDTH, OUT_A, OUT_B, OUT_WIDTH, SPANS_A, SPANS_B, SHARES_A,
    SHARES_B, SHARES, EVEN, STRIDE, PHASES, PHASE_TABLE, FRAMED, FRAMED_BYTES, FRAME, FLAT, WORDS,
) = range(26)  # fmt: skip
# a phase: how many cells it has, how many neighbours they add up, the table of these, where the sums are in scratch
PHASE_COUNT, PHASE_TAPS, PHASE_LIST, PHASE_BYTES, PHASE_WORDS = range(5)
PER_ITEM_CELLS = 1 << 14

_span = stack(4)


def _loops(name: str, store: Any) -> tuple[Any, Any]:
    @compiled(f"avg_pool_turns_{name}")
    def turns(out, at, even, odd, count):
        for i in range(count // 2):
            store(out, at + 2 * i, load_f32(even, i))
            store(out, at + 2 * i + 1, load_f32(odd, i))
        if count % 2:
            store(out, at + count - 1, load_f32(even, count // 2))

    @compiled(f"avg_pool_fill_{name}")
    def fill(out, at, count, value):
        for i in range(count):
            store(out, at + i, value)

    return turns, fill


_turns_f32, _fill_f32 = _loops("f32", store_f32)
_turns_f16, _fill_f16 = _loops("f16", store_f16)
_turns_bf16, _fill_bf16 = _loops("bf16", store_bf16)


@njit
def _turns(kind, out, at, even, odd, count):
    """Two vectors that take turns."""
    if kind == F16:
        _turns_f16(out, at, even, odd, count)
    elif kind == BF16:
        _turns_bf16(out, at, even, odd, count)
    else:
        _turns_f32(out, at, even, odd, count)


@njit
def _fill(kind, out, at, count, value):
    if kind == F16:
        _fill_f16(out, at, count, value)
    elif kind == BF16:
        _fill_bf16(out, at, count, value)
    else:
        _fill_f32(out, at, count, value)


@njit
def _spans(p, a, b, span):
    """The windows over a row of a plane, along both axes; whether they are other ones than `span` said."""
    at_a, at_b = p + 8 * (load_i64(p, SPANS_A) + 2 * a), p + 8 * (load_i64(p, SPANS_B) + 2 * b)
    new = False
    for n in range(4):
        value = load_i64(at_a, n) if n < 2 else load_i64(at_b, n - 2)
        new = new or value != load_i64(span, n)
        store_i64(span, n, value)
    return new


@njit
def _along(p, call, plane, span, scratch):
    """What a cell of a row gets of each window along it, into the frame of zeros."""
    shares_a, shares_b = p + 8 * load_i64(p, SHARES_A), p + 8 * load_i64(p, SHARES_B)
    out_a, out_b, out_width = load_i64(p, OUT_A), load_i64(p, OUT_B), load_i64(p, OUT_WIDTH)
    count = 0
    for oa in range(load_i64(span, 0), load_i64(span, 1)):
        share = load_f32(p, 2 * EVEN) * load_f32(shares_a, oa)
        for ob in range(load_i64(span, 2), load_i64(span, 3)):
            store_i64(scratch, 2 * count, ((plane * out_a + oa) * out_b + ob) * out_width)
            store_f32(scratch, 4 * count + 2, share * load_f32(shares_b, ob))
            count += 1
    target = scratch + load_i64(p, FRAMED_BYTES) + 4 * load_i64(p, FRAME)
    combine(load_i64(p, KIND), target, load_i64(call, CALL_INPUTS), scratch, count, out_width)
    if load_i64(p, SHARES):
        shares = p + 8 * load_i64(p, SHARES)
        for i in range(out_width):
            store_f32(target, i, load_f32(target, i) * load_f32(shares, i))


@njit
def _phase(p, c):
    return p + 8 * (load_i64(p, PHASE_TABLE) + PHASE_WORDS * c)


@njit
def _add_up(p, scratch):
    """The sums of the phases that are no mere part of the frame."""
    framed = scratch + load_i64(p, FRAMED_BYTES)
    for c in range(load_i64(p, PHASES)):
        phase = _phase(p, c)
        if load_i64(phase, PHASE_TAPS) > 1:
            sums, table = scratch + load_i64(phase, PHASE_BYTES), p + 8 * load_i64(phase, PHASE_LIST)
            combine_rows(sums, framed, table, load_i64(phase, PHASE_TAPS), load_i64(phase, PHASE_COUNT))


@njit
def _write(p, call, at, scratch):
    """A row of dx from its phases."""
    kind, width, stride, out = load_i64(p, KIND), load_i64(p, WIDTH), load_i64(p, STRIDE), load_i64(call, CALL_OUTPUT)
    phases, first = load_i64(p, PHASES), _phase(p, 0)
    sums = scratch + load_i64(first, PHASE_BYTES)
    if phases == 1 and kind == F32:
        copy_run(out + 4 * at, sums, width)
    elif phases == 2 and stride == 2:
        _turns(kind, out, at, sums, scratch + load_i64(_phase(p, 1), PHASE_BYTES), width)
    else:
        for c in range(phases):
            sums = scratch + load_i64(_phase(p, c), PHASE_BYTES)
            write_run(kind, out, at + c, stride, sums, 0, load_i64(_phase(p, c), PHASE_COUNT))


@njit
def _item(job, item, scratch):
    """Some rows."""
    call = load_i64(job, JOB_CALL)
    p = load_i64(call, CALL_PARAMETERS)
    rows_a, rows_b, width = load_i64(p, A), load_i64(p, B), load_i64(p, WIDTH)
    clear(scratch + load_i64(p, FRAMED_BYTES), 0, load_i64(p, FRAMED))
    for c in range(load_i64(p, PHASES)):
        if load_i64(_phase(p, c), PHASE_TAPS) == 0:
            clear(scratch + load_i64(_phase(p, c), PHASE_BYTES), 0, load_i64(_phase(p, c), PHASE_COUNT))
    row = item * load_i64(p, PER_ITEM)
    last = min(load_i64(p, ROWS), row + load_i64(p, PER_ITEM))
    plane, a, b, span = row // (rows_a * rows_b), row // rows_b % rows_a, row % rows_b, _span()
    _spans(p, a, b, span)
    while row < last:
        made = plane
        _along(p, call, plane, span, scratch)
        first, more = row, True
        while more:  # rows of the same windows
            row, b = row + 1, b + 1
            if b == rows_b:
                a, b = a + 1, 0
            if a == rows_a:
                plane, a = plane + 1, 0
            more = row < last and not _spans(p, a, b, span) and plane == made
        if load_i64(p, FLAT):
            value = load_f32(scratch + load_i64(p, FRAMED_BYTES), load_i64(p, FRAME))
            _fill(load_i64(p, KIND), load_i64(call, CALL_OUTPUT), first * width, (row - first) * width, value)
            continue
        _add_up(p, scratch)
        for n in range(first, row):
            _write(p, call, n * width, scratch)


_work = worker("avg_pool_work", _item, ITEMS, LANE_BYTES)


@njit
def _run(call):
    p = load_i64(call, CALL_PARAMETERS)
    job = new_job()
    begin(job, call, 0)
    return work_off(job, load_i64(p, WORKER), load_i64(p, ITEMS))


def _build() -> tuple[Any, Any]:
    @exported(types.void(types.int64, types.int64))
    def work(job, lane):
        _work(job, lane)

    @exported(types.int64(types.int64))
    def run(call):
        return _run(call)

    return work, run


@cache
def _functions() -> tuple[Any, Any]:
    return keep(_build())


def _compile() -> object:
    return _functions(), interpolation_gather.functions()


def _plan(call: Call) -> Plan:
    windows = call.inputs[0]
    assert windows is not None
    if call.attributes["data_format"] == "NXC" or 0 in windows:
        return interpolation_plans.plan(call, 0, lambda: taps(call.attributes, call.output, windows))
    return _rows_plan(call, windows)


def _rows_plan(call: Call, windows: tuple[int, ...]) -> Plan:
    axes = pooling.axes_of(call.attributes, call.output[2:], windows[2:])
    blank = pooling.Axis(1, 1, 1, 1, 1, 0)
    a, b, w = axes[0] if len(axes) > 1 else blank, axes[1] if len(axes) > 2 else blank, axes[-1]
    words = np.zeros(WORDS, np.int64)
    tables: list[np.ndarray] = []

    def place(table: np.ndarray) -> int:
        """A table of int64 or float32, in words."""
        if table.dtype == np.float32:
            table = np.pad(table, (0, len(table) % 2)).view(np.int64)
        tables.append(table.astype(np.int64))
        return WORDS + sum(map(len, tables)) - len(table)

    exclude_pad = call.attributes["exclude_pad"] == 1
    for axis, spans, shares in ((a, SPANS_A, SHARES_A), (b, SPANS_B, SHARES_B)):
        words[spans], words[shares] = place(_covering(axis)), place(_shares(axis, exclude_pad))
    along, even = _shares(w, exclude_pad), np.ones(1, np.float32)
    if (along == along[0]).all():
        even = along[:1]
    else:
        words[SHARES] = place(along)
    words[EVEN] = np.pad(even, (0, 1)).view(np.int64)[0]
    most = math.prod(int(np.max(_covering(axis)[1::2] - _covering(axis)[::2], initial=1)) for axis in (a, b))
    frame, framed, phases = _phases(w)
    words[FRAMED_BYTES] = size = 16 * most
    size += 4 * framed
    entries = []
    for count, lists in phases:
        table = np.zeros((len(lists), 2), np.int64)
        table[:, 0], table[:, 1] = lists, _ONE
        at = place(table.reshape(-1))
        if len(lists) == 1:
            entries.append((count, 1, at, int(words[FRAMED_BYTES]) + 4 * lists[0]))
            continue
        entries.append((count, len(lists), at, size))
        size += 4 * count
    rows = math.prod(call.output[:2]) * a.length * b.length
    per_item = max(1, min(PER_ITEM_CELLS // w.length, -(-rows // 64)))
    work, run = _functions()
    fixed = {
        WORKER: work.address,
        KIND: call.element_type,
        ITEMS: -(-rows // per_item),
        LANE_BYTES: size,
        ROWS: rows,
        PER_ITEM: per_item,
        A: a.length,
        B: b.length,
        WIDTH: w.length,
        OUT_A: a.out,
        OUT_B: b.out,
        OUT_WIDTH: w.out,
        STRIDE: w.stride,
        PHASES: len(phases),
        PHASE_TABLE: place(np.array(entries, np.int64).reshape(-1)),
        FRAMED: framed,
        FRAME: frame,
        FLAT: w.out == 1 and w.kernel - w.begin >= w.length,
    }
    for word, value in fixed.items():
        words[word] = value
    return Plan(run.address, np.concatenate([words, *tables]))


_ONE = int(np.array([1, 0], np.float32).view(np.int64)[0])


def _shares(axis: pooling.Axis, exclude_pad: bool) -> np.ndarray:
    """What a window is divided by along an axis, inverted."""
    return (1 / (pooling.cells(axis) if exclude_pad else np.full(axis.out, axis.kernel))).astype(np.float32)


def _covering(axis: pooling.Axis) -> np.ndarray:
    """The first window over each cell and one behind the last."""
    place = np.arange(axis.length) + axis.begin
    first = np.maximum(-(-(place - axis.kernel + 1) // axis.stride), 0)
    last = np.minimum(place // axis.stride + 1, axis.out)
    return np.stack([first, last], axis=1).reshape(-1)


def _phases(axis: pooling.Axis) -> tuple[int, int, list[tuple[int, list[int]]]]:
    """Zeros before the windows in the frame, its length, and of each phase its cells and where their neighbours begin.

    The cells of phase c are S·i + c, in window (P + c) // S + i as its cell (P + c) % S, and in the windows before it
    as far as these reach.
    """
    phases: list[tuple[int, list[int]]] = []
    for c in range(min(axis.stride, axis.length)):
        start, cell = divmod(axis.begin + c, axis.stride)
        count = -(-(axis.length - c) // axis.stride)
        reach = (axis.kernel - 1 - cell) // axis.stride  # -1: between two windows
        phases.append((count, list(range(max(start - reach, 1 - count), min(start + 1, axis.out)))))
    frame = max(0, *(-n for _, windows in phases for n in windows), 0)
    end = max([axis.out, *(n + count for count, windows in phases for n in windows)])
    return frame, frame + end, [(count, [frame + n for n in windows]) for count, windows in phases]


KERNEL = NativeKernel(OP, _plan, _compile)
